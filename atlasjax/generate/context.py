"""The state of a model after the text that it has read, as a value."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree
from numpy.typing import ArrayLike

from atlasjax import check
from atlasjax.generate.definition import Definition, split
from atlasjax.generate.room import check_room
from atlasjax.nn import LanguageModel

_PREFILL_PIECE = 512  # prompt tokens read at a time; bounds memory and the number of compiled lengths


@dataclasses.dataclass(frozen=True)
class Context:
    """All that generation goes on from after a text was read. A value: what goes on from it leaves it as it is.

    Attributes:
      cache: as `LanguageModel.extend` returns it, every leaf [repetitions, batch, …].
      logits: of the next token, float32 [batch, vocab_size].
      seen: which tokens the text has, bool [batch, vocab_size] (NumPy).
      num_tokens: number of tokens read, int32 [batch] (NumPy).
      max_length: number of tokens for which the cache has room. It matters only if a mixer keeps every token.
      note: what those who keep it want to know again. It has no effect here; files keep it.
    """

    cache: PyTree
    logits: Float[Array, "batch vocab"]
    seen: Bool[np.ndarray, "batch vocab"]
    num_tokens: Int[np.ndarray, " batch"]
    max_length: int
    note: str = ""

    @property
    def num_bytes(self) -> int:
        """Size of the cache in bytes."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.cache))

    def rows(self, index: ArrayLike) -> "Context":
        """Rows of the batch, in this order; a row may be taken several times. index: integers [n]."""
        check.plain_array("Context.rows", "index", index)
        index = np.asarray(index)
        if np.array_equal(index, np.arange(len(self.num_tokens))):
            return self  # without a copy of the cache
        cache = jax.tree.map(lambda leaf: leaf[:, index], self.cache)
        return Context(cache, self.logits[index], self.seen[index], self.num_tokens[index], self.max_length, self.note)

    def for_batch(self, size: int) -> "Context":
        """This context for `size` rows: it has as many, or one, which then all of them share.

        Raises:
          ValueError: it has another number of rows.
        """
        have = len(self.num_tokens)
        if have not in (1, size):
            raise ValueError(f"context has {have} rows; the prompt has {size}, so it should have 1 or {size}.")
        return self if have == size else self.rows(np.zeros(size, int))

    def with_room(self, model: LanguageModel, max_length: int) -> "Context":
        """This context with room for at least `max_length` tokens.

        States that keep every token keep them in order, so what is added is as in an empty cache.
        """
        if max_length <= self.max_length:
            return self
        batch = len(self.num_tokens)
        old = jax.tree.leaves(self.cache)
        shapes = jax.eval_shape(lambda: model.init_cache(batch, max_length))
        if [x.shape for x in jax.tree.leaves(shapes)] == [x.shape for x in old]:
            new = old
        else:
            corner = lambda empty, x: empty.at[tuple(map(slice, x.shape))].set(x) if empty.shape != x.shape else x
            new = list(map(corner, jax.tree.leaves(model.init_cache(batch, max_length)), old))
        cache = jax.tree.unflatten(jax.tree.structure(shapes), new)
        return dataclasses.replace(self, cache=cache, max_length=max_length)


def read(
    model: LanguageModel, prompt: ArrayLike, *, context: Context | None = None, max_length: int | None = None
) -> Context:
    """Reads text, after the text of a context if one is given.

    Args:
      model: a `LanguageModel`.
      prompt: integers [batch, time], time ≥ 1; or a list of rows of unequal length, which are read without padding.
      context: from an earlier `read`, of as many rows, or of one, which all rows of the prompt go on from.
      max_length: number of tokens for which to make room, text to be generated included. None: as many as are read.

    Raises:
      ValueError: a prompt is empty or not of rank 2 or has a token that is not in the vocabulary, the context has another number of
        rows, there are more tokens than the model has learned positions, or the texts do not fit in memory.
    """
    prompts = rows_of(prompt, model.config.vocab_size)
    context = None if context is None else context.for_batch(len(prompts))
    before = np.zeros(len(prompts), np.int32) if context is None else context.num_tokens
    num_tokens = before + np.array([len(row) for row in prompts], np.int32)
    check.integer("read", "max_length", max_length, optional=True)
    longest = int(num_tokens.max())
    model.check_length(longest, "prompt")
    seen = np.zeros((len(prompts), model.config.vocab_size), bool) if context is None else context.seen.copy()
    for row, tokens in zip(seen, prompts, strict=True):
        row[tokens] = True
    max_length = max(longest, max_length or 0)
    check_room(model, ("the number of prompts", len(prompts)), ("max_length", max_length))
    if context is not None:
        context = context.with_room(model, max_length)
        max_length = context.max_length
    definition, params = split(model)
    # Rows of equal length are read together: a recurrent state would read padding as text.
    by_length = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    done = []
    for _, same in itertools.groupby(by_length, key=lambda row: len(prompts[row])):
        rows = list(same)
        if context is None:
            cache = _fresh(definition, params, len(rows), max_length)
        else:
            cache = copied(context.rows(rows).cache)
        done.append(prefill(definition, params, np.stack([prompts[row] for row in rows]), cache))
    logits, cache = done[0]
    if len(done) > 1:
        order = np.argsort(by_length)
        logits = jnp.concatenate([logits for logits, _ in done])[order]
        cache = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1)[:, order], *(cache for _, cache in done))
    return Context(cache, logits, seen, num_tokens, max_length)


def rows_of(prompt: ArrayLike | None, vocab_size: int) -> list[np.ndarray]:
    """The rows of a prompt, int32 [time ≥ 1] each.

    Raises:
      TypeError: it is a masked array, or has another byte order than this machine.
      ValueError: it is not an array of integers [batch, time], or a list of such rows; or a token is not in the vocabulary.
    """
    if isinstance(prompt, list | tuple):
        rows = [array_of("prompt", row) for row in prompt]
        uneven = len({row.shape for row in rows}) > 1
        arrays = [row[None] for row in rows] if uneven else [np.asarray(rows)]
    else:
        arrays = [array_of("prompt", prompt)]
    for array in arrays:
        if array.ndim != 2 or 0 in array.shape or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(
                f"prompt is {array.dtype} {list(array.shape)}; it must be an integer array [batch, time] with at least one "
                "token, or a list of such rows."
            )
        check_tokens(array, vocab_size, "prompt")
    return [row.astype(np.int32) for array in arrays for row in array]


def array_of(name: str, value: ArrayLike | None) -> np.ndarray:
    """A NumPy array of the same values.

    Raises:
      TypeError: it is a masked array, or has another byte order than this machine.
      ValueError: there is none, as of lists of unequal length.
    """
    check.plain_array("generate", name, value)
    try:
        return np.asarray(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {str(value)[:60]}; it must be an array of integers.") from None


def check_tokens(tokens: np.ndarray, vocab_size: int, where: str) -> None:
    """Raises ValueError if a token is not in the vocabulary. Under `jit` the model cannot, and its logits would be NaN.

    The message starts with `where`.
    """
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if outside.size:
        raise ValueError(
            f"{where} has the token {outside[0]}; it should have tokens in [0, {vocab_size}), the vocabulary."
        )


def copied(cache: PyTree) -> PyTree:
    """The same values in arrays of their own, for a function that writes into its cache in place."""
    return jax.tree.map(jnp.copy, cache)


def prefill(
    definition: Definition, params: list[jax.Array], prompt: np.ndarray, cache: PyTree
) -> tuple[jax.Array, PyTree]:
    """Reads a prompt into the cache, piece by piece.

    Args:
      definition, params: of the model (`split`).
      prompt: int32 [batch, time].
      cache: the cache before the prompt. Its arrays are donated: they cannot be used again.

    Returns:
      The logits of the token after the prompt, float32 [batch, vocabulary], and the cache after the prompt.
    """
    logits = None
    for start in range(0, prompt.shape[1], _PREFILL_PIECE):
        logits, cache = _extend(definition, params, prompt[:, start : start + _PREFILL_PIECE], cache)
    assert logits is not None
    return logits, cache


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _fresh(definition: Definition, params: list[jax.Array], batch: int, max_length: int) -> PyTree:
    """`LanguageModel.init_cache`, compiled: operation by operation it takes longer than a small model reads a prompt."""
    return definition.merge(params).init_cache(batch, max_length)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _extend(
    definition: Definition, params: list[jax.Array], tokens: jax.Array, cache: PyTree
) -> tuple[jax.Array, PyTree]:
    logits, cache = definition.merge(params).extend(tokens, cache, last=True)
    return logits[:, -1], cache
