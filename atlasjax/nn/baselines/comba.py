"""Comba (arXiv 2506.02475): Gated DeltaNet with closed-loop control, by a read key and a correction of the queries."""

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax import rules
from atlasjax.nn.baselines.gated_deltanet import GatedDeltaNetMixer
from atlasjax.nn.baselines.recurrent import Tokens
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.parameters import param


class CombaMixer(GatedDeltaNetMixer):
    """Gated DeltaNet that removes at a key p, and subtracts it from its queries:

        q, k, v = SiLU(conv(x W)),  p = σ(d_h) k,  q ← q − D_h p,  then q, k and p of unit length
        S_t = α_t S_{t−1} + β_t (v_t − S_{t−1} p_t) k_tᵀ        y_t = S_t q_t
        out = (RMSNorm(y) ⊙ σ(z)) W_out                         one norm per head

    α, β, z and the initial values are those of Gated DeltaNet; d and D, one for each head of keys, are initially 1. In this order,
    that of fla's layer (`Comba`), p has the length of k, so that d acts only on the queries. In the paper values are
    twice as wide as keys (`value_expansion=2`), and D starts at 0.02 in small models.

    Args:
      config: as for `GatedDeltaNetMixer`, with its sizes (`gated_deltanet`).
      rngs: source of the initial values.

    Raises:
      ValueError: num_heads does not divide the number of heads of values, or gated_deltanet.negative_eigenvalues is set.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        if config.gated_deltanet.negative_eigenvalues:
            # The decay comes last: with β up to 2 the eigenvalue α − β would be below −1.
            raise ValueError(
                "mixer 'comba': gated_deltanet.negative_eigenvalues must be False, because α − β may be −2 with it."
            )
        super().__init__(config, rules.comba(), rngs=rngs)
        self.inner_decay = param(jnp.ones(config.num_heads, jnp.float32), "heads")  # d
        self.correction = param(jnp.ones(config.num_heads, jnp.float32), "heads")  # D

    def output_gate(self, logits):
        return jax.nn.sigmoid(logits)

    def project(self, x, inputs, segment_ids):
        q, k, v, z, inputs = self.of_heads(x, inputs, segment_ids)
        of_keys = lambda a: a[None, None, :, None]
        wide = lambda a: a.astype(jnp.float32)
        p = (wide(k) * jax.nn.sigmoid(of_keys(self.inner_decay[...]))).astype(x.dtype)
        q = (wide(q) - of_keys(self.correction[...]) * wide(p)).astype(x.dtype)
        gates = self.write_gates(x)._replace(removal_key=self.unit(p))
        return Tokens(self.unit(q), self.unit(k), v, gates, z), inputs
