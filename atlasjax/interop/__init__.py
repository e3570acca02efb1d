"""Public weights as runs of this library, and runs as public weights: safetensors with a config.json, in both directions."""

from atlasjax.interop.convert import Converted, import_weights
from atlasjax.interop.export import export_weights
from atlasjax.interop.families import FAMILIES
from atlasjax.interop.family import Family
from atlasjax.interop.table import Row

__all__ = ["FAMILIES", "Converted", "Family", "Row", "export_weights", "import_weights"]
