"""How well a model predicts a text, by the position in its context and by the size of a sliding window."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from atlasjax import check
from atlasjax.evaluate.scoring import Scorer


@dataclasses.dataclass(frozen=True)
class TextLoss:
    """The loss of some tokens of a text.

    Attributes:
      task: name of the measurement.
      length: tokens of the context at most.
      start, end: positions in the context of the tokens, end excluded; position 1 is the first token that is predicted.
      tokens: number of tokens.
      nats: their cross entropy in all.
      num_bytes: bytes of text that they encode.
      standard_error: of the loss, over windows; NaN of a single one.
    """

    task: str
    length: int
    start: int
    end: int
    tokens: int
    nats: float
    num_bytes: int
    standard_error: float

    @property
    def loss(self) -> float:
        """Mean cross entropy, nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss), per token."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Cross entropy in bits per byte of text."""
        return self.nats / (math.log(2) * self.num_bytes)


def by_position(
    scorer: Scorer, tokens: np.ndarray, bytes_per_token: np.ndarray, length: int, *, windows: int = 10
) -> list[TextLoss]:
    """The loss by position: does it fall as the context grows?

    The text is cut into windows of `length` tokens, evenly spaced and without overlap. Each is read from an empty state.

    Args:
      scorer: reads the windows.
      tokens: of the text, integers [time].
      bytes_per_token: int [vocabulary], from the tokenizer.
      length: tokens of a window.
      windows: number of windows; fewer if the text is shorter.

    Returns:
      The losses at positions [1, 64), [64, 128), [128, 256), … up to the length.

    Raises:
      ValueError: the text is shorter than a window.
    """
    name = "perplexity_by_position"
    check.integer(name, "windows", windows)
    _check(name, tokens, length)
    count = min(windows, len(tokens) // length)
    starts = np.linspace(0, len(tokens) - length, count).astype(int)
    rows = [tokens[start : start + length] for start in starts]
    nats = -np.stack([score.token_log_likelihoods for score in scorer.score([(row[:1], row[1:]) for row in rows])])
    sizes = np.asarray(bytes_per_token, np.int64)[np.stack(rows)[:, 1:]]
    edges = [1, *(64 << i for i in range(length.bit_length()) if 64 << i < length), length]
    return [
        _loss(name, length, a, b, nats[:, a - 1 : b - 1], int(sizes[:, a - 1 : b - 1].sum()))
        for a, b in zip(edges, edges[1:])
    ]


def sliding_window(
    scorer: Scorer, tokens: np.ndarray, bytes_per_token: np.ndarray, length: int, *, most: int | None = None
) -> TextLoss:
    """The loss of a text where each token is predicted from a window of at most `length` tokens, read from an empty state.

    Windows begin every length/2 tokens. The first one predicts all its tokens but the first, each other one its second half. So the
    same tokens are predicted at all lengths.

    Args:
      scorer: reads the windows.
      tokens: of the text, integers [time].
      bytes_per_token: int [vocabulary], from the tokenizer.
      length: tokens of a window.
      most: how much of the text is read, in tokens. None: all.

    Raises:
      ValueError: the text, or its part, is shorter than a window.
    """
    name = "sliding_window_perplexity"
    tokens = tokens[:most]
    _check(name, tokens, length)
    stride = max(1, length // 2)
    pairs = [(tokens[:1], tokens[1:length])]
    for begin in range(length, len(tokens), stride):
        end = min(begin + stride, len(tokens))
        pairs.append((tokens[begin + stride - length : begin], tokens[begin:end]))
    nats = -np.concatenate([score.token_log_likelihoods for score in scorer.score(pairs)]).astype(np.float64)
    return _loss(name, length, 1, length, nats[None], int(np.asarray(bytes_per_token, np.int64)[tokens[1:]].sum()))


def _check(name: str, tokens: Sequence[int] | np.ndarray, length: int) -> None:
    check.integer(name, "length", length, 2)
    if len(tokens) < length:
        raise ValueError(f"{name}: the text has {len(tokens):,} tokens; a window has {length:,}. Give more text.")


def _loss(name: str, length: int, start: int, end: int, nats: np.ndarray, num_bytes: int) -> TextLoss:
    """Of the cross entropy of tokens [windows, time]."""
    means = nats.mean(axis=1, dtype=np.float64)
    error = float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else math.nan
    return TextLoss(name, length, start, end, nats.size, float(nats.sum(dtype=np.float64)), num_bytes, error)
