"""MesaNet (von Oswald et al. 2025): ridge regression over all tokens, solved at every token."""

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax import memory, rules
from atlasjax.nn.baselines.recurrent import HeadProjections, HeadsMixer, Tokens, float32_product
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.layers import Linear, l2_normalize
from atlasjax.nn.parameters import param


class MesaMixer(HeadsMixer):
    """The mesa layer (arXiv 2506.05233; in fla `MesaNet`):

        q, k = SiLU(conv(x W)) of unit length,  v = x W_v
        α_t = σ(x W_α + b_α),  β_t = σ(x W_β + b_β),  λ = 1/4 + softplus(λ̂)
        H_t = α_t H_{t−1} + β_t k_t k_tᵀ,  G_t = α_t G_{t−1} + β_t v_t k_tᵀ        y_t = G_t (H_t + Diag(λ))⁻¹ q_t
        out = (RMSNorm(y) (⊙ SiLU(x W_z))) W_out                                   one norm per head

    Values have neither a convolution nor an activation. Initially α and β are about 1/2, and λ, of each head and key channel, is 1.

    Args:
      config: as for `HeadsMixer`, conv_width, and mesa.
      rngs: source of the initial values.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        rule = rules.mesa(config.mesa.solver, config.mesa.steps)
        super().__init__(config, rule, rngs=rngs)
        sizes = (self.key_dim, self.key_dim, self.value_dim) + (self.value_dim,) * config.mesa.output_gate
        self.inputs = HeadProjections(config.dim, self.num_heads, sizes, config.conv_width, 2, rngs=rngs)
        self.gates = Linear((config.dim, 2, self.num_heads), ("embed", None, "heads"), rngs=rngs)  # α, β
        self.gate_bias = param(jnp.zeros((2, self.num_heads), jnp.float32), None, "heads")
        initial = memory.init_params(
            rule, jax.random.key(0), num_heads=self.num_heads, key_dim=self.key_dim, value_dim=self.value_dim
        )
        self.ridge = param(initial.ridge, "heads", None)

    def memory_params(self) -> memory.MesaParams:
        """λ̂ is learned; the matrix starts at zero."""
        weights = {"W": jnp.zeros((self.num_heads, self.value_dim, self.key_dim), jnp.float32)}
        return memory.MesaParams(weights, self.ridge[...])

    def project(self, x, inputs, segment_ids):
        (q, k, v, *z), inputs = self.inputs(x, inputs, segment_ids)
        q, k = (l2_normalize(a).astype(x.dtype) for a in (q, k))
        alpha, beta = jnp.moveaxis(jax.nn.sigmoid(float32_product(x, self.gates) + self.gate_bias[None, None]), 2, 0)
        return Tokens(q, k, v, memory.Gates(retention=alpha, step_size=beta), z[0] if z else None), inputs
