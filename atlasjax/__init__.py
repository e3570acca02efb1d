"""atlasjax: sequence models that learn at test time, in JAX."""

import importlib
from typing import Any

__version__ = "0.1.0"

# Imported at first use, so that `import atlasjax` costs nothing and `atlasjax.memory` what jax costs.
_LAZY = {
    name: f"atlasjax.{name}"
    for name in (
        "cli",
        "data",
        "distributed",
        "evaluate",
        "generate",
        "memory",
        "mixers",
        "nn",
        "plan",
        "presets",
        "rules",
        "train",
    )
} | {name: f"atlasjax.mixers.{name}" for name in ("elastic", "gam")}


def __getattr__(name: str) -> Any:
    if name == "trust":
        from atlasjax.trusted import trust

        return trust
    if name in _LAZY:
        return importlib.import_module(_LAZY[name])
    raise AttributeError(f"module 'atlasjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY, "trust"])
