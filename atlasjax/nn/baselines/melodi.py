"""Melodi's short-term memory (Chen et al. 2024) in a single layer: summary tokens, mixed linearly into the next block's memory."""

import jax
from flax import nnx

from atlasjax.mixers import melodi
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.elastic import BlockProjections
from atlasjax.nn.layers import Linear, RMSNorm
from atlasjax.nn.parameters import normal, param


class MelodiMixer(BlockProjections):
    """Causal attention within blocks of L tokens and to the N memory tokens written by the previous block.

    See `atlasjax.mixers.melodi` for the equations, and for our choices where the paper is silent. In addition to attention's
    parameters it has the summary tokens, the linear map that mixes them with a block's tokens, and three norms:
    N (dim + L + N + 1) + 3 dim parameters. So unlike in "elastic", the parameters depend on the block size and on N.

    Args:
      config: as for `BlockProjections`, and norm_eps, melodi (L: block_size, N: summary_tokens).
      rngs: source of the initial values. Summary tokens are standard normal, the scale of the layer norm's outputs.

    Raises:
      ValueError: as for `BlockProjections`.
    """

    mixer = "melodi"

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        summary, dim, self.eps = config.melodi.summary_tokens, config.dim, config.norm_eps
        self.summary = param(normal(rngs, (summary, dim), 1.0), None, "embed")
        self.mixing = Linear((config.melodi.block_size + summary, summary), (None, None), bias=True, rngs=rngs)
        norm = lambda: RMSNorm((dim,), ("embed",), config.norm_eps)
        self.context_norm, self.summary_norm, self.memory_norm = norm(), norm(), norm()

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, max_segments: int | None = None
    ) -> jax.Array:
        """Whole sequences: [batch, time, dim] → [batch, time, dim]. Outputs for documents beyond max_segments are NaN."""
        return melodi.attention(
            x, self._weights(), rope_theta=self.theta, norm_eps=self.eps, segment_ids=segment_ids, max_segments=max_segments
        )  # fmt: skip

    def init_state(self, batch_size: int, max_length: int | None = None) -> melodi.MelodiState:
        """The state before the first token. max_length has no effect."""
        return melodi.init_state(batch_size, self._weights(), self.dtype)

    def extend(self, x: jax.Array, state: melodi.MelodiState) -> tuple[jax.Array, melodi.MelodiState]:
        """The output for the next piece of a sequence (time ≥ 1) and the next state."""
        return melodi.extend(x, self._weights(), state, rope_theta=self.theta, norm_eps=self.eps)

    def _weights(self) -> melodi.Weights:
        bias = self.mixing.bias
        assert bias is not None
        return melodi.Weights(
            inputs=self.inputs.kernel[...], out=self.out.kernel[...], summary=self.summary[...],
            mixing=self.mixing.kernel[...], mixing_bias=bias[...], context_norm=self.context_norm.scale[...],
            summary_norm=self.summary_norm.scale[...], memory_norm=self.memory_norm.scale[...],
        )  # fmt: skip
