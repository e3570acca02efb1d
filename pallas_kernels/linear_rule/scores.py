"""Scores of a chunk's queries and keys under decays for each channel, by recursive halving. Restricted to what Mosaic compiles.

    scores[t, i] = Σ_d α_{i+1,d} … α_{t,d} queries[t, d] keys[i, d]    for i < t

Two neighbouring parts of s tokens are merged into one of 2 s. For t in the second and i in the first, the decays are (those of the
second up to t) · (those of the first after i). So the scores between them are one product of decayed queries and decayed keys: no
[m, m, D] array, and no quotients of decays, so α = 0 is exact. Heads lie side by side (`side_by_side`).

A token is in one of the two parts: it takes part either as a query or as a key. So a query and a key that both have three passes
share an array, which is divided into two bfloat16 numbers once.

Arrays are in tiles of 8 rows, those of a register. All tiles have the same masks for parts within them. From 8 tokens on, a part is
a number of whole tiles: only queries of second parts are multiplied, without masks.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Arrays
from pallas_kernels.blocks import Precision, entry, halves, product
from pallas_kernels.layout import LANES, matrix_unit
from pallas_kernels.side_by_side import diagonal, of_diagonal

_ROWS = 8  # of a tile
_LEVELS = 3  # that lie within one: parts of 1, 2 and 4 tokens

T = TypeVar("T")
Scores = tuple[Arrays, ...]  # of each query with each key, [m, P · m]


class _How(NamedTuple):
    """How scores are computed: the precision of each query's products, not HIGH for the first one, and whether they are wanted."""

    of_queries: tuple[Precision, ...]
    wanted: tuple[bool, ...]

    @property
    def shared(self) -> bool:
        return Precision.HIGH in self.of_queries


class Decayed(NamedTuple):
    """The result of `decayed`.

    Attributes:
      queries: those given, decayed from the chunk's start, [m, P · D] each.
      keys: those given, decayed to the chunk's end.
      whole: the product of all decays of the chunk, [1, P · D].
      scores: of each query with each key, zero for i > t.
    """

    queries: Arrays
    keys: Arrays
    whole: jax.Array
    scores: Scores


def decayed(
    decay: jax.Array, queries: Arrays, keys: Arrays, own: Arrays, precisions: tuple[Precision, ...],
    known: tuple[Arrays | None, ...], heads: int,
) -> Decayed:  # fmt: skip
    """Decays queries and keys, and computes all their scores.

    Args:
      decay: α [m, P · D], m a power of two ≥ 8.
      queries: [m, P · D] each, times what they have of their own token's decay.
      keys: [m, P · D] each, not more than queries.
      own: what the first queries have in their place for a token's own key, [m, P · D] each; others have zero there.
      precisions: of each query's products; static.
      known: the scores of each query with each key if they are known; they are only differentiated.
      heads: P; static.
    """
    size, how = decay.shape[0], _How(precisions, tuple(x is None for x in known))
    number = lambda width, axis: jax.lax.broadcasted_iota(jnp.int32, (1, _ROWS, width), axis)
    row, column = number(heads * size, 1), number(heads * size, 2) & (size - 1)
    in_tile = column & (_ROWS - 1)
    # Within tiles. What a tile's rows have with the columns of other tiles is masked at the end.
    whole = _tall(decay)  # the product of the decays of a token's part
    queries, keys = tuple(map(_tall, queries)), tuple(map(_tall, keys))
    for level in range(_LEVELS):
        between = ((row >> level) == (in_tile >> level) + 1) & (((in_tile >> level) & 1) == 0)
        if level == 0:  # tokens' own keys are needed in all rows
            with_own = _How(how.of_queries[: len(own)] + how.of_queries, how.wanted[: len(own)] + how.wanted)
            found = _between((*own, *map(_flat, queries)), tuple(map(_flat, keys)), with_own, heads)
            scores = [[jnp.where(between, _tall(x), 0.0) for x in xs] for xs in found[len(own) :]]
            for i, xs in enumerate(found[: len(own)]):
                scores[i] = [_placed(row == in_tile, _tall(x), y) for x, y in zip(xs, scores[i])]
            _, _, queries, keys, whole = _merged(queries, keys, whole, level, False)
            continue
        left, right, queries, keys, whole = _merged(queries, keys, whole, level, how.shared)
        found = _between(tuple(map(_flat, left)), tuple(map(_flat, right)), how, heads)
        scores = [[_placed(between, _tall(x), y) for x, y in zip(xs, ys)] for xs, ys in zip(found, scores)]
    at = _between_tiles(whole, queries, keys, scores, column[0], how, heads)
    return at._replace(scores=tuple(x if y is None else _known(x, y) for x, y in zip(at.scores, known)))


def _tall(x: jax.Array) -> jax.Array:
    """[m, lanes] in tiles, [m / 8, 8, lanes]."""
    return x.reshape(-1, _ROWS, x.shape[-1])


def _flat(x: jax.Array) -> jax.Array:
    """The inverse of `_tall`."""
    return x.reshape(-1, x.shape[-1])


def _factors(
    queries: tuple[T, ...], keys: tuple[T, ...], shared: bool, either: Callable[[T, T], T]
) -> tuple[tuple[T, ...], tuple[T, ...]]:
    """Left and right factors of the scores between neighbouring parts. If they are shared, the last queries and the keys have the
    same arrays: `either(query, key)` is the query in second parts, and elsewhere the key."""
    if not shared:
        return queries, keys
    alone = len(queries) - len(keys)
    both = tuple(either(query, key) for query, key in zip(queries[alone:], keys))
    return (*queries[:alone], *both), both


_Merged = tuple[Arrays, Arrays, Arrays, Arrays, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _merged(queries: Arrays, keys: Arrays, whole: jax.Array, level: int, shared: bool) -> _Merged:
    """Factors of the scores between parts of 2^level rows of a tile, and the three others for parts of twice as many."""
    return _merged_forward(queries, keys, whole, level, shared)[0]


def _second(like: jax.Array, level: int) -> jax.Array:
    """Whether a row of a tile is in a second part."""
    return ((jax.lax.broadcasted_iota(jnp.int32, (1, *like.shape[1:]), 1) >> level) & 1) == 1


def _merged_forward(queries: Arrays, keys: Arrays, whole: jax.Array, level: int, shared: bool) -> tuple[_Merged, Any]:
    neighbour, second = exchanged(whole, level), _second(whole, level)
    left, right = _factors(queries, keys, shared, lambda query, key: jnp.where(second, query, key))
    of_query, of_key = jnp.where(second, neighbour, 1.0), jnp.where(second, 1.0, neighbour)
    after = tuple(of_query * x for x in queries), tuple(of_key * x for x in keys), whole * neighbour
    return (left, right, *after), (left, right, whole, neighbour, of_query, of_key)


def _merged_backward(level: int, shared: bool, kept: Any, d: _Merged) -> tuple[Arrays, Arrays, jax.Array]:
    left, right, whole, neighbour, of_query, of_key = kept
    dleft, dright, dqueries, dkeys, dwhole = d
    second, alone = _second(whole, level), len(left) - len(right)
    add = functools.partial(functools.reduce, jnp.add)
    if shared:
        dneighbour = add([jnp.where(second, dq, dk) * x for dq, dk, x in zip(dqueries[alone:], dkeys, right)])
        if alone:
            dneighbour += jnp.where(second, add([dq * x for dq, x in zip(dqueries[:alone], left)]), 0.0)
    else:
        of_parts = (add([dx * x for dx, x in zip(*of)]) for of in ((dqueries, left), (dkeys, right)))
        dneighbour = jnp.where(second, *of_parts)
    # Cotangents of factors are zero where these are not used.
    return (
        tuple(of_query * dx + more for dx, more in zip(dqueries, dleft)),
        tuple(of_key * dx + more for dx, more in zip(dkeys, dright)),
        dwhole * neighbour + exchanged(dneighbour + dwhole * whole, level),
    )


_merged.defvjp(_merged_forward, _merged_backward)


def _between_tiles(
    whole: jax.Array, queries: Arrays, keys: Arrays, scores: list[list[jax.Array]], column: jax.Array, how: _How,
    heads: int,
) -> Decayed:  # fmt: skip
    """Merges tiles, whose scores within themselves are known, to the whole chunk.

    Args:
      whole: the product of the decays of each tile, in all of its rows.
      queries, keys: decayed from and to their tile's ends.
      scores: of tokens in the same tile; elsewhere anything.
      column: the column of each entry within its head, [8, P · m].
    """
    tiles = lambda x: list(_parts(x, x.shape[0]))
    of_tile = lambda x: [jnp.where((column >> _LEVELS) == tile, y[0], 0.0) for tile, y in enumerate(tiles(x))]
    of_queries, of_keys = tuple(map(tiles, queries)), tuple(map(tiles, keys))
    of_scores = [[of_tile(x) for x in xs] for xs in scores]
    wholes = tiles(whole)  # of each part; all rows of a tile are equal
    count = len(wholes)
    join = lambda x: _flat(jnp.concatenate(x))
    for level in range(_LEVELS, _LEVELS + count.bit_length() - 1):
        length = 1 << (level - _LEVELS)  # tiles of a part
        seconds = [tile for tile in range(count) if tile & length]
        either = lambda query, key, of=length: [(query if tile & of else key)[tile] for tile in range(count)]
        left, right = _factors(of_queries, of_keys, how.shared, either)
        of_seconds = tuple(join([x[tile] for tile in seconds]) for x in left)
        found = _between(of_seconds, tuple(map(join, right)), how, heads)
        for x, y in ((x, y) for xs, ys in zip(of_scores, found) for x, y in zip(xs, ys)):
            for tile, new in zip(seconds, tiles(_tall(y))):
                x[tile] = _placed((column >> level) == tile // length - 1, new[0], x[tile])
        for tile in range(count):
            of_part, beside = (of_queries, -1) if tile & length else (of_keys, 1)
            for x in of_part:
                x[tile] = x[tile] * wholes[tile // length + beside]
        wholes = [x * y for x, y in zip(wholes[::2], wholes[1::2])]
    return Decayed(
        tuple(map(join, of_queries)),
        tuple(map(join, of_keys)),
        entry(wholes[0][0], 0),
        tuple(tuple(jnp.concatenate(x) for x in xs) for xs in of_scores),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _between(queries: Arrays, keys: Arrays, how: "_How", heads: int) -> Scores:
    """The scores of each of the queries [r, P · D] with each of the keys [m, P · D], [r, P · m].

    The scores of all queries are one product with a key, because filling a matrix unit with a factor takes longer than a product.
    """
    rows, lanes = queries[0].shape[0], heads * keys[0].shape[0]
    places = [halves(x) if precision == Precision.HIGH else (x,) for x, precision in zip(queries, how.of_queries)]
    split = [parts if wanted else () for parts, wanted in zip(places, how.wanted)]
    zero = jnp.zeros((rows, lanes), jnp.float32)
    if not any(split):
        return ((zero,) * len(keys),) * len(queries)
    left, scores = jnp.concatenate([part for parts in split for part in parts]), []
    of_rest = [parts[0] for parts in split if len(parts) == 2]  # queries that are multiplied with the rests of keys
    for key in keys:
        right = [diagonal(part, heads) for part in (halves(key) if of_rest else (key,))]
        if of_rest and matrix_unit() > LANES:  # in a wide unit other queries' products with the rests take no time
            both = product(left, jnp.concatenate(right), 1, 1, how.of_queries[0])
            found, rests = both[:, :lanes], both[:, lanes:]
        else:
            found = product(left, right[0], 1, 1, how.of_queries[0])
            rests = product(jnp.concatenate(of_rest), right[1], 1, 1, how.of_queries[0]) if of_rest else found
        of_key, place, of_rests = [], 0, 0
        for parts in split:
            x = found[place : place + rows] if parts else zero
            if len(parts) == 2:  # without the product of the two rests
                at = place if rests.shape == found.shape else of_rests
                x = x + (rests[at : at + rows] + found[place + rows : place + 2 * rows])
                of_rests += rows
            of_key.append(x)
            place += len(parts) * rows
        scores.append(of_key)
    return tuple(zip(*scores))


def _between_backward(how: "_How", heads: int, kept: tuple[Arrays, Arrays], d: Scores) -> tuple[Arrays, Arrays]:
    """In the precision of products with tokens: cotangents do not grow."""
    queries, keys = kept
    precision = how.of_queries[0]
    d_all = jnp.concatenate([jnp.concatenate(of_query, axis=1) for of_query in d])
    right = jnp.concatenate([diagonal(key, heads) for key in keys])
    dqueries = product(d_all, right, 1, 0, precision)
    dkeys = product(d_all, jnp.concatenate(queries), 0, 0, precision)
    split = lambda x, count: [x[i * x.shape[0] // count : (i + 1) * x.shape[0] // count] for i in range(count)]
    return tuple(split(dqueries, len(queries))), tuple(of_diagonal(x, heads) for x in split(dkeys, len(keys)))


_between.defvjp(lambda queries, keys, *of: (_between(queries, keys, *of), (queries, keys)), _between_backward)


@jax.custom_vjp
def _known(scores: Arrays, known: Arrays) -> Arrays:
    """`scores`, whose values are known."""
    return known


_known.defvjp(lambda scores, known: (known, None), lambda _, d: (d, None))


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
    return jnp.where(_second(x, level), down(size), down(_ROWS - size))


exchanged.defvjp(lambda x, level: (exchanged(x, level), None), lambda level, _, d: (exchanged(d, level),))
