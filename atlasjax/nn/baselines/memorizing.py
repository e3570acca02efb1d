"""Memorizing Transformer (Wu et al. 2022) as a layer: attention within blocks, and to a queue of the tokens before them."""

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax.mixers import memorizing
from atlasjax.mixers.block_memory import BlockMemoryState
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.elastic import BlockProjections
from atlasjax.nn.parameters import param


class MemorizingMixer(BlockProjections):
    """Causal attention within blocks, mixed by a gate for each head with attention to the last N tokens before the block.

        q, k, v = x W_in;  out = `mixers.memorizing.attention`(q, k, v, b) W_out        RoPE within the block; no biases

    The parameters are those of attention and b, [heads], zero at the start: half of each. N is
    `memorizing.queue_length`. Bounded state: the queue and one block.

    Args:
      config: dim, num_heads, head_dim (even), value_expansion, dtype, attention.rope_theta, memorizing; output_scale.
      rngs: source of the initial values.

    Raises:
      ValueError: an odd head_dim.
    """

    mixer = "memorizing"

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.queue_length, self.block_size = config.memorizing.queue_length, config.memorizing.block_size
        self.gate = param(jnp.zeros(self.heads, jnp.float32), "heads")

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, max_segments: int | None = None
    ) -> jax.Array:
        """Whole sequences: [batch, time, dim] → [batch, time, dim]; documents beyond max_segments get NaN."""
        y = memorizing.attention(
            *self._project(x), self.gate[...], queue_length=self.queue_length, block_size=self.block_size,
            rope_theta=self.theta, segment_ids=segment_ids, max_segments=max_segments,
        )  # fmt: skip
        return self._output(y)

    def init_state(self, batch_size: int, max_length: int | None = None) -> BlockMemoryState:
        """The state before the first token; max_length has no effect."""
        return memorizing.init_state(
            batch_size, self.queue_length, self.block_size, self.heads, self.key_dim, self.value_dim, self.dtype
        )

    def extend(self, x: jax.Array, state: BlockMemoryState) -> tuple[jax.Array, BlockMemoryState]:
        """The next piece of a sequence, any time ≥ 1."""
        y, state = memorizing.extend(*self._project(x), self.gate[...], state, rope_theta=self.theta)
        return self._output(y), state
