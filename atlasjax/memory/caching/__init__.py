"""Memory Caching (arXiv 2602.24281): the functions of `atlasjax.memory` for a `CachedRule`."""

from atlasjax.memory.caching.api import read, reference, scan, step
from atlasjax.memory.caching.rule import CachedRule
from atlasjax.memory.caching.state import CachedState, init_state

__all__ = ["CachedRule", "CachedState", "init_state", "read", "reference", "scan", "step"]
