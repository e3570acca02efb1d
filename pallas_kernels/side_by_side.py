"""Products of matrices of several heads that lie side by side in lanes: X = [X_1 | … | X_P], each [m, n], as one matrix [m, P · n].

A matrix unit has 128 × 128 places, so that a product of [64, 64] matrices leaves three quarters of it idle. Beside each other, the
left factors of two heads pass through the unit together, and the right factors are blocks on a diagonal. For one head these are
plain products.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import HIGHEST, Precision, entry, product, selected
from pallas_kernels.layout import LANES


def own(shape: tuple[int, ...], heads: int, rows: int | None = None) -> jax.Array:
    """Of [P · n, P · w], whether an entry's row and lane are of the same head; with `rows`, only the first rows of each head."""
    n, width = shape[0] // heads, shape[1] // heads
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    # By ranges and not by equal heads: of two heads, MLIR would simplify that to a comparison of booleans, which Mosaic lacks.
    blocks = (
        (row >= head * n)
        & (row < (head * n + rows if rows else (head + 1) * n))
        & (lane >= head * width)
        & (lane < (head + 1) * width)
        for head in range(heads)
    )
    return functools.reduce(jnp.logical_or, blocks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def diagonal(x: jax.Array, heads: int) -> jax.Array:
    """[n, P · w] → [P · n, P · w], with the heads' blocks on the diagonal."""
    if heads == 1:
        return x
    rows, lanes = x.shape
    return jnp.where(own((heads * rows, lanes), heads), jnp.concatenate([x] * heads), 0.0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def of_diagonal(x: jax.Array, heads: int) -> jax.Array:
    """The transpose of `diagonal`: [P · n, P · w] → [n, P · w], the blocks on the diagonal side by side."""
    if heads == 1:
        return x
    rows = x.shape[0] // heads
    x = jnp.where(own(x.shape, heads), x, 0.0)
    return functools.reduce(jnp.add, (x[head * rows : (head + 1) * rows] for head in range(heads)))


# Each is the derivative of the other, because the derivative of a slice would be a pad.
diagonal.defvjp(lambda x, heads: (diagonal(x, heads), None), lambda heads, _, d: (of_diagonal(d, heads),))
of_diagonal.defvjp(lambda x, heads: (of_diagonal(x, heads), None), lambda heads, _, d: (diagonal(d, heads),))


def times(x: jax.Array, y: jax.Array, heads: int, precision: Precision = HIGHEST) -> jax.Array:
    """X Y of each head: [m, P · a], [a, P · b] → [m, P · b]."""
    return product(x, diagonal(y, heads), 1, 0, precision)


def times_transposed(x: jax.Array, y: jax.Array, heads: int, precision: Precision = HIGHEST) -> jax.Array:
    """X Yᵀ of each head: [m, P · a], [n, P · a] → [m, P · n]."""
    return product(x, diagonal(y, heads), 1, 1, precision)


def transposed_times(x: jax.Array, y: jax.Array, heads: int, precision: Precision = HIGHEST) -> jax.Array:
    """Xᵀ Y of each head: [m, P · a], [m, P · b] → [a, P · b]."""
    return of_diagonal(product(x, y, 0, 0, precision), heads)


def spread(rows: jax.Array, heads: int, width: int, *, by_product: bool = False) -> jax.Array:
    """One row of m tokens for each head, [P, m], as a column in all of the head's lanes, [m, P · width]; of one head, [m, 1].

    by_product: for kernels whose matrix units wait for arithmetic on vectors. Widths other than m always take a product.
    """
    if heads == 1 or (width == rows.shape[1] and not by_product):
        return columns_of(jnp.concatenate([rows[i : i + 1] for i in range(heads)], axis=1), heads)
    return selected(rows, own((heads, heads * width), heads).astype(jnp.float32), 0, 0)


def place(shape: tuple[int, ...], axis: int, heads: int) -> jax.Array:
    """The row (axis 0) of each entry of [m, P · m], or its lane within its head (axis 1). m is a power of two."""
    places = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    return places if heads == 1 or axis == 0 else places & (shape[1] // heads - 1)


def head_sums(x: jax.Array, heads: int) -> jax.Array:
    """The sum over each head's lanes of [m, P · w], in all of them, [m, P · w]; of one head, [m, 1]."""
    if heads == 1:
        return jnp.sum(x, axis=1, keepdims=True)
    lane, width = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1), x.shape[1] // heads
    total = jnp.zeros_like(x)
    for head in range(heads):
        here = (lane >= head * width) & (lane < (head + 1) * width)
        total = jnp.where(here, jnp.sum(jnp.where(here, x, 0.0), axis=1, keepdims=True), total)
    return total


def columns_of(rows: jax.Array, heads: int = 1) -> jax.Array:
    """A row of m tokens for each head, [1, P · m], as a column in all of the head's lanes, [m, P · m]; of one head, [m, 1].

    Exact, and without a product, which would keep a matrix unit as long as one of whole matrices.
    """
    shape = rows.shape[1] // heads, rows.shape[1]
    return head_sums(jnp.where(place(shape, 0, heads) == place(shape, 1, heads), rows, 0.0), heads)


def columns(rows: jax.Array) -> jax.Array:
    """[n, m] → [m, n] of one head, for a few rows. Per-token values are stored as rows, 8 of them to a tile."""
    return jnp.concatenate([columns_of(rows[i : i + 1]) for i in range(rows.shape[0])], axis=1)


def rows_of_columns(columns: jax.Array, heads: int = 1) -> jax.Array:
    """The inverse of `columns_of`."""
    shape = columns.shape[0], heads * columns.shape[0]
    return jnp.sum(jnp.where(place(shape, 0, heads) == place(shape, 1, heads), columns, 0.0), axis=0, keepdims=True)


def from_start(decay: jax.Array, products: jax.Array, heads: int = 1) -> jax.Array:
    """α_0 … α_t of each head, a column as those of `columns_of`, from α as such a column and P [m, P · m].

    P[t,0] has the products of the decays after the first token; times α_0 they are from the start.
    """
    first = jnp.where(place(products.shape, 1, heads) == 0, products, 0.0)
    return entry(decay, 0) * head_sums(first, heads)


def weighted(x: jax.Array, columns: jax.Array, heads: int) -> jax.Array:
    """X of each head, [m, P · m], times its column, in float32 and without a product."""
    return head_sums(x * rows_of_columns(columns, heads), heads)


def beside(function: Callable[..., Any], width: int, *trees: Any) -> Any:
    """`function(heads, *trees)` on groups of as many heads as fit in a tile, side by side.

    Args:
      function: takes and returns trees of arrays [n, P · width]. With P = 1, columns are [n, 1].
      width: lanes of a head.
      trees: of arrays [heads, n, width] or, for columns, [heads, n, 1].

    Returns:
      `function`'s results for each head, [heads, n, width], or with P = 1 as it returns them.
    """
    count = jax.tree.leaves(trees)[0].shape[0]
    together = next(size for size in range(max(LANES // width, 1), 0, -1) if count % size == 0)
    over_groups = jax.vmap(functools.partial(function, together))
    if together == 1:
        return over_groups(*trees)

    def grouped(x: jax.Array) -> jax.Array:
        wide = lambda x: jnp.broadcast_to(x, (x.shape[0], width))
        groups = range(0, count, together)
        return jnp.stack([jnp.concatenate([wide(x[i + j]) for j in range(together)], axis=1) for i in groups])

    def split(x: jax.Array) -> jax.Array:
        lanes = range(0, together * width, width)
        return jnp.stack([group[:, i : i + width] for group in x for i in lanes])

    return jax.tree.map(split, over_groups(*jax.tree.map(grouped, trees)))
