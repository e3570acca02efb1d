"""Byte n-gram models: the baselines that a language model on the same text has to beat."""

import dataclasses

import numpy as np

_FIT_SHARE = 0.9  # share of the training text used for counts while the weights are fitted on the rest
_EM_STEPS = 20


@dataclasses.dataclass(frozen=True)
class ByteNgram:
    """An interpolated byte n-gram model (Jelinek and Mercer, 1980).

    p(x | context) = Σ_k weights[k] p_k(x | last k - 1 bytes), where p_0 is uniform over the 256 bytes and p_k is the relative
    frequency of k-grams. If the context of p_k was never seen, p_k is p_(k-1).

    Attributes:
      weights: float64 [order + 1], nonnegative, with sum 1.
      grams: for k = 1 … order, the sorted k-grams as base-256 numbers, int64, and the count of each, int64.
    """

    weights: np.ndarray
    grams: tuple[tuple[np.ndarray, np.ndarray], ...]

    def bits_per_byte(self, data: bytes) -> float:
        """Returns the mean of -log2 p over the bytes of `data`, preceded by zero bytes. ValueError if `data` is empty."""
        return float(-np.log2(_probabilities(self.grams, _as_array(data, "data")) @ self.weights).mean())


def fit_ngram(data: bytes, order: int) -> ByteNgram:
    """Fits a model of n-grams up to `order` (1: unigram, 3: trigram) to a training text.

    The weights come from 20 steps of expectation maximization on the last tenth of the text, with counts from the rest.
    The final model has the counts of the whole text.

    Raises:
      ValueError: order is not in [1, 7], or the text is too short to be split.
    """
    if not 1 <= order <= 7:
        raise ValueError(f"order is {order}; it must be in [1, 7] (a k-gram is kept in 64 bits).")
    array = _as_array(data, "training text")
    cut = int(len(array) * _FIT_SHARE)
    if not cut:
        raise ValueError(f"The training text of an n-gram model has {len(array)} bytes; it needs at least 2.")
    probabilities = _probabilities(_count(array[:cut], order), array[cut:])
    weights = np.full(order + 1, 1 / (order + 1))
    for _ in range(_EM_STEPS):
        parts = probabilities * weights
        weights = (parts / parts.sum(axis=1, keepdims=True)).mean(axis=0)
    # A byte that no n-gram predicts must keep some probability, whatever the fit on the last tenth gives.
    weights = np.maximum(weights, 1e-6)
    return ByteNgram(weights / weights.sum(), _count(array, order))


def baselines(train: str, held_out: str) -> dict[str, float]:
    """Returns bits per byte of `held_out` under a "unigram" and an interpolated "trigram" byte model of `train`."""
    fitted, evaluated = train.encode(), held_out.encode()
    return {
        "unigram": fit_ngram(fitted, 1).bits_per_byte(evaluated),
        "trigram": fit_ngram(fitted, 3).bits_per_byte(evaluated),
    }


def _as_array(data: bytes, name: str) -> np.ndarray:
    if not data:
        raise ValueError(f"The {name} of an n-gram model is empty.")
    return np.frombuffer(data, np.uint8)


def _codes(array: np.ndarray, k: int) -> np.ndarray:
    """The k-gram ending at each byte as a base-256 number, int64 [len(array)]. The text is preceded by zero bytes."""
    padded = np.concatenate([np.zeros(k, np.int64), array.astype(np.int64)])
    codes = np.zeros(len(array), np.int64)
    for i in range(k):  # from the oldest byte to the newest
        codes = codes * 256 + padded[i + 1 : i + 1 + len(array)]
    return codes


def _count(array: np.ndarray, order: int) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    return tuple(np.unique(_codes(array, k), return_counts=True) for k in range(1, order + 1))


def _probabilities(grams: tuple[tuple[np.ndarray, np.ndarray], ...], array: np.ndarray) -> np.ndarray:
    """p_k of every byte for k = 0 … order, float64 [len(array), order + 1].

    An undefined p_k is replaced by p_(k-1), which gives its weight to the longest context that was seen.
    """
    columns = [np.full(len(array), 1 / 256)]
    for k, (codes, counts) in enumerate(grams, start=1):
        contexts, first = np.unique(codes // 256, return_index=True)
        totals = np.add.reduceat(counts, first)  # codes are sorted, so those of one context are adjacent
        wanted = _codes(array, k)
        total = _find(contexts, totals, wanted // 256)
        frequency = _find(codes, counts, wanted) / np.maximum(total, 1)
        columns.append(np.where(total > 0, frequency, columns[-1]))
    return np.stack(columns, axis=1)


def _find(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The entries of `values` at the positions of `wanted` in the sorted `keys`, 0 where a key is missing."""
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)
