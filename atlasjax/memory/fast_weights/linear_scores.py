"""Scores of a block's queries and keys under decays, one for each head or one for each channel."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from atlasjax.memory.blocks import applied, decay_products, exact, neighbours, row_sums, spread


class Mask(NamedTuple):
    """Which scores queries have: P[t,i] is the product of the decays i + 1 … t (shift: … t − 1), for i ≤ t (strict: i < t)."""

    strict: bool
    shift: bool


def head_scores(
    queries: list[jax.Array], keys: list[jax.Array], decay: jax.Array | None, masks: list[Mask]
) -> list[list[jax.Array]]:
    """Σ_d P[t,i] queries[t,d] keys[i,d], or 0 where its mask excludes i: [m, m] for each of `queries` and each of `keys`.

    queries, keys: [m, D]. decay: [m], or None for decays of 1.
    """
    m = keys[0].shape[0]
    products = applied(jnp.concatenate(queries), jnp.concatenate(keys), keys[0].dtype, jax.lax.Precision.HIGHEST)
    pairwise = jnp.tril(jnp.ones((m, m), keys[0].dtype)) if decay is None else decay_products(decay)[1]

    def masked(mask: Mask) -> jax.Array:
        # Row t of the shifted products is row t − 1, which excludes i = t by itself.
        if mask.shift and decay is not None:
            return jnp.concatenate([jnp.zeros_like(pairwise[:1]), pairwise[:-1]])
        return jnp.tril(pairwise, -1) if mask.strict else pairwise

    rows = [jnp.split(row, len(keys), axis=1) for row in jnp.split(products, len(queries))]
    return [[product * masked(mask) for product in row] for row, mask in zip(rows, masks)]


def channel_scores(
    queries: list[jax.Array], keys: list[jax.Array], decay: jax.Array, masks: list[Mask]
) -> list[list[jax.Array]]:
    """`head_scores` for a decay per channel [m, D], by recursive halving: neighbouring parts of a block are merged.

    For t in the second part and i in the first, P[t,i] = (decays of the second part up to t) · (decays of the first after i). So
    the scores between them are one product of decayed queries and decayed keys, without an [m, m, D] array or quotients of decays.
    """
    m, _ = decay.shape
    padding = (0, (1 << (m - 1).bit_length()) - m)
    padded = lambda x, fill: jnp.pad(x, (padding, *((0, 0),) * (x.ndim - 1)), constant_values=fill)
    # A part of one token has only its own score, which a strict or shifted mask leaves out.
    diagonal = lambda q, k, mask: jnp.zeros_like(q[:, 0]) if any(mask) else row_sums(q * k)
    scores = jnp.stack([jnp.stack([diagonal(q, k, mask) for k in keys], 1) for q, mask in zip(queries, masks)], 1)
    decayed = [q if mask.shift else q * decay for q, mask in zip(queries, masks)]
    # [parts, tokens of a part, D], where the queries of a token are rows of their own, one after another, and so are its keys.
    scores, whole = padded(scores, 0.0), padded(decay, 1.0)[:, None]
    rows, columns = padded(jnp.stack(decayed, 1), 0.0), padded(jnp.stack(keys, 1), 0.0)
    # Queries are decayed from their part's start to t (shift: t − 1), keys from i + 1 to their part's end. whole: a part's decay.
    while scores.shape[0] > 1:
        (first_q, second_q), (first_k, second_k), (first, second) = map(neighbours, (rows, columns, whole))
        # All decays between both are in the two factors, each at most 1, so nothing overflows as quotients of decays would.
        across = exact(second_q, first_k.mT)
        first_scores, second_scores = neighbours(scores)
        above = jnp.concatenate([first_scores, jnp.zeros_like(across)], axis=2)
        below = jnp.concatenate([across, second_scores], axis=2)
        scores = jnp.concatenate([above, below], axis=1)
        rows = jnp.concatenate([first_q, spread(first, rows.shape[1], 1) * second_q], axis=1)
        columns = jnp.concatenate([spread(second, columns.shape[1], 1) * first_k, second_k], axis=1)
        whole = first * second
    each = scores[0].reshape(scores.shape[1] // len(queries), len(queries), -1, len(keys))[:m, :, :m]
    return [[each[:, i, :, j] for j in range(len(keys))] for i in range(len(queries))]
