"""One chunk of the (gated) delta rule in WY form, with matrix operations only. The TPU kernel runs it per chunk.

    W_t = α_t W_{t−1} + u_t k_tᵀ,   u_t = β_t (v_t − α_t W_{t−1} k_t),   y_t = W_t q_t

With A_t = α_1 … α_t, P[t,i] = α_{i+1} … α_t and the memory W_0 before the chunk,

    (I + diag(β) (P ∘ K Kᵀ)_{t>i}) U = β ⊙ (V − A ⊙ K W_0ᵀ)
    Y = A ⊙ Q W_0ᵀ + (P ∘ Q Kᵀ)_{t≥i} U        W_end = A_end W_0 + (P[end, ·]ᵀ ⊙ U)ᵀ K

Decays are products, not quotients, so they are exact at α = 0. The system is inverted by `unit_lower_inverse`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Arrays
from pallas_kernels.blocks import (
    HIGHEST,
    columns,
    decay_products,
    entry,
    from_start,
    iota,
    last_row,
    product,
    unit_lower_inverse,
)


@dataclasses.dataclass(frozen=True)
class DeltaRuleChunk:
    """A `chunk_scan.Chunk`: carry (W [value_dim, key_dim],); inputs q, k [m, key_dim], v [m, value_dim] and the gates [n, m].

    The rows of the gates are β and, for the gated rule, α. m is a power of two; padding has β = 0 and α = 1. `precision` is that of
    products with q, k, v and W.
    """

    gated: bool
    precision: jax.lax.Precision = HIGHEST

    def __call__(self, carry: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        (w,), (q, k, v, gates) = carry, xs
        dot = functools.partial(product, precision=self.precision)
        size = q.shape[0]
        row, column = iota(size, 0), iota(size, 1)
        gates = columns(gates)
        beta = gates[:, :1]
        wk, wq, p = dot(k, w, 1, 1), dot(q, w, 1, 1), (row >= column).astype(jnp.float32)
        if self.gated:
            p = decay_products(gates[:, 1:])
            start = from_start(gates[:, 1:], p)  # A
            wk, wq = start * wk, start * wq
        system = jnp.where(row > column, beta * dot(k, k, 1, 1) * p, 0.0)
        u = product(unit_lower_inverse(system), beta * (v - wk), 1, 0)
        y = wq + dot(dot(q, k, 1, 1) * p, u, 1, 0)
        if self.gated:
            w, u = entry(start, size - 1) * w, last_row(p) * u
        return (w + dot(u, k, 0, 0),), (y,)
