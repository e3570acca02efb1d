"""Reads rows of unequal length with a model, in pieces of a few fixed lengths, so that new lengths compile nothing."""

import collections
import functools
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import PyTree

from atlasjax.nn import LanguageModel

T = TypeVar("T")


class Reader:
    """Calls a model with batches of `batch_size` rows and one of the lengths in `pieces`.

    Args:
      model: a `LanguageModel`.
      batch_size: rows read together.
      pieces: numbers of tokens read at a time, in descending order.
    """

    def __init__(self, model: LanguageModel, batch_size: int, pieces: Sequence[int]):
        self._model, self._batch_size, self._pieces = model, batch_size, pieces
        self._graphdef, self._params = nnx.split(model, nnx.Param)
        self._empty: tuple[int, PyTree] | None = None

    def room(self, length: int) -> int:
        """Tokens to make room for, so that few different numbers occur."""
        return max(self._pieces[0], 1 << (length - 1).bit_length())

    def cache(self, room: int) -> PyTree:
        """An empty cache. The last one is kept: a cache is never changed."""
        if self._empty is None or self._empty[0] != room:
            self._empty = room, self._model.init_cache(self._batch_size, room)
        return self._empty[1]

    def read(self, rows: list[np.ndarray], cache: PyTree) -> tuple[jax.Array, PyTree]:
        """(logits of the next token [batch_size, vocabulary], cache) after rows of unequal length, each read exactly to its end."""
        rows = filled(rows, self._batch_size)
        lengths, read = np.array([len(row) for row in rows]), np.zeros(self._batch_size, int)
        logits = jnp.zeros((self._batch_size, self._model.config.vocab_size), jnp.float32)
        for piece in self._pieces:
            while (active := lengths - read >= piece).any():
                tokens = np.zeros((self._batch_size, piece), np.int32)
                for i in np.flatnonzero(active):
                    tokens[i] = rows[i][read[i] : read[i] + piece]
                logits, cache = _read_piece(self._graphdef, self._params, tokens, active, logits, cache)
                read[active] += piece
        rest = lengths - read
        if rest.any():
            tokens = np.zeros((self._batch_size, self._pieces[-1]), np.int32)
            for i in np.flatnonzero(rest):
                tokens[i, : rest[i]] = rows[i][read[i] :]
            logits, cache = _read_rest(self._graphdef, self._params, tokens, rest, logits, cache)
        return logits, cache

    def score(self, tails: list[np.ndarray], length: int, cache: PyTree) -> tuple[np.ndarray, np.ndarray]:
        """ln p and whether it is the most likely token, [batch_size, length]: of every token but the first, padding included."""
        # The padding comes after the tokens, so it changes nothing but states that are not used any more.
        tokens = np.zeros((self._batch_size, length + 1), np.int32)
        for row, tail in zip(tokens, tails):
            row[: len(tail)] = tail
        results, start = [], 0
        while start < length:
            piece = next((piece for piece in self._pieces if piece <= length - start), length - start)
            part = slice(start, start + piece)
            *result, cache = _score_piece(
                self._graphdef, self._params, tokens[:, :-1][:, part], tokens[:, 1:][:, part], cache
            )
            results.append(result)
            start += piece
        likelihoods, greedy = (np.concatenate([np.asarray(part) for part in parts], axis=1) for parts in zip(*results))
        return likelihoods, greedy


def shared_beginnings(rows: Sequence[np.ndarray], piece: int, least: int) -> list[tuple[int, list[int]]]:
    """Groups texts by the longest beginning that at least `least` of them share.

    Args:
      rows: integers [time] each.
      piece: a beginning has a multiple of so many tokens, and is shorter than its text.
      least: a beginning that fewer texts share does not count.

    Returns:
      (number of tokens that the texts of a group share, their indices in `rows`). 0 tokens: those that share none.
    """
    names: dict[tuple[int, bytes], int] = {}  # (name of a beginning, the piece after it) → name of both together
    paths = []
    for row in rows:
        path = [0]
        for start in range(0, (len(row) - 1) // piece * piece, piece):
            path.append(names.setdefault((path[-1], row[start : start + piece].tobytes()), len(names) + 1))
        paths.append(path)
    counts = collections.Counter(name for path in paths for name in path[1:])
    groups: dict[tuple[int, int], list[int]] = {}
    for index, path in enumerate(paths):
        depth = sum(counts[name] >= least for name in path[1:])  # a longer beginning is shared by no more texts
        groups.setdefault((depth * piece, path[depth]), []).append(index)
    return [(length, members) for (length, _), members in groups.items()]


def filled(items: list[T], size: int) -> list[T]:
    """A list of `size` items, in which the last one is repeated."""
    return items + items[-1:] * (size - len(items))


@jax.jit
def _gather(cache: PyTree, index: jax.Array) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[:, index], cache)


def take(cache: PyTree, rows: list[int]) -> PyTree:
    """A cache with these rows of another one."""
    return cache if rows == list(range(len(rows))) else _gather(cache, np.array(rows))


@functools.partial(jax.jit, static_argnums=0)
def _score_piece(
    graphdef: nnx.GraphDef, params: PyTree, tokens: jax.Array, targets: jax.Array, cache: PyTree
) -> tuple[jax.Array, jax.Array, PyTree]:
    logits, cache = nnx.merge(graphdef, params).extend(tokens, cache)
    logits = logits.astype(jnp.float32)
    likelihoods = -optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return likelihoods, jnp.argmax(logits, axis=-1) == targets, cache


@functools.partial(jax.jit, static_argnums=0)
def _read_piece(
    graphdef: nnx.GraphDef, params: PyTree, tokens: jax.Array, active: jax.Array, logits: jax.Array, cache: PyTree
) -> tuple[jax.Array, PyTree]:
    new, after = nnx.merge(graphdef, params).extend(tokens, cache)
    return _where(active, (new[:, -1].astype(jnp.float32), after), (logits, cache))


@functools.partial(jax.jit, static_argnums=0)
def _read_rest(
    graphdef: nnx.GraphDef, params: PyTree, tokens: jax.Array, lengths: jax.Array, logits: jax.Array, cache: PyTree
) -> tuple[jax.Array, PyTree]:
    """The first lengths[i] tokens of row i, one at a time: a state cannot be taken from inside a longer piece."""
    model = nnx.merge(graphdef, params)

    def one(carry: tuple[jax.Array, PyTree], xs: tuple[jax.Array, jax.Array]) -> tuple[tuple[jax.Array, PyTree], None]:
        token, i = xs
        new, after = model.extend(token[:, None], carry[1])
        return _where(i < lengths, (new[:, -1].astype(jnp.float32), after), carry), None

    (logits, cache), _ = jax.lax.scan(one, (logits, cache), (tokens.T, jnp.arange(tokens.shape[1])))
    return logits, cache


def _where(active: jax.Array, new: tuple[jax.Array, PyTree], old: tuple[jax.Array, PyTree]) -> tuple[jax.Array, PyTree]:
    """(logits, cache) of the rows that are active, and as before of the others."""

    def chosen(new: jax.Array, old: jax.Array) -> jax.Array:  # leaves of a cache have the batch at axis 1
        return jnp.where(active.reshape(1, -1, *(1,) * (new.ndim - 2)), new, old)

    return jnp.where(active[:, None], new[0], old[0]), jax.tree.map(chosen, new[1], old[1])
