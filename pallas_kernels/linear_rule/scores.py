"""Scores of a chunk's queries and keys under decays for each channel, by recursive halving. Restricted to what Mosaic compiles.

    scores[t, i] = Σ_d α_{i+1,d} … α_{t,d} queries[t, d] keys[i, d]    for i < t

Two neighbouring parts of s tokens are merged into one of 2 s. For t in the second and i in the first, the decays are (those of the
second up to t) · (those of the first after i). So the scores between them are one product of decayed queries and decayed keys: no
[m, m, D] array, and no quotients of decays, so α = 0 is exact. Heads lie side by side (`side_by_side`).

Arrays are in tiles of 8 rows, those of a register. All tiles have the same masks for parts within them. From 8 tokens on, a part is
a number of whole tiles: only queries of second parts and keys of first parts are multiplied, without masks.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Arrays
from pallas_kernels.blocks import Precision, entry
from pallas_kernels.side_by_side import times_transposed

_ROWS = 8  # of a tile
_LEVELS = 3  # that lie within one: parts of 1, 2 and 4 tokens


class Pair(NamedTuple):
    """Whose scores are wanted: the places of one of the queries and one of the keys, and the precision of their products.

    `own` is the place of what is multiplied with a token's own key, among the third arguments of `decayed`; None gives zero there.
    """

    query: int
    key: int
    precision: Precision
    own: int | None = None


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
    scores: Arrays


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
    tall, flat = (lambda x: x.reshape(-1, _ROWS, x.shape[-1])), (lambda x: x.reshape(-1, x.shape[-1]))
    number = lambda width, axis: jax.lax.broadcasted_iota(jnp.int32, (1, _ROWS, width), axis)
    row, column, token = number(heads * size, 1), number(heads * size, 2) & (size - 1), number(decay.shape[1], 1)
    in_tile = column & (_ROWS - 1)

    # Within tiles. What a tile's rows have with the keys of other tiles is masked at the end.
    across = lambda left, pair: tall(times_transposed(left, flat(keys[pair.key]), heads, pair.precision))
    own_key, key_before = row == in_tile, (row == in_tile + 1) & ((in_tile & 1) == 0)
    scores = []
    for pair in pairs:
        if pair.own is None:
            scores.append(jnp.where(key_before, across(queries[pair.query], pair), 0.0))
        else:  # both take the same keys through the matrix unit
            both = across(jnp.concatenate([own[pair.own], queries[pair.query]]), pair)
            of_own, before = _parts(both, 2)
            scores.append(jnp.where(own_key, of_own, jnp.where(key_before, before, 0.0)))
    whole = tall(decay)  # the product of the decays of a token's part
    queries, keys = tuple(map(tall, queries)), tuple(map(tall, keys))
    for level in range(_LEVELS):
        if level:
            between = ((row >> level) == (in_tile >> level) + 1) & (((in_tile >> level) & 1) == 0)
            scores = [jnp.where(between, across(flat(queries[pair.query]), pair), x) for pair, x in zip(pairs, scores)]
        neighbour, second = exchanged(whole, level), ((token >> level) & 1) == 1
        of_query, of_key = jnp.where(second, neighbour, 1.0), jnp.where(second, 1.0, neighbour)
        queries, keys = tuple(of_query * x for x in queries), tuple(of_key * x for x in keys)
        whole = whole * neighbour

    # Between tiles.
    count = size // _ROWS
    column = column[0]
    tiles = lambda x: list(_parts(x, x.shape[0]))
    of_tile = lambda x: [jnp.where((column >> _LEVELS) == tile, y[0], 0.0) for tile, y in enumerate(tiles(x))]
    of_queries, of_keys, of_scores = [tiles(x) for x in queries], [tiles(x) for x in keys], [of_tile(x) for x in scores]
    wholes = tiles(whole)  # of each part; all rows of a tile are equal
    for level in range(_LEVELS, size.bit_length() - 1):
        length = 1 << (level - _LEVELS)  # tiles of a part
        later = [tile for tile in range(count) if tile & length]
        for x, pair in zip(of_scores, pairs):
            left = flat(jnp.concatenate([of_queries[pair.query][tile] for tile in later]))
            right = flat(jnp.concatenate(of_keys[pair.key]))
            products = tiles(tall(times_transposed(left, right, heads, pair.precision)))
            for tile, y in zip(later, products):
                x[tile] = jnp.where((column >> level) == tile // length - 1, y[0], x[tile])
        for tile in range(count):
            of_part, beside = (of_queries, -1) if tile & length else (of_keys, 1)
            for x in of_part:
                x[tile] = x[tile] * wholes[tile // length + beside]
        wholes = [x * y for x, y in zip(wholes[::2], wholes[1::2])]
    join = lambda x: flat(jnp.concatenate(x))
    return Decayed(
        tuple(map(join, of_queries)),
        tuple(map(join, of_keys)),
        entry(wholes[0][0], 0),
        tuple(jnp.concatenate(x) for x in of_scores),
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
