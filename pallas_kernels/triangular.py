"""Lower triangular matrices of one block of m tokens: products of decays, inverses, systems. Restricted to what Mosaic compiles.

With `heads` > 1, the matrices [m, P · m] of P heads lie side by side (`side_by_side`).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import HIGHEST, Precision, before, entry, halves, product
from pallas_kernels.layout import LANES
from pallas_kernels.side_by_side import (
    columns_of,
    diagonal,
    head_sums,
    in_tile,
    lanes_at,
    place,
    rows_of_columns,
    running_products,
    sum_of_parts,
    times,
    times_transposed,
    transposed_times,
    weighted,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def decay_products(decay: jax.Array, heads: int = 1, precision: Precision = HIGHEST) -> tuple[jax.Array, jax.Array]:
    """P [m, P · m], with P[t,i] = α_{i+1} … α_t for t ≥ i, else 0, and α_0 … α_t, a column, from α, a row [1, P · m].

    m is a power of two. Columns are in all lanes of their head; of one head they are [m, 1]. `precision` is that of the
    derivative's product.
    """
    return (_products_by_tiles if in_tile(decay.shape[1], heads) else _products_by_columns)(decay, heads)


def _products_by_columns(decay: jax.Array, heads: int) -> tuple[jax.Array, jax.Array]:
    column = columns_of(decay, heads)
    shape = decay.shape[1] // heads, decay.shape[1]
    row, lane = place(shape, 0, heads), place(shape, 1, heads)
    products = running_products(jnp.where(row > lane, column, 1.0))
    return jnp.where(row >= lane, products, 0.0), running_products(column)


def _products_by_tiles(decay: jax.Array, heads: int) -> tuple[jax.Array, jax.Array]:
    """Eight tokens at a time, the rows of a tile. Those of all tiles within themselves are one tile, [8, P · m]."""
    size, shape = decay.shape[1] // heads, (8, decay.shape[1])
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    decay = jnp.broadcast_to(decay, shape)
    within = running_products(jnp.where(row > (lane & 7), lanes_at(decay, (lane & -8) + row), 1.0))
    begun = within * decay  # and the lane's own decay
    within, last = jnp.where(row >= (lane & 7), within, 0.0), entry(within, 7)
    tile, head = (lane & (size - 1)) >> 3, lane & -size
    # Up to the tile before: the products after each lane's token, and from the start.
    after, start = jnp.zeros(shape, jnp.float32), jnp.ones(shape, jnp.float32)
    products, starts = [], []
    for number in range(size // 8):
        of_tile = lanes_at(begun, head + 8 * number)
        products.append(jnp.where(tile == number, within, of_tile * after))
        starts.append(of_tile * start)
        whole = entry(of_tile, 7)
        after, start = jnp.where(tile == number, last, after * whole), start * whole
    return jnp.concatenate(products), jnp.concatenate(starts)


_Products = tuple[jax.Array, jax.Array]


def _decay_forward(decay: jax.Array, heads: int, precision: Precision) -> tuple[_Products, _Products]:
    found = decay_products(decay, heads, precision)
    return found, found


def _decay_backward(heads: int, precision: Precision, kept: _Products, d: _Products) -> tuple[jax.Array]:
    # dα_j = Σ_{t ≥ j > i} dP[t,i] P[t,j] P[j−1,i], and the products from the start are those after a token −1. The last column of
    # P has no decay, so that its place is free for them.
    products, start = kept
    dproducts, dstart = d
    lane = place(products.shape, 1, heads)
    last = lane == products.shape[0] - 1
    dproducts = jnp.where(last, sum_of_parts(dstart, heads), dproducts)
    left = jnp.where(last, before(start, 1.0), before(products, 0.0))
    parts = transposed_times(products, dproducts, heads, precision) * left
    return (rows_of_columns(head_sums(parts, heads), heads),)


decay_products.defvjp(_decay_forward, _decay_backward)


def unit_lower_inverse(lower: jax.Array, heads: int = 1, precision: Precision = HIGHEST) -> jax.Array:
    """(I + L)⁻¹ for a strictly lower triangular L [m, m], m a power of two.

    Recursively doubles the block size s: X ← X − X L_s X, where L_s is the part of L between adjacent blocks of s tokens. This uses
    only products of whole matrices, forms no powers of L that could overflow, and is as accurate as substitution.
    """
    size = lower.shape[0]
    if lower.shape[1] == LANES and size >= 32:
        # The halves on the diagonal, side by side as those of twice as many heads: half as many rows.
        half, second = size // 2, place(lower.shape, 1, heads)[: size // 2] >= size // 2
        x = unit_lower_inverse(jnp.where(second, lower[half:], lower[:half]), 2 * heads, precision)
        x = jnp.concatenate([jnp.where(second, 0.0, x), jnp.where(second, x, 0.0)])
        across = jnp.concatenate([jnp.zeros_like(x[:half]), jnp.where(second, 0.0, lower[half:])])
        return _merged_by_tiles(x, across, heads, half, precision)
    row, column = place(lower.shape, 0, heads), place(lower.shape, 1, heads)
    x = _inverse_of_fours(lower, row, column)
    for level in range(2, size.bit_length() - 1):
        # Bit operations, because integer division needs to know the TPU generation.
        same = (row >> (level + 1)) == (column >> (level + 1))
        between = same & ((row >> level) > (column >> level))
        part = jnp.where(between, lower, 0.0)
        if in_tile(lower.shape[1], heads) and size >= 16:
            x = _merged_by_tiles(x, part, heads, 1 << level, precision)
        else:
            x = x - times(x, times(part, x, heads, precision), heads, precision)
    return x


def _merged_by_tiles(x: jax.Array, part: jax.Array, heads: int, s: int, precision: Precision) -> jax.Array:
    """X − X L_s X for blocks of s ≥ 4 tokens. Only the rows of second blocks change.

    L_s leads from first to second blocks, so that one product sums over the lanes of first blocks and the other over the rest.
    """
    second = _rows_of(x, s, 1)
    change = _times_at(_rows_of(part, s, 1), s, 0, _rows_of(x, s, 0), heads, precision)
    changed = second - _times_at(second, s, 1, change, heads, precision)
    rows = range(0, x.shape[0], 8)
    if s >= 8:
        tiles = {row: changed[8 * i : 8 * i + 8] for i, row in enumerate(row for row in rows if row & s)}
        return jnp.concatenate([tiles.get(row, x[row : row + 8]) for row in rows])
    pairs = {row: changed[row // 16 * 8 : row // 16 * 8 + 8] for row in rows}
    lower_half = {row: tile if row & 8 else _turned(tile) for row, tile in pairs.items()}
    return jnp.concatenate([_upper_and_lower(x[row : row + 8], lower_half[row]) for row in rows])


def _rows_of(x: jax.Array, s: int, place: int) -> jax.Array:
    """The rows of every other block of s rows of [m, n], from the first (place 0) or the second on: [m / 2, n]."""
    rows = range(0, x.shape[0], 8)
    if s >= 8:
        return jnp.concatenate([x[row : row + 8] for row in rows if bool(row & s) == bool(place)])
    # Halves of two tiles become one: the half that is not in its place is turned into it.
    pairs = ((x[row : row + 8], x[row + 8 : row + 16]) for row in range(0, x.shape[0], 16))
    return jnp.concatenate(
        [_upper_and_lower(_turned(a), b) if place else _upper_and_lower(a, _turned(b)) for a, b in pairs]
    )


def _turned(tile: jax.Array) -> jax.Array:
    """A tile with its upper and lower four rows exchanged."""
    return jnp.concatenate([tile[4:], tile[:4]])


def _upper_and_lower(a: jax.Array, b: jax.Array) -> jax.Array:
    """The upper four rows of tile a and the lower four of tile b."""
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, a.shape, 0) < 4, a, b)


def _lanes_of(x: jax.Array, s: int, place: int) -> jax.Array:
    """The lanes of every other block of s lanes of [r, 128], from the first (place 0) or the second on: [r, 128], each twice."""
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) & (LANES // 2 - 1)
    return lanes_at(x, ((lane & -s) << 1) + (lane & (s - 1)) + place * s)


def _times_at(x: jax.Array, s: int, place: int, y: jax.Array, heads: int, precision: Precision) -> jax.Array:
    """X Y of each head, where only every other block of s lanes of X is a factor: [r, 128], [m / 2, P · n] → [r, P · n].

    The rows of Y are those of these lanes. So a product has half the depth.
    """
    half = LANES // 2
    if precision != Precision.HIGH:
        return product(_lanes_of(x, s, place)[:, :half], diagonal(y, heads), 1, 0, precision)
    (x, x_rest), (y, y_rest) = halves(x), (diagonal(part, heads) for part in halves(y))
    x = jnp.concatenate([_lanes_of(x, s, place), _lanes_of(x_rest, s, place)[:, :half]], axis=1)
    return product(x, jnp.concatenate([y, y_rest, y]), 1, 0, Precision.DEFAULT)


def _inverse_of_fours(lower: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
    """The first two levels of `unit_lower_inverse`: blocks of four tokens, without a product.

    Of [[X_1, 0], [C, X_2]], X_1 = [[1, 0], [−a, 1]] and X_2 = [[1, 0], [−b, 1]], the corner is −X_2 C X_1.
    """
    to_left = lambda x, by: jnp.concatenate([x[:, by:], x[:, :by]], axis=1)
    down = lambda x, by: jnp.concatenate([x[-by:], x[:-by]])
    r, c = row & 3, column & 3
    next_column = to_left(lower, 1)
    a = jnp.where(r == 2, down(lower, 1), down(lower, 2))
    corner = jnp.where(c == 0, lower - next_column * a, lower)
    b = jnp.where(c == 0, to_left(lower, 2), next_column)
    corner = jnp.where(r == 3, corner - b * down(corner, 1), corner)
    fours, pairs = (row >> 2) == (column >> 2), (row >> 1) == (column >> 1)
    below = jnp.where(pairs, lower, corner)
    return jnp.where(fours & (row >= column), jnp.where(row == column, 1.0, -below), 0.0)


class _Halves(NamedTuple):
    """[[L_1, 0], [A, L_2]] = L of each head, as [m/2, P · m].

    inverse: of I + L_1 in the first lanes of a head, and of I + L_2 in the others. across: A in the first lanes, else zero.
    second: whether a lane is one of the others.
    """

    inverse: jax.Array
    across: jax.Array
    second: jax.Array


def _in_halves(lower: jax.Array, heads: int, precision: Precision) -> _Halves:
    half = lower.shape[0] // 2
    second = place((half, lower.shape[1]), 1, heads) >= half
    inverse = unit_lower_inverse(jnp.where(second, lower[half:], lower[:half]), 2 * heads, precision)
    return _Halves(inverse, jnp.where(second, 0.0, lower[half:]), second)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def solve(
    lower: jax.Array,
    right: jax.Array,
    inverse: jax.Array,
    known: jax.Array | None,
    heads: int = 1,
    precision: Precision = HIGHEST,
) -> jax.Array:
    """(I + L)⁻¹ R of each head, [m, P · n], from a strictly lower triangular L [m, P · m], R [m, P · n] and the inverse of I + L.

    The derivative is G = (I + L)⁻ᵀ dU for R, and −G Uᵀ for L. known: the solution if it is known; then it is only differentiated.
    """
    return times(inverse, right, heads, precision) if known is None else known


def _solve_forward(lower: jax.Array, right: jax.Array, inverse: jax.Array, *how: Any) -> tuple[jax.Array, Any]:
    solved = solve(lower, right, inverse, *how)
    return solved, (inverse, solved)


def _solve_backward(heads: int, precision: Precision, kept: Any, d: jax.Array) -> tuple[jax.Array | None, ...]:
    inverse, solved = kept
    g = transposed_times(inverse, d, heads, precision)
    # Nothing is solved with it, so its errors do not grow.
    dlower = times_transposed(g, solved, heads, Precision.DEFAULT if precision == Precision.HIGH else precision)
    below = place(dlower.shape, 0, heads) > place(dlower.shape, 1, heads)
    return jnp.where(below, -dlower, 0.0), g, None, None


solve.defvjp(_solve_forward, _solve_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def solve_column(lower: jax.Array, column: jax.Array, heads: int = 1, precision: Precision = HIGHEST) -> jax.Array:
    """`solve` for one column, which is in all lanes of its head (`side_by_side.columns_of`), with its last products as sums.

    A product with one column keeps a matrix unit as long as one of whole matrices.
    """
    return _column_forward(lower, column, heads, precision)[0]


def _column_forward(
    lower: jax.Array, column: jax.Array, heads: int, precision: Precision
) -> tuple[jax.Array, tuple[_Halves, jax.Array]]:
    of, half = _in_halves(lower, heads, precision), lower.shape[0] // 2
    first = weighted(of.inverse, jnp.where(of.second, 0.0, column[:half]), 2 * heads)
    across = head_sums(of.across * rows_of_columns(first, 2 * heads), heads)
    second = weighted(of.inverse, jnp.where(of.second, column[half:] - across, 0.0), 2 * heads)
    row = rows_of_columns(first + second, 2 * heads)
    return columns_of(row, heads), (of, row)


def _column_backward(
    heads: int, precision: Precision, kept: tuple[_Halves, jax.Array], d: jax.Array
) -> tuple[jax.Array, jax.Array]:
    of, x = kept
    half, shape = d.shape[0] // 2, (d.shape[0], x.shape[1])
    d = sum_of_parts(d, heads)
    halves = jnp.where(of.second, d[half:], d[:half])
    g = jnp.sum(of.inverse * halves, axis=0, keepdims=True)  # done in the lanes of second halves
    moved = jnp.where(place(of.across.shape, 1, heads) == place(of.across.shape, 0, heads) + half, g, 0.0)
    across = jnp.sum(of.across * head_sums(moved, heads), axis=0, keepdims=True)
    first = jnp.sum(of.inverse * (halves - columns_of(across, 2 * heads)), axis=0, keepdims=True)
    g = columns_of(jnp.where(of.second[:1], g, first), heads)
    row, lane = place(shape, 0, heads), place(shape, 1, heads)
    dlower = jnp.where(row > lane, -g * x, 0.0)
    if heads > 1:
        g = jnp.where(lane == 0, g, 0.0)
    return dlower, g


solve_column.defvjp(_column_forward, _column_backward)
