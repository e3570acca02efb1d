"""One chunk of the (gated) delta rule in WY form, with matrix operations only. The TPU kernel runs it per chunk.

    W_t = α_t W_{t−1} + u_t k_tᵀ,   u_t = β_t (v_t − α_t W_{t−1} k_t),   y_t = W_t q_t

With A_t = α_1 … α_t, P[t,i] = α_{i+1} … α_t and the memory W_0 before the chunk,

    (I + diag(β) (P ∘ K Kᵀ)_{t>i}) U = β ⊙ (V − A ⊙ K W_0ᵀ)
    Y = A ⊙ Q W_0ᵀ + (P ∘ Q Kᵀ)_{t≥i} U        W_end = A_end W_0 + (P[end, ·]ᵀ ⊙ U)ᵀ K

Decays are products, not quotients, so they are exact at α = 0. The system is solved by the inverses of its halves (`solve`).
Several narrow heads lie side by side (`side_by_side`).
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Arrays
from pallas_kernels.blocks import HIGHEST, Precision, entry, finer, selected
from pallas_kernels.side_by_side import (
    columns_of,
    from_start,
    of_diagonal,
    own,
    place,
    spread,
    times,
    times_transposed,
    transposed_times,
)
from pallas_kernels.triangular import decay_products, solve


@dataclasses.dataclass(frozen=True)
class DeltaRuleChunk:
    """A `chunk_scan.Chunk` for P heads: carry (W [value_dim, P · key_dim],); inputs q, k [m, P · key_dim], v [m, P · value_dim] and
    the gates [n · P, m].

    The rows of the gates are β of each head and, for the gated rule, α of each head. m is a power of two; padding has β = 0 and
    α = 1. `precision` is that of products with q, k, v and W.
    """

    gated: bool
    precision: Precision = HIGHEST
    heads: int = 1

    def __call__(self, carry: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        (w,), (q, k, v, gates) = carry, xs
        heads, size, fine = self.heads, q.shape[0], finer(self.precision)
        key_dim, dim = k.shape[1] // heads, v.shape[1] // heads
        square = size, heads * size
        row, column = place(square, 0, heads), place(square, 1, heads)
        beta = spread(gates[:heads], heads, dim)
        beta_of_row = beta if heads == 1 or dim == size else spread(gates[:heads], heads, size)
        rows = jnp.concatenate([k, q])  # both take the same factors through the matrix unit
        of_memory = times_transposed(rows, w, heads, self.precision)
        of_keys = times_transposed(rows, k, heads, self.precision)
        wk, wq = of_memory[:size], of_memory[size:]
        kk, kq = of_keys[:size], of_keys[size:]
        p = (row >= column).astype(jnp.float32)
        if self.gated:
            alpha = spread(gates[heads:], heads, size)
            p = decay_products(alpha, heads, fine)
            start = self._start(gates, alpha, p, dim)
            wk, wq = start * wk, start * wq
        system = jnp.where(row > column, beta_of_row * kk * p, 0.0)
        u = solve(system, beta * (v - wk), heads, fine)
        y = wq + times(kq * p, u, heads, self.precision)
        if self.gated:
            start_of_keys = start if key_dim == dim else self._start(gates, alpha, p, key_dim)
            w, u = entry(start_of_keys, size - 1) * w, self._at_end(p, dim) * u
        return (w + transposed_times(u, k, heads, self.precision),), (y,)

    def _start(self, gates: jax.Array, alpha: jax.Array, p: jax.Array, dim: int) -> jax.Array:
        """A in all lanes of each head, [m, P · dim]; of one head, [m, 1]."""
        heads, size = self.heads, p.shape[0]
        if heads == 1 or dim == size:
            return from_start(alpha, p, heads)
        # P's first lane of each head is spread to all of the head's lanes.
        firsts = own((heads * size, heads * dim), heads, rows=1).astype(jnp.float32)
        return entry(spread(gates[heads:], heads, dim), 0) * selected(p, firsts, 1, 0)

    def _at_end(self, p: jax.Array, dim: int) -> jax.Array:
        """P's last row of each head as a column, in all of its lanes, [m, P · dim]; of one head, [m, 1]."""
        if self.heads == 1 or dim == p.shape[0]:
            return columns_of(entry(p, p.shape[0] - 1), self.heads)
        last = jax.lax.broadcasted_iota(jnp.int32, (p.shape[0], self.heads * dim), 0) == p.shape[0] - 1
        return of_diagonal(selected(p, last.astype(jnp.float32), 0, 0), self.heads)
