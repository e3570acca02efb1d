"""Log-linear attention: linear attention that keeps the past as one state for each level of a Fenwick tree.

    y_t = Σ_{s ≤ t} λ_t[level(t, s)] (α_{s+1} … α_t) ⟨q_t, k_s⟩ v_s        level(t, s) = bit_length(t xor s)

(Guo et al. 2025, arXiv 2506.04761.) Level 0 is the token itself. Level ℓ ≥ 1 is the dyadic segment of 2^{ℓ−1} tokens just before
t's own segment of that size, so the resolution is finer for nearer tokens. Levels depend only on positions, not on the length of
the text. The second variant, which we call Log-Linear++, has the gates of Memory Caching's gated residual memory (GRM, arXiv
2602.24281) over the same segments; neither paper has it. Its λ_t is the softmax of ⟨u_t, mean of the segment's keys⟩ over the
levels that t has (`segment_weights`).

Both are computed recursively. Two adjacent segments are merged into one, and what the second reads from the first is one product
with the first's state. The work is O(T log T), and decoding keeps O(log T) states per sequence.
"""

from atlasjax.mixers.log_linear.levels import level_of, num_levels
from atlasjax.mixers.log_linear.parallel import attention, segment_weights
from atlasjax.mixers.log_linear.state import LogLinearState, init_state
from atlasjax.mixers.log_linear.stream import extend, step

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
