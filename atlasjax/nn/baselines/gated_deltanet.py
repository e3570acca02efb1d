"""Gated DeltaNet (Yang et al. 2025): decay, then the delta rule."""

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax import memory, rules
from atlasjax.nn.baselines.recurrent import HeadProjections, HeadsMixer, Tokens, float32_product
from atlasjax.nn.baselines.step_sizes import decay, log_rates, step_bias
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.layers import Linear, l2_normalize
from atlasjax.nn.parameters import param


def value_groups(config: ModelConfig) -> int:
    """Heads of values for each head of keys.

    Raises:
      ValueError: num_heads does not divide the number of heads of values.
    """
    if config.value_heads % config.num_heads:
        raise ValueError(
            f"GatedDeltaNetConfig: value_heads={config.value_heads} must be a multiple of num_heads={config.num_heads}."
        )
    return config.value_heads // config.num_heads


class GatedDeltaNetMixer(HeadsMixer):
    """The gated delta rule:

        q, k, v = SiLU(conv(x W)),  q and k of unit length,  z = x W_z,  β_t = σ(x W_β)
        α_t = e^{g_t},  g_t = −exp(A_log) · softplus(x W_a + dt_bias)
        S_t = α_t S_{t−1} + β_t (v_t − α_t S_{t−1} k_t) k_tᵀ        y_t = S_t q_t
        out = (RMSNorm(y) ⊙ SiLU(z)) W_out                          one norm per head

    In the paper values are twice as wide as keys (`value_expansion=2`). Initial rates exp(A_log) are uniform in [0, 16]. Several
    heads of values may share queries and keys (`gated_deltanet.value_heads`); each has its own S, β and α. β is twice as large with
    `gated_deltanet.negative_eigenvalues`.

    Args:
      config: as for `HeadsMixer`, conv_width, and gated_deltanet.
      rngs: source of the initial values.

    Raises:
      ValueError: num_heads does not divide the number of heads of values.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        key_heads, self.groups = config.num_heads, value_groups(config)
        super().__init__(config, rules.gated_delta_rule(), num_heads=config.value_heads, rngs=rngs)
        self.largest_step = 2.0 if config.gated_deltanet.negative_eigenvalues else 1.0
        values = self.groups * self.value_dim  # of one head of keys
        sizes = (self.key_dim, self.key_dim, values, values)
        self.inputs = HeadProjections(config.dim, key_heads, sizes, config.conv_width, rngs=rngs)
        self.gates = Linear((config.dim, 2, self.num_heads), ("embed", None, "heads"), rngs=rngs)  # β, decay
        self.A_log = param(log_rates(rngs, self.num_heads, 1e-3, 16.0), "heads")  # log 0 could not be learned
        self.dt_bias = param(step_bias(rngs, self.num_heads), "heads")

    def start_inputs(self, batch_size, dtype):
        return self.inputs.start(batch_size, dtype)

    def project(self, x, inputs, segment_ids):
        (q, k, v, z), inputs = self.inputs(x, inputs, segment_ids)
        shared = lambda a: jnp.repeat(l2_normalize(a).astype(x.dtype), self.groups, axis=2)
        split = lambda a: a.reshape(*a.shape[:2], self.num_heads, self.value_dim)
        q, k, v, z = shared(q), shared(k), split(v), split(z)
        logits = float32_product(x, self.gates)
        beta = self.largest_step * jax.nn.sigmoid(logits[:, :, 0])
        alpha = decay(logits[:, :, 1], self.A_log[...], self.dt_bias[...])
        return Tokens(q, k, v, memory.Gates(retention=alpha, step_size=beta), z), inputs
