"""The chunkwise recurrence of a deep memory, in its dual form."""

from pallas_kernels.chunk_memory.api import chunk_memory

__all__ = ["chunk_memory"]
