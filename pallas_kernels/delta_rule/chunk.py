"""One chunk of the (gated) delta rule in WY form, with matrix operations only. The TPU kernel runs it per chunk.

    W_t = α_t W_{t−1} + β_t u_t k_tᵀ,   u_t = v_t − α_t W_{t−1} k_t,   y_t = W_t q_t

With A_t = α_1 … α_t, P[t,i] = α_{i+1} … α_t β_i and the memory W_0 before the chunk,

    (I + (P ∘ K Kᵀ)_{t>i}) U = V − A ⊙ K W_0ᵀ
    Y = A ⊙ Q W_0ᵀ + (P ∘ Q Kᵀ)_{t≥i} U        W_end = A_end W_0 + Uᵀ diag(P[end, ·]) K

So β and P[end, ·] stay rows, with tokens in lanes, and only A is a column. Decays are products, not quotients, so they are
exact at α = 0. The system's inverse does not depend on the memory. Narrow heads lie side by side (`side_by_side`).
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Arrays
from pallas_kernels.blocks import HIGHEST, Precision, as_tokens, entry, finer
from pallas_kernels.residuals import KeepingChunk
from pallas_kernels.side_by_side import (
    lanes_of,
    place,
    rows_of,
    times,
    times_transposed,
    weighted_outer,
    widened,
)
from pallas_kernels.triangular import decay_products, solve, unit_lower_inverse


class _System(NamedTuple):
    """The products of a chunk's tokens with each other, without the memory.

    Attributes:
      lower: (P ∘ K Kᵀ)_{t>i}, [m, P · m].
      upper: (P ∘ Q Kᵀ)_{t≥i}, [m, P · m].
      start: A, [m, P · value_dim], or None without decays.
      whole: A_end, [1, P · key_dim], or None.
      at_end: P[end, ·], [P, m].
      inverse: of I + lower, [m, P · m].
    """

    lower: jax.Array
    upper: jax.Array
    start: jax.Array | None
    whole: jax.Array | None
    at_end: jax.Array
    inverse: jax.Array


@dataclasses.dataclass(frozen=True)
class DeltaRuleChunk(KeepingChunk):
    """A `chunk_scan.Chunk` for P heads: carry (W [value_dim, P · key_dim],); inputs q, k [m, P · key_dim], v [m, P · value_dim] and
    the gates [n · P, m].

    The rows of the gates are β of each head and, for the gated rule, α of each head. m is a power of two; padding has β = 0 and
    α = 1. `precision` is that of products with q, k, v and W.

    Attributes:
      gated: whether there is α.
      residuals: what the forward kernel keeps of a chunk: nothing; "inverse": that of its system; "all": also U.
    """

    gated: bool
    precision: Precision = HIGHEST
    heads: int = 1
    ahead: ClassVar[bool] = True  # several chunks are prepared together

    def __call__(self, carry: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        return self.advance(carry, xs, self._system(xs))

    def prepare(self, xs: Arrays) -> _System:
        """For several groups of heads or chunks, whose products do not wait for each other."""
        return jax.vmap(self._system)(xs)

    def _of_memory(self, carry: Arrays, xs: Arrays) -> jax.Array:
        """[K; Q] W_0ᵀ, [2 m, P · value_dim]. Both take the same factor through the matrix unit, here and in `_system`."""
        return times_transposed(jnp.concatenate([xs[1], xs[0]]), carry[0], self.heads, self.precision)

    def _system(self, xs: Arrays) -> _System:
        q, k, v, gates, *known = xs
        heads, size = self.heads, q.shape[0]
        key_dim, dim = k.shape[1] // heads, v.shape[1] // heads
        square = size, heads * size
        row, column = place(square, 0, heads), place(square, 1, heads)
        of_keys = times_transposed(jnp.concatenate([k, q]), k, heads, self.precision)
        kk, kq = of_keys[:size], of_keys[size:]
        p = (row >= column).astype(jnp.float32)
        at_end, start, whole = gates[:heads], None, None
        if self.gated:
            p, products = decay_products(lanes_of(gates[heads:]), heads, finer(self.precision))
            start = widened(products, heads, dim)
            whole = entry(start if key_dim == dim else widened(products, heads, key_dim), size - 1)
            at_end = at_end * rows_of(entry(p, size - 1), heads)
        written = p * lanes_of(gates[:heads])
        lower = jnp.where(row > column, kk * written, 0.0)
        # `solve` has the derivative by `lower`.
        inverse = known[0] if known else unit_lower_inverse(jax.lax.stop_gradient(lower), heads, finer(self.precision))
        return _System(lower, kq * written, start, whole, at_end, inverse)

    def advance(self, carry: Arrays, xs: Arrays, of: _System) -> tuple[Arrays, Arrays]:
        """A chunk after `prepare`."""
        (w,), (_, k, v, _, *known) = carry, xs
        of_memory = self._of_memory(carry, xs)
        heads, size, precision = self.heads, k.shape[0], self.precision
        wk, wq = of_memory[:size], of_memory[size:]
        if of.start is not None and of.whole is not None:
            wk, wq, w = of.start * wk, of.start * wq, of.whole * w
        u = solve(of.lower, v - wk, of.inverse, known[1] if known[1:] else None, heads, finer(precision))
        y = wq + times(of.upper, u, heads, precision)
        kept = (of.inverse, *([as_tokens(u, precision)] if self.residuals == "all" else []))
        return (w + weighted_outer(u, k, of.at_end, precision),), (y, *(kept if self.keeps else ()))
