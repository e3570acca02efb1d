"""How well a model predicts a text, by the position in its context and by the size of a sliding window."""

import itertools
import math

import numpy as np

from atlasjax.evaluate.long_context.task import Run, TextTask, Value, add, standard_error

_FIRST = 64  # positions before the first boundary


def by_position(run: Run, length: int) -> list[Value]:
    """The loss by position: does it fall as the context grows?

    `plan.samples` windows of `length` tokens (fewer if the text is shorter), evenly spaced over the text and without overlap, are
    read from an empty state.

    Returns:
      loss (nats per token), perplexity and bits_per_byte of all tokens, and of those at positions [1, 64), [64, 128), [128, 256), …
      of a window. Standard errors are over windows.
    """
    count = min(run.plan.samples, len(run.tokens) // length)
    starts = np.linspace(0, len(run.tokens) - length, count).astype(int)
    rows = np.stack([run.tokens[start : start + length] for start in starts])
    scores = run.reader.score([(row[:1], row[1:]) for row in rows])
    nats = -np.stack([score.token_log_likelihoods for score in scores]).astype(np.float64)
    sizes = np.stack([run.sizes[start + 1 : start + length] for start in starts])
    edges = [1, *(_FIRST << i for i in range(length.bit_length()) if _FIRST << i < length), length]
    return [_value(nats, sizes)] + [
        _value(nats[:, a - 1 : b - 1], sizes[:, a - 1 : b - 1], (a, b)) for a, b in itertools.pairwise(edges)
    ]


def sliding_window(run: Run, length: int) -> list[Value]:
    """The loss of a text where each token is predicted from a window of at most `length` tokens, read from an empty state.

    Windows begin every length/2 tokens. The first one predicts all its tokens but the first, each other one its second half. So the
    same tokens are predicted at all lengths: the first plan.samples · max(plan.lengths) of the text.

    Returns:
      loss (nats per token), perplexity and bits_per_byte of all tokens. The standard error is over windows.
    """
    tokens = run.tokens[: run.plan.samples * max(run.plan.lengths)]
    stride = length // 2
    pairs = [(tokens[:1], tokens[1:length])] + [
        (tokens[begin + stride - length : begin], tokens[begin : begin + stride])
        for begin in range(length, len(tokens), stride)
    ]
    nats = [-score.token_log_likelihoods.astype(np.float64) for score in run.reader.score(pairs)]
    whole = _value(np.concatenate(nats)[None], run.sizes[1 : len(tokens)])
    return [Value(whole.metrics, standard_error([part.mean() for part in nats]), whole.count)]


add(TextTask("perplexity_by_position", by_position, "the loss of a text by the position in its context"))
add(TextTask("sliding_window_perplexity", sliding_window, "the loss of a text with a sliding window of each length"))


def _value(nats: np.ndarray, sizes: np.ndarray, positions: tuple[int, int] | None = None) -> Value:
    """The value for the cross entropies of tokens and their bytes, [windows, time]."""
    loss = float(nats.mean())
    metrics = {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),  # an untrained model must not overflow a float
        "bits_per_byte": float(nats.sum() / (math.log(2) * sizes.sum())),
    }
    return Value(metrics, standard_error(nats.mean(axis=1)), nats.size, positions=positions)
