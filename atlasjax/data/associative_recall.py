"""Multi-query associative recall (MQAR): sequences of key-value pairs, followed by one query per key.

config = RecallConfig(vocab_size=256, length=64, num_pairs=16)
tokens, labels = recall_sequences(config, 1000, seed=0)
test_tokens, test_labels = recall_sequences(config, 1000, seed=0, split="test")
accuracy = recall_accuracy(model(test_tokens), test_labels)

The task of Zoology (Arora et al. 2023, arXiv 2312.04927), as defined by its public generator.
"""

import dataclasses
import typing
from numbers import Integral
from typing import TYPE_CHECKING, Literal

import numpy as np

from atlasjax import check
from atlasjax.names import lookup

if TYPE_CHECKING:
    import jax

IGNORE = -100
"""Label of positions without a query."""

Filler = Literal["zeros", "random"]
RecallSplit = Literal["train", "test"]

_BLOCK = 2**22  # random numbers drawn at once; bounds memory for large vocabularies and many sequences


@dataclasses.dataclass(frozen=True)
class RecallConfig:
    """Configuration of MQAR. With K pairs and L tokens, a sequence is

        k_1 v_1 k_2 v_2 … k_K v_K, then L − 2K positions, in which each key appears once more

    Keys are K distinct tokens from 1 … V/2 − 1 and values are K distinct tokens from V/2 … V − 1, both uniform. Key j is queried at
    position 2K + 2 (g_j − 1), where g_1, g_2, … are drawn without replacement from 1 … (L − 2K) / 2 with weights g^(power − 1). The
    label v_j is at the query's own position: it is the next token to predict, so labels are not shifted. Others are `IGNORE`.

    Attributes:
      vocab_size: V, greater than the length.
      length: L, even, at least 4K.
      num_pairs: K ≥ 1.
      power: a > 0. 1 gives uniform distances to the query; with the published 0.01 most queries come early.
      filler: tokens at positions without a query: "zeros", or "random" tokens from the whole vocabulary (also keys and values).

    Raises:
      ValueError: a field is out of range, fields clash, or the filler is unknown.
    """

    vocab_size: int = 8192
    length: int = 64
    num_pairs: int = 4
    power: float = 0.01
    filler: Filler = "zeros"

    def __post_init__(self) -> None:
        check.integers(self, {"vocab_size": 1, "length": 1, "num_pairs": 1})
        check.number("RecallConfig", "power", self.power, above=0)
        if self.vocab_size <= self.length:
            raise ValueError(
                f"RecallConfig: vocab_size must be greater than length={self.length}, got {self.vocab_size}."
            )
        if self.length % 2:
            raise ValueError(f"RecallConfig: length must be even, got {self.length}.")
        if 4 * self.num_pairs > self.length:
            raise ValueError(
                f"RecallConfig: num_pairs={self.num_pairs} needs a length of at least 4 · num_pairs = {4 * self.num_pairs}, "
                f"got {self.length}: 2 tokens per pair, and a query at every other later position."
            )
        check.literal("filler", self.filler, Filler)


def recall_sequences(
    config: RecallConfig, num_sequences: int, seed: int, split: RecallSplit = "train"
) -> tuple[np.ndarray, np.ndarray]:
    """Sequences and their labels.

    Args:
      config: the task.
      num_sequences: n ≥ 1.
      seed: ≥ 0. The same seed, split and n give the same sequences.
      split: "train" or "test": independent random streams of the same seed.

    Returns:
      tokens and labels, both int32 [n, length]. A label is a token, or `IGNORE` where there is no query.

    Raises:
      ValueError: num_sequences or seed is out of range, or the split is unknown.
    """
    check.integer("recall_sequences", "num_sequences", num_sequences, kinds=Integral)
    check.integer("recall_sequences", "seed", seed, 0, kinds=Integral)
    stream = lookup("split", split, {name: number for number, name in enumerate(typing.get_args(RecallSplit))})
    rng = np.random.default_rng([seed, stream])
    step = max(1, _BLOCK // config.vocab_size)
    sizes = [min(step, num_sequences - start) for start in range(0, num_sequences, step)]
    tokens, labels = zip(*(_block(config, size, rng) for size in sizes), strict=True)
    return np.concatenate(tokens), np.concatenate(labels)


def _block(config: RecallConfig, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    half, pairs, length = config.vocab_size // 2, config.num_pairs, config.length
    slots = (length - 2 * pairs) // 2
    keys = 1 + _without_replacement(rng, n, pairs, np.zeros(half - 1))
    values = half + _without_replacement(rng, n, pairs, np.zeros(config.vocab_size - half))
    gaps = _without_replacement(rng, n, pairs, (config.power - 1) * np.log(np.arange(1, slots + 1)))
    asked = 2 * pairs + 2 * gaps
    tokens = np.zeros((n, length), np.int32)
    tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
    np.put_along_axis(tokens, asked, keys.astype(np.int32), axis=1)
    labels = np.full((n, length), IGNORE, np.int32)
    np.put_along_axis(labels, asked, values.astype(np.int32), axis=1)
    if config.filler == "random":
        tokens = np.where(tokens == 0, rng.integers(0, config.vocab_size, tokens.shape, dtype=np.int32), tokens)
    return tokens, labels


def _without_replacement(rng: np.random.Generator, n: int, k: int, log_weights: np.ndarray) -> np.ndarray:
    """[n, k] distinct indices into `log_weights`, in the order drawn. Each draw applies the weights to the remaining indices.

    These are the k largest values of log_weights + Gumbel noise, in descending order (Yellott 1977). All rows are drawn at once.
    """
    scores = log_weights + rng.gumbel(size=(n, len(log_weights)))
    largest = np.argpartition(-scores, k - 1, axis=1)[:, :k]
    order = np.argsort(-np.take_along_axis(scores, largest, axis=1), axis=1)
    return np.take_along_axis(largest, order, axis=1)


def recall_accuracy(logits: "np.ndarray | jax.Array", labels: "np.ndarray | jax.Array") -> "np.floating | jax.Array":
    """The fraction of queries answered correctly in each sequence, averaged over sequences.

    Args:
      logits: [n, length, vocab_size], NumPy or JAX. The answer is the argmax.
      labels: integers [n, length], from the same library. Each row needs a label other than `IGNORE`.

    Returns:
      A scalar in [0, 1]. Works under `jit` and `vmap`.

    Raises:
      ValueError: the shapes do not match.
    """
    if logits.ndim != 3 or logits.shape[:2] != labels.shape:
        raise ValueError(
            f"recall_accuracy: logits has shape {logits.shape}, must be [n, length, vocab_size] with labels' "
            f"[n, length] = {labels.shape}."
        )
    asked = labels != IGNORE
    right = (logits.argmax(-1) == labels) & asked
    return (right.sum(-1) / asked.sum(-1)).mean()
