"""Matrix operations on one block of tokens, shared by the kernels of several memories and restricted to what Mosaic compiles."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.layout import matrix_unit

Precision = jax.lax.Precision
HIGHEST = Precision.HIGHEST


def token_precision(dtype: jax.typing.DTypeLike) -> Precision:
    """Precision of products with tokens of a dtype: exact for float32, one bfloat16 pass for bfloat16."""
    return HIGHEST if jnp.dtype(dtype) == jnp.float32 else Precision.DEFAULT


def finer(precision: Precision) -> Precision:
    """Precision of products whose errors grow, beside products with tokens of `precision`: of decays, and of systems.

    Beside one bfloat16 pass they take three, which leaves 2⁻¹⁶ of relative error to its 2⁻⁸. Beside exact products they are exact.
    """
    return Precision.HIGH if precision == Precision.DEFAULT else HIGHEST


def as_tokens(x: jax.Array, precision: Precision) -> jax.Array:
    """x in the dtype of tokens whose products have this precision (`token_precision`)."""
    return x.astype(jnp.float32 if precision == HIGHEST else jnp.bfloat16)


def iota(size: int, axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, (size, size), axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def product(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int, precision: Precision = HIGHEST) -> jax.Array:
    """Contracts axis x_axis of x with axis y_axis of y, both matrices.

    Its derivatives are products too. jax's own would transpose their results.

    Args:
      precision: DEFAULT is one pass of bfloat16 on a TPU, HIGHEST is exact (six passes). HIGH is three, of x and y as sums of two
        bfloat16 numbers each, without the product of the smaller ones; Mosaic does not have it.
    """
    return product_of(x, y, x_axis, y_axis, precision, lambda y: y)


def product_of(
    x: jax.Array,
    y: jax.Array,
    x_axis: int,
    y_axis: int,
    precision: Precision,
    arranged: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """`product` of x and `arranged(y)`, without a derivative of its own; `arranged` only moves entries and adds zeros."""
    if precision != Precision.HIGH:
        return _dot(x, arranged(y), x_axis, y_axis, precision)
    (x, x_rest), (y, y_rest) = halves(x), map(arranged, halves(y))
    # One product whose sum runs over all three, so that nothing is added outside of the matrix unit.
    x, y = jnp.concatenate([x, x, x_rest], x_axis), jnp.concatenate([y, y_rest, y], y_axis)
    return _dot(x, y, x_axis, y_axis, Precision.DEFAULT)


def _dot(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int, precision: Precision) -> jax.Array:
    axes = (((x_axis,), (y_axis,)), ((), ()))
    if precision == Precision.DEFAULT and matrix_unit() > 128:
        # A register has twice as many bfloat16 numbers, and filling these larger units takes longer than the products. On v5e it
        # does not, and the units round float32 operands themselves.
        x, y = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
    return jax.lax.dot_general(x, y, axes, precision=precision, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def selected(x: jax.Array, mask: jax.Array, x_axis: int, y_axis: int) -> jax.Array:
    """`product` with a matrix of zeros and ones, exact with one pass for the three bfloat16 numbers whose sum is x."""
    x, rest = halves(x)
    return _dot(
        jnp.concatenate([x, *halves(rest)], x_axis),
        jnp.concatenate([mask] * 3, y_axis),
        x_axis,
        y_axis,
        Precision.DEFAULT,
    )


def _selected_backward(x_axis: int, y_axis: int, mask: jax.Array, d: jax.Array) -> tuple[jax.Array, None]:
    dx = selected(d, mask, 1, 1 - y_axis) if x_axis == 1 else product(mask, d, 1 - y_axis, 1)
    return dx, None


selected.defvjp(lambda x, mask, x_axis, y_axis: (selected(x, mask, x_axis, y_axis), mask), _selected_backward)


def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x rounded to bfloat16, and the rest, as float32.

    By bits, because XLA, which compiles this for the interpreter, drops a conversion to bfloat16 and back.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    rounded = jax.lax.bitcast_convert_type((bits + 0x8000) & -0x10000, jnp.float32)
    return rounded, x - rounded


def _product_forward(
    x: jax.Array, y: jax.Array, x_axis: int, y_axis: int, precision: Precision
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return product(x, y, x_axis, y_axis, precision), (x, y)


def _product_backward(
    x_axis: int, y_axis: int, precision: Precision, kept: tuple[jax.Array, jax.Array], d: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, y = kept
    dx = product(d, y, 1, 1 - y_axis, precision) if x_axis == 1 else product(y, d, 1 - y_axis, 1, precision)
    dy = product(d, x, 0, 1 - x_axis, precision) if y_axis == 1 else product(x, d, 1 - x_axis, 0, precision)
    return dx, dy


product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def before(x: jax.Array, first: float) -> jax.Array:
    """x [m, n] shifted down by one row, with `first` in row 0. Has its own derivative, because that of a slice would be a pad."""
    return jnp.concatenate([jnp.full((1, x.shape[1]), first, x.dtype), x[:-1]])


def _before_forward(x: jax.Array, first: float) -> tuple[jax.Array, None]:
    return before(x, first), None


def _before_backward(first: float, _: None, d: jax.Array) -> tuple[jax.Array]:
    return (jnp.concatenate([d[1:], jnp.zeros((1, d.shape[1]), d.dtype)]),)


before.defvjp(_before_forward, _before_backward)


def transposed(x: jax.Array) -> jax.Array:
    """[n, m] → [m, n], by an exact product."""
    size = x.shape[0]
    return selected(x, (iota(size, 0) == iota(size, 1)).astype(jnp.float32), 0, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def entry(x: jax.Array, place: int) -> jax.Array:
    """One row of x [m, n], [1, n]. Has its own derivative, because that of a slice would be a pad."""
    return x[place : place + 1]


def _entry_backward(place: int, like: jax.Array, d: jax.Array) -> tuple[jax.Array]:
    here = jax.lax.broadcasted_iota(jnp.int32, like.shape, 0) == place
    return (jnp.where(here, d, 0.0),)


entry.defvjp(lambda x, place: (entry(x, place), x), _entry_backward)
