"""Kimi Delta Attention (arXiv 2510.26692): a decay for each channel of the key, then the delta rule."""

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax import memory, rules
from atlasjax.nn.baselines.recurrent import HeadProjections, HeadsMixer, Tokens, float32_product, value_groups
from atlasjax.nn.baselines.step_sizes import log_rates, step_bias
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.layers import Linear, l2_normalize
from atlasjax.nn.module import Module
from atlasjax.nn.parameters import param


class LowRankLinear(Module):
    """x W_1 W_2 (+ b).

    Args:
      dim: width of x.
      rank: columns of W_1. 0: a full matrix, x W (+ b).
      shape: shape of the result, (heads, size).
      bias: whether there is a b, initially zero.
      rngs: source of the initial values.
    """

    def __init__(self, dim: int, rank: int, shape: tuple[int, int], *, bias: bool = False, rngs: nnx.Rngs):
        self.down = Linear((dim, rank), ("embed", "rank"), rngs=rngs) if rank else None
        width, axis = (rank, "rank") if rank else (dim, "embed")
        # Unlike RWKV-7's `LowRank`, these have the axis names of matrices: in the published models they have weight decay.
        self.up = Linear((width, *shape), (axis, "heads", None), bias=bias, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., dim] → [..., heads, size], in x's dtype."""
        return self.up(x if self.down is None else self.down(x))


class ChannelDecay(Module):
    """α = e^g, one for each channel of a head's keys. With f = x W_1 W_2 + dt_bias it is one of

        g = −exp(A_log) · softplus(f)                    the plain gate, A_log = log U(1, 16) at first
        g = lower_bound · σ(exp(A_log) · f)              the bounded gate, A_log = 0 at first

    Initially softplus(dt_bias) is log-uniform in [0.001, 0.1], with both gates.

    Args:
      dim: width of x.
      rank: of W_1 W_2, see `LowRankLinear`.
      shape: (heads, key_dim). There is one A_log for each head.
      lower_bound: of g, below 0. None: the plain gate.
      rngs: source of the initial values.
    """

    def __init__(self, dim: int, rank: int, shape: tuple[int, int], lower_bound: float | None, *, rngs: nnx.Rngs):
        heads, key_dim = shape
        self.logits = LowRankLinear(dim, rank, shape, rngs=rngs)
        # A rate of 16 inside a sigmoid would make it a step: the bounded gate starts with rates of 1.
        log_rate = jnp.zeros(heads, jnp.float32) if lower_bound is not None else log_rates(rngs, heads, 1.0, 16.0)
        self.A_log = param(log_rate, "heads")
        self.dt_bias = param(step_bias(rngs, heads * key_dim).reshape(shape), "heads", None)
        self.lower_bound = lower_bound

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., dim] → α [..., heads, key_dim], float32."""
        low = x if self.logits.down is None else float32_product(x, self.logits.down)
        logits = float32_product(low, self.logits.up) + self.dt_bias[None, None]
        rate = jnp.exp(self.A_log[None, None, :, None])
        if self.lower_bound is None:
            return jnp.exp(-rate * jax.nn.softplus(logits))
        return jnp.exp(self.lower_bound * jax.nn.sigmoid(rate * logits))


class ChannelDecayMixer(HeadsMixer):
    """The parts that Kimi Delta Attention and Gated DeltaNet-2 share. Subclasses define `write`.

        q, k, v = SiLU(conv(x W)),  q and k of unit length,  z = x W_3 W_4 (+ b)
        out = (RMSNorm(y) ⊙ σ(z)) W_out        one norm per head; norm, σ and their product are float32

    Args:
      config: as for `HeadsMixer`, conv_width, and kda.
      rule: the memory rule, without Memory Caching.
      by_key: whether a decay is that of a head of keys, with logits of gates for each channel of k and v (`more` of `write`).
      rngs: source of the initial values.

    Raises:
      ValueError: num_heads does not divide the number of heads of values.
    """

    def __init__(self, config: ModelConfig, rule: memory.MemoryRule, *, by_key: bool = False, rngs: nnx.Rngs):
        key_heads, value_heads = config.num_heads, config.kda.value_heads or config.num_heads
        super().__init__(config, rule, num_heads=value_heads, rngs=rngs)
        self.largest_step = 2.0 if config.kda.negative_eigenvalues else 1.0
        rank = self.value_dim if config.kda.rank is None else config.kda.rank
        values = value_groups("KDAConfig", value_heads, key_heads) * self.value_dim  # of one head of keys
        sizes = (self.key_dim, self.key_dim, values) + ((self.key_dim, values) if by_key else ())
        self.inputs = HeadProjections(config.dim, key_heads, sizes, config.conv_width, rngs=rngs)
        decays = key_heads if by_key else value_heads, self.key_dim
        self.decay = ChannelDecay(config.dim, rank, decays, config.kda.lower_bound, rngs=rngs)
        outputs = value_heads, self.value_dim
        self.gate = LowRankLinear(config.dim, rank, outputs, bias=config.kda.gate_bias, rngs=rngs)

    def write(self, x: jax.Array, k: jax.Array, v: jax.Array, more: list[jax.Array]) -> tuple[jax.Array, memory.Gates]:
        """The values as they are written, and the gates besides the decay.

        Args:
          x: the layer input.
          k: keys [batch, time, key heads, key_dim], of unit length.
          v: values [batch, time, value heads, value_dim].
          more: the logits of further gates, [batch, time, key heads, …] each, in x's dtype.
        """
        raise NotImplementedError

    def for_values(self, a: jax.Array) -> jax.Array:
        """[batch, time, heads, size] of heads of keys or values → of heads of values, which consecutively share those of keys."""
        return jnp.repeat(a, self.num_heads // a.shape[2], axis=2)

    def project(self, x, inputs, segment_ids):
        (q, k, v, *more), inputs = self.inputs(x, inputs, segment_ids)
        q, k = l2_normalize(q).astype(x.dtype), l2_normalize(k).astype(x.dtype)
        v, gates = self.write(x, k, v.reshape(*v.shape[:2], self.num_heads, self.value_dim), more)
        gates = gates._replace(retention=self.for_values(self.decay(x)))
        return Tokens(self.for_values(q), self.for_values(k), v, gates, self.gate(x)), inputs

    def output(self, y, tokens):
        # In float32, so that bfloat16 rounds once, as in the published models; the gate of `HeadsMixer` rounds three times.
        wide = self.norm(y.astype(jnp.float32)) * jax.nn.sigmoid(tokens.rest.astype(jnp.float32))
        return self.out(wide.astype(y.dtype).reshape(*y.shape[:2], -1))


class KDAMixer(ChannelDecayMixer):
    """Kimi Delta Attention (fla: KimiDeltaAttention; transformers: KimiLinearDeltaAttention):

        q, k, v = SiLU(conv(x W)),  q and k of unit length,  z = x W_3 W_4,  β_t = σ(x W_β)
        α_t = e^{g_t},  g_t = −exp(A_log) · softplus(x W_1 W_2 + dt_bias)            one for each channel of a head's keys
        S̃_t = S_{t−1} Diag(α_t),  S_t = S̃_t + β_t (v_t − S̃_t k_t) k_tᵀ              y_t = S_t q_t
        out = (RMSNorm(y) ⊙ σ(z)) W_out                                              one norm per head, float32

    The bounded gate (`kda.lower_bound`) has another g_t, see `ChannelDecay`. W_1 W_2 and W_3 W_4 have the rank `kda.rank`. Several
    heads of values may share queries and keys (`kda.value_heads`); each has its own S, β and α. β is twice as large with
    `kda.negative_eigenvalues`. The published models scale q by head_dim^{−1/2}, which the norm undoes up to its eps
    (`HeadNormConfig`).

    Args:
      config: as for `HeadsMixer`, conv_width, and kda.
      rngs: source of the initial values.

    Raises:
      ValueError: num_heads does not divide the number of heads of values.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rules.kda(), rngs=rngs)
        self.beta = Linear((config.dim, self.num_heads), ("embed", "heads"), rngs=rngs)

    def write(self, x, k, v, more):
        return v, memory.Gates(step_size=self.largest_step * jax.nn.sigmoid(float32_product(x, self.beta)))
