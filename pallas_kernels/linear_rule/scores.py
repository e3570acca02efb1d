"""Scores of a chunk's queries and keys under decays for each channel, by recursive halving. Restricted to what Mosaic compiles.

    scores[t, i] = Σ_d α_{i+1,d} … α_{t,d} queries[t, d] keys[i, d]    for i < t

Two neighbouring parts of s tokens are merged into one of 2 s. For t in the second and i in the first, the decays are (those of the
second up to t) · (those of the first after i). So the scores between them are one product of decayed queries and decayed keys: no
[m, m, D] array, and no quotients of decays, so α = 0 is exact. Heads lie side by side (`side_by_side`).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Arrays
from pallas_kernels.blocks import Precision
from pallas_kernels.side_by_side import place, times_transposed


class Pair(NamedTuple):
    """Whose scores are wanted: the places of one of the queries and one of the keys, and the precision of their products."""

    query: int
    key: int
    precision: Precision


class Decayed(NamedTuple):
    """The result of `decayed`.

    Attributes:
      queries: those given, decayed from the chunk's start, [m, P · D] each.
      keys: those given, decayed to the chunk's end.
      whole: the product of all decays of the chunk in every row, [m, P · D].
      scores: [m, P · m] for each pair, zero for i ≥ t.
    """

    queries: Arrays
    keys: Arrays
    whole: jax.Array
    scores: Arrays


def decayed(decay: jax.Array, queries: Arrays, keys: Arrays, pairs: tuple[Pair, ...], heads: int) -> Decayed:
    """Decays queries and keys, and computes the scores of pairs.

    Args:
      decay: α [m, P · D], m a power of two.
      queries: [m, P · D] each, times what they have of their own token's decay.
      keys: [m, P · D] each.
      pairs: whose scores are wanted; static.
      heads: P; static.
    """
    size = decay.shape[0]
    row, column = place((size, heads * size), 0, heads), place((size, heads * size), 1, heads)
    token = jax.lax.broadcasted_iota(jnp.int32, decay.shape, 0)
    scores = [jnp.zeros((size, heads * size), jnp.float32) for _ in pairs]
    whole = decay  # the product of the decays of a token's part
    for level in range(size.bit_length() - 1):
        between = ((row >> level) == (column >> level) + 1) & (((column >> level) & 1) == 0)
        for i, pair in enumerate(pairs):
            across = times_transposed(queries[pair.query], keys[pair.key], heads, pair.precision)
            scores[i] = jnp.where(between, across, scores[i])
        neighbour, second = exchanged(whole, level), ((token >> level) & 1) == 1
        of_query, of_key = jnp.where(second, neighbour, 1.0), jnp.where(second, 1.0, neighbour)
        queries, keys = tuple(of_query * x for x in queries), tuple(of_key * x for x in keys)
        whole = whole * neighbour
    return Decayed(queries, keys, whole, tuple(scores))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def exchanged(x: jax.Array, level: int) -> jax.Array:
    """x [m, n] with neighbouring parts of 2^level rows exchanged. Its own transpose, because the derivative of a slice is a pad."""
    size = 1 << level
    second = ((jax.lax.broadcasted_iota(jnp.int32, x.shape, 0) >> level) & 1) == 1
    from_first, from_second = jnp.concatenate([x[-size:], x[:-size]]), jnp.concatenate([x[size:], x[:size]])
    return jnp.where(second, from_first, from_second)


exchanged.defvjp(lambda x, level: (exchanged(x, level), None), lambda level, _, d: (exchanged(d, level),))
