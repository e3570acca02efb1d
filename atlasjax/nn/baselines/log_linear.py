"""Log-linear attention (Guo et al. 2025) as layers: one state per level of a Fenwick tree, with weights λ as in the paper or from
Memory Caching's gates."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from atlasjax.mixers import log_linear
from atlasjax.nn.attention import output_projection
from atlasjax.nn.baselines.mamba2 import Mamba2Mixer, Mamba2Tokens
from atlasjax.nn.baselines.recurrent import (
    HeadProjections,
    RecurrentMixer,
    RecurrentState,
    float32_product,
)
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.layers import Linear, RMSNorm, l2_normalize
from atlasjax.nn.module import Module
from atlasjax.nn.parameters import param
from atlasjax.nn.partition import NOT_DIVIDED

LEVELS = 15  # levels with a λ of their own, as published: 16,384 tokens
_LONGEST = 1 << 30  # tokens that a state without max_length has levels for


class LogLinearTokens(NamedTuple):
    """q, k, v: [batch, time, heads, …]; retention α: [batch, time, heads] or None; rest: inputs of `output`; and either
    weights λ: [batch, time, heads, levels], float32, or connector u, with q's shape."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    retention: jax.Array | None
    rest: PyTree
    weights: jax.Array | None = None
    connector: jax.Array | None = None


class LevelWeights(Module):
    """λ = softplus(scale ⊙ x W): a weight per level, token and head, float32. `scale` is initially one, as published.

    Levels beyond the last one share its weight, so all tokens more than 2^14 back are weighted alike.

    Args:
      dim: width of x.
      num_heads: number of heads.
      rngs: source of the initial values.
    """

    def __init__(self, dim: int, num_heads: int, *, rngs: nnx.Rngs):
        self.linear = Linear((dim, num_heads, LEVELS), ("embed", "heads", None), rngs=rngs)
        self.scale = param(jnp.ones((num_heads, LEVELS), jnp.float32), "heads", None)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, time, dim] → [batch, time, heads, LEVELS]."""
        return jax.nn.softplus(self.scale[None, None] * float32_product(x, self.linear))


def _with_levels(weights: jax.Array, levels: int) -> jax.Array:
    """λ for `levels` levels. Levels without a weight of their own use the last one."""
    return jnp.take(weights, jnp.minimum(jnp.arange(levels), weights.shape[-1] - 1), axis=-1)


def init_state(
    mixer: RecurrentMixer, sizes: tuple[int, int, int], batch_size: int, max_length: int | None
) -> RecurrentState:
    """The state before the first token, with num_levels(max_length) levels, or the maximum (31) if max_length is None.

    sizes: heads, key_dim, value_dim.
    """
    length = _LONGEST if max_length is None else min(max_length, _LONGEST)
    return RecurrentState(
        mixer.start_inputs(batch_size, mixer.dtype), log_linear.init_state(batch_size, *sizes, max_length=length)
    )


def recur(
    tokens: LogLinearTokens, state: log_linear.LogLinearState | None, segment_ids: jax.Array | None
) -> tuple[jax.Array, log_linear.LogLinearState | None]:
    """y and the next state: of whole sequences, and None, if `state` is None; otherwise of the next piece."""
    q, k, v, retention, _, weights, connector = tokens
    if state is not None:
        if weights is not None:
            weights = _with_levels(weights, state.states.shape[2])
        return log_linear.extend(state, q, k, v, weights, retention, connector)
    if weights is not None:
        weights = _with_levels(weights, log_linear.num_levels(q.shape[1]))
    else:
        assert connector is not None
        weights = log_linear.segment_weights(connector, k, segment_ids)
    return log_linear.attention(q, k, v, weights, retention, segment_ids), None


class LogLinearMamba2Mixer(Mamba2Mixer):
    """Log-linear Mamba-2 (Guo et al. 2025, §3.4): Mamba-2's block with one state per level of a Fenwick tree:

        λ_t = softplus(L ⊙ u W_λ)                                     one weight per head and each of 15 levels
        y_t = Σ_{s ≤ t} λ_t[level(t, s)] (∏_{j=s+1}^t exp(Δ_j A)) Δ_s x_s ⟨B_s, C_t⟩ + D x_t

    With λ = 1 it is Mamba-2. L is initially one, so λ is about log 2. The published code does not define λ beyond 16,384 tokens.
    Here all levels from the 15th on share its λ.

    Args:
      config: as for `Mamba2Mixer`.
      rngs: source of the initial values.

    Raises:
      ValueError: as for `Mamba2Mixer`.
    """

    takes_caching = False  # it keeps states of its own for earlier tokens
    undivided = NOT_DIVIDED
    memory_call = None  # it does not call `memory.scan`

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.levels = LevelWeights(config.dim, self.num_heads, rngs=rngs)

    def init_state(self, batch_size: int, max_length: int | None = None) -> RecurrentState:
        """The state before the first token; tokens beyond `max_length` get NaN."""
        return init_state(self, (self.num_heads, self.key_dim, self.value_dim), batch_size, max_length)

    def project(self, x, inputs, segment_ids):
        tokens, inputs = super().project(x, inputs, segment_ids)
        B, C = (jnp.repeat(z, self.num_heads // self.groups, axis=2) for z in (tokens.B, tokens.C))
        v = (tokens.step[..., None] * tokens.x.astype(jnp.float32)).astype(x.dtype)
        retention = jnp.exp(-tokens.step * jnp.exp(self.A_log[None, None]))
        return LogLinearTokens(C, B, v, retention, tokens, weights=self.levels(x)), inputs

    def recur(self, tokens, state, segment_ids, max_segments):
        y, state = recur(tokens, state, segment_ids)
        skip = self.D[None, None, :, None] * tokens.rest.x.astype(jnp.float32)
        return (y.astype(jnp.float32) + skip).astype(y.dtype), state

    def output(self, y, tokens):
        rest: Mamba2Tokens = tokens.rest
        return super().output(y, rest)


class LogLinearMixer(RecurrentMixer):
    """Log-linear attention based on linear attention without decay (Guo et al. 2025, §3.1, the first of its forms):

        q, k, v = SiLU(conv(x W)),  q and k of unit length,  z = x W_z
        λ_t = softplus(L ⊙ x W_λ),  y_t = Σ_{s ≤ t} λ_t[level(t, s)] ⟨q_t, k_s⟩ v_s
        out = (RMSNorm(y) ⊙ SiLU(z)) W_out                          one norm per head

    The paper trains only variants of Mamba-2 and Gated DeltaNet. Here the layer around y is that of this library's memories, so
    that "log_linear", "log_linear_plus_plus" and a cached linear attention differ only in their weights and segments.

    Args:
      config: dim, num_heads, head_dim (of keys), value_expansion, conv_width, norm_eps, num_layers (for W_out's initial scale),
        dtype.
      rngs: source of the initial values.
    """

    _inputs = 4  # q, k, v, z

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        heads, key_dim, value_dim = config.num_heads, config.resolved_head_dim, config.value_dim
        self.sizes = (heads, key_dim, value_dim)
        self.dtype = jnp.dtype(config.dtype)
        sizes = (key_dim, key_dim, value_dim, value_dim, *(key_dim,) * (self._inputs - 4))
        self.inputs = HeadProjections(config.dim, heads, sizes, config.conv_width, rngs=rngs)
        if self._inputs == 4:
            self.levels = LevelWeights(config.dim, heads, rngs=rngs)
        self.norm = RMSNorm((heads, value_dim), ("heads", None), config.norm_eps)
        self.out = output_projection(config, rngs, inner=heads * value_dim)

    def start_inputs(self, batch_size, dtype):
        return self.inputs.start(batch_size, dtype)

    def init_state(self, batch_size: int, max_length: int | None = None) -> RecurrentState:
        """The state before the first token; tokens beyond `max_length` get NaN."""
        return init_state(self, self.sizes, batch_size, max_length)

    def project(self, x, inputs, segment_ids):
        (q, k, v, z, *u), inputs = self.inputs(x, inputs, segment_ids)
        q, k = l2_normalize(q).astype(x.dtype), l2_normalize(k).astype(x.dtype)
        if u:
            return LogLinearTokens(q, k, v, None, z, connector=u[0]), inputs
        return LogLinearTokens(q, k, v, None, z, weights=self.levels(x)), inputs

    def recur(self, tokens, state, segment_ids, max_segments):
        return recur(tokens, state, segment_ids)

    def output(self, y, tokens):
        y = self.norm(y) * jax.nn.silu(tokens.rest)
        return self.out(y.reshape(*y.shape[:2], -1))


class LogLinearPlusPlusMixer(LogLinearMixer):
    """Log-linear attention with the gates of Memory Caching: λ of gated residual memory (GRM) over the dyadic segments.

        λ_t = softmax over the levels of t of ⟨u_t, mean of the segment's keys⟩,  u_t = x_t W_u

    The combination and its name, Log-Linear++, are ours: the paper has Log-Linear only as a baseline for GRM. Our choices: the
    rule is linear attention without decay, u has its own projection and no convolution, scores have no 1/√d, and level 0, the
    token itself, is included with its own key.

    Args:
      config: as for `LogLinearMixer`.
      rngs: source of the initial values.
    """

    _inputs = 5  # q, k, v, z, u
