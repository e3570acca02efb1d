"""One chunk of a linear rule with decays for each channel, for `chunk_scan`.

    W_t = W_{t−1} Diag(α_t) + β_t (v_t k_tᵀ − (W̃_t r_t) s_tᵀ)        y_t = W_t q_t

W̃_t is W_{t−1}, or W_{t−1} Diag(α_t) if the decay comes first; the delta rule has r = s = k, and linear attention has no removal.
With A_t = α_1 … α_t, P[t,i] = α_{i+1} … α_t (of each channel) and the memory W_0 before the chunk,

    U = diag(β) X    X = −(I + L diag(β))⁻¹ ((Ã ⊙ R) W_0ᵀ + L' diag(β) V)    L[t,i] = Σ_d P̃[t,i,d] r_t[d] s_i[d]
    Y = (A ⊙ Q) W_0ᵀ + scores(Q, S) U + scores(Q, K) diag(β) V
    W_end = W_0 Diag(A_end) + Uᵀ S̃ + (diag(β) V)ᵀ K̃

where S̃ and K̃ are decayed to the chunk's end, L' has k_i for s_i, and Ã, P̃ end at t − 1 (or t if the decay comes first). The delta
rule has the two terms in one: X = (I + L diag(β))⁻¹ (V − (Ã ⊙ K) W_0ᵀ), and nothing else is added. All scores are computed by
`scores`.

β multiplies columns of L, not rows: tokens of β are in lanes, and X, from which dβ follows, is also known where β is 0.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax

from pallas_kernels.arguments import Arrays
from pallas_kernels.blocks import HIGHEST, Precision, as_tokens, finer
from pallas_kernels.chunk_program import in_turn
from pallas_kernels.linear_rule.scores import Decayed, decayed
from pallas_kernels.residuals import KeepingChunk
from pallas_kernels.side_by_side import (
    lanes_of,
    spread,
    times,
    times_transposed,
    transposed_times,
    weighted_outer,
)
from pallas_kernels.triangular import solve, unit_lower_inverse


@dataclasses.dataclass(frozen=True)
class LinearChunk(KeepingChunk):
    """A `chunk_scan.Chunk` for P heads: carry (W [value_dim, P · D],); inputs q, k [m, P · D], v [m, P · value_dim], α [m, P · D],
    r and s [m, P · D] if the removal is not at k, and the gate β [P, m].

    m is a power of two; padding has β = 0 and α = 1. `precision` is that of products with q, v and W.

    Attributes:
      removes: whether there is a removal.
      delta: whether r = s = k.
      decay_first: whether the removal reads the decayed memory.
      residuals: what the forward kernel keeps of a chunk: nothing; "inverse": that of its system, and the scores of r, if there is
        a removal; "all": also the scores of q, and X.
    """

    removes: bool
    delta: bool
    decay_first: bool
    precision: Precision = HIGHEST
    heads: int = 1

    @property
    def keeps_something(self) -> bool:
        return self.residuals == "all" or (self.removes and self.residuals != "recompute")

    @property
    def ahead(self) -> bool:
        """Whether several chunks are prepared together: those with systems."""
        return self.removes

    def __call__(self, carry: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        at = self._decayed(xs)
        return self.advance(carry, xs, (at, self._inverse(xs, at)))

    def of_heads(self, carry: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        """For several groups of heads."""
        advance = jax.vmap(self.advance) if self.removes else functools.partial(in_turn, self.advance)
        return advance(carry, xs, self.prepare(xs))

    def prepare(self, xs: Arrays) -> "_Prepared":
        """For several groups or chunks: decays in turn, and systems together, whose products wait for each other."""
        at = in_turn(self._decayed, xs)
        return at, jax.vmap(self._inverse)(xs, at)

    def _parts(self, xs: Arrays) -> "_Inputs":
        q, k, v, decay, *rest = xs
        count = 2 if self.removes and not self.delta else 0
        kept, keys = tuple(rest[count + 1 :]), len(rest[:count]) // 2 + 1
        known = None
        if self.backward and self.keeps_something:
            known = _Known.of(kept, keys) if self.removes else _Known(None, (), kept, None)
        return _Inputs(q, k, v, decay, tuple(rest[:count]), rest[count], known)

    def _decayed(self, xs: Arrays) -> Decayed:
        """Queries q, and r if there is a removal; keys k, and s if it is not k."""
        x = self._parts(xs)
        queries: Arrays = (x.q * x.decay,)
        if self.removes:
            r = x.removal[0] if x.removal else x.k
            queries = (*queries, r * x.decay if self.decay_first else r)
        precisions = (self.precision, finer(self.precision))[: len(queries)]
        known = (None, None) if x.known is None else (x.known.of_queries or None, x.known.of_removal)
        return decayed(x.decay, queries, (x.k, *x.removal[1:]), (x.q,), precisions, known[: len(queries)], self.heads)

    def _inverse(self, xs: Arrays, at: Decayed) -> jax.Array | None:
        """The inverse of the system I + L diag(β), if there is a removal."""
        x = self._parts(xs)
        if not self.removes or x.known is not None:
            return None if x.known is None else x.known.inverse
        lower = jax.lax.stop_gradient(at.scores[1][-1] * lanes_of(x.beta))  # `solve` has its derivative
        return unit_lower_inverse(lower, self.heads, finer(self.precision))

    def advance(self, carry: Arrays, xs: Arrays, prepared: "_Prepared") -> tuple[Arrays, Arrays]:
        """A chunk after `prepare`."""
        (w,), x, (at, inverse) = carry, self._parts(xs), prepared
        heads, precision = self.heads, self.precision
        y, w_end = times_transposed(at.queries[0], w, heads, precision), at.whole * w
        if inverse is None:
            # β stays rows, with tokens in lanes.
            (of_queries,) = at.scores[0]
            y = y + times(of_queries * lanes_of(x.beta), x.v, heads, precision)
            scores_kept: Arrays = (as_tokens(of_queries, self.precision),) if self.keeps else ()
            return (w_end + weighted_outer(x.v, at.keys[0], x.beta, precision),), (y, *scores_kept)
        rate = spread(x.beta, heads, x.v.shape[1] // heads)
        right = times_transposed(at.queries[1], w, heads, precision)
        u, kept = self._after_removal(at, inverse, right, rate, x)
        written: Arrays = (u,) if self.delta else (rate * x.v, u)  # at each of the keys
        for scores, keys, z in zip(at.scores[0], at.keys, written):
            y = y + times(scores, z, heads, precision)
            w_end = w_end + transposed_times(z, keys, heads, precision)
        return (w_end,), (y, *(kept if self.keeps else ()))

    def _after_removal(
        self, at: Decayed, inverse: jax.Array, right: jax.Array, rate: jax.Array, x: "_Inputs"
    ) -> tuple[jax.Array, Arrays]:
        """U [m, P · value_dim], and what is kept for the backward kernel. `right` is what the memory before the chunk has at r."""
        heads, fine = self.heads, finer(self.precision)
        *of_keys, of_removal = at.scores[1]
        right = x.v - right if self.delta else -(right + times(of_keys[0], rate * x.v, heads, fine))
        known = None if x.known is None else x.known.solved
        solved = solve(of_removal * lanes_of(x.beta), right, inverse, known, heads, fine)
        more = (*at.scores[0], solved) if self.residuals == "all" else ()
        return rate * solved, (inverse, *(as_tokens(z, self.precision) for z in (*at.scores[1], *more)))


class _Known(NamedTuple):
    """The arrays that the forward kernel kept: the inverse, scores of r with each of the keys, and of q, and X."""

    inverse: jax.Array | None
    of_removal: Arrays
    of_queries: Arrays
    solved: jax.Array | None

    @classmethod
    def of(cls, kept: Arrays, keys: int) -> "_Known":
        more = kept[1 + keys :]
        return cls(kept[0], kept[1 : 1 + keys], more[:keys], more[keys] if more else None)


class _Inputs(NamedTuple):
    """Inputs of a chunk by name. removal: r and s, or nothing."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    decay: jax.Array
    removal: Arrays
    beta: jax.Array
    known: _Known | None


_Prepared = tuple[Decayed, jax.Array | None]
