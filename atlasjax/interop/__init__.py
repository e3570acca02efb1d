"""Public weights as runs of this library, and runs as public weights: safetensors with a config.json, in both directions.

`from_fla` and `to_fla_state` do the same for calls of single functions."""

from atlasjax.interop.convert import Converted, import_weights
from atlasjax.interop.export import export_weights
from atlasjax.interop.families import FAMILIES
from atlasjax.interop.family import Family
from atlasjax.interop.fla_calls import MemoryCall, from_fla, to_fla_state
from atlasjax.interop.table import Row

__all__ = [
    "FAMILIES",
    "Converted",
    "Family",
    "MemoryCall",
    "Row",
    "export_weights",
    "from_fla",
    "import_weights",
    "to_fla_state",
]
