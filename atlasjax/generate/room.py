"""Whether what a model holds of texts fits in memory, before any of it is made."""

import functools

import jax

from atlasjax.check import require
from atlasjax.generate.definition import Definition, split
from atlasjax.machine import available_bytes, check_fits
from atlasjax.nn import LanguageModel

_MOST = 2**31 - 1  # tokens and texts are counted in int32


def check_room(
    model: LanguageModel,
    texts: tuple[str, int],
    tokens: tuple[str, int],
    *,
    before: int = 0,
    rows: int = 1,
    kept: bool = False,
) -> None:
    """Raises ValueError if texts do not fit. The message names the number that is too large, and the largest that is not.

    Args:
      model: a `LanguageModel`.
      texts: the argument with the number of texts, and its value ≥ 1.
      tokens: the argument with the number of tokens of a text, and its value ≥ 1.
      before: tokens of a text before those.
      rows: how many times there are so many texts.
      kept: whether the tokens themselves are kept too, int32.
    """
    (texts_name, number), (tokens_name, length) = texts, tokens
    for name, value, most in ((texts_name, number, _MOST // rows), (tokens_name, length, _MOST - before)):
        require(value <= most, name, value, f"an integer of at most {most:,}: it is counted in 32 bits")
    available, whole = available_bytes(), _bytes_of_text(model, before + length) + 4 * length * kept
    if available is None or number * rows * whole <= available:
        return
    least = _bytes_of_text(model, before + 1) + 4 * kept
    check_fits(texts_name, number, 0, rows * least, available, "what the model holds of the texts")
    each = -(-(whole - least) // max(1, length - 1))
    check_fits(
        tokens_name, length, number * rows * least, number * rows * each, available, "what the model holds of them"
    )


def _bytes_of_text(model: LanguageModel, length: int) -> int:
    """Bytes that a text of this length takes: its cache, the logits of the next token, and what was seen before it."""
    definition, params = split(model)
    # For each token of the vocabulary a float32 logit, and a bool of whether the text has it.
    return _bytes_of_cache(definition, tuple(map(jax.typeof, params)), length) + 5 * model.config.vocab_size


@functools.lru_cache(maxsize=64)  # tracing takes longer than a small model reads a prompt
def _bytes_of_cache(definition: Definition, params: tuple[jax.core.ShapedArray, ...], length: int) -> int:
    cache = jax.eval_shape(lambda params: definition.merge(params).init_cache(1, length), list(params))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
