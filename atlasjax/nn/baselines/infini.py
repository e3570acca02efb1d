"""Infini-attention (Munkhdalai et al. 2024) as a layer: attention within blocks and a linear memory of earlier blocks."""

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax.mixers import infini
from atlasjax.mixers.block_memory import BlockMemoryState
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.elastic import BlockProjections
from atlasjax.nn.parameters import param


class InfiniMixer(BlockProjections):
    """Causal attention within blocks, mixed by a gate per head with a read of a matrix memory written by the delta rule.

        q, k, v = x W_in;  out = `mixers.infini.attention`(q, k, v, β) W_out        RoPE within the block; no biases

    The parameters are those of attention and β [heads]. β is initially zero, which weights both equally. The state is bounded: a
    matrix and a vector per head, and one block.

    Args:
      config: as for `BlockProjections`, and norm_eps, infini.
      rngs: source of the initial values.

    Raises:
      ValueError: as for `BlockProjections`.
    """

    mixer = "infini"

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.block_size, self.norm_eps = config.infini.block_size, config.norm_eps
        self.gate = param(jnp.zeros(self.heads, jnp.float32), "heads")

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, max_segments: int | None = None
    ) -> jax.Array:
        """Whole sequences: [batch, time, dim] → [batch, time, dim]. Outputs for documents beyond max_segments are NaN."""
        y = infini.attention(
            *self._project(x), self.gate[...], block_size=self.block_size, rope_theta=self.theta, norm_eps=self.norm_eps,
            segment_ids=segment_ids, max_segments=max_segments,
        )  # fmt: skip
        return self._output(y)

    def init_state(self, batch_size: int, max_length: int | None = None) -> BlockMemoryState:
        """The state before the first token. max_length has no effect."""
        return infini.init_state(batch_size, self.block_size, self.heads, self.key_dim, self.value_dim, self.dtype)

    def extend(self, x: jax.Array, state: BlockMemoryState) -> tuple[jax.Array, BlockMemoryState]:
        """The output for the next piece of a sequence (time ≥ 1) and the next state."""
        y, state = infini.extend(
            *self._project(x), self.gate[...], state, rope_theta=self.theta, norm_eps=self.norm_eps
        )  # fmt: skip
        return self._output(y), state
