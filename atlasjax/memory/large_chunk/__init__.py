"""Large-chunk memories: read at the start of a chunk, written once at its end. The rule is `LargeChunkRule`."""

from atlasjax.memory.large_chunk.rule import LargeChunkRule
from atlasjax.memory.large_chunk.state import LargeChunkState

__all__ = ["LargeChunkRule", "LargeChunkState"]
