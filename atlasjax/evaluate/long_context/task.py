"""What a long-context task is, and the table of all of them."""

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import numpy as np

from atlasjax import check
from atlasjax.evaluate.long_context.haystack import Haystack
from atlasjax.names import resolve


class Tokenizer(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, /) -> np.ndarray:
        """Return the tokens of `text`, int32 [time]."""
        ...

    def decode(self, ids: Iterable[int], /) -> str:
        """Return the text of `ids`."""
        ...


@dataclasses.dataclass(frozen=True)
class Setting:
    """What one prompt is made from. Equal settings give equal prompts.

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
class Task:
    """A task whose answer a model writes.

    Attributes:
      name: its name.
      make: Setting → Prompt; a pure function.
      num_tokens: tokens that the model generates. They count inside the length.
      score: (Prompt, generated text) → a number in [0, 1].
      stop: strings that end the generated text.
      has_depth: whether `Setting.depth` says where the answer is.
      about: one line for lists of tasks.
    """

    name: str
    make: Callable[[Setting], Prompt]
    num_tokens: int
    score: Callable[[Prompt, str], float]
    stop: tuple[str, ...] = ()
    has_depth: bool = True
    about: str = ""


TASKS: dict[str, Task] = {}


def register(
    num_tokens: int,
    score: Callable[[Prompt, str], float],
    *,
    stop: tuple[str, ...] = (),
    has_depth: bool = True,
    about: str = "",
) -> Callable[[Callable[[Setting], Prompt]], Callable[[Setting], Prompt]]:
    """Decorates a function Setting → Prompt, and puts it into `TASKS` under its name. Arguments: the fields of `Task`."""

    def add(make: Callable[[Setting], Prompt]) -> Callable[[Setting], Prompt]:
        TASKS[make.__name__] = Task(make.__name__, make, num_tokens, score, stop, has_depth, about)
        return make

    return add


def find(name: str, table: Mapping[str, Task] = TASKS) -> Task:
    """The task of a name, or your own `Task` by "package.module:object".

    Raises:
      ValueError: there is no such task, with a suggestion.
    """
    found = resolve("task", name, table)
    check.instance(f"task {name!r}", "the object", found, Task)
    return found


def fitted(
    setting: Setting, task: str, num_tokens: int, text: Callable[[int], str], *, least: int = 1, most: int | None = None
) -> tuple[str, np.ndarray]:
    """The longest text that leaves room for the tokens to be generated.

    Args:
      setting: has the length and the tokenizer.
      task: name, for messages.
      num_tokens: tokens that will be generated.
      text: number of units of haystack → text. More units should not have fewer tokens.
      least, most: the smallest and largest number of units. None: there is no largest one.

    Returns:
      The text of the largest number of units with which tokens and `num_tokens` are at most `setting.length`, and its tokens.

    Raises:
      ValueError: even the smallest number of units is too long, or the largest one too short.
    """
    encode, room = setting.tokenizer.encode, setting.length - num_tokens
    low, best = least, text(least)
    tokens = encode(best)
    if len(tokens) > room:
        raise ValueError(
            f"task {task!r}: a length of {setting.length:,} tokens is too short; with this tokenizer and {num_tokens} tokens to "
            f"generate it needs at least {len(tokens) + num_tokens:,}."
        )
    high, high_tokens, turn = None, 0, 0
    while high is None or high - low > 1:
        if high is None:
            if low == most:
                raise ValueError(
                    f"task {task!r}: a length of {setting.length:,} tokens is too long; the task ends at "
                    f"{len(tokens) + num_tokens:,} with this tokenizer."
                )
            middle = 2 * low + 8 if most is None else min(2 * low + 8, most)
        elif turn % 3 == 2:  # interpolation alone may approach from one side only
            middle = (low + high) // 2
        else:
            middle = low + math.ceil((high - low) * (room - len(tokens)) / max(1, high_tokens - len(tokens)))
        middle = middle if high is None else min(max(middle, low + 1), high - 1)
        tried = text(middle)
        encoded = encode(tried)
        if len(encoded) <= room:
            low, best, tokens = middle, tried, encoded
        else:
            high, high_tokens = middle, len(encoded)
        turn += 1
    return best, tokens
