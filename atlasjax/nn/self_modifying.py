"""Self-modifying Titans as a layer."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from atlasjax.memory.check import check_segments
from atlasjax.mixers import self_modifying
from atlasjax.nn.attention import output_projection
from atlasjax.nn.baselines.recurrent import RecurrentMixer
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.layers import CausalConv, Linear, RMSNorm, l2_normalize
from atlasjax.nn.module import Module
from atlasjax.nn.parameters import normal, param

_BIAS = 4.0  # of α, which is then 0.98 where M_α(x) is 0


class StartMemory(Module):
    """A learned `self_modifying.Residual` of every head. Initially normal with variance 1 / in.

    Args:
      heads, dim, hidden: sizes.
      out: size of the output; with another one than `dim`, the skip is a matrix.
      rngs: source of the initial values.
    """

    def __init__(self, heads: int, dim: int, hidden: int, out: int, *, rngs: nnx.Rngs):
        new = lambda rows, columns: param(
            normal(rngs, (heads, rows, columns), columns**-0.5), "heads", "memory_out", "memory_in"
        )
        self.W1, self.W2 = new(out, hidden), new(hidden, dim)
        self.skip = None if out == dim else new(out, dim)

    def __call__(self) -> self_modifying.Residual:
        skip = None if self.skip is None else self.skip[...]
        return self_modifying.Residual(self.W1[...], self.W2[...], skip)


class SelfModifyingMixer(RecurrentMixer):
    """The sequence model of HOPE (Nested Learning, NeurIPS 2025):

        x' = conv(x),  q = l2(x' W_q)
        y = self_modifying.scan(x', q)              the heads share out the channels of x'
        out = RMSNorm(y) W_out

    Args:
      config: dim, num_heads, conv_width, norm_eps, dtype, output_scale, self_modifying.
      rngs: source of the initial values.

    Raises:
      ValueError: the heads are not dim / num_heads wide, or there is a value_expansion.
    """

    undivided: ClassVar[str | None] = "its keys are made by memories that the tokens before have written"

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        heads, size, given = config.num_heads, config.resolved_head_dim, config.self_modifying
        if heads * size != config.dim or config.value_expansion != 1:
            raise ValueError(
                f"mixer 'self_modifying_titans': its heads share out dim={config.dim}; num_heads={heads}, head_dim={size} and "
                f"value_expansion={config.value_expansion} must be heads of dim / num_heads without expansion."
            )
        self.dtype, self.heads, self.size, self.given = jnp.dtype(config.dtype), heads, size, given
        self.conv = CausalConv(config.conv_width, (config.dim,), ("heads",), rngs=rngs)
        self.query = Linear((config.dim, heads, size), ("embed", "heads", None), rngs=rngs)
        for name in ("memory", *self_modifying.GENERATORS):
            out = 1 if name in ("step_size", "retention") else size
            setattr(self, name, StartMemory(heads, size, given.expansion * size, out, rngs=rngs))
        self.bias = param(jnp.full(heads, _BIAS, jnp.float32), "heads")
        self.norm = RMSNorm((heads, size), ("heads", None), config.norm_eps)
        self.out = output_projection(config, rngs)

    def start_inputs(self, batch_size: int, dtype: jnp.dtype) -> PyTree:
        return self.conv.init_state(batch_size, dtype)

    def start_recurrence(self, batch_size: int) -> PyTree:
        return self_modifying.init_state(self._start(), batch_size)

    def project(self, x: jax.Array, inputs: PyTree, segment_ids: jax.Array | None) -> tuple[PyTree, PyTree]:
        x, inputs = self.conv(x, inputs, segment_ids)
        return (x.reshape(*x.shape[:2], self.heads, self.size), l2_normalize(self.query(x))), inputs

    def recur(
        self, tokens: PyTree, state: PyTree, segment_ids: jax.Array | None, max_segments: int | None
    ) -> tuple[jax.Array, PyTree]:
        x, q = tokens
        if segment_ids is not None:
            max_segments = check_segments(segment_ids, max_segments, x, "SelfModifyingMixer")
        return self_modifying.scan(
            self.given, self._start(), state, x, q, self.bias[...], segment_ids=segment_ids, max_segments=max_segments
        )

    def output(self, y: jax.Array, tokens: PyTree) -> jax.Array:
        y = self.norm(y.astype(self.dtype))
        return self.out(y.reshape(*y.shape[:2], -1))

    def _start(self) -> self_modifying.Memories:
        return {name: getattr(self, name)() for name in ("memory", *self_modifying.GENERATORS)}
