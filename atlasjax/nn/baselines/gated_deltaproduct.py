"""Gated DeltaProduct (Siems et al. 2025): Gated DeltaNet with several writes for each token."""

from typing import ClassVar

import jax
from flax import nnx

from atlasjax import memory, rules
from atlasjax.mixers.delta_product import interleaved, last_reads
from atlasjax.nn.baselines.recurrent import (
    HeadProjections,
    HeadsMixer,
    Tokens,
    float32_product,
    run_memory,
    value_groups,
)
from atlasjax.nn.baselines.step_sizes import decay, log_rates, step_bias
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.layers import Linear, l2_normalize
from atlasjax.nn.parameters import param


class GatedDeltaProductMixer(HeadsMixer):
    """n delta rules for each token, of which one decays:

        q, k_1 … k_n, v_1 … v_n = SiLU(conv(x W)),  q and k of unit length,  z = x W_z,  β_{t,j} = 2 σ(x W_{β,j})
        α_t = e^{g_t},  g_t = −exp(A_log) · softplus(x W_a + dt_bias)
        S ← α_t S_{t−1},  then for j = 1 … n:  S ← S + β_{t,j} (v_{t,j} − S k_{t,j}) k_{t,j}ᵀ        S_t = S,  y_t = S_t q_t
        out = (RMSNorm(y) ⊙ SiLU(z)) W_out                          one norm per head

    Source: arXiv 2502.10297. With one write and β = σ(x W_β) it is Gated DeltaNet, with the same initial values; without
    `forget_gate` it is DeltaProduct. A sequence costs as much as one of n times as many tokens (`mixers.delta_product`), without
    the projections. In fla (`GatedDeltaProduct`) values are twice as wide as keys (`value_expansion=2`).

    Args:
      config: as for `HeadsMixer` but caching, conv_width, and gated_deltaproduct.
      rngs: source of the initial values.

    Raises:
      ValueError: num_heads does not divide the number of heads of values.
    """

    takes_caching: ClassVar[bool] = False  # gates and segments of a cache are of tokens, not of their n rows

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        given = config.gated_deltaproduct
        key_heads, value_heads = config.num_heads, given.value_heads or config.num_heads
        self.groups = value_groups("DeltaProductConfig", value_heads, key_heads)
        rule = rules.gated_delta_rule() if given.forget_gate else rules.delta_rule()
        super().__init__(config, rule, num_heads=value_heads, rngs=rngs)
        self.writes = given.writes
        self.largest_step = 2.0 if given.negative_eigenvalues else 1.0
        values = self.groups * self.value_dim  # of one head of keys
        sizes = (self.key_dim, self.writes * self.key_dim, self.writes * values, values)
        self.inputs = HeadProjections(config.dim, key_heads, sizes, config.conv_width, rngs=rngs)
        gates = self.writes + given.forget_gate  # β of each write, and the decay
        self.gates = Linear((config.dim, gates, value_heads), ("embed", None, "heads"), rngs=rngs)
        rates = lambda: param(log_rates(rngs, value_heads, 1e-3, 16.0), "heads")  # log 0 could not be learned
        self.A_log = rates() if given.forget_gate else None
        self.dt_bias = param(step_bias(rngs, value_heads), "heads") if given.forget_gate else None

    def project(self, x, inputs, segment_ids):
        """Tokens whose k, v and β have an axis of writes after that of time."""
        (q, k, v, z), inputs = self.inputs(x, inputs, segment_ids)

        def by_write(a, heads):
            """[batch, time, heads of keys, writes · …] → [batch, time, writes, heads, …]."""
            return a.reshape(*a.shape[:3], self.writes, -1).swapaxes(2, 3).reshape(*a.shape[:2], self.writes, heads, -1)

        unit = lambda a: l2_normalize(a).astype(x.dtype).repeat(self.groups, axis=-2)
        q, k, v = unit(q), unit(by_write(k, q.shape[2])), by_write(v, self.num_heads)
        logits = float32_product(x, self.gates)
        beta = self.largest_step * jax.nn.sigmoid(logits[:, :, : self.writes])
        alpha = None
        if self.A_log is not None and self.dt_bias is not None:
            alpha = decay(logits[:, :, -1], self.A_log[...], self.dt_bias[...])
        z = z.reshape(*z.shape[:2], self.num_heads, self.value_dim)
        return Tokens(q, k, v, memory.Gates(retention=alpha, step_size=beta), z), inputs

    def recur(self, tokens, state, segment_ids, max_segments):
        rows = interleaved(tokens.q, tokens.k, tokens.v, tokens.gates, segment_ids)
        tokens = Tokens(rows.q, rows.k, rows.v, rows.gates)
        y, state = run_memory(self.rule, tokens, state, rows.segment_ids, max_segments, self.implementation)
        return last_reads(y, self.writes), state
