"""Mamba-2 (Dao & Gu 2024): state space duality (SSD) in a gated block."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax import memory
from atlasjax.mixers import mamba2
from atlasjax.nn.attention import output_projection
from atlasjax.nn.baselines.recurrent import MatrixMixer, float32_product, with_caching
from atlasjax.nn.baselines.step_sizes import log_rates, step_bias
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.execution import execution
from atlasjax.nn.layers import CausalConv, Linear, RMSNorm, scaled
from atlasjax.nn.parameters import param


class Mamba2Tokens(NamedTuple):
    """x: [batch, time, heads, head_dim]; z: [batch, time, inner]; step Δ: [batch, time, heads], float32; B, C:
    [batch, time, groups, state]; gates: those of Memory Caching."""

    x: jax.Array
    z: jax.Array
    step: jax.Array
    B: jax.Array
    C: jax.Array
    gates: memory.Gates = memory.Gates()


class Mamba2Mixer(MatrixMixer):
    """Mamba-2's block:

        z, x, B, C = u W_in,  x, B, C ← SiLU(conv(·) + b),  Δ = softplus(u W_Δ + dt_bias)
        h_t = exp(Δ_t A) h_{t−1} + Δ_t x_t B_tᵀ,  y_t = h_t C_t + D x_t        A = −exp(A_log) and D per head
        out = RMSNorm(y ⊙ SiLU(z)) W_out                                       one norm over the heads of a group

    The config may bound Δ, move the norm before the gate or drop it (`SSMConfig`), and multiply the projections and the output by
    constants (`MultiplierConfig`).

    The heads of a group share B and C, and the norm's mean square is over the channels of a group. The number of heads is
    inner / ssm.head_dim, where inner is expand · dim or ssm.inner, not `num_heads`. As published, there is one group, ssm.state_dim
    is 128 and ssm.head_dim is 64, initial rates exp(A_log) are uniform in [1, 16], initial Δ is log-uniform in [0.001, 0.1], and
    there is no feed-forward network.

    Args:
      config: dim, conv_width, ssm (all but dt_rank), multipliers (ssm, ssm_out), norm_eps, num_layers (for W_out's initial scale),
        caching, dtype, memory.implementation.
      rngs: source of the initial values.

    Raises:
      ValueError: ssm.head_dim does not divide the inner width, or ssm.groups does not divide the number of heads.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        ssm = config.ssm
        inner = config.ssm_inner
        if inner % ssm.head_dim:
            width = "ssm.inner" if ssm.inner else f"ssm.expand · dim = {ssm.expand} · {config.dim}"
            raise ValueError(f"mixer 'mamba2': ssm.head_dim={ssm.head_dim} must divide {width} = {inner}.")
        self.dtype = jnp.dtype(config.dtype)
        self.num_heads, self.value_dim, self.key_dim = inner // ssm.head_dim, ssm.head_dim, ssm.state_dim
        self.groups = ssm.groups
        if self.num_heads % self.groups:
            raise ValueError(f"mixer 'mamba2': ssm.groups={ssm.groups} must divide the {self.num_heads} heads.")
        selection = 2 * ssm.groups * ssm.state_dim
        self.inputs = Linear((config.dim, 2, inner), ("embed", None, "heads"), rngs=rngs)
        self.selection = Linear((config.dim, selection), ("embed", "rank"), rngs=rngs)
        self.step = Linear((config.dim, self.num_heads), ("embed", "heads"), rngs=rngs)
        self.conv = CausalConv(config.conv_width, (inner,), ("heads",), rngs=rngs)
        self.conv_bias = param(jnp.zeros(inner, jnp.float32), "heads")
        self.selection_conv = CausalConv(config.conv_width, (selection,), (None,), rngs=rngs)
        self.selection_bias = param(jnp.zeros(selection, jnp.float32), None)
        self.dt_bias = param(step_bias(rngs, self.num_heads), "heads")
        self.A_log = param(log_rates(rngs, self.num_heads, 1.0, 16.0), "heads")
        self.D = param(jnp.ones(self.num_heads, jnp.float32), "heads")
        self.norms_last = ssm.output_norm == "gated"
        self.norm = None if ssm.output_norm == "none" else RMSNorm((inner,), ("heads",), config.norm_eps, ssm.groups)
        self.steps = (ssm.least_step, ssm.largest_step)
        self.factors, self.out_factor = config.multipliers.ssm, config.multipliers.ssm_out
        self.out = output_projection(config, rngs, inner=inner)
        self.implementation = config.memory.implementation
        self.rule = mamba2.RULE
        if type(self).takes_caching:
            self.rule, self.cache = with_caching(config, mamba2.RULE, self.num_heads, self.key_dim, rngs)

    def start_inputs(self, batch_size, dtype):
        return self.conv.init_state(batch_size, dtype), self.selection_conv.init_state(batch_size, dtype)

    def project(self, x, inputs, segment_ids):
        z, mixed = (scaled(self.inputs(x)[:, :, i], self.factors[i]) for i in range(2))
        mixed, conv = self.conv(mixed, inputs[0], segment_ids)
        mixed = jax.nn.silu(mixed + self.conv_bias[None, None]).astype(x.dtype)
        selected, selection_conv = self.selection_conv(self._selection(x), inputs[1], segment_ids)
        selected = jax.nn.silu(selected + self.selection_bias[None, None]).astype(x.dtype)
        B, C = jnp.split(selected.reshape(*x.shape[:2], 2 * self.groups, self.key_dim), 2, axis=2)
        step = scaled(float32_product(x, self.step), self.factors[4]) + self.dt_bias[None, None]
        step = _bounded(jax.nn.softplus(step), *self.steps)
        mixed = mixed.reshape(*x.shape[:2], self.num_heads, self.value_dim)
        return Mamba2Tokens(mixed, z, step, B, C), (conv, selection_conv)

    def _selection(self, x: jax.Array) -> jax.Array:
        """B and C before their convolution."""
        selected = self.selection(x)
        if self.factors[2] == self.factors[3]:
            return scaled(selected, self.factors[2])
        B, C = jnp.split(selected, 2, axis=-1)
        return jnp.concatenate([scaled(B, self.factors[2]), scaled(C, self.factors[3])], axis=-1)

    def recur(self, tokens, state, segment_ids, max_segments):
        x, _, step, B, C, gates = tokens
        how = execution(self.implementation if state is None else None, self.rule, C, x)
        A = -jnp.exp(self.A_log[...])
        return mamba2.ssd(
            x, step, A, B, C, self.D[...], state=state, segment_ids=segment_ids, max_segments=max_segments,
            rule=self.rule, gates=gates, **how,
        )  # fmt: skip

    def output(self, y, tokens):
        y, gate = y.reshape(tokens.z.shape), jax.nn.silu(tokens.z)
        if self.norm is None:
            y = y * gate
        else:
            y = self.norm(y * gate) if self.norms_last else self.norm(y) * gate
        return scaled(self.out(y), self.out_factor)


def _bounded(step: jax.Array, least: float, largest: float | None) -> jax.Array:
    """Δ within its bounds; unchanged without any."""
    return step if least == 0 and largest is None else jnp.clip(step, least, largest)
