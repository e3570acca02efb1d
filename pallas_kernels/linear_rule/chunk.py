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
import functools

import jax

from pallas_kernels.arguments import Arrays
from pallas_kernels.blocks import HIGHEST, Precision, finer
from pallas_kernels.chunk_program import computed_again, in_turn
from pallas_kernels.linear_rule.scores import Decayed, Pair, decayed, read
from pallas_kernels.side_by_side import lanes_of, spread, times, times_transposed, transposed_times, weighted_outer
from pallas_kernels.triangular import solve


@dataclasses.dataclass(frozen=True)
class LinearChunk:
    """A `chunk_scan.Chunk` for P heads: carry (W [value_dim, P · D],); inputs q, k [m, P · D], v [m, P · value_dim], α [m, P · D],
    r and s [m, P · D] if the removal is not at k, and the gate β [P, m].

    m is a power of two; padding has β = 0 and α = 1. `precision` is that of products with q, v and W.

    Attributes:
      delta: whether r = s = k.
      decay_first: whether the removal reads the decayed memory.
      turned: whether scores are computed in both orders, as their derivative needs them.
      turned_backward: the same for the backward kernel.
    """

    delta: bool
    decay_first: bool
    precision: Precision = HIGHEST
    heads: int = 1
    turned: bool = False
    turned_backward: bool = False

    @property
    def differentiated(self) -> "LinearChunk":
        """The same function as the backward kernel needs it."""
        return dataclasses.replace(self, turned=self.turned_backward)

    def __call__(self, carry: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        return self._advance(carry, xs, self._decayed(xs))

    def of_heads(self, carry: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        """For several groups of heads. Decays in turn, and systems together, whose products wait for each other."""
        # Without a system nothing waits, so groups come in turn, and each is computed again for its derivative.
        if self.turned and not self._removes(xs):
            return in_turn(functools.partial(computed_again, self), carry, xs)
        at = in_turn(self._decayed, xs)
        advance = jax.vmap(self._advance) if self._removes(xs) else functools.partial(in_turn, self._advance)
        return advance(carry, xs, at)

    def _removes(self, xs: Arrays) -> bool:
        return self.delta or len(xs) > 5  # r and s

    def _decayed(self, xs: Arrays) -> Decayed:
        """Queries q, and r if there is a removal; keys k, and s if it is not k. Scores of q with all keys, then those of r."""
        q, k, _, decay, *removal, _ = xs
        fine = finer(self.precision)
        queries: Arrays = (q * decay,)
        if self._removes(xs):
            r = removal[0] if removal else k
            queries = (*queries, r * decay if self.decay_first else r)
        keys: Arrays = (k, *removal[1:])
        pairs = [Pair(0, key, self.precision, own=0, turned=self.turned) for key in range(len(keys))]
        if len(queries) > 1:
            pairs += [Pair(1, key, fine) for key in range(len(keys))]
        return decayed(decay, queries, keys, (q,), tuple(pairs), self.heads)

    def _advance(self, carry: Arrays, xs: Arrays, at: Decayed) -> tuple[Arrays, Arrays]:
        (w,), (_, _, v, *_, beta) = carry, xs
        heads, precision = self.heads, self.precision
        y, w_end = times_transposed(at.queries[0], w, heads, precision), at.whole * w
        removes = self._removes(xs)
        # Scales columns of the scores: a column of β would have to be spread over lanes first.
        if not (removes or self.turned):
            # β stays rows, with tokens in lanes.
            y = y + times(at.scores[0] * lanes_of(beta), v, heads, precision)
            return (w_end + weighted_outer(v, at.keys[0], beta, precision),), (y,)
        # From rows with tokens in lanes to a column beside v: the layout of its rows.
        rate = spread(beta, heads, v.shape[1] // heads)
        written: Arrays = (rate * v,)  # at each of the keys
        if removes:
            right = times_transposed(at.queries[1], w, heads, precision)
            written = self._after_removal(at, right, rate, v, beta)
        # The first scores are those of q; those of r come after them and were used by `_after_removal`.
        for scores, keys, x in zip(at.scores, at.keys, written):
            y = y + read(scores, x, heads, precision)
            w_end = w_end + transposed_times(x, keys, heads, precision)
        return (w_end,), (y,)

    def _after_removal(self, at: Decayed, right: jax.Array, rate: jax.Array, v: jax.Array, beta: jax.Array) -> Arrays:
        """The writes at each of the keys, [m, P · value_dim] each. right: the reads at r of the memory before the chunk."""
        heads, size, fine = self.heads, v.shape[0], finer(self.precision)
        *of_keys, of_removal = at.scores[len(at.keys) :]
        if self.delta:
            right = rate * (v - right)
        else:
            right = -rate * (right + read(of_keys[0], rate * v, heads, fine))
        by_row = rate if heads == 1 or v.shape[1] == heads * size else spread(beta, heads, size)
        u = solve(by_row * of_removal, right, heads, fine)
        return (u,) if self.delta else (rate * v, u)
