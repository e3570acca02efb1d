"""Gated linear attention (Yang et al. 2024a): linear attention with a decay per key channel."""

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax import memory, rules
from atlasjax.nn.baselines.recurrent import HeadProjections, HeadsMixer, Tokens, float32_product
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.layers import Linear
from atlasjax.nn.parameters import param

_RANK = 16
_TEMPERATURE = 16.0


class GLAMixer(HeadsMixer):
    """Gated linear attention:

        q, k, v, z = x W;  k is scaled by head_dim^{−1/2}
        S_t = S_{t−1} Diag(α_t) + v_t k_tᵀ,  α_t = σ(x W_1 W_2 + b)^{1/16}        y_t = S_t q_t
        out = (RMSNorm(y) ⊙ SiLU(z)) W_out                                        one norm per head

    W_1 W_2 has rank 16. Initially α is about 0.96. In the paper keys are half as wide as values
    (`head_dim = dim / (2 num_heads)` with `value_expansion=2`).

    Args:
      config: as for `HeadsMixer`.
      rngs: source of the initial values.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rules.gla(), rngs=rngs)
        sizes = (self.key_dim, self.key_dim, self.value_dim, self.value_dim)
        self.inputs = HeadProjections(config.dim, self.num_heads, sizes, rngs=rngs)
        self.decay_in = Linear((config.dim, _RANK), ("embed", "rank"), rngs=rngs)
        self.decay_out = Linear((_RANK, self.num_heads, self.key_dim), ("rank", "heads", None), rngs=rngs)
        self.decay_bias = param(jnp.zeros((self.num_heads, self.key_dim), jnp.float32), "heads", None)

    def project(self, x, inputs, segment_ids):
        (q, k, v, z), _ = self.inputs(x, None, None)
        logits = float32_product(float32_product(x, self.decay_in), self.decay_out) + self.decay_bias[None, None]
        alpha = jnp.exp(jax.nn.log_sigmoid(logits) / _TEMPERATURE)
        gates = memory.Gates(retention=alpha, step_size=jnp.ones(q.shape[:3], jnp.float32))
        return Tokens(q, k * self.key_dim**-0.5, v, gates, z), None
