"""Continuing a text: tokens as they are sampled, or all at once."""

import functools
import numbers
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from numpy.typing import ArrayLike

from atlasjax import check
from atlasjax.generate.context import Context, PyTree, copied, read, rows_of
from atlasjax.generate.definition import Definition, decoder, split
from atlasjax.generate.room import check_room
from atlasjax.generate.sampling import SamplingConfig, sample
from atlasjax.nn import LanguageModel
from atlasjax.nn.unrolled import CacheForm

# Tokens of a prompt, and of a text, up to which the loop that decodes also reads the prompt: a program less to compile.
_SHORT_PROMPT, _SHORT_TEXT = 16, 512


def generate(
    model: LanguageModel,
    prompt: ArrayLike | None,
    num_tokens: int,
    *,
    config: SamplingConfig = SamplingConfig(),
    seed: int = 0,
    vocab_size: int | None = None,
    context: Context | None = None,
    num_samples: int = 1,
) -> Int[Array, "rows num_tokens"]:
    """Continues a prompt.

    Args:
      model: a `LanguageModel`.
      prompt: integers [batch, time], time ≥ 1; or a list of rows of unequal length, which are read without padding. With a
        context, None continues its text.
      num_tokens: number of tokens to sample.
      config: how to sample them.
      seed: the same seed gives the same tokens, generated at once or streamed. Rows of a batch are sampled independently.
      vocab_size: tokens of the tokenizer, if it has fewer than the model: others are never sampled.
      context: text that was read before the prompt (`read`), of as many rows, or of one, which all rows of the prompt go on from.
      num_samples: continuations of each row, which is read once.

    Returns:
      int32 [batch · num_samples, num_tokens]; the samples of a row are neighbours.

    Raises:
      ValueError: a prompt is empty or not of rank 2 or has a token that is not in the vocabulary, a number is not an integer ≥ 1,
        the context has another number of rows, prompt and tokens together exceed the maximum length of a model with learned
        positions, or the texts do not fit in memory.
    """
    blocks = stream(
        model, prompt, num_tokens, config=config, seed=seed, block=num_tokens, vocab_size=vocab_size, context=context,
        num_samples=num_samples,
    )  # fmt: skip
    return jnp.concatenate(list(blocks), axis=1)


def begin(
    compiles: Callable[..., object], model: LanguageModel, prompt: Int[np.ndarray, "batch time"], num_tokens: int, *,
    config: SamplingConfig = SamplingConfig(), seed: int = 0, vocab_size: int | None = None,
) -> None:  # fmt: skip
    """Begins to compile the program of `generate` with these arguments, if it is a single one: that of a short prompt.

    Args:
      compiles: is called with a program and its arguments.
      model: its parameters may be shapes.
      prompt, num_tokens, config, seed, vocab_size: as for `generate`.
    """
    if _is_short(prompt.shape[1], num_tokens):
        compiles(_continued, *_arguments(model, prompt, seed), config=config, length=num_tokens, vocab_size=vocab_size)


def _is_short(before: int, num_tokens: int) -> bool:
    return before <= _SHORT_PROMPT and before + num_tokens <= _SHORT_TEXT


def _arguments(
    model: LanguageModel, rows: np.ndarray, seed: int
) -> tuple[Definition, list[jax.Array], np.ndarray, jax.Array]:
    """Those of `_continued`."""
    return *split(model), rows.astype(np.int32), jax.random.key(seed)


def stream(
    model: LanguageModel, prompt: ArrayLike | None, num_tokens: int, *, config: SamplingConfig = SamplingConfig(), seed: int = 0,
    block: int = 16, vocab_size: int | None = None, context: Context | None = None, num_samples: int = 1,
) -> Iterator[jax.Array]:  # fmt: skip
    """Yields the tokens of `generate` as they are sampled, int32 [batch · num_samples, n ≤ block] at a time.

    Args:
      model, prompt, num_tokens, config, seed, vocab_size, context, num_samples: as for `generate`.
      block: tokens sampled per device call.

    Raises:
      ValueError: as for `generate`, or `block` is not positive.
    """
    prompts = None if prompt is None and context is not None else rows_of(prompt, model.config.vocab_size)
    counts = {"num_tokens": num_tokens, "block": block, "vocab_size": vocab_size, "num_samples": num_samples}
    for name, value in counts.items():
        inside = (value is None and name == "vocab_size") or check.is_integer(value, 1, kinds=numbers.Integral)
        check.require(inside, name, value, "at least 1, and an integer")
    check.require(check.is_integer(seed, 0) and seed < 2**32, "seed", seed, "in [0, 2^32)")
    if context is not None and prompts is not None:
        context = context.for_batch(len(prompts))
    before = 0 if context is None else context.num_tokens
    lengths = before + np.array([0] if prompts is None else [len(row) for row in prompts])
    max_length = int(lengths.max()) + num_tokens
    model.check_length(max_length, "prompt and num_tokens")
    texts, tokens = ("num_samples", num_samples), ("num_tokens", num_tokens)
    check_room(model, texts, tokens, before=int(lengths.max()), rows=len(lengths), kept=block >= num_tokens)

    def whole() -> Iterator[jax.Array]:
        rows = np.repeat(np.stack(prompts or ()), num_samples, axis=0)
        yield _continued(*_arguments(model, rows, seed), config=config, length=num_tokens, vocab_size=vocab_size)

    def blocks() -> Iterator[jax.Array]:
        start = context if prompts is None else read(model, prompts, context=context, max_length=max_length)
        assert start is not None
        start = start.with_room(model, max_length)
        start = start.rows(np.repeat(np.arange(len(start.num_tokens)), num_samples))
        definition, params, form = decoder(model)
        # Donated below, while a context of the caller stays as it is.
        cache = start.cache if prompts is not None else copied(start.cache)
        cache = _in_form(cache, form) if form != CacheForm() else cache
        logits, seen = start.logits, jnp.asarray(start.seen) if config.penalizes else None
        key = jax.random.key(seed)
        for first in range(0, num_tokens, block):
            tokens, logits, cache, seen = _decode(
                definition, params, logits, cache, seen, key, first, config=config,
                length=min(block, num_tokens - first), vocab_size=vocab_size,
            )  # fmt: skip
            yield tokens

    is_short = len({*lengths}) == 1 and _is_short(lengths[0], num_tokens)
    # Generators of their own, so that the checks above are made at once.
    return whole() if context is None and block >= num_tokens and is_short else blocks()


@functools.partial(jax.jit, static_argnames="form")
def _in_form(cache: PyTree, form: CacheForm) -> PyTree:
    return form.of(cache)


_Decoded = tuple[jax.Array, PyTree, jax.Array | None]  # logits, cache and the tokens that were seen


@functools.partial(
    jax.jit, static_argnums=0, static_argnames=("config", "length", "vocab_size"), donate_argnames="cache"
)
def _decode(
    definition: Definition, params: list[jax.Array], logits: jax.Array, cache: PyTree, seen: jax.Array | None, key: jax.Array,
    start: jax.Array, *, config: SamplingConfig, length: int, vocab_size: int | None,
) -> tuple[jax.Array, jax.Array, PyTree, jax.Array | None]:  # fmt: skip
    model = definition.merge(params)
    known = jnp.arange(logits.shape[-1]) < (logits.shape[-1] if vocab_size is None else vocab_size)

    def draw(carry: _Decoded, i: jax.Array) -> tuple[_Decoded, jax.Array]:
        logits, cache, seen = carry
        return _append(model, _drawn(logits, seen, key, i, known, config), cache, seen)

    (logits, cache, seen), tokens = jax.lax.scan(draw, (logits, cache, seen), start + jnp.arange(length))
    return tokens.T, logits, cache, seen


@functools.partial(jax.jit, static_argnums=0, static_argnames=("config", "length", "vocab_size"))
def _continued(
    definition: Definition, params: list[jax.Array], prompt: jax.Array, key: jax.Array, *, config: SamplingConfig, length: int,
    vocab_size: int | None,
) -> jax.Array:  # fmt: skip
    """The tokens of `_decode` after a prompt int32 [batch, time], which is read token by token by the same loop."""
    model = definition.merge(params)
    batch, before = prompt.shape
    most = model.config.vocab_size
    known = jnp.arange(most) < (most if vocab_size is None else vocab_size)
    given = jnp.pad(prompt, ((0, 0), (0, length))).T

    def draw(carry: _Decoded, x: tuple[jax.Array, jax.Array]) -> tuple[_Decoded, jax.Array]:
        (logits, cache, seen), (i, given) = carry, x
        return _append(model, jnp.where(i < 0, given, _drawn(logits, seen, key, i, known, config)), cache, seen)

    seen = jnp.zeros((batch, most), bool) if config.penalizes else None
    fresh = jnp.zeros((batch, most), jnp.float32), model.init_cache(batch, before + length), seen
    return jax.lax.scan(draw, fresh, (jnp.arange(-before, length), given))[1][before:].T


def _drawn(
    logits: jax.Array, seen: jax.Array | None, key: jax.Array, i: jax.Array, known: jax.Array, config: SamplingConfig
) -> jax.Array:
    """The i-th token after the prompt, [batch]. One key per position in the text: tokens do not depend on the block size."""
    return sample(jnp.where(known, logits, -jnp.inf), jax.random.fold_in(key, i), config, seen)


def _append(
    model: LanguageModel, token: jax.Array, cache: PyTree, seen: jax.Array | None
) -> tuple[_Decoded, jax.Array]:
    """The state of decoding after one more token [batch], and that token."""
    if seen is not None:
        seen = seen.at[jnp.arange(len(token)), token].set(True)
    logits, cache = model.extend(token[:, None], cache)
    return (logits[:, -1], cache, seen), token
