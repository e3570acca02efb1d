"""The state of a large-chunk memory."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from atlasjax.memory.gates import Weights


class LargeChunkState(NamedTuple):
    """The memory at the start of the current chunk, and what the chunk's tokens so far will write to it.

    float32 (float64 for float64 inputs) and int32, batch axis first.

    Attributes:
      memory: M_{t'}, name → [batch, heads, out, in].
      sums: G of the current chunk's tokens so far, like `memory`.
      momentum: G of the chunk before, with its own momentum, like `memory`. None without momentum.
      decay_sum: the sum of θ over the current chunk's tokens so far, [batch, heads]. None without momentum.
      position: number of tokens of the current chunk read so far, in [0, chunk_size), [batch].
      segment: segment id of the last token, [batch], −1 if no token had one.
    """

    memory: Weights
    sums: Weights
    momentum: Weights | None
    decay_sum: Float[Array, "batch heads"] | None
    position: Int[Array, " batch"]
    segment: Int[Array, " batch"]

    @property
    def heads_axis(self) -> int:  # of its arrays, for `distributed.cache_shardings`
        return 1
