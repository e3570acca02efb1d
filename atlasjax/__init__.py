"""atlasjax: sequence models that learn at test time, in JAX."""

import importlib
import importlib.util
import pkgutil
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Modules are imported at first use, so that `import atlasjax` costs nothing and `atlasjax.memory` what jax costs."""
    if name == "trust":
        return importlib.import_module("atlasjax.trusted").trust
    if not name.startswith("_") and importlib.util.find_spec(f"atlasjax.{name}") is not None:
        return importlib.import_module(f"atlasjax.{name}")
    raise AttributeError(f"module 'atlasjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "trust"} | {name for _, name, _ in pkgutil.iter_modules(__path__) if name != "__main__"})
