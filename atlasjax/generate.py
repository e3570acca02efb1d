"""Sampling text from a language model through its streaming cache."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from atlasjax import check
from atlasjax.nn import LanguageModel

PyTree = Any
_PREFILL_PIECE = 512  # prompt tokens read at a time; bounds memory and the number of compiled lengths


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen.

    Attributes:
      temperature: divides the logits. 0 takes the most likely token (greedy).
      top_k: sample only from the k most likely tokens. None means all.
      top_p: sample only from the smallest set of most likely tokens that reaches this probability (nucleus). None means all.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        top_k, top_p = self.top_k, self.top_p
        check.require(self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or more")
        check.require(top_k is None or top_k >= 1, "top_k", top_k, "at least 1, or None for all tokens")
        check.require(top_p is None or 0 < top_p <= 1, "top_p", top_p, "in (0, 1], or None for all tokens")


def sample(logits: jax.Array, key: jax.Array, config: SamplingConfig) -> jax.Array:
    """Draws one token per row.

    Args:
      logits: [batch, vocabulary].
      key: PRNG key; unused when greedy.
      config: temperature, top-k and top-p, applied in this order. The most likely token is always kept.

    Returns:
      int32 [batch].
    """
    if config.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, filtered_logits(logits, config)).astype(jnp.int32)


def filtered_logits(logits: jax.Array, config: SamplingConfig) -> jax.Array:
    """Logits after temperature, top-k and top-p, float32 [batch, vocabulary]. Excluded tokens have -inf."""
    logits = logits.astype(jnp.float32) / config.temperature
    if config.top_k is not None and config.top_k < logits.shape[-1]:
        smallest = jax.lax.top_k(logits, config.top_k)[0][..., -1:]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if config.top_p is not None and config.top_p < 1:
        descending = -jnp.sort(-logits, axis=-1)
        probabilities = jax.nn.softmax(descending, axis=-1)
        # A token is kept while the more likely ones have not reached top_p, so the first one always is.
        kept = jnp.cumsum(probabilities, axis=-1) - probabilities < config.top_p
        smallest = jnp.min(jnp.where(kept, descending, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    return logits


def generate(
    model: LanguageModel, prompt: Any, num_tokens: int, *, config: SamplingConfig = SamplingConfig(), seed: int = 0,
    vocab_size: int | None = None,
) -> jax.Array:  # fmt: skip
    """Continues a prompt.

    Args:
      model: a `LanguageModel`.
      prompt: integers [batch, time], time ≥ 1; or a list of rows of unequal length, which are read without padding.
      num_tokens: number of tokens to sample.
      config: how to sample them.
      seed: the same seed gives the same tokens, generated at once or streamed. Rows of a batch are sampled independently.
      vocab_size: tokens of the tokenizer, if it has fewer than the model: others are never sampled.

    Returns:
      int32 [batch, num_tokens].

    Raises:
      ValueError: a prompt is empty or not of rank 2, num_tokens is not positive, or prompt and tokens together exceed the
        maximum length of a model with learned positions.
    """
    return jnp.concatenate(
        list(stream(model, prompt, num_tokens, config=config, seed=seed, block=num_tokens, vocab_size=vocab_size)),
        axis=1,
    )


def stream(
    model: LanguageModel, prompt: Any, num_tokens: int, *, config: SamplingConfig = SamplingConfig(), seed: int = 0,
    block: int = 16, vocab_size: int | None = None,
) -> Iterator[jax.Array]:  # fmt: skip
    """Yields the tokens of `generate` as they are sampled, int32 [batch, n ≤ block] at a time.

    Args:
      model, prompt, num_tokens, config, seed, vocab_size: as for `generate`.
      block: tokens sampled per device call.

    Raises:
      ValueError: as for `generate`, or `block` is not positive.
    """
    prompts = _rows(prompt)
    for name, value in (("num_tokens", num_tokens), ("block", block), ("vocab_size", vocab_size)):
        check.require(value is None or value >= 1, name, value, "at least 1")
    check.require(check.is_integer(seed, 0) and seed < 2**32, "seed", seed, "in [0, 2^32)")
    model.check_length(max(map(len, prompts)) + num_tokens, "prompt and num_tokens")
    return _stream(model, prompts, num_tokens, config, jax.random.key(seed), block, vocab_size)


def _rows(prompt: Any) -> list[np.ndarray]:
    """The rows of a prompt, int32 [time ≥ 1] each."""
    ragged = isinstance(prompt, list | tuple) and len({np.shape(row) for row in prompt}) > 1
    arrays = [np.asarray(row)[None] for row in prompt] if ragged else [np.asarray(prompt)]
    for array in arrays:
        if array.ndim != 2 or 0 in array.shape or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(
                f"prompt is {array.dtype} {list(array.shape)}; it should be an integer array [batch, time] with at least one "
                "token, or a list of such rows."
            )
    return [row.astype(np.int32) for array in arrays for row in array]


def _stream(
    model: LanguageModel, prompts: list[np.ndarray], num_tokens: int, config: SamplingConfig, key: jax.Array, block: int,
    vocab_size: int | None,
) -> Iterator[jax.Array]:  # fmt: skip
    graphdef, params = nnx.split(model, nnx.Param)
    max_length = max(map(len, prompts)) + num_tokens
    by_length = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    read = []
    for _, same in itertools.groupby(by_length, key=lambda row: len(prompts[row])):
        rows = np.stack([prompts[row] for row in same])
        read.append(prefill(graphdef, params, rows, model.init_cache(len(rows), max_length)))
    order = np.argsort(by_length)
    logits = jnp.concatenate([logits for logits, _ in read])[order]
    cache = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1)[:, order], *(cache for _, cache in read))
    for start in range(0, num_tokens, block):
        tokens, logits, cache = _decode(
            graphdef, params, logits, cache, key, start, config=config, length=min(block, num_tokens - start),
            vocab_size=vocab_size,
        )  # fmt: skip
        yield tokens


def prefill(graphdef: nnx.GraphDef, params: PyTree, prompt: np.ndarray, cache: PyTree) -> tuple[jax.Array, PyTree]:
    """Reads a prompt into the cache, piece by piece.

    Args:
      graphdef, params: `nnx.split(model, nnx.Param)`.
      prompt: int32 [batch, time].
      cache: the cache before the prompt.

    Returns:
      The logits of the token after the prompt, float32 [batch, vocabulary], and the cache after the prompt.
    """
    logits = None
    for start in range(0, prompt.shape[1], _PREFILL_PIECE):
        logits, cache = _extend(graphdef, params, jnp.asarray(prompt[:, start : start + _PREFILL_PIECE]), cache)
    assert logits is not None
    return logits, cache


@functools.partial(jax.jit, static_argnums=0)
def _extend(graphdef: nnx.GraphDef, params: PyTree, tokens: jax.Array, cache: PyTree) -> tuple[jax.Array, PyTree]:
    logits, cache = nnx.merge(graphdef, params).extend(tokens, cache)
    return logits[:, -1], cache


@functools.partial(jax.jit, static_argnums=0, static_argnames=("config", "length", "vocab_size"))
def _decode(
    graphdef: nnx.GraphDef, params: PyTree, logits: jax.Array, cache: PyTree, key: jax.Array, start: jax.Array, *,
    config: SamplingConfig, length: int, vocab_size: int | None,
) -> tuple[jax.Array, jax.Array, PyTree]:  # fmt: skip
    model = nnx.merge(graphdef, params)
    known = jnp.arange(logits.shape[-1]) < (logits.shape[-1] if vocab_size is None else vocab_size)

    def draw(carry: tuple[jax.Array, PyTree], i: jax.Array) -> tuple[tuple[jax.Array, PyTree], jax.Array]:
        logits, cache = carry
        logits = jnp.where(known, logits, -jnp.inf)
        # One key per position in the text, so that the tokens do not depend on the block size.
        token = sample(logits, jax.random.fold_in(key, i), config)
        logits, cache = model.extend(token[:, None], cache)
        return (logits[:, -1], cache), token

    (logits, cache), tokens = jax.lax.scan(draw, (logits, cache), start + jnp.arange(length))
    return tokens.T, logits, cache
