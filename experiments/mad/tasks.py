"""The six tasks of MAD (Poli et al. 2024, arXiv 2403.17844) in the baseline setting of its public generators.

tokens, labels = TASKS["in_context_recall"].sequences(1000, seed=0)
test_tokens, test_labels = TASKS["in_context_recall"].sequences(1000, seed=0, split="test")

A label stands at the position whose output is to be it, `IGNORE` elsewhere. In training the three recall tasks predict every next
token; in tests only the values that the context determines. The other tasks have the same labels in both.

Two accidents of the public generators are left out: their in-context recall could ask for a key although every pair was noise
(probability below 1e-40), and some 2% of the final fuzzy keys have no pair before them. Such sequences are not made here.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import numpy as np

from atlasjax import check
from atlasjax.data.associative_recall import IGNORE
from atlasjax.names import lookup

Split = Literal["train", "test"]
Arrays = tuple[np.ndarray, np.ndarray]
MAP_STREAM = 2  # of the random numbers of a seed, after training and test: the mapping of memorization

Draw = Callable[["Task", int, np.random.Generator, bool, np.random.Generator], Arrays]


@dataclasses.dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
      vocab_size: number of tokens, special ones included.
      length: tokens of a sequence, before the last one is cut off as a label in the recall tasks.
      draw: (task, number of sequences, random numbers, whether in training, random numbers of what is fixed for a seed) → tokens
        and labels, integers [n, time].
      train_sequences: number of distinct training sequences of the benchmark.
      noise_vocab: how many of the tokens are noise.
      noise: probability that a pair is noise.
      motif: greatest number of tokens of a key or value.
      copied: tokens to copy.
      decodes_last: the output is decoded from the last position alone (an autoencoder).
    """

    vocab_size: int
    length: int
    draw: Draw
    train_sequences: int = 12_800
    noise_vocab: int = 0
    noise: float = 0.0
    motif: int = 1
    copied: int = 0
    decodes_last: bool = False

    @property
    def time(self) -> int:
        """Number of tokens that a model reads."""
        return self.length - 1 if self.draw is _in_context_recall else self.length

    def sequences(self, n: int, seed: int, split: Split = "train") -> Arrays:
        """n sequences and their labels, int32 [n, time]. The same arguments give the same sequences.

        Raises:
          ValueError: n or the seed is out of range, or the split is unknown.
        """
        check.integer("MAD", "n", n)
        check.integer("MAD", "seed", seed, 0)
        stream = lookup("split", split, {"train": 0, "test": 1})
        rng, fixed = (np.random.default_rng([seed, number]) for number in (stream, MAP_STREAM))
        tokens, labels = self.draw(self, n, rng, split == "train", fixed)
        return tokens.astype(np.int32), labels.astype(np.int32)

    def chance(self) -> float:
        """The macro accuracy of a guess among the tokens that are labels in tests: one over their number."""
        labels = self.sequences(320, 0, "test")[1]
        return 1 / len(np.unique(labels[labels != IGNORE]))


def _shifted(tokens: np.ndarray, labels: np.ndarray, training: bool) -> Arrays:
    return tokens[:, :-1], (tokens if training else labels)[:, 1:]


def _in_context_recall(task: Task, n: int, rng: np.random.Generator, training: bool, _: np.random.Generator) -> Arrays:
    """Pairs k v k v …, each k of a sequence always with the same v, then a final pair of a key that was shown.

    A pair may be noise instead. A value is a label where its key was shown before.
    """
    plain = task.vocab_size - task.noise_vocab
    half, pairs, row = plain // 2, task.length // 2, np.arange(n)
    value_of = rng.integers(half, plain, (n, half))
    keys = rng.integers(half, size=(n, pairs))
    noisy = rng.random((n, pairs)) < task.noise
    noisy[row, rng.integers(pairs - 1, size=n)] = False  # at least one pair
    noisy[:, -1] = False
    shown = (keys[..., None] == np.arange(half)) & ~noisy[..., None]  # [n, pairs, keys]
    present = shown[:, :-1].any(1)
    keys[:, -1] = np.where(present, rng.random((n, half)), -1.0).argmax(1)  # one of those, each as likely
    before = np.cumsum(shown, 1) - shown
    again = np.take_along_axis(before, keys[..., None], 2)[..., 0] > 0
    again[:, -1] = True
    values = np.take_along_axis(value_of, keys, 1)
    tokens = np.where(noisy[..., None], rng.integers(plain, task.vocab_size, (n, pairs, 2)) if task.noise else 0,
                      np.stack((keys, values), -1))  # fmt: skip
    asked = np.where(again & ~noisy, values, IGNORE)
    labels = np.stack((np.full_like(asked, IGNORE), asked), -1)
    return _shifted(tokens.reshape(n, -1), labels.reshape(n, -1), training)


def _fuzzy(task: Task, n: int, rng: np.random.Generator, training: bool, _: np.random.Generator) -> Arrays:
    """In-context recall whose keys and values are 1 to `motif` different tokens; in tests keys have exactly `motif`.

    Sequences are padded on the left.
    """
    tokens = np.full((n, task.length + 1), task.vocab_size - 1)
    labels = np.full_like(tokens, IGNORE)
    for i in range(n):
        found = None
        while found is None:
            found = _fuzzy_sequence(task, rng, training)
        tokens[i, -len(found[0]) :], labels[i, -len(found[0]) :] = found
    return _shifted(tokens, labels, training)


def _fuzzy_sequence(task: Task, rng: np.random.Generator, training: bool) -> tuple[list[int], list[int]] | None:
    """Tokens and labels, or None if the final key was not shown."""
    plain, most = task.vocab_size - 1, task.motif
    half, rounds = plain // 2, task.length // 2 + 1  # a pair has two tokens or more; the last round is the final pair
    order = lambda size: rng.random((rounds, size)).argsort(1)
    key_tokens, value_tokens = order(half), half + order(plain - half)
    key_sizes = rng.integers(1, most + 1, rounds) if training else np.full(rounds, most)
    value_sizes = rng.integers(1, most + 1, rounds)
    key_at = lambda i: tuple(key_tokens[i, : key_sizes[i]].tolist())
    value_at = lambda i: tuple(value_tokens[i, : value_sizes[i]].tolist())
    probe, answer = key_at(-1), value_at(-1)
    size = len(probe) + len(answer)
    place = int(rng.integers(task.length - 2 * size))
    tokens: list[int] = []
    labels: list[int] = []
    values: dict[tuple[int, ...], tuple[int, ...]] = {}

    def add(key: tuple[int, ...], value: tuple[int, ...]) -> None:
        labels.extend([IGNORE] * len(key) + (list(value) if key in values else [IGNORE] * len(value)))
        tokens.extend(key + value)
        values[key] = value

    i = 0
    while len(tokens) < task.length - size - 2 * most:
        if len(tokens) >= place and probe not in values:
            add(probe, answer)
            continue
        key = key_at(i)
        add(key, answer if key == probe else values.get(key, value_at(i)))
        i += 1
    if probe not in values:
        return None
    add(probe, answer)
    return tokens, labels


def _selective_copying(task: Task, n: int, rng: np.random.Generator, training: bool, _: np.random.Generator) -> Arrays:
    """Tokens among blanks, then the copy token, then blanks at which the tokens are to be repeated in order.

    The last token is always just before the copy token, because blanks are inserted before tokens.
    """
    copy, blank, count = task.vocab_size - 1, task.vocab_size - 2, task.copied
    copied = rng.integers(blank, size=(n, count))
    blanks = rng.multinomial(task.length - 2 * count - 1, np.full(count, 1 / count), size=n)
    tokens = np.full((n, task.length), blank)
    np.put_along_axis(tokens, np.arange(count) + np.cumsum(blanks, 1), copied, 1)
    tokens[:, -count - 1] = copy
    labels = np.full_like(tokens, IGNORE)
    labels[:, -count:] = copied
    return tokens, labels


def _compression(task: Task, n: int, rng: np.random.Generator, training: bool, _: np.random.Generator) -> Arrays:
    """Random tokens and the compression token. All are to be decoded from the output at the latter, which has seen all."""
    last = task.vocab_size - 1
    tokens = np.concatenate((rng.integers(last, size=(n, task.length - 1)), np.full((n, 1), last)), 1)
    return tokens, tokens


def _memorization(task: Task, n: int, rng: np.random.Generator, training: bool, fixed: np.random.Generator) -> Arrays:
    """Keys, each followed by the insert token, at which its value is to be told. One mapping for all sequences of a seed."""
    insert = task.vocab_size - 1
    half = insert // 2
    value_of = half + fixed.permutation(insert - half)[:half]
    keys = rng.integers(half, size=(n, task.length // 2))
    tokens = np.stack((keys, np.full_like(keys, insert)), -1).reshape(n, -1)
    labels = np.stack((np.full_like(keys, IGNORE), value_of[keys]), -1).reshape(n, -1)
    return tokens, labels


# Short sequences first.
TASKS = {
    "memorization": Task(256, 32, _memorization, train_sequences=256),
    "compression": Task(16, 32, _compression, decodes_last=True),
    "in_context_recall": Task(16, 128, _in_context_recall),
    "noisy_recall": Task(32, 128, _in_context_recall, noise_vocab=16, noise=0.2),
    "fuzzy_recall": Task(16, 128, _fuzzy, motif=3),
    "selective_copying": Task(16, 256, _selective_copying, copied=16),
}
