"""Momentum DeltaNet (arXiv:2605.05838): a delta rule whose writes are a gated part of their momentum."""

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax import memory, rules
from atlasjax.nn.baselines.recurrent import HeadProjections, HeadsMixer, Tokens, float32_product, value_groups
from atlasjax.nn.baselines.step_sizes import log_rates, step_bias
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.layers import Linear, l2_normalize
from atlasjax.nn.parameters import param

_LEAST = 1e-3  # of initial values that are uniform from 0: log 0 could not be learned
_LEAST_LOG_MOMENTUM = -2.0  # fla: min_log_mu


class MomentumDeltaNetMixer(HeadsMixer):
    """The delta rule with momentum, as fla's `MomentumDeltaNet` with its default arguments:

        q, k, v = SiLU(conv(x W)),  z = x W_z;  then q ← q − D k, and q and k of unit length
        η_t = 1 + tanh(x W_η / √dim)                             r_t = η_t exp(log_factor),  so that tan ϑ = r
        α_t = cos²ϑ · exp(−exp(A_log) softplus(x W_α + dt_bias)),  cos²ϑ = 1/(1 + r²)
        β_t = sin²ϑ · σ(x W_β)                                   α + β ≤ 1
        μ_t = exp(max(−exp(Mu_log) softplus(x W_μ + mu_bias), −2))
        S_t = μ_t S_{t−1} − η_t (α_t W_{t−1} k_t − v_t) k_tᵀ     W_t = α_t W_{t−1} + β_t S_t     y_t = W_t q_t
        out = (RMSNorm(y) ⊙ SiLU(z)) W_out                       one norm per head

    Values are twice as wide as keys in fla (`value_expansion=2`). D = exp(D_log), log_factor, A_log and Mu_log belong to a head of
    keys, dt_bias and mu_bias to a head of values (`gated_deltanet.value_heads`), which has its own S, W and gates. Initial values
    of exp(A_log) and exp(Mu_log) are uniform in [0, 16], of exp(log_factor) in [0, 4] and of D in [0, 1]; softplus of dt_bias is
    log-uniform in [0.001, 0.1], and mu_bias is the same. With `gated_deltanet.negative_eigenvalues` β is twice as large. This
    factor is a part of η here, at most 4 then: S is linear in η, and only the product ηβ counts.

    The rule has no bound (`rules.momentum_delta`): any would cut these steps.

    Args:
      config: as for `HeadsMixer`, conv_width, and gated_deltanet.
      rngs: source of the initial values.

    Raises:
      ValueError: num_heads does not divide the number of heads of values.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        heads = config.num_heads
        self.groups = value_groups("GatedDeltaNetConfig", config.value_heads, heads)
        super().__init__(config, rules.momentum_delta(), num_heads=heads * self.groups, rngs=rngs)
        self.step_scale = 2.0 if config.gated_deltanet.negative_eigenvalues else 1.0
        self.sharpness = config.dim**-0.5
        values = self.groups * self.value_dim  # of one head of keys
        self.inputs = HeadProjections(
            config.dim, heads, (self.key_dim, self.key_dim, values, values), config.conv_width, rngs=rngs
        )
        self.gates = Linear((config.dim, 4, self.num_heads), ("embed", None, "heads"), rngs=rngs)  # η, α, β, μ
        rates = lambda most: param(log_rates(rngs, heads, _LEAST, most), "heads")
        self.A_log, self.Mu_log, self.log_factor, self.D_log = rates(16.0), rates(16.0), rates(4.0), rates(1.0)
        bias = step_bias(rngs, self.num_heads)
        self.dt_bias, self.mu_bias = param(bias, "heads"), param(jnp.copy(bias), "heads")

    def project(self, x, inputs, segment_ids):
        (q, k, v, z), inputs = self.inputs(x, inputs, segment_ids)
        wide = lambda a: a.astype(jnp.float32)
        q = wide(q) - jnp.exp(self.D_log[None, None, :, None]) * wide(k)  # before q has unit length, as in fla
        shared = lambda a: jnp.repeat(l2_normalize(a).astype(x.dtype), self.groups, axis=2)
        split = lambda a: a.reshape(*a.shape[:2], self.num_heads, self.value_dim)
        return Tokens(shared(q), shared(k), split(v), self._gates(x), split(z)), inputs

    def _gates(self, x: jax.Array) -> memory.Gates:
        eta, alpha, beta, mu = jnp.moveaxis(float32_product(x, self.gates), 2, 0)
        of_value_heads = lambda p: jnp.repeat(jnp.exp(p[...]), self.groups)[None, None]
        eta = 1.0 + jnp.tanh(self.sharpness * eta)
        square = jnp.square(eta * of_value_heads(self.log_factor))
        decay = of_value_heads(self.A_log) * jax.nn.softplus(alpha + self.dt_bias[None, None])
        forget = of_value_heads(self.Mu_log) * jax.nn.softplus(mu + self.mu_bias[None, None])
        return memory.Gates(
            retention=jnp.exp(-decay) / (1.0 + square),
            step_size=self.step_scale * eta,
            momentum_decay=jnp.exp(jnp.maximum(-forget, _LEAST_LOG_MOMENTUM)),
            write_size=square / (1.0 + square) * jax.nn.sigmoid(beta),
        )
