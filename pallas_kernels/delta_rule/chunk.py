"""One chunk of the (gated) delta rule in WY form, of matrices alone: what the TPU kernel runs for each chunk.

    W_t = α_t W_{t−1} + u_t k_tᵀ,   u_t = β_t (v_t − α_t W_{t−1} k_t),   y_t = W_t q_t

With A_t = α_1 … α_t, P[t,i] = α_{i+1} … α_t and the memory W_0 before the chunk,

    (I + diag(β) (P ∘ K Kᵀ)_{t>i}) U = β ⊙ (V − A ⊙ K W_0ᵀ)
    Y = A ⊙ Q W_0ᵀ + (P ∘ Q Kᵀ)_{t≥i} U        W_end = A_end W_0 + (P[end, ·]ᵀ ⊙ U)ᵀ K

Decays are products, not quotients: exact at α = 0. The system is inverted by halves, X ← X − X L_s X with the part L_s of the
system between neighbouring blocks of s tokens: products of whole matrices, no powers of L that could overflow, and as exact as
substitution.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

_HIGHEST = jax.lax.Precision.HIGHEST


def _iota(size: int, axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, (size, size), axis)


def _product(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int, precision: Any = _HIGHEST) -> jax.Array:
    axes = (((x_axis,), (y_axis,)), ((), ()))
    return jax.lax.dot_general(x, y, axes, precision=precision, preferred_element_type=jnp.float32)


@jax.custom_vjp
def decay_products(decay: jax.Array) -> jax.Array:
    """P [m, m] from α [m, 1]; m a power of two. P is (I − N)⁻¹ with α below the diagonal of N."""
    size = decay.shape[0]
    row, column = _iota(size, 0), _iota(size, 1)
    products = jnp.where(row > column, decay, 1.0)  # of the last 2^k decays
    shift = 1
    while shift < size:
        earlier = jnp.concatenate([jnp.ones((shift, size), products.dtype), products[:-shift]])
        products = products * earlier
        shift *= 2
    return jnp.where(row >= column, products, 0.0)


def _decay_forward(decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    products = decay_products(decay)
    return products, products


def _decay_backward(products: jax.Array, d: jax.Array) -> tuple[jax.Array]:
    size = products.shape[0]
    inner = _product(_product(products, d, 0, 0), products, 1, 1)  # Pᵀ dP Pᵀ
    return (jnp.sum(jnp.where(_iota(size, 0) == _iota(size, 1) + 1, inner, 0.0), axis=1, keepdims=True),)


decay_products.defvjp(_decay_forward, _decay_backward)


@jax.custom_vjp
def inverse(lower: jax.Array) -> jax.Array:
    """(I + L)⁻¹ of a strictly lower triangular L [m, m]; m a power of two."""
    size = lower.shape[0]
    row, column = _iota(size, 0), _iota(size, 1)
    x = (row == column).astype(jnp.float32)
    for level in range(size.bit_length() - 1):
        # Bits, not quotients: dividing integers needs to know the generation of the TPU.
        same = (row >> (level + 1)) == (column >> (level + 1))
        between = same & ((row >> level) > (column >> level))
        part = jnp.where(between, lower, 0.0)
        # The first step's X is the identity.
        x = x - part if level == 0 else x - _product(x, _product(part, x, 1, 0), 1, 0)
    return x


def _inverse_forward(lower: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = inverse(lower)
    return x, x


def _inverse_backward(x: jax.Array, d: jax.Array) -> tuple[jax.Array]:
    size = x.shape[0]
    dlower = -_product(_product(x, d, 0, 0), x, 1, 1)  # −Xᵀ dX Xᵀ
    return (jnp.where(_iota(size, 0) > _iota(size, 1), dlower, 0.0),)


inverse.defvjp(_inverse_forward, _inverse_backward)


@dataclasses.dataclass(frozen=True)
class DeltaRuleChunk:
    """A `chunk_scan.Chunk`: carry (W [value_dim, key_dim],); inputs q, k [m, key_dim], v [m, value_dim], β and, gated, α [m, 1].

    m is a power of two; padding has β = 0 and α = 1. `precision` is that of products with q, k, v and W.
    """

    gated: bool
    precision: jax.lax.Precision = _HIGHEST

    def __call__(self, carry: tuple[jax.Array, ...], xs: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        (w,), (q, k, v, beta, *decay) = carry, xs
        product = functools.partial(_product, precision=self.precision)
        size = q.shape[0]
        row, column = _iota(size, 0), _iota(size, 1)
        if self.gated:
            p = decay_products(decay[0])
            at = lambda place: (_column(size) == place).astype(jnp.float32)
            total = lambda x, axis: jnp.sum(x, axis=axis, keepdims=True)
            from_start = total(at(0) * decay[0], 0) * total(jnp.where(column == 0, p, 0.0), 1)  # A [m, 1]
            to_end = _product(p, at(size - 1), 0, 0)  # P[end, ·] as a column
            last = total(at(size - 1) * from_start, 0)  # [1, 1]
        else:
            p = (row >= column).astype(jnp.float32)
        keys = jnp.where(row > column, product(k, k, 1, 1) * p, 0.0)
        scores = product(q, k, 1, 1) * p
        wk, wq = product(k, w, 1, 1), product(q, w, 1, 1)
        if self.gated:
            wk, wq = from_start * wk, from_start * wq
        u = _product(inverse(beta * keys), beta * (v - wk), 1, 0)
        y = wq + product(scores, u, 1, 0)
        if not self.gated:
            return (w + product(u, k, 0, 0),), (y,)
        return (last * w + product(to_end * u, k, 0, 0),), (y,)


def _column(size: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
