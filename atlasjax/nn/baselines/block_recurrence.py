"""Transformer++ with block recurrence (Transformer-XL, Dai et al. 2019): attention to the current and the previous block."""

import jax
from flax import nnx

from atlasjax.mixers import block_recurrence
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.elastic import BlockProjections


class BlockRecurrenceMixer(BlockProjections):
    """Causal attention within blocks of `block_recurrence.block_size` tokens and to the whole previous block.

        q, k, v = x W_in;  out = `mixers.block_recurrence.attention`(q, k, v) W_out        RoPE; no biases

    Gradients flow into the previous block. The state holds the keys and values of two blocks.

    Args:
      config: as for `BlockProjections`, and block_recurrence.
      rngs: source of the initial values.

    Raises:
      ValueError: as for `BlockProjections`.
    """

    mixer = "block_recurrence"

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.block_size = config.block_recurrence.block_size

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, max_segments: int | None = None
    ) -> jax.Array:
        """Whole sequences: [batch, time, dim] → [batch, time, dim]. Outputs for documents beyond max_segments are NaN."""
        y = block_recurrence.attention(
            *self._project(x), block_size=self.block_size, rope_theta=self.theta, segment_ids=segment_ids,
            max_segments=max_segments,
        )  # fmt: skip
        return self._output(y)

    def init_state(self, batch_size: int, max_length: int | None = None) -> block_recurrence.BlockRecurrenceState:
        """The state before the first token. max_length has no effect."""
        return block_recurrence.init_state(
            batch_size, self.block_size, self.heads, self.key_dim, self.value_dim, self.dtype
        )

    def extend(
        self, x: jax.Array, state: block_recurrence.BlockRecurrenceState
    ) -> tuple[jax.Array, block_recurrence.BlockRecurrenceState]:
        """The output for the next piece of a sequence (time ≥ 1) and the next state."""
        y, state = block_recurrence.extend(*self._project(x), state, rope_theta=self.theta)
        return self._output(y), state
