"""Arithmetic of one block of tokens on matrices alone: what kernels of several memories share, in terms that Mosaic compiles."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def token_precision(dtype: jax.typing.DTypeLike) -> jax.lax.Precision:
    """Of products with tokens of a dtype: exact for float32, one pass of bfloat16 for bfloat16."""
    return HIGHEST if jnp.dtype(dtype) == jnp.float32 else jax.lax.Precision.DEFAULT


def iota(size: int, axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, (size, size), axis)


def product(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int, precision: Any = HIGHEST) -> jax.Array:
    axes = (((x_axis,), (y_axis,)), ((), ()))
    return jax.lax.dot_general(x, y, axes, precision=precision, preferred_element_type=jnp.float32)


@jax.custom_vjp
def decay_products(decay: jax.Array) -> jax.Array:
    """P [m, m] from α [m, 1]; m a power of two. P is (I − N)⁻¹ with α below the diagonal of N."""
    size = decay.shape[0]
    row, column = iota(size, 0), iota(size, 1)
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
    inner = product(product(products, d, 0, 0), products, 1, 1)  # Pᵀ dP Pᵀ
    return (jnp.sum(jnp.where(iota(size, 0) == iota(size, 1) + 1, inner, 0.0), axis=1, keepdims=True),)


decay_products.defvjp(_decay_forward, _decay_backward)


@jax.custom_vjp
def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """(I + L)⁻¹ of a strictly lower triangular L [m, m]; m a power of two.

    By halves, X ← X − X L_s X with the part L_s of the system between neighbouring blocks of s tokens: products of whole matrices,
    no powers of L that could overflow, and as exact as substitution.
    """
    size = lower.shape[0]
    row, column = iota(size, 0), iota(size, 1)
    x = (row == column).astype(jnp.float32)
    for level in range(size.bit_length() - 1):
        # Bits, not quotients: dividing integers needs to know the generation of the TPU.
        same = (row >> (level + 1)) == (column >> (level + 1))
        between = same & ((row >> level) > (column >> level))
        part = jnp.where(between, lower, 0.0)
        # The first step's X is the identity.
        x = x - part if level == 0 else x - product(x, product(part, x, 1, 0), 1, 0)
    return x


def _inverse_forward(lower: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = unit_lower_inverse(lower)
    return x, x


def _inverse_backward(x: jax.Array, d: jax.Array) -> tuple[jax.Array]:
    size = x.shape[0]
    dlower = -product(product(x, d, 0, 0), x, 1, 1)  # −Xᵀ dX Xᵀ
    return (jnp.where(iota(size, 0) > iota(size, 1), dlower, 0.0),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def before(x: jax.Array, first: float) -> jax.Array:
    """Row t − 1 of x [m, n] in row t, and `first` in row 0. (The derivative of slices would be a padding.)"""
    return jnp.concatenate([jnp.full((1, x.shape[1]), first, x.dtype), x[:-1]])


def _before_forward(x: jax.Array, first: float) -> tuple[jax.Array, None]:
    return before(x, first), None


def _before_backward(first: float, _: None, d: jax.Array) -> tuple[jax.Array]:
    return (jnp.concatenate([d[1:], jnp.zeros((1, d.shape[1]), d.dtype)]),)


before.defvjp(_before_forward, _before_backward)


def columns(rows: jax.Array) -> jax.Array:
    """[n, m] → [m, n] for a few rows, by an exact product: values of tokens lie in memory as rows, 8 of them to a tile."""
    size = rows.shape[0]
    return product(rows, (iota(size, 0) == iota(size, 1)).astype(jnp.float32), 0, 0)


def row_of(column: jax.Array) -> jax.Array:
    """[m, 1] → [1, m], exactly."""
    m = column.shape[0]
    return jnp.sum(jnp.where(iota(m, 0) == iota(m, 1), column, 0.0), axis=0, keepdims=True)


def last_row(x: jax.Array) -> jax.Array:
    """The last row of [m, n] as a column [n, 1]."""
    place = jax.lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)
    return product(x, (place == x.shape[0] - 1).astype(jnp.float32), 0, 0)


def first_column(x: jax.Array) -> jax.Array:
    """The first column of [m, n], [m, 1]."""
    return jnp.sum(jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) == 0, x, 0.0), axis=1, keepdims=True)


def entry(column: jax.Array, place: int) -> jax.Array:
    """One entry of a column [m, 1], [1, 1]."""
    here = jax.lax.broadcasted_iota(jnp.int32, column.shape, 0) == place
    return jnp.sum(jnp.where(here, column, 0.0), axis=0, keepdims=True)


def from_start(decay: jax.Array, products: jax.Array) -> jax.Array:
    """α_0 … α_t, [m, 1], from α [m, 1] and its `decay_products`."""
    return entry(decay, 0) * first_column(products)
