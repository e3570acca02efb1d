"""Lower triangular matrices of one block of m tokens: products of decays, and inverses. Restricted to what Mosaic compiles.

With `heads` > 1, the matrices [m, P · m] of P heads lie side by side (`side_by_side`).
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import before
from pallas_kernels.side_by_side import (
    columns_of,
    head_sums,
    place,
    rows_of_columns,
    times,
    times_transposed,
    transposed_times,
    weighted,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def decay_products(decay: jax.Array, heads: int = 1) -> jax.Array:
    """P [m, m] from α [m, 1], m a power of two. P = (I − N)⁻¹, where N has α below its diagonal.

    With several heads, α is given in all lanes of its head, [m, P · m].
    """
    size = decay.shape[0]
    shape = size, heads * size
    row, column = place(shape, 0, heads), place(shape, 1, heads)
    products = jnp.where(row > column, decay, 1.0)  # products of the last 2^k decays
    shift = 1
    while shift < size:
        earlier = jnp.concatenate([jnp.ones((shift, shape[1]), products.dtype), products[:-shift]])
        products = products * earlier
        shift *= 2
    return jnp.where(row >= column, products, 0.0)


def _decay_forward(decay: jax.Array, heads: int) -> tuple[jax.Array, jax.Array]:
    products = decay_products(decay, heads)
    return products, products


def _decay_backward(heads: int, products: jax.Array, d: jax.Array) -> tuple[jax.Array]:
    # dα_j = Σ_{t ≥ j > i} dP[t,i] P[t,j] P[j−1,i]. With several heads it is left in parts, one for each lane that has α_j.
    parts = transposed_times(products, d, heads) * before(products, 0.0)
    return (jnp.sum(parts, axis=1, keepdims=True) if heads == 1 else parts,)


decay_products.defvjp(_decay_forward, _decay_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def unit_lower_inverse(lower: jax.Array, heads: int = 1) -> jax.Array:
    """(I + L)⁻¹ for a strictly lower triangular L [m, m], m a power of two.

    Recursively doubles the block size s: X ← X − X L_s X, where L_s is the part of L between adjacent blocks of s tokens. This uses
    only products of whole matrices, forms no powers of L that could overflow, and is as accurate as substitution.
    """
    row, column = place(lower.shape, 0, heads), place(lower.shape, 1, heads)
    x = (row == column).astype(jnp.float32)
    for level in range(lower.shape[0].bit_length() - 1):
        # Bit operations, because integer division needs to know the TPU generation.
        same = (row >> (level + 1)) == (column >> (level + 1))
        between = same & ((row >> level) > (column >> level))
        part = jnp.where(between, lower, 0.0)
        # X is the identity in the first step.
        x = x - part if level == 0 else x - times(x, times(part, x, heads), heads)
    return x


def _inverse_forward(lower: jax.Array, heads: int) -> tuple[jax.Array, jax.Array]:
    x = unit_lower_inverse(lower, heads)
    return x, x


def _inverse_backward(heads: int, x: jax.Array, d: jax.Array) -> tuple[jax.Array]:
    dlower = -times_transposed(transposed_times(x, d, heads), x, heads)  # −Xᵀ dX Xᵀ
    return (jnp.where(place(d.shape, 0, heads) > place(d.shape, 1, heads), dlower, 0.0),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def solve_unit_lower(lower: jax.Array, column: jax.Array, heads: int = 1) -> jax.Array:
    """(I + L)⁻¹ times a column, which is in all lanes of its head (`side_by_side.columns_of`). As `unit_lower_inverse`.

    Its derivative takes no more products: with g = (I + L)⁻ᵀ dx it is g for the column, and −g xᵀ for L.
    """
    return _solve_forward(lower, column, heads)[0]


def _solve_forward(lower: jax.Array, column: jax.Array, heads: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    inverse = unit_lower_inverse(lower, heads)
    x = weighted(inverse, column, heads)
    return x, (inverse, x)


def _solve_backward(heads: int, kept: tuple[jax.Array, jax.Array], d: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse, x = kept
    # The cotangent of a column in all lanes is in parts, one for each lane.
    d = head_sums(d, heads) if heads > 1 else d
    g = columns_of(jnp.sum(inverse * d, axis=0, keepdims=True), heads)
    dlower = -g * rows_of_columns(x, heads)
    dlower = jnp.where(place(inverse.shape, 0, heads) > place(inverse.shape, 1, heads), dlower, 0.0)
    if heads > 1:
        g = jnp.where(place(inverse.shape, 1, heads) == 0, g, 0.0)
    return dlower, g


solve_unit_lower.defvjp(_solve_forward, _solve_backward)
