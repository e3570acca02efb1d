"""One chunk of a linear rule with decays for each channel, for `chunk_scan`.

    W_t = W_{t−1} Diag(α_t) + β_t (v_t k_tᵀ − (W̃_t r_t) s_tᵀ)        y_t = W_t q_t

W̃_t is W_{t−1}, or W_{t−1} Diag(α_t) if the decay comes first; the delta rule has r = s = k, and linear attention has no removal.
With A_t = α_1 … α_t, P[t,i] = α_{i+1} … α_t (of each channel) and the memory W_0 before the chunk,

    U = −(I + diag(β) L)⁻¹ diag(β) ((Ã ⊙ R) W_0ᵀ + L' diag(β) V)           L[t,i] = Σ_d P̃[t,i,d] r_t[d] s_i[d],  L' with k_i for s_i
    Y = (A ⊙ Q) W_0ᵀ + scores(Q, S) U + scores(Q, K) diag(β) V
    W_end = W_0 Diag(A_end) + Uᵀ S̃ + (diag(β) V)ᵀ K̃

where S̃ and K̃ are decayed to the chunk's end, and Ã, P̃ end at t − 1 (or t if the decay comes first). The delta rule has the two
terms in one: U = (I + diag(β) L)⁻¹ diag(β) (V − (Ã ⊙ K) W_0ᵀ), and nothing else is added. All scores are computed by `scores`.
"""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.arguments import Arrays
from pallas_kernels.blocks import HIGHEST, Precision, entry, finer
from pallas_kernels.linear_rule.scores import Pair, decayed
from pallas_kernels.side_by_side import place, spread, times, times_transposed, transposed_times
from pallas_kernels.triangular import solve


@dataclasses.dataclass(frozen=True)
class LinearChunk:
    """A `chunk_scan.Chunk` for P heads: carry (W [value_dim, P · D],); inputs q, k [m, P · D], v [m, P · value_dim], α [m, P · D],
    r and s [m, P · D] if the removal is not at k, and the gate β [P, m].

    m is a power of two; padding has β = 0 and α = 1. `precision` is that of products with q, v and W.

    Attributes:
      delta: whether r = s = k.
      decay_first: whether the removal reads the decayed memory.
    """

    delta: bool
    decay_first: bool
    precision: Precision = HIGHEST
    heads: int = 1

    def __call__(self, carry: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        (w,), (q, k, v, decay, *removal, beta) = carry, xs
        heads, size, precision = self.heads, q.shape[0], self.precision
        fine = finer(precision)
        removes = self.delta or bool(removal)
        rate = spread(beta, heads, v.shape[1] // heads, by_product=not removes)
        # Queries of the scores: q, and r if there is a removal. Keys: k, and s if it is not k.
        queries: Arrays = (q * decay,)
        keys: Arrays = (k,)
        of_read, of_removal = [Pair(0, 0, precision)], list[Pair]()
        if removes:
            r = removal[0] if removal else k
            queries = (*queries, r * decay if self.decay_first else r)
            of_removal = [Pair(1, 0, fine)]
        if removal:
            keys = (*keys, removal[1])
            of_read.append(Pair(0, 1, precision))
            of_removal.append(Pair(1, 1, fine))
        at = decayed(decay, queries, keys, (*of_read, *of_removal), heads)
        reads, lowers = at.scores[: len(of_read)], at.scores[len(of_read) :]
        shape = size, heads * size
        own = place(shape, 0, heads) == place(shape, 1, heads)
        reads = tuple(
            jnp.where(own, times_transposed(q, key, heads, precision), x) for key, x in zip((k, *removal[1:]), reads)
        )
        y = times_transposed(at.queries[0], w, heads, precision)
        w_end = entry(at.whole, size - 1) * w
        written = rate * v  # what is written at k
        if removes:
            right = times_transposed(at.queries[1], w, heads, precision)
            right = rate * (v - right) if self.delta else -rate * (right + times(lowers[0], written, heads, fine))
            by_row = rate if heads == 1 or v.shape[1] == shape[1] else spread(beta, heads, size)
            u = solve(by_row * lowers[-1], right, heads, fine)
            if self.delta:
                written = u
            else:
                y = y + times(reads[1], u, heads, precision)
                w_end = w_end + transposed_times(u, at.keys[1], heads, precision)
        y = y + times(reads[0], written, heads, precision)
        return (w_end + transposed_times(written, at.keys[0], heads, precision),), (y,)
