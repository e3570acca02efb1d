"""Gated DeltaNet-2 (arXiv 2605.22791): Kimi Delta Attention with gates of their own for erasing and for writing."""

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax import memory, rules
from atlasjax.nn.baselines.kda import ChannelDecayMixer
from atlasjax.nn.config import ModelConfig


class GDN2Mixer(ChannelDecayMixer):
    """Gated DeltaNet-2 (fla: GatedDeltaNet2):

        q, k, v = SiLU(conv(x W)),  q and k of unit length,  z = x W_3 W_4
        b_t = σ(x W_b),  w_t = σ(x W_w)                                              for each channel of k, and of v
        α_t = e^{g_t},  g_t = −exp(A_log) · softplus(x W_1 W_2 + dt_bias)            for each channel of k
        S̃_t = S_{t−1} Diag(α_t),  S_t = S̃_t + (w_t ⊙ v_t − S̃_t (b_t ⊙ k_t)) k_tᵀ    y_t = S_t q_t
        out = (RMSNorm(y) ⊙ σ(z)) W_out                                              one norm per head, float32

    With b = w = β in all channels it is `KDAMixer`, and the fields of `config.kda` mean the same. Heads of values that share a key
    share its b and α. b is twice as large with `kda.negative_eigenvalues`.

    Args:
      config: as for `HeadsMixer`, conv_width, and kda.
      rngs: source of the initial values.

    Raises:
      ValueError: num_heads does not divide the number of heads of values.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rules.gdn2(), by_key=True, rngs=rngs)

    def write(self, x, k, v, more):
        # Logits in the model's dtype: errors of a gate that acts once do not add up over tokens, as those of a decay do.
        erase, write = (jax.nn.sigmoid(logits.astype(jnp.float32)) for logits in more)
        removal_key = self.for_values(self.largest_step * erase * k.astype(jnp.float32))
        gates = memory.Gates(removal_key=removal_key, step_size=jnp.ones(v.shape[:3], jnp.float32))
        return v * write.reshape(v.shape).astype(v.dtype), gates
