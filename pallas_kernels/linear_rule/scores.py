"""Scores of a chunk's queries and keys under decays for each channel, by recursive halving. Restricted to what Mosaic compiles.

    scores[t, i] = Σ_d α_{i+1,d} … α_{t,d} queries[t, d] keys[i, d]    for i < t

Two neighbouring parts of s tokens are merged into one of 2 s. For t in the second and i in the first, the decays are (those of the
second up to t) · (those of the first after i). So the scores between them are one product of decayed queries and decayed keys: no
[m, m, D] array, and no quotients of decays, so α = 0 is exact. Heads lie side by side (`side_by_side`).

Arrays are in tiles of 8 rows, those of a register. All tiles have the same masks for parts within them. From 8 tokens on, a part is
a number of whole tiles: only queries of second parts and keys of first parts are multiplied, without masks.

**Derivatives.** The cotangent of the keys is a product with the transposed cotangent of the scores. To transpose matrices of heads
that lie side by side takes long, and half of such a product is of one head's scores with the queries of another. But `read`, which
uses the scores, gets the transposed cotangent by a product of its own. So in the backward kernel scores exist in both orders
(`Turned`): through those with queries in rows come the cotangents of queries, and through those with keys in rows those of keys.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Arrays
from pallas_kernels.blocks import Precision, entry
from pallas_kernels.side_by_side import times, times_transposed

_ROWS = 8  # of a tile
_LEVELS = 3  # that lie within one: parts of 1, 2 and 4 tokens


class Pair(NamedTuple):
    """Whose scores are wanted: the places of one of the queries and one of the keys, and the precision of their products.

    `own` is the place of what is multiplied with a token's own key, among the third arguments of `decayed`; None gives zero there.
    `turned` gives the scores in both orders.
    """

    query: int
    key: int
    precision: Precision
    own: int | None = None
    turned: bool = False


class Turned(NamedTuple):
    """Scores [m, P · m] with queries in rows, and the same with keys in rows. Only for `read`: each needs its own cotangent."""

    by_query: jax.Array
    by_key: jax.Array


Scores = jax.Array | Turned


class Decayed(NamedTuple):
    """The result of `decayed`.

    Attributes:
      queries: those given, decayed from the chunk's start, [m, P · D] each.
      keys: those given, decayed to the chunk's end.
      whole: the product of all decays of the chunk, [1, P · D].
      scores: [m, P · m] for each pair, zero for i > t.
    """

    queries: Arrays
    keys: Arrays
    whole: jax.Array
    scores: tuple[Scores, ...]


def decayed(
    decay: jax.Array, queries: Arrays, keys: Arrays, own: Arrays, pairs: tuple[Pair, ...], heads: int
) -> Decayed:
    """Decays queries and keys, and computes the scores of pairs.

    Args:
      decay: α [m, P · D], m a power of two ≥ 8.
      queries: [m, P · D] each, times what they have of their own token's decay.
      keys: [m, P · D] each.
      own: queries of a token's own key, [m, P · D] each.
      pairs: whose scores are wanted; static.
      heads: P; static.
    """
    size = decay.shape[0]
    number = lambda width, axis: jax.lax.broadcasted_iota(jnp.int32, (1, _ROWS, width), axis)
    row, column, token = number(heads * size, 1), number(heads * size, 2) & (size - 1), number(decay.shape[1], 1)
    in_tile = column & (_ROWS - 1)
    orders = [(pair, by_key) for pair in pairs for by_key in (False, True)[: 1 + pair.turned]]

    def between(level: int, by_key: bool) -> jax.Array:
        """Whether a tile's row and column are a query and a key of neighbouring parts."""
        query, key = (in_tile >> level, row >> level) if by_key else (row >> level, in_tile >> level)
        return (query == key + 1) & ((key & 1) == 0)

    # Within tiles. Scores of a tile's rows with the columns of other tiles are masked at the end.
    scores = []
    for pair, by_key in orders:
        query, key = queries[pair.query], keys[pair.key]
        if pair.own is None:
            before = _products(query, key, pair, by_key, heads)
        elif by_key:
            of_own, before = (_products(x, key, pair, by_key, heads) for x in (own[pair.own], query))
        else:  # both take the same keys through the matrix unit
            of_own, before = _parts(_products(jnp.concatenate([own[pair.own], query]), key, pair, by_key, heads), 2)
        before = jnp.where(between(0, by_key), before, 0.0)
        scores.append(before if pair.own is None else _placed(row == in_tile, of_own, before))
    whole = _tall(decay)  # the product of the decays of a token's part
    queries, keys = tuple(map(_tall, queries)), tuple(map(_tall, keys))
    for level in range(_LEVELS):
        for i, (pair, by_key) in enumerate(orders if level else []):
            found = _products(_flat(queries[pair.query]), _flat(keys[pair.key]), pair, by_key, heads)
            scores[i] = _placed(between(level, by_key), found, scores[i])
        neighbour, second = exchanged(whole, level), ((token >> level) & 1) == 1
        of_query, of_key = jnp.where(second, neighbour, 1.0), jnp.where(second, 1.0, neighbour)
        queries, keys = tuple(of_query * x for x in queries), tuple(of_key * x for x in keys)
        whole = whole * neighbour

    return _between_tiles(whole, queries, keys, scores, orders, column[0], heads)


def _tall(x: jax.Array) -> jax.Array:
    """[m, lanes] in tiles, [m / 8, 8, lanes]."""
    return x.reshape(-1, _ROWS, x.shape[-1])


def _flat(x: jax.Array) -> jax.Array:
    """The inverse of `_tall`."""
    return x.reshape(-1, x.shape[-1])


def _products(query: jax.Array, key: jax.Array, pair: Pair, by_key: bool, heads: int) -> jax.Array:
    """The scores of all queries with all keys, in tiles."""
    left, right = (key, query) if by_key else (query, key)
    # The other order of the scores has the derivative by the right factor.
    right = jax.lax.stop_gradient(right) if pair.turned else right
    return _tall(times_transposed(left, right, heads, pair.precision))


def _between_tiles(
    whole: jax.Array, queries: Arrays, keys: Arrays, scores: list[jax.Array], orders: list[tuple[Pair, bool]],
    column: jax.Array, heads: int,
) -> Decayed:  # fmt: skip
    """Merges tiles, whose scores within themselves are known, to the whole chunk.

    Args:
      whole: the product of the decays of each tile, in all of its rows.
      queries, keys: decayed from and to their tile's ends.
      scores: for each of `orders`, of tokens in the same tile; elsewhere anything.
      orders: pairs, and whether their scores have keys in rows.
      column: the column of each entry within its head, [8, P · m].
    """
    tiles = lambda x: list(_parts(x, x.shape[0]))
    of_tile = lambda x: [jnp.where((column >> _LEVELS) == tile, y[0], 0.0) for tile, y in enumerate(tiles(x))]
    of_queries, of_keys, of_scores = [tiles(x) for x in queries], [tiles(x) for x in keys], [of_tile(x) for x in scores]
    wholes = tiles(whole)  # of each part; all rows of a tile are equal
    count = len(wholes)
    for level in range(_LEVELS, _LEVELS + count.bit_length() - 1):
        length = 1 << (level - _LEVELS)  # tiles of a part
        for x, (pair, by_key) in zip(of_scores, orders):
            its_queries, its_keys = of_queries[pair.query], of_keys[pair.key]
            rows = [tile for tile in range(count) if bool(tile & length) != by_key]
            if by_key:
                its_keys = [its_keys[tile] for tile in rows]
            else:
                its_queries = [its_queries[tile] for tile in rows]
            query, key = _flat(jnp.concatenate(its_queries)), _flat(jnp.concatenate(its_keys))
            found = _products(query, key, pair, by_key, heads)
            for tile, y in zip(rows, tiles(found)):
                part = tile // length + (1 if by_key else -1)
                x[tile] = _placed((column >> level) == part, y[0], x[tile])
        for tile in range(count):
            of_part, beside = (of_queries, -1) if tile & length else (of_keys, 1)
            for x in of_part:
                x[tile] = x[tile] * wholes[tile // length + beside]
        wholes = [x * y for x, y in zip(wholes[::2], wholes[1::2])]
    join = lambda x: _flat(jnp.concatenate(x))
    ordered = iter([jnp.concatenate(x) for x in of_scores])
    return Decayed(
        tuple(map(join, of_queries)),
        tuple(map(join, of_keys)),
        entry(wholes[0][0], 0),
        tuple(
            Turned(next(ordered), next(ordered)) if pair.turned else next(ordered)
            for pair, by_key in orders if not by_key
        ),
    )  # fmt: skip


def read(scores: Scores, x: jax.Array, heads: int, precision: Precision) -> jax.Array:
    """The reads of x by queries, [m, P · w], one row for each key: `times(scores, x)`."""
    return times(scores, x, heads, precision) if isinstance(scores, jax.Array) else _read(scores, x, heads, precision)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _read(scores: Turned, x: jax.Array, heads: int, precision: Precision) -> jax.Array:
    return times(scores.by_query, x, heads, precision)


def _read_backward(
    heads: int, precision: Precision, kept: tuple[jax.Array, jax.Array], d: jax.Array
) -> tuple[Turned, jax.Array]:
    by_key, x = kept
    dscores = Turned(times_transposed(d, x, heads, precision), times_transposed(x, d, heads, precision))
    return dscores, times(by_key, d, heads, precision)


_read.defvjp(lambda scores, x, *how: (_read(scores, x, *how), (scores.by_key, x)), _read_backward)


@jax.custom_vjp
def _placed(here: jax.Array, x: jax.Array, rest: jax.Array) -> jax.Array:
    """x here, and elsewhere the rest, which was masked to its own places before: so its cotangent need not be masked here."""
    return jnp.where(here, x, rest)


_placed.defvjp(
    lambda here, x, rest: (_placed(here, x, rest), here),
    lambda here, d: (None, jnp.where(here, d, 0.0), d),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _parts(x: jax.Array, count: int) -> Arrays:
    """Equal parts of x along its first axis. Has its own derivative, because that of a slice would be a pad."""
    size = x.shape[0] // count
    return tuple(x[i : i + size] for i in range(0, x.shape[0], size))


_parts.defvjp(lambda x, count: (_parts(x, count), None), lambda count, _, d: (jnp.concatenate(d),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def exchanged(x: jax.Array, level: int) -> jax.Array:
    """x [n, 8, lanes] with neighbouring parts of 2^level rows exchanged. Its own transpose."""
    size = 1 << level
    down = lambda by: jnp.concatenate([x[:, -by:], x[:, :-by]], axis=1)
    if 2 * size == _ROWS:
        return down(size)
    second = ((jax.lax.broadcasted_iota(jnp.int32, (1, *x.shape[1:]), 1) >> level) & 1) == 1
    return jnp.where(second, down(size), down(_ROWS - size))


exchanged.defvjp(lambda x, level: (exchanged(x, level), None), lambda level, _, d: (exchanged(d, level),))
