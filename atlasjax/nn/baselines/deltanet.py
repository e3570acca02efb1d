"""DeltaNet (Schlag et al. 2021; Yang et al. 2024b): linear attention whose writes replace the value stored under a key."""

import jax
from flax import nnx

from atlasjax import memory, rules
from atlasjax.nn.baselines.recurrent import HeadProjections, HeadsMixer, Tokens, float32_product
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.layers import Linear, l2_normalize


class DeltaNetMixer(HeadsMixer):
    """The delta rule:

        q, k, v = SiLU(conv(x W)),  q and k of unit length,  β_t = σ(x W_β)
        S_t = S_{t−1} + β_t (v_t − S_{t−1} k_t) k_tᵀ        y_t = S_t q_t
        out = RMSNorm(y) W_out                              one norm per head, no output gate

    Args:
      config: as for `HeadsMixer`, and conv_width.
      rngs: source of the initial values.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rules.delta_rule(), rngs=rngs)
        sizes = (self.key_dim, self.key_dim, self.value_dim)
        self.inputs = HeadProjections(config.dim, self.num_heads, sizes, config.conv_width, rngs=rngs)
        self.write = Linear((config.dim, self.num_heads), ("embed", "heads"), rngs=rngs)

    def project(self, x, inputs, segment_ids):
        (q, k, v), inputs = self.inputs(x, inputs, segment_ids)
        q, k = l2_normalize(q).astype(x.dtype), l2_normalize(k).astype(x.dtype)
        beta = jax.nn.sigmoid(float32_product(x, self.write))
        return Tokens(q, k, v, memory.Gates(step_size=beta)), inputs
