"""Memorizing Transformer (Wu et al. 2022) as a layer: attention within blocks and to a queue of earlier tokens."""

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax.mixers import memorizing
from atlasjax.mixers.block_memory import BlockMemoryState
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.elastic import BlockProjections
from atlasjax.nn.parameters import param


class MemorizingMixer(BlockProjections):
    """Causal attention within blocks, mixed by a gate per head with attention to the last N tokens before the block.

        q, k, v = x W_in;  out = `mixers.memorizing.attention`(q, k, v, b) W_out        RoPE within the block; no biases

    The parameters are those of attention and b [heads]. b is initially zero, which weights both equally. N is
    `memorizing.queue_length`. The state is bounded: the queue and one block.

    Args:
      config: as for `BlockProjections`, and memorizing.
      rngs: source of the initial values.

    Raises:
      ValueError: as for `BlockProjections`.
    """

    mixer = "memorizing"

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.queue_length, self.block_size = config.memorizing.queue_length, config.memorizing.block_size
        self.gate = param(jnp.zeros(self.heads, jnp.float32), "heads")

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, max_segments: int | None = None
    ) -> jax.Array:
        """Whole sequences: [batch, time, dim] → [batch, time, dim]. Outputs for documents beyond max_segments are NaN."""
        y = memorizing.attention(
            *self._project(x), self.gate[...], queue_length=self.queue_length, block_size=self.block_size,
            rope_theta=self.theta, segment_ids=segment_ids, max_segments=max_segments,
        )  # fmt: skip
        return self._output(y)

    def init_state(self, batch_size: int, max_length: int | None = None) -> BlockMemoryState:
        """The state before the first token. max_length has no effect."""
        return memorizing.init_state(
            batch_size, self.queue_length, self.block_size, self.heads, self.key_dim, self.value_dim, self.dtype
        )

    def extend(self, x: jax.Array, state: BlockMemoryState) -> tuple[jax.Array, BlockMemoryState]:
        """The output for the next piece of a sequence (time ≥ 1) and the next state."""
        y, state = memorizing.extend(*self._project(x), self.gate[...], state, rope_theta=self.theta)
        return self._output(y), state
