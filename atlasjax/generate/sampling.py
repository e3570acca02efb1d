"""How the next token is chosen from the logits."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from atlasjax import check

_SMALLEST = float(np.finfo(np.float32).tiny)  # by which float32 can be divided; a lower temperature is greedy
_LARGEST = 1e30  # a higher temperature or penalty is no different


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen. The steps are taken in the order repetition penalty, temperature, top-k, top-p, min-p.

    Attributes:
      temperature: divides the logits. 0 takes the most likely token (greedy), and so does what is below 1.2e-38.
      top_k: sample only from the k most likely tokens. None means all.
      top_p: sample only from the smallest set of most likely tokens that reaches this probability (nucleus). None means all.
      min_p: sample only from tokens at least this times as likely as the most likely one (arXiv 2407.01082). None means all.
      repetition_penalty: divides positive logits, and multiplies negative ones, of tokens that the text has already, prompt
        included (arXiv 1909.05858 §4.1). Above 1 they become less likely; 1 has no effect.

    Raises:
      ValueError: a number is out of range.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        temperature, top_k, penalty = self.temperature, self.top_k, self.repetition_penalty
        require = check.require
        require(
            check.is_finite(temperature) and temperature >= 0,
            "temperature",
            temperature,
            "0 (greedy) or more, and finite",
        )
        require(
            top_k is None or check.is_integer(top_k, 1),
            "top_k",
            top_k,
            "an integer, at least 1, or None for all tokens",
        )
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            require(
                value is None or (check.is_finite(value) and 0 < value <= 1),
                name,
                value,
                "in (0, 1], or None for all tokens",
            )
        require(
            check.is_finite(penalty) and penalty > 0,
            "repetition_penalty",
            penalty,
            "positive (1 has no effect) and finite",
        )

    @property
    def penalizes(self) -> bool:
        """Whether it matters which tokens the text has already."""
        return self.repetition_penalty != 1


def sample(
    logits: Float[Array, "batch vocab"],
    key: PRNGKeyArray,
    config: SamplingConfig,
    seen: Bool[Array, "batch vocab"] | None = None,
) -> Int[Array, " batch"]:
    """Draws one token per row.

    Args:
      logits: [batch, vocabulary].
      key: PRNG key; unused when greedy.
      config: how. The most likely token is always among those that can be drawn.
      seen: tokens that the text has already, bool [batch, vocabulary]; needed by a repetition penalty only.

    Returns:
      int32 [batch].

    Raises:
      ValueError: `seen` is None and there is a repetition penalty.
    """
    check.plain_array("sample", "logits", logits)
    check.plain_array("sample", "seen", seen)
    if config.penalizes:
        if seen is None:
            raise ValueError("sample: seen is None; a repetition penalty needs the tokens that the text has already.")
        logits = penalized_logits(logits, seen, min(config.repetition_penalty, _LARGEST))
    if config.temperature < _SMALLEST:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, filtered_logits(logits, config)).astype(jnp.int32)


def penalized_logits(
    logits: Float[Array, "batch vocab"],
    seen: Bool[Array, "batch vocab"],
    penalty: float | Float[Array, "batch 1"] | Float[np.ndarray, "batch 1"],
) -> Float[Array, "batch vocab"]:
    """Logits with the repetition penalty on the tokens in `seen` (bool, of the logits' shape), float32 [batch, vocabulary]."""
    logits = logits.astype(jnp.float32)
    penalty = jnp.clip(jnp.asarray(penalty, jnp.float32), 1 / _LARGEST, _LARGEST)  # else infinite logits, or NaN
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def filtered_logits(logits: Float[Array, "batch vocab"], config: SamplingConfig) -> Float[Array, "batch vocab"]:
    """Logits after temperature, top-k, top-p and min-p, float32 [batch, vocabulary]. Excluded tokens have -inf.

    They are relative to the largest logit of the row. A temperature of 0 excludes all tokens but the most likely.
    """
    logits = _divided(logits.astype(jnp.float32), min(max(float(config.temperature), _SMALLEST), _LARGEST))
    if config.top_k is not None and config.top_k < logits.shape[-1]:
        logits = _at_least(logits, jax.lax.top_k(logits, config.top_k)[0][..., -1:])
    if config.top_p is not None and config.top_p < 1:
        descending = -jnp.sort(-logits, axis=-1)
        probabilities = jax.nn.softmax(descending, axis=-1)
        logits = _at_least(logits, _last_kept(descending, _before(probabilities) < config.top_p))
    if config.min_p is not None:
        logits = _at_least(logits, jnp.max(logits, axis=-1, keepdims=True) + math.log(config.min_p))
    return logits


class RowSampling(NamedTuple):
    """A `SamplingConfig` for each row of a batch, as arrays [batch], so that one program serves all of them.

    Attributes:
      temperature: float32; 0 is greedy.
      top_k: int32; the size of the vocabulary means all tokens.
      top_p: float32; 1 or more means all tokens.
      min_p: float32; 0 means all tokens.
      repetition_penalty: float32; 1 has no effect.
    """

    temperature: Float[Array, " batch"] | Float[np.ndarray, " batch"]
    top_k: Int[Array, " batch"] | Int[np.ndarray, " batch"]
    top_p: Float[Array, " batch"] | Float[np.ndarray, " batch"]
    min_p: Float[Array, " batch"] | Float[np.ndarray, " batch"]
    repetition_penalty: Float[Array, " batch"] | Float[np.ndarray, " batch"]

    @classmethod
    def of(cls, configs: Sequence[SamplingConfig], vocab_size: int) -> "RowSampling":
        """The arrays (NumPy) of one config per row. vocab_size: of the logits."""
        rows = [
            (
                min(c.temperature, _LARGEST),
                min(c.top_k or vocab_size, vocab_size),
                c.top_p or 1.0,
                c.min_p or 0.0,
                min(c.repetition_penalty, _LARGEST),
            )
            for c in configs
        ]
        return cls(*(np.array(x, np.int32 if i == 1 else np.float32) for i, x in enumerate(zip(*rows, strict=True))))


def sample_rows(
    logits: Float[Array, "batch vocab"], keys: Key[Array, " batch"], how: RowSampling, seen: Bool[Array, "batch vocab"]
) -> Int[Array, " batch"]:
    """Draws one token per row, each as `sample` draws that row alone with its own key and config.

    Args:
      logits: [batch, vocabulary].
      keys: PRNG keys [batch].
      how: the configs of the rows.
      seen: tokens that each text has already, bool [batch, vocabulary].

    Returns:
      int32 [batch].
    """
    for name, given in {"logits": logits, "how": how, "seen": seen}.items():
        check.plain_array("sample_rows", name, given)
    logits = penalized_logits(logits, seen, how.repetition_penalty[:, None])
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    is_drawn = how.temperature >= _SMALLEST

    def drawn() -> jax.Array:
        scaled = _divided(logits, jnp.clip(how.temperature, _SMALLEST, _LARGEST)[:, None])
        by_rank = jnp.any((how.top_k < logits.shape[-1]) | (how.top_p < 1))
        scaled = jax.lax.cond(by_rank, lambda: _ranked(scaled, how), lambda: scaled)
        scaled = _at_least(scaled, jnp.max(scaled, axis=-1, keepdims=True) + jnp.log(how.min_p)[:, None])
        # Each row draws as in a batch of its own, so that a sample does not depend on the rows beside it.
        tokens = jax.vmap(lambda key, row: jax.random.categorical(key, row[None])[0])(keys, scaled)
        return jnp.where(is_drawn, tokens.astype(jnp.int32), greedy)

    # A batch of greedy rows costs no sort and no random numbers.
    return jax.lax.cond(jnp.any(is_drawn), drawn, lambda: greedy)


def _ranked(logits: jax.Array, how: RowSampling) -> jax.Array:
    """Top-k and top-p of each row, with one sort for both."""
    descending = -jnp.sort(-logits, axis=-1)
    last = jnp.take_along_axis(descending, how.top_k[:, None] - 1, axis=-1)
    descending = jnp.where(descending < last, -jnp.inf, descending)
    before = _before(jax.nn.softmax(descending, axis=-1))
    kept = (descending >= last) & ((before < how.top_p[:, None]) | (how.top_p[:, None] >= 1))
    return _at_least(logits, _last_kept(descending, kept))


def _divided(logits: jax.Array, temperature: float | jax.Array) -> jax.Array:
    """Logits relative to the largest of the row, over a temperature. The largest is 0, even if all others underflow to -inf."""
    return (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature


def _before(probabilities: jax.Array) -> jax.Array:
    """The sum of the more likely tokens, for each token in descending order."""
    return jnp.cumsum(probabilities, axis=-1) - probabilities


def _last_kept(descending: jax.Array, kept: jax.Array) -> jax.Array:
    """The smallest logit that is kept. The first one always is: `top_p` itself may underflow to 0."""
    first = jnp.arange(descending.shape[-1]) == 0
    return jnp.min(jnp.where(kept | first, descending, jnp.inf), axis=-1, keepdims=True)


def _at_least(logits: jax.Array, smallest: jax.Array) -> jax.Array:
    return jnp.where(logits < smallest, -jnp.inf, logits)
