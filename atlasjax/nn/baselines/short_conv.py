"""The gated short convolution of LFM2 (Liquid AI 2025)."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax.nn.attention import output_projection
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.layers import CausalConv, Linear
from atlasjax.nn.module import Module


class ShortConvMixer(Module):
    """A causal convolution of a few tokens between two gates that depend on the token, without activations:

        B, C, z = x W_in,  out = (C ⊙ conv(B ⊙ z)) W_out

    The state is the last conv_width − 1 tokens of B ⊙ z. As published, conv_width is 3.

    Args:
      config: dim, conv_width, dtype, num_layers (for W_out's initial scale).
      rngs: source of the initial values.
    """

    undivided: ClassVar[str | None] = None  # see `mixers.check_divided`

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.dtype = jnp.dtype(config.dtype)
        self.inputs = Linear((config.dim, 3, config.dim), ("embed", None, "heads"), rngs=rngs)
        self.conv = CausalConv(config.conv_width, (config.dim,), ("heads",), rngs=rngs)
        self.out = output_projection(config, rngs, inner=config.dim)

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, max_segments: int | None = None
    ) -> jax.Array:
        """Whole sequences: [batch, time, dim] → [batch, time, dim]. `max_segments` has no effect."""
        return self._run(x, self.conv.init_state(x.shape[0], x.dtype), segment_ids)[0]

    def init_state(self, batch_size: int, max_length: int | None = None) -> jax.Array:
        """The inputs of the convolution before the first token: zeros [batch, conv_width − 1, dim]. `max_length` has no effect."""
        return self.conv.init_state(batch_size, self.dtype)

    def extend(self, x: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The output for the next piece of a sequence (time ≥ 1), and the next state."""
        return self._run(x, state, None)

    def _run(self, x: jax.Array, state: jax.Array, segment_ids: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        projected = self.inputs(x)
        before, after, z = (projected[:, :, i] for i in range(3))
        y, state = self.conv(before * z, state, segment_ids)
        return self.out(after * y.astype(x.dtype)), state
