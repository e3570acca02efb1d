"""The chunkwise recurrence of a deep memory, in its dual form."""

from pallas_kernels.chunk_memory.api import CHUNK_SIZES, chunk_memory

__all__ = ["CHUNK_SIZES", "chunk_memory"]
