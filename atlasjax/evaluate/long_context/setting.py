"""The material of a prompt, and the plan of which prompts are asked."""

import dataclasses
import zlib
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

from atlasjax import check
from atlasjax.evaluate.long_context.haystack import Haystack


class Tokenizer(Protocol):
    """The methods of a tokenizer that are used here."""

    def encode(self, text: str, /) -> np.ndarray:
        """Return the tokens of `text`, int32 [time]."""
        ...

    def decode(self, ids: Iterable[int], /) -> str:
        """Return the text of `ids`."""
        ...


@dataclasses.dataclass(frozen=True)
class Setting:
    """The material of one prompt. Equal settings give equal prompts.

    Attributes:
      seed: chooses all that is random. The same seed asks the same question at every length and depth.
      length: tokens that prompt and generated tokens may have together.
      tokenizer: counts the tokens.
      haystack: the text in which tasks hide what they ask for.
      depth: where in the prompt the answer is, from 0 (its beginning) to 1. None: at random.

    Raises:
      ValueError: a number is out of range.
    """

    seed: int
    length: int
    tokenizer: Tokenizer
    haystack: Haystack
    depth: float | None = None

    def __post_init__(self) -> None:
        check.integer("Setting", "seed", self.seed, 0)
        check.integer("Setting", "length", self.length)
        check.number("Setting", "depth", self.depth, least=0, most=1, optional=True)

    def rng(self, name: str) -> np.random.Generator:
        """The random numbers of a task. They do not depend on length and depth."""
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One question.

    Attributes:
      text: the text that a model continues.
      tokens: of this text, int32 [time] (NumPy).
      answers: what the continuation should have.
      labels: answers that the task could have had, if a continuation may name only the right one.
      question: the question at the end of the text, if `labels` are given.
    """

    text: str
    tokens: np.ndarray
    answers: tuple[str, ...]
    labels: tuple[str, ...] = ()
    question: str = ""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The prompts that tasks are asked.

    Attributes:
      lengths: tokens of prompt and answer together.
      depths: where the answer is, from 0 to 1. Tasks without a depth have `samples` prompts for each length.
      samples: prompts for each length and depth, with the seeds seed, seed + 1, ….
      seed: the first seed.

    Raises:
      ValueError: a number is out of range, or there is no length or depth.
    """

    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("lengths", "depths"):
            check.require(len(getattr(self, name)) > 0, name, getattr(self, name), "at least one number")
        for length in self.lengths:
            check.integer("Plan", "lengths", length)
        for depth in self.depths:
            check.number("Plan", "depths", depth, least=0, most=1)
        check.integers(self, {"samples": 1, "seed": 0})

    def settings(self, length: int, has_depth: bool, tokenizer: Tokenizer, haystack: Haystack) -> Iterator[Setting]:
        """The settings of one length; those of a seed are neighbours."""
        for seed in range(self.seed, self.seed + self.samples):
            for depth in self.depths if has_depth else (None,):
                yield Setting(seed, length, tokenizer, haystack, depth)
