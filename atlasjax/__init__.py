"""atlasjax: sequence models that learn at test time, in JAX."""

import importlib
import importlib.util
import pkgutil
from typing import Any

from atlasjax.trusted import trust as trust

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Modules are imported at first use, so that `import atlasjax` costs nothing and `atlasjax.memory` what jax costs."""
    if not name.startswith("_") and importlib.util.find_spec(f"atlasjax.{name}") is not None:
        return importlib.import_module(f"atlasjax.{name}")
    raise AttributeError(f"module 'atlasjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals()} | {name for _, name, _ in pkgutil.iter_modules(__path__) if name != "__main__"})
