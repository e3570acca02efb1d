"""RetNet's retention (Sun et al. 2023): linear attention with a fixed decay per head."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from atlasjax import memory, rules
from atlasjax.mixers.rotary import rotate
from atlasjax.nn.baselines.recurrent import HeadProjections, HeadsMixer, Tokens
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.layers import segment_starts


class RetNetMixer(HeadsMixer):
    """Multi-scale retention:

        q, k, v, z = x W;  q and k rotated by position (RoPE, θ = 10,000),  k scaled by head_dim^{−1/2}
        S_t = γ_h S_{t−1} + v_t k_tᵀ,  γ_h = 1 − 2^{−5−h}              y_t = S_t q_t
        out = (RMSNorm(y) ⊙ SiLU(z)) W_out                             one norm per head

    In the paper values are twice as wide as keys (`value_expansion=2`).

    Args:
      config: as for `HeadsMixer`; head_dim must be even.
      rngs: source of the initial values.

    Raises:
      ValueError: head_dim is odd.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rules.retnet(), rngs=rngs)
        if self.key_dim % 2:
            raise ValueError(f"mixer 'retnet': head_dim={self.key_dim} must be even for rotary positions.")
        sizes = (self.key_dim, self.key_dim, self.value_dim, self.value_dim)
        self.inputs = HeadProjections(config.dim, self.num_heads, sizes, rngs=rngs)

    def start_inputs(self, batch_size, dtype):
        return jnp.zeros((batch_size,), jnp.int32)  # tokens read

    def project(self, x, inputs, segment_ids):
        (q, k, v, z), _ = self.inputs(x, None, None)
        time = jnp.arange(x.shape[1])
        position = inputs[:, None] + time[None]
        if segment_ids is not None:  # positions count from the segment's start
            position = position - jax.lax.cummax(jnp.where(segment_starts(segment_ids), position, 0), axis=1)
        q, k = rotate(q, position), rotate(k, position) * self.key_dim**-0.5
        gamma = jnp.asarray(1.0 - 2.0 ** (-5.0 - np.arange(self.num_heads)), jnp.float32)
        gates = memory.Gates(
            retention=jnp.broadcast_to(gamma, q.shape[:3]), step_size=jnp.ones(q.shape[:3], jnp.float32)
        )
        return Tokens(q, k.astype(q.dtype), v, gates, z), inputs + x.shape[1]
