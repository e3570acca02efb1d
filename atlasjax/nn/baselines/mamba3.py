"""Mamba-3 (Lahoti et al. 2026): exponential-trapezoidal writes to a rotated state, of rank R, in a gated block."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax import memory, rules
from atlasjax.mixers import mamba3
from atlasjax.nn.attention import output_projection
from atlasjax.nn.baselines.recurrent import MatrixMixer, float32_product, with_caching
from atlasjax.nn.baselines.step_sizes import step_bias
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.execution import execution
from atlasjax.nn.layers import Linear, RMSNorm
from atlasjax.nn.parameters import param

_LEAST_RATE = 1e-4  # of −A, as published


class Mamba3Tokens(NamedTuple):
    """x: [batch, time, rank, heads, head_dim]; z: [batch, time, 1, heads, head_dim]; step Δ, A and blend λ: [batch, time, heads],
    float32; B, C: [batch, time, rank, heads, state], rotated; gates: those of Memory Caching."""

    x: jax.Array
    z: jax.Array
    step: jax.Array
    A: jax.Array
    blend: jax.Array
    B: jax.Array
    C: jax.Array
    gates: memory.Gates = memory.Gates()


class Rotations(NamedTuple):
    """The last token's angles, in turns: float32 [batch, heads, angles]."""

    turns: jax.Array

    @property
    def heads_axis(self) -> int:  # of its arrays, for `distributed.cache_shardings`
        return 1


class Mamba3Mixer(MatrixMixer):
    """Mamba-3's block (`atlasjax.mixers.mamba3`; fla: `layers.mamba3.Mamba3`), without a convolution:

        z, v, B, C = u W_in,  Δ, a, λ, ω = u W_gates        Δ = softplus(Δ + dt_bias), A = −softplus(a), λ = σ(λ) per head
        B, C ← RMSNorm(B) + B_bias, RMSNorm(C) + C_bias     one norm over the state, one bias per head
        x_r = v ⊙ mimo_x_r                                  r = 1 … R
        y = recurrence(x, Δ, A, λ, B, C) + D x              keys B and queries C rotated by Σ Δ π tanh(ω)
        out = (Σ_r y_r ⊙ SiLU(z ⊙ mimo_z_r) ⊙ mimo_o_r) W_out

    With rank R = 1 (SISO) there are no mimo_x, mimo_z and mimo_o. With `mamba3.output_norm`, y_r is normalized over the channels of
    each head before its gate. The heads of a group share B and C. The number of heads is expand · dim / ssm.head_dim, not
    `num_heads`. As published, there is one group, ssm.state_dim is 128 and ssm.head_dim is 64; B_bias, C_bias, D and mimo_z are one
    initially, mimo_x and mimo_o are 1/R, and softplus(dt_bias) is log-uniform in [0.001, 0.1].

    Args:
      config: dim, ssm (expand, state_dim, head_dim, groups), mamba3, norm_eps, num_layers (for W_out's initial scale), caching,
        dtype, memory.implementation.
      rngs: source of the initial values.

    Raises:
      ValueError: ssm.head_dim does not divide ssm.expand · dim, ssm.groups does not divide the number of heads, ssm.state_dim is
        odd or too small to be rotated, or caching is given with a rank above 1.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        ssm, own = config.ssm, config.mamba3
        inner = ssm.expand * config.dim
        _check(config, inner)
        heads, state, rank = inner // ssm.head_dim, ssm.state_dim, own.rank
        self.dtype = jnp.dtype(config.dtype)
        self.num_heads, self.value_dim, self.key_dim = heads, ssm.head_dim, state
        self.groups, self.rank, self.num_angles = ssm.groups, rank, _angles(config)
        self.inputs = Linear((config.dim, 2, inner), ("embed", None, "heads"), rngs=rngs)
        self.selection = Linear((config.dim, 2 * rank * ssm.groups * state), ("embed", "rank"), rngs=rngs)
        self.gates = Linear((config.dim, 3, heads), ("embed", None, "heads"), rngs=rngs)
        self.rates = Linear((config.dim, self.num_angles), ("embed", "rank"), rngs=rngs)
        self.dt_bias = param(step_bias(rngs, heads), "heads")
        self.B_norm, self.C_norm = (RMSNorm((state,), (None,), config.norm_eps) for _ in range(2))
        self.B_bias, self.C_bias = (
            param(jnp.ones((rank, heads, state), jnp.float32), None, "heads", None) for _ in range(2)
        )
        self.D = param(jnp.ones(heads, jnp.float32), "heads")
        self.mimo_x, self.mimo_z, self.mimo_o = (
            None if rank == 1 else param(jnp.full((rank, heads, ssm.head_dim), value, jnp.float32), None, "heads", None)
            for value in (1 / rank, 1.0, 1 / rank)
        )
        self.norm = RMSNorm((heads, ssm.head_dim), ("heads", None), config.norm_eps) if own.output_norm else None
        self.out = output_projection(config, rngs, inner=inner)
        self.implementation = config.memory.implementation
        self.rule, self.cache = with_caching(config, rules.mamba3(rank=rank), heads, state, rngs)

    def start_inputs(self, batch_size, dtype):
        return Rotations(jnp.zeros((batch_size, self.num_heads, self.num_angles), jnp.float32))

    def project(self, x, inputs, segment_ids):
        lead = x.shape[:2]
        z, v = (a.reshape(*lead, 1, self.num_heads, -1) for a in jnp.moveaxis(self.inputs(x), 2, 0))
        step, rate, blend = jnp.moveaxis(float32_product(x, self.gates), 2, 0)
        step = jax.nn.softplus(step + self.dt_bias[None, None])
        A = -jnp.maximum(jax.nn.softplus(rate), _LEAST_RATE)
        turns = mamba3.rotations(float32_product(x, self.rates), step, inputs.turns, segment_ids)
        B, C = jnp.moveaxis(self.selection(x).reshape(*lead, 2, self.rank, self.groups, self.key_dim), 2, 0)
        keys = self._selected(B, self.B_norm, self.B_bias[...], turns)
        queries = self._selected(C, self.C_norm, self.C_bias[...], turns)
        if self.mimo_x is not None:
            v = (v.astype(jnp.float32) * self.mimo_x[None, None]).astype(x.dtype)
        return Mamba3Tokens(v, z, step, A, jax.nn.sigmoid(blend), keys, queries), Rotations(turns[:, -1])

    def _selected(self, x: jax.Array, norm: RMSNorm, bias: jax.Array, turns: jax.Array) -> jax.Array:
        """B or C of every head from that of its group, normalized and rotated."""
        each = jnp.repeat(norm(x), self.num_heads // self.groups, axis=3).astype(jnp.float32)
        return mamba3.rotate(each + bias[None, None], turns).astype(x.dtype)

    def recur(self, tokens, state, segment_ids, max_segments):
        x, _, step, A, blend, B, C, gates = tokens
        how = execution(self.implementation if state is None else None, self.rule, C[:, :, 0], x[:, :, 0])
        return mamba3.trapezoidal_scan(
            x, step, A, blend, B, C, self.D[...], state=state, segment_ids=segment_ids, max_segments=max_segments,
            rule=self.rule if self.rank == 1 else None, gates=gates, **how,
        )  # fmt: skip

    def output(self, y, tokens):
        z = tokens.z
        if self.norm is not None:
            y = self.norm(y)
        if self.mimo_z is None:
            y = y * jax.nn.silu(z)
        else:
            assert self.mimo_o is not None
            z = z.astype(jnp.float32) * self.mimo_z[None, None]
            y = (y * jax.nn.silu(z) * self.mimo_o[None, None]).astype(y.dtype)
        return self.out(jnp.sum(y, axis=2, dtype=jnp.float32).astype(y.dtype).reshape(*y.shape[:2], -1))


def _angles(config: ModelConfig) -> int:
    """The number of rotated pairs: an odd channel is left as it is."""
    return int(config.ssm.state_dim * config.mamba3.rope_fraction) // 2


def _check(config: ModelConfig, inner: int) -> None:
    ssm, rank = config.ssm, config.mamba3.rank
    if inner % ssm.head_dim:
        raise ValueError(
            f"mixer 'mamba3': ssm.head_dim={ssm.head_dim} must divide ssm.expand · dim = {ssm.expand} · {config.dim} = {inner}."
        )
    if inner // ssm.head_dim % ssm.groups:
        raise ValueError(f"mixer 'mamba3': ssm.groups={ssm.groups} must divide the {inner // ssm.head_dim} heads.")
    if ssm.state_dim % 2 or not _angles(config):
        least = round(2 / config.mamba3.rope_fraction)
        raise ValueError(
            f"mixer 'mamba3': ssm.state_dim={ssm.state_dim} must be even and at least {least}, to be rotated."
        )
    if rank > 1 and config.caching is not None:
        raise ValueError(
            f"mixer 'mamba3': caching is given, but mamba3.rank is {rank}; must be 1, because a read of a higher rank has parts "
            "that are in no memory."
        )
