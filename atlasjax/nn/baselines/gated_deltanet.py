"""Gated DeltaNet (Yang et al. 2025): decay, then the delta rule."""

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax import memory, rules
from atlasjax.nn.baselines.recurrent import HeadProjections, HeadsMixer, Tokens, float32_product, value_groups
from atlasjax.nn.baselines.step_sizes import decay, log_rates, step_bias
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.layers import Linear, l2_normalize
from atlasjax.nn.parameters import param


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
      rule: the memory rule of a subclass. None: `rules.gated_delta_rule()`.
      rngs: source of the initial values.

    Raises:
      ValueError: num_heads does not divide the number of heads of values.
    """

    def __init__(self, config: ModelConfig, rule: memory.MemoryRule | None = None, *, rngs: nnx.Rngs):
        self.groups = value_groups("GatedDeltaNetConfig", config.value_heads, config.num_heads)
        rule = rules.gated_delta_rule() if rule is None else rule
        super().__init__(config, rule, num_heads=config.value_heads, rngs=rngs)
        self.largest_step = 2.0 if config.gated_deltanet.negative_eigenvalues else 1.0
        values = self.groups * self.value_dim  # of one head of keys
        sizes = (self.key_dim, self.key_dim, values, values)
        self.inputs = HeadProjections(config.dim, config.num_heads, sizes, config.conv_width, rngs=rngs)
        self.gates = Linear((config.dim, 2, self.num_heads), ("embed", None, "heads"), rngs=rngs)  # β, decay
        self.A_log = param(log_rates(rngs, self.num_heads, 1e-3, 16.0), "heads")  # log 0 could not be learned
        self.dt_bias = param(step_bias(rngs, self.num_heads), "heads")

    def project(self, x, inputs, segment_ids):
        q, k, v, z, inputs = self.of_heads(x, inputs, segment_ids)
        return Tokens(self.unit(q), self.unit(k), v, self.write_gates(x), z), inputs

    def of_heads(
        self, x: jax.Array, inputs: jax.Array | None, segment_ids: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """q and k of the heads of keys, v and z of the heads of values, [batch, time, heads, size], and the next `inputs`."""
        (q, k, v, z), inputs = self.inputs(x, inputs, segment_ids)
        split = lambda a: a.reshape(*a.shape[:2], self.num_heads, self.value_dim)
        return q, k, split(v), split(z), inputs

    def unit(self, a: jax.Array) -> jax.Array:
        """Queries or keys of unit length, repeated for the heads of values that share them."""
        return jnp.repeat(l2_normalize(a).astype(a.dtype), self.groups, axis=2)

    def write_gates(self, x: jax.Array) -> memory.Gates:
        """α and β of the layer input x."""
        logits = float32_product(x, self.gates)
        alpha = decay(logits[:, :, 1], self.A_log[...], self.dt_bias[...])
        return memory.Gates(retention=alpha, step_size=self.largest_step * jax.nn.sigmoid(logits[:, :, 0]))
