"""Infini-attention (Munkhdalai et al. 2024) as a layer: attention within blocks, and a linear memory of the blocks before."""

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax.mixers import infini
from atlasjax.mixers.block_memory import BlockMemoryState
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.elastic import BlockProjections
from atlasjax.nn.parameters import param


class InfiniMixer(BlockProjections):
    """Causal attention within blocks, mixed by a gate for each head with a read of a matrix that the delta rule writes.

        q, k, v = x W_in;  out = `mixers.infini.attention`(q, k, v, β) W_out        RoPE within the block; no biases

    The parameters are those of attention and β, [heads], zero at the start: half of each. Bounded state: a matrix and a vector for
    each head, and one block.

    Args:
      config: dim, num_heads, head_dim (even), value_expansion, dtype, norm_eps, attention.rope_theta, infini; output_scale.
      rngs: source of the initial values.

    Raises:
      ValueError: an odd head_dim.
    """

    mixer = "infini"

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.block_size, self.norm_eps = config.infini.block_size, config.norm_eps
        self.gate = param(jnp.zeros(self.heads, jnp.float32), "heads")

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, max_segments: int | None = None
    ) -> jax.Array:
        """Whole sequences: [batch, time, dim] → [batch, time, dim]; documents beyond max_segments get NaN."""
        y = infini.attention(
            *self._project(x), self.gate[...], block_size=self.block_size, rope_theta=self.theta, norm_eps=self.norm_eps,
            segment_ids=segment_ids, max_segments=max_segments,
        )  # fmt: skip
        return self._output(y)

    def init_state(self, batch_size: int, max_length: int | None = None) -> BlockMemoryState:
        """The state before the first token; max_length has no effect."""
        return infini.init_state(batch_size, self.block_size, self.heads, self.key_dim, self.value_dim, self.dtype)

    def extend(self, x: jax.Array, state: BlockMemoryState) -> tuple[jax.Array, BlockMemoryState]:
        """The next piece of a sequence, any time ≥ 1."""
        y, state = infini.extend(
            *self._project(x), self.gate[...], state, rope_theta=self.theta, norm_eps=self.norm_eps
        )  # fmt: skip
        return self._output(y), state
