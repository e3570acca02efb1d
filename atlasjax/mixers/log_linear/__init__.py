"""Log-linear attention: linear attention whose past is kept as one state for each level of a Fenwick tree.

    y_t = Σ_{s ≤ t} λ_t[level(t, s)] (α_{s+1} … α_t) ⟨q_t, k_s⟩ v_s        level(t, s) = bit_length(t xor s)

(Guo et al. 2025, arXiv 2506.04761.) Level 0 is the token itself, level ℓ ≥ 1 the dyadic segment of 2^{ℓ−1} tokens that t's own
segment of that size follows: nearer tokens are told apart more finely. Levels depend on positions alone, never on the length of
the text. The second variant, Log-Linear++ of the Memory Caching paper (§4), is gated residual memory over the same segments: its
λ_t = softmax over the levels that t has of ⟨u_t, mean of the segment's keys⟩ (`segment_weights`).

Both are computed by halves: two neighbouring segments become one, and what the second reads of the first is one product with the
first's state. O(T log T) work, log T states for each sequence in decoding.
"""

from atlasjax.mixers.log_linear.levels import level_of, num_levels
from atlasjax.mixers.log_linear.parallel import attention, segment_weights
from atlasjax.mixers.log_linear.stream import LogLinearState, extend, init_state, step

__all__ = [
    "LogLinearState",
    "attention",
    "extend",
    "init_state",
    "level_of",
    "num_levels",
    "segment_weights",
    "step",
]
