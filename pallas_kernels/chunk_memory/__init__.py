"""The chunkwise recurrence of a deep memory in its dual form."""

from pallas_kernels.chunk_memory.api import chunk_memory
from pallas_kernels.chunk_memory.call import CHUNK_SIZES
from pallas_kernels.chunk_memory.gpu import unsupported_by_gpu

__all__ = ["CHUNK_SIZES", "chunk_memory", "unsupported_by_gpu"]
