"""Products of matrices of several heads that lie side by side in lanes: X = [X_1 | … | X_P], each [m, n], as one matrix [m, P · n].

A matrix unit has 128 × 128 places, so that a product of [64, 64] matrices leaves three quarters of it idle. Beside each other, the
left factors of two heads pass through the unit together, and the right factors are blocks on a diagonal. For one head these are
plain products.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import HIGHEST, Precision, product, product_of, selected
from pallas_kernels.layout import LANES


def own(shape: tuple[int, ...], heads: int, rows: int | None = None) -> jax.Array:
    """Whether row and lane of an entry of [P · n, P · w] are of the same head; with `rows`, only the first rows of each head."""
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def times(x: jax.Array, y: jax.Array, heads: int, precision: Precision = HIGHEST) -> jax.Array:
    """X Y of each head: [m, P · a], [a, P · b] → [m, P · b]."""
    return product_of(x, y, 1, 0, precision, lambda y: diagonal(y, heads))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def times_transposed(x: jax.Array, y: jax.Array, heads: int, precision: Precision = HIGHEST) -> jax.Array:
    """X Yᵀ of each head: [m, P · a], [n, P · a] → [m, P · n]."""
    return product_of(x, y, 1, 1, precision, lambda y: diagonal(y, heads))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def transposed_times(x: jax.Array, y: jax.Array, heads: int, precision: Precision = HIGHEST) -> jax.Array:
    """Xᵀ Y of each head: [m, P · a], [m, P · b] → [a, P · b]."""
    return of_diagonal(product(x, y, 0, 0, precision), heads)


def _derivatives(of: Any, of_x: Callable[..., jax.Array], of_y: Callable[..., jax.Array]) -> None:
    """Sets the derivatives of one of the three products, which are others of them: functions of x, y, the cotangent, and how."""
    of.defvjp(
        lambda x, y, *how: (of(x, y, *how), (x, y)),
        lambda heads, precision, xy, d: (of_x(*xy, d, heads, precision), of_y(*xy, d, heads, precision)),
    )


_derivatives(
    times,
    lambda x, y, d, *how: times_transposed(d, y, *how),
    lambda x, y, d, *how: transposed_times(x, d, *how),
)
_derivatives(
    times_transposed,
    lambda x, y, d, *how: times(d, y, *how),
    lambda x, y, d, *how: transposed_times(d, x, *how),
)
_derivatives(
    transposed_times,
    lambda x, y, d, *how: times_transposed(y, d, *how),
    lambda x, y, d, *how: times(x, d, *how),
)


def lanes_of(rows: jax.Array) -> jax.Array:
    """One row for each head, [P, m], beside each other, [1, P · m]."""
    return jnp.concatenate([rows[i : i + 1] for i in range(rows.shape[0])], axis=1)


def rows_of(lanes: jax.Array, heads: int) -> jax.Array:
    """The inverse of `lanes_of`."""
    size = lanes.shape[1] // heads
    return jnp.concatenate([lanes[:, i * size : (i + 1) * size] for i in range(heads)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def weighted_outer(x: jax.Array, y: jax.Array, weights: jax.Array, precision: Precision = HIGHEST) -> jax.Array:
    """Xᵀ diag(w) Y of each head: [m, P · a], [m, P · b] and w [P, m] → [a, P · b].

    The tokens of Xᵀ are in lanes, as those of w are, which need not be spread to a column.
    """
    return _outer_forward(x, y, weights, precision)[0]


def _in_rows(weights: jax.Array, rows: int) -> jax.Array:
    """[P, m] → [rows, m], each head's weights in the rows of its part."""
    heads, size = weights.shape
    return jnp.concatenate([jnp.broadcast_to(weights[i : i + 1], (rows // heads, size)) for i in range(heads)])


_Kept = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _outer_forward(x: jax.Array, y: jax.Array, weights: jax.Array, precision: Precision) -> tuple[jax.Array, _Kept]:
    turned = x.T
    weighted = turned * _in_rows(weights, turned.shape[0])
    return of_diagonal(product(weighted, y, 1, 0, precision), weights.shape[0]), (turned, weighted, y, weights)


def _outer_backward(precision: Precision, kept: _Kept, d: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    turned, weighted, y, weights = kept
    rows, heads = turned.shape[0], weights.shape[0]
    d = diagonal(d, heads)
    dweighted = product(d, y, 1, 1, precision)
    each = turned * dweighted
    of_head = (each[i : i + rows // heads] for i in range(0, rows, rows // heads))
    dweights = jnp.concatenate([jnp.sum(part, axis=0, keepdims=True) for part in of_head])
    return (dweighted * _in_rows(weights, rows)).T, product(weighted, d, 0, 0, precision), dweights


weighted_outer.defvjp(_outer_forward, _outer_backward)


def spread(rows: jax.Array, heads: int, width: int) -> jax.Array:
    """One row of m tokens for each head, [P, m], as a column in all of the head's lanes, [m, P · width]; of one head, [m, 1].

    Widths other than m or whole tiles take a product.
    """
    if heads == 1 or width == rows.shape[1] or _whole_tiles(heads * rows.shape[1], heads, width):
        return widened(columns_of(lanes_of(rows), heads), heads, width)
    return selected(rows, own((heads, heads * width), heads).astype(jnp.float32), 0, 0)


def _whole_tiles(lanes: int, heads: int, width: int) -> bool:
    return in_tile(lanes, heads) and width % LANES == 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def widened(column: jax.Array, heads: int, width: int) -> jax.Array:
    """A column in all lanes of each head, [m, P · m], in lanes of another number, [m, P · width]; of one head, [m, 1].

    Widths other than m or whole tiles take a product.
    """
    size = column.shape[1] // heads
    if heads == 1 or width == size:
        return column
    if not _whole_tiles(column.shape[1], heads, width):
        return selected(column, own((heads * size, heads * width), heads, rows=1).astype(jnp.float32), 1, 0)
    of_head = [lanes_at(column, jnp.full(column.shape, head * size)) for head in range(heads)]
    return jnp.concatenate([tile for tile in of_head for _ in range(width // LANES)], axis=1)


def _widened_backward(heads: int, width: int, size: int, d: jax.Array) -> tuple[jax.Array]:
    # The cotangent of a column is in parts, one for each lane of its head.
    if heads == 1 or width == size:
        return (d,)
    if not _whole_tiles(heads * size, heads, width):
        return (selected(d, own((heads * size, heads * width), heads, rows=1).astype(jnp.float32), 1, 1),)
    lane = jax.lax.broadcasted_iota(jnp.int32, (d.shape[0], LANES), 1)
    total = jnp.zeros(lane.shape, jnp.float32)
    for head in range(heads):
        tiles = [d[:, start : start + LANES] for start in range(head * width, (head + 1) * width, LANES)]
        part, shift = functools.reduce(jnp.add, tiles), LANES // 2
        while shift >= size:
            part = part + jnp.concatenate([part[:, shift:], part[:, :shift]], axis=1)
            shift //= 2
        total = jnp.where((lane >= head * size) & (lane < (head + 1) * size), part, total)
    return (total,)


widened.defvjp(
    lambda column, heads, width: (widened(column, heads, width), column.shape[1] // heads), _widened_backward
)


def running_products(x: jax.Array) -> jax.Array:
    """The product of each entry of x [m, n] with all those above it; m is a power of two."""
    shift = 1
    while shift < x.shape[0]:
        x = jnp.concatenate([x[:shift], x[shift:] * x[:-shift]])
        shift *= 2
    return x


def place(shape: tuple[int, ...], axis: int, heads: int) -> jax.Array:
    """The row (axis 0) of each entry of [m, P · m], or its lane within its head (axis 1). m is a power of two."""
    places = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    return places if heads == 1 or axis == 0 else places & (shape[1] // heads - 1)


def head_sums(x: jax.Array, heads: int) -> jax.Array:
    """The sum over each head's lanes of [m, P · w], in all of them, [m, P · w]; of one head, [m, 1]."""
    if heads == 1:
        return jnp.sum(x, axis=1, keepdims=True)
    lane, width = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1), x.shape[1] // heads
    own_lanes = [(lane >= head * width) & (lane < (head + 1) * width) for head in range(heads)]
    return in_own_lanes([jnp.where(here, x, 0.0) for here in own_lanes])


def in_own_lanes(parts: Sequence[jax.Array]) -> jax.Array:
    """For each head one matrix [m, P · w]: the sum of its row in all of the head's lanes, [m, P · w]."""
    lane, width = jax.lax.broadcasted_iota(jnp.int32, parts[0].shape, 1), parts[0].shape[1] // len(parts)
    sums = [jnp.sum(part, axis=1, keepdims=True) for part in parts]
    total = jnp.broadcast_to(sums[0], parts[0].shape)
    for head, other in enumerate(sums[1:], 1):
        total = jnp.where(lane >= head * width, other, total)
    return total


def in_tile(width: int, heads: int) -> bool:
    """Whether several heads fill the lanes of one tile, within which `lanes_at` moves entries."""
    return heads > 1 and width == LANES


def lanes_at(x: jax.Array, lanes: jax.Array) -> jax.Array:
    """x[r, lanes[r, l]] of [m, 128]: one operation for each tile, where a sum over lanes takes several. TPUs have it from v4 on.

    Only for functions with a derivative of their own, because that of a gather would be a scatter, which Mosaic lacks.
    """
    # Under vmap the places must have the batch axis of x, because Mosaic has only gathers along an axis. The selection, which
    # gives them one, is removed by the compiler.
    return jnp.take_along_axis(x, jnp.where(x == x, lanes, lanes), axis=1, mode="promise_in_bounds")


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def columns_of(rows: jax.Array, heads: int = 1) -> jax.Array:
    """A row of m tokens for each head, [1, P · m], as a column in all of the head's lanes, [m, P · m]; of one head, [m, 1].

    Exact, and without a product, which would keep a matrix unit as long as one of whole matrices.
    """
    shape = rows.shape[1] // heads, rows.shape[1]
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    if in_tile(rows.shape[1], heads):
        return lanes_at(jnp.broadcast_to(rows, shape), row + (lane & -shape[0]))
    parts = [jnp.where(row + head * shape[0] == lane, rows, 0.0) for head in range(heads)]
    return jnp.sum(parts[0], axis=1, keepdims=True) if heads == 1 else in_own_lanes(parts)


columns_of.defvjp(
    lambda rows, heads: (columns_of(rows, heads), None),
    lambda heads, _, d: (rows_of_columns(sum_of_parts(d, heads), heads),),
)


def sum_of_parts(d: jax.Array, heads: int) -> jax.Array:
    """The cotangent of a column, from that of a column in all lanes of its head, where each lane has a part of it."""
    return d if heads == 1 else head_sums(d, heads)


def columns(rows: jax.Array) -> jax.Array:
    """[n, m] → [m, n] of one head, for a few rows. Per-token values are stored as rows, 8 of them to a tile."""
    return jnp.concatenate([columns_of(rows[i : i + 1]) for i in range(rows.shape[0])], axis=1)


def rows_of_columns(columns: jax.Array, heads: int = 1) -> jax.Array:
    """The inverse of `columns_of`."""
    shape = columns.shape[0], heads * columns.shape[0]
    return jnp.sum(jnp.where(place(shape, 0, heads) == place(shape, 1, heads), columns, 0.0), axis=0, keepdims=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def first_column(x: jax.Array, heads: int = 1) -> jax.Array:
    """The first column of each head of [m, P · m], in all of the head's lanes; of one head, [m, 1]."""
    if not in_tile(x.shape[1], heads):
        return head_sums(jnp.where(place(x.shape, 1, heads) == 0, x, 0.0), heads)
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return lanes_at(x, lane & -(x.shape[1] // heads))


def _first_backward(heads: int, lanes: int, d: jax.Array) -> tuple[jax.Array]:
    return (jnp.where(place((d.shape[0], lanes), 1, heads) == 0, sum_of_parts(d, heads), 0.0),)


first_column.defvjp(lambda x, heads: (first_column(x, heads), x.shape[1]), _first_backward)


def diagonal_column(x: jax.Array, heads: int = 1) -> jax.Array:
    """The diagonal of each head of [m, P · m], in all of the head's lanes; of one head, [m, 1]."""
    if heads > 1:
        return _diagonal_columns(x, heads)
    # GPU kernels call it for one head, and Triton has no lowering of a function with a derivative of its own.
    return jnp.sum(jnp.where(place(x.shape, 0, 1) == place(x.shape, 1, 1), x, 0.0), axis=1, keepdims=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _diagonal_columns(x: jax.Array, heads: int) -> jax.Array:
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) for axis in (0, 1))
    if in_tile(x.shape[1], heads):
        return lanes_at(x, row + (lane & -x.shape[0]))
    return head_sums(jnp.where(row == place(x.shape, 1, heads), x, 0.0), heads)


def _diagonal_backward(heads: int, lanes: int, d: jax.Array) -> tuple[jax.Array]:
    shape = d.shape[0], lanes
    return (jnp.where(place(shape, 0, heads) == place(shape, 1, heads), sum_of_parts(d, heads), 0.0),)


_diagonal_columns.defvjp(lambda x, heads: (_diagonal_columns(x, heads), x.shape[1]), _diagonal_backward)


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
