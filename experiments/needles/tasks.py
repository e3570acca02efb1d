"""Facts hidden in text, and questions about them: small versions of RULER's needles and of BABILong.

tokens, labels = TASKS["niah_2"].sequences(1000, 256, seed=0)
test_tokens, test_labels = TASKS["niah_2"].sequences(1000, 1024, seed=0, split="test")

Haystacks are ASCII text, one token a byte. Facts and questions have tokens of their own, so a small model need not learn to read
first: a fact is a name and its value, and a question is `ASK` and a name, to be followed by the value. A label stands at the
position whose output is to be it, `IGNORE` elsewhere. All questions are at the end of the sequence.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal

import numpy as np

from atlasjax import check
from atlasjax.data.associative_recall import IGNORE
from atlasjax.data.documents import EveryNth
from atlasjax.data.sources import embedded_documents
from atlasjax.evaluate.long_context.haystack import NOISE
from atlasjax.names import lookup

Split = Literal["train", "test"]
Arrays = tuple[np.ndarray, np.ndarray]

BYTES, NAMES, VALUES = 128, 32, 32  # numbers of tokens
NAME, VALUE, ASK = BYTES, BYTES + NAMES, BYTES + NAMES + VALUES  # the first of each kind
VOCAB_SIZE = ASK + 1
_TEST_DOCUMENTS = 10  # every tenth document is for tests


@dataclasses.dataclass(frozen=True)
class Facts:
    """The statements and questions of a sequence.

    Attributes:
      statements: runs of tokens, in order, between which the haystack stands.
      answers: name → the tokens of its value, for every name that can be asked for.
    """

    statements: list[list[int]]
    answers: dict[int, list[int]]


@dataclasses.dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
      draw: (random numbers, whether in training) → facts.
      about: what is asked, and which benchmark has it.
      noise: whether the haystack is one sentence, repeated. Otherwise it is text.
      questions: the largest number of questions in training. Tests have one.
    """

    draw: Callable[[np.random.Generator, bool], Facts]
    about: str
    noise: bool = False
    questions: int = 8

    def sequences(self, n: int, length: int, seed: int, split: Split = "train") -> Arrays:
        """n sequences and their labels, int32 [n, length]. The same arguments give the same sequences.

        Raises:
          ValueError: a number is out of range, the split is unknown, or the facts and questions are longer than `length`.
        """
        check.integer("needles", "n", n)
        check.integer("needles", "length", length)
        check.integer("needles", "seed", seed, 0)
        rng = np.random.default_rng([seed, lookup("split", split, {"train": 0, "test": 1})])
        haystack = _noise() if self.noise else _text(split)
        rows = [self._sequence(length, rng, split == "train", haystack) for _ in range(n)]
        tokens, labels = (np.asarray(part, np.int32) for part in zip(*rows, strict=True))
        return tokens, labels

    def guesses(self) -> dict[str, float]:
        """The share of answers in tests that a reader has who does not look at the name that is asked for.

        Returns:
          "any value": as many of all value tokens as the answer has, different ones, at random. "a value of the text": one of the
          values that the text states, at random. "the last value of the text": that.
        """
        random, last = [], []
        tokens, labels = self.sequences(500, 128, 0, "test")
        for row, label in zip(tokens, labels, strict=True):
            answer = label[label != IGNORE]
            stated = row[: np.argmax(row == ASK)]
            values = stated[(stated >= VALUE) & (stated < ASK)].reshape(-1, len(answer))
            right = (values == answer).all(1)
            random.append(right.mean())
            last.append(right[-1])
        free = range(VALUES - len(answer) + 1, VALUES + 1)
        return {
            "any value": 1 / math.prod(free),
            "a value of the text": float(np.mean(random)),
            "the last value of the text": float(np.mean(last)),
        }

    def chance(self) -> float:
        """The best of these guesses. If the text has one value alone, "any value": to say it, a model must have found it."""
        found = self.guesses()
        return found["any value"] if found["a value of the text"] == 1 else max(found.values())

    def _sequence(self, length: int, rng: np.random.Generator, training: bool, haystack: np.ndarray) -> Arrays:
        facts = self.draw(rng, training)
        most = self.questions if training else 1
        asked = rng.permutation(list(facts.answers))[:most].tolist()
        tokens, labels = [], []
        for name in asked:
            answer = facts.answers[name]
            tokens += [ASK, name, *answer[:-1]]
            labels += [IGNORE, *answer]
        left = length - len(tokens) - sum(map(len, facts.statements))
        if left < 0:
            raise ValueError(f"needles: length must be at least {length - left} for these facts, got {length}.")
        start = int(rng.integers(len(haystack) - left + 1))
        cuts = np.sort(rng.integers(left + 1, size=len(facts.statements)))
        pieces = np.split(haystack[start : start + left], cuts)
        body = [pieces[0]]
        for statement, piece in zip(facts.statements, pieces[1:], strict=True):
            body += [np.asarray(statement), piece]
        before = np.concatenate(body)
        return np.concatenate((before, tokens)), np.concatenate((np.full(len(before), IGNORE), labels))


@functools.cache
def _noise() -> np.ndarray:
    """RULER's sentence of noise, repeated."""
    return np.frombuffer((NOISE + " ").encode() * 1000, np.uint8)


@functools.cache
def _text(split: Split) -> np.ndarray:
    """The bytes of the embedded text's documents of a split; what is not ASCII is a question mark."""
    documents = EveryNth(embedded_documents(), _TEST_DOCUMENTS, complement=split == "train")
    text = "\n\n".join(documents[i] for i in range(len(documents)))
    return np.frombuffer(text.encode("ascii", "replace"), np.uint8)


def _names(rng: np.random.Generator, n: int, start: int = 0, stop: int = NAMES) -> list[int]:
    return (NAME + start + rng.permutation(stop - start)[:n]).tolist()


def _values(rng: np.random.Generator, n: int) -> list[int]:
    return (VALUE + rng.permutation(VALUES)[:n]).tolist()


def _needles(trained: int, tested: int, size: int, rng: np.random.Generator, training: bool) -> Facts:
    """Names with values of `size` different tokens."""
    answers = {name: _values(rng, size) for name in _names(rng, trained if training else tested)}
    return Facts([[name, *value] for name, value in answers.items()], answers)


_PEOPLE = 8  # of the names; the others are things
_MOVES, _TAKEN = 8, 4


def _places(things: bool, rng: np.random.Generator, training: bool) -> Facts:
    """People go from place to place: "person place". With `things` they also take things with them: "thing person".

    Four people make eight moves. Asked are the last places of people, or of things, which are carried to the end.
    """
    people = _names(rng, 4, 0, _PEOPLE)
    statements, last = [], {}
    for _ in range(_MOVES):
        person = int(rng.choice(people))
        place = VALUE + int(rng.integers(VALUES))
        statements.append([person, place])
        last[person] = [place]
    if not things:
        return Facts(statements, last)
    movers, answers = list(last), {}
    for thing in _names(rng, _TAKEN, _PEOPLE):
        person = int(rng.choice(movers))
        statements.insert(int(rng.integers(len(statements) + 1)), [thing, person])
        answers[thing] = last[person]
    return Facts(statements, answers)


def _task(about: str, draw: Callable[..., Facts], *args: int | bool, noise: bool = False) -> Task:
    return Task(functools.partial(draw, *args), about, noise)


TASKS = {
    "niah_1": _task("a value in a repeated sentence (RULER's S-NIAH-1)", _needles, 8, 1, 1, noise=True),
    "niah_2": _task("a value in text (S-NIAH-2)", _needles, 8, 1, 1),
    "niah_3": _task("a value of four tokens in text (S-NIAH-3: a long value)", _needles, 8, 1, 4),
    "multi_key": _task("one of eight values in text (MK-NIAH-1; in-context recall)", _needles, 8, 8, 1),
    "places_1": _task("where a person is, after several moves (BABILong's first task)", _places, False),
    "places_2": _task("where a thing is that a person carries (BABILong's second task)", _places, True),
}
