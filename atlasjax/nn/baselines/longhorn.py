"""Longhorn (Liu et al. 2024): Mamba's block with online regression solved by implicit steps."""

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax import memory, rules
from atlasjax.mixers.matrix_memory import zero_start
from atlasjax.nn.baselines.mamba import MambaBlock
from atlasjax.nn.baselines.recurrent import Tokens, run_memory
from atlasjax.nn.config import ModelConfig

_RULE = rules.longhorn_channel()


class LonghornMixer(MambaBlock):
    """Longhorn in Mamba's block, with k for B, q for C, and β_t = σ(…) per channel in place of Δ:

        S_t = S_{t−1} + δ_t (x_t − S_{t−1} k_t) k_tᵀ,  δ_t = β_t / (1 + β_t ‖k_t‖²)        y_t = S_t q_t

    S is [inner, state], and row c uses the δ of channel c (rule `longhorn_channel`), because the published model has a β per
    channel. This is the step that the paper derives, and the row of A Table 1. The authors' code keeps only the diagonal of
    k kᵀ, to fit Mamba's scan. The block-parallel delta rule does not need this approximation. There is no rate A. Initially β is
    about one half.

    Args:
      config: as for `MambaBlock`.
      rngs: source of the initial values.
    """

    undivided = _RULE.undivided  # see `mixers.check_divided`

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, jnp.zeros(config.ssm.expand * config.dim, jnp.float32), rngs=rngs)

    def activate(self, logits):
        return jax.nn.sigmoid(logits)

    def start_recurrence(self, batch_size):
        return memory.init_state(_RULE, zero_start(1, self.inner, self.state_dim), batch_size=batch_size)

    def recur(self, tokens, state, segment_ids, max_segments):
        q, k, v, beta = (z[:, :, None] for z in (tokens.read, tokens.write, tokens.x, tokens.step))
        heads = Tokens(q, k, v, memory.Gates(step_size=beta))
        y, state = run_memory(_RULE, heads, state, segment_ids, max_segments)
        return y[:, :, 0], state
