"""Memory Caching (arXiv 2602.24281): memories of earlier segments are kept and read. The rule is `CachedRule`."""

from atlasjax.memory.caching.rule import CachedRule
from atlasjax.memory.caching.state import CachedState

__all__ = ["CachedRule", "CachedState"]
