"""The kinds of long-context tasks, and the table of all tasks."""

import dataclasses
import math
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from atlasjax import check
from atlasjax.evaluate.long_context.haystack import Haystack
from atlasjax.evaluate.long_context.setting import Plan, Prompt, Setting, Tokenizer
from atlasjax.evaluate.scoring import Score
from atlasjax.names import resolve


class Reader(Protocol):
    """A model that reads rows of unequal length, such as `evaluate.scoring.Scorer`."""

    @property
    def batch_size(self) -> int:
        """Rows read together."""
        ...

    def score(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]], /) -> list[Score]:
        """The model's likelihoods of continuations, each given its context."""
        ...

    def generate(
        self, prompts: Sequence[np.ndarray], num_tokens: int, tokenizer: Tokenizer, *, stop: Sequence[Sequence[str]],
        end_tokens: Sequence[int], vocab_size: int | None,
    ) -> list[str]:  # fmt: skip
        """The texts that follow prompts."""
        ...


@dataclasses.dataclass(frozen=True)
class Run:
    """The settings of a run of tasks.

    Attributes:
      plan: lengths, depths, samples and seed.
      reader: reads prompts.
      tokenizer: of the model.
      haystack: the text in which tasks hide what they ask for.
      tokens: of the text whose loss is measured, integers [time] (NumPy). May be empty if no task reads it.
      end_tokens: tokens that end a generated text.
      counted: the bytes of text that each of `tokens` represents, integers [time]. None: those of the tokenizer.
    """

    plan: Plan
    reader: Reader
    tokenizer: Tokenizer
    haystack: Haystack
    tokens: np.ndarray
    end_tokens: Sequence[int] = ()
    counted: np.ndarray | None = None

    @property
    def sizes(self) -> np.ndarray:
        """The bytes of text that each of `tokens` represents, int64 [time]."""
        if self.counted is not None:
            return np.asarray(self.counted, np.int64)
        tokenizer: Any = self.tokenizer  # only these tasks need the attribute
        return np.asarray(tokenizer.bytes_per_token, np.int64)[self.tokens]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One answer: the setting of its prompt, the tokens of the prompt, expected and given answer, and a score in [0, 1]."""

    task: str
    length: int
    depth: float | None
    seed: int
    prompt_tokens: int
    answers: tuple[str, ...]
    output: str
    score: float


@dataclasses.dataclass(frozen=True)
class Value:
    """One number of a result.

    Attributes:
      metrics: name → value, e.g. "score", "loss".
      standard_error: of the first metric; NaN of a single sample.
      count: number of samples, or of predicted tokens.
      depth: where the answers are, from 0 to 1. None: at all depths of the plan.
      positions: in the context, of the tokens that are predicted; the end excluded. None: all.
    """

    metrics: dict[str, float]
    standard_error: float
    count: int
    depth: float | None = None
    positions: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """A task at one length, at one depth or at all of them.

    Attributes:
      task: name of the task.
      length: tokens of prompt and answer together, or of a window of text.
      values: for a task with depths, the value of all samples first, then the values of the depths; for one depth, only its value.
        For a text, the value of all tokens first, then the values of the positions.
      tokens: tokens read.
      seconds: for reading and answering, compilation included.
      peak_memory: largest resident memory of this process so far, in bytes.
      samples: the answers, if the task has any.
    """

    task: str
    length: int
    values: list[Value]
    tokens: int
    seconds: float
    peak_memory: int
    samples: list[Sample] = dataclasses.field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Tokens read per second."""
        return self.tokens / self.seconds


class Task(Protocol):
    """A task that runs under a name, such as `PromptTask` and `TextTask`."""

    @property
    def name(self) -> str: ...

    @property
    def about(self) -> str:
        """One line for lists of tasks."""
        ...

    @property
    def needs_text(self) -> bool:
        """Whether it measures the loss of `Run.tokens`."""
        ...

    def check(self, plan: Plan, tokenizer: Tokenizer, haystack: Haystack, tokens: np.ndarray) -> None:
        """Raises ValueError if a length is too short for the task or the text, before a model reads anything."""
        ...

    def depths(self, plan: Plan) -> Sequence[float | None]:
        """The depths that are measured one by one; (None,) if the task has none."""
        ...

    def result(self, run: Run, length: int, depth: float | None) -> Result:
        """Runs the task at one of the plan's lengths and one of the depths."""
        ...


@dataclasses.dataclass(frozen=True)
class PromptTask:
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

    needs_text: ClassVar[bool] = False
    name: str
    make: Callable[[Setting], Prompt]
    num_tokens: int
    score: Callable[[Prompt, str], float]
    stop: tuple[str, ...] = ()
    has_depth: bool = True
    about: str = ""

    def check(self, plan: Plan, tokenizer: Tokenizer, haystack: Haystack, tokens: np.ndarray) -> None:
        """Makes every prompt once: nothing is ever cut off one, so ValueError if it does not fit into its length."""
        for length in plan.lengths:
            for setting in plan.settings(length, self.has_depth, tokenizer, haystack):
                self.make(setting)

    def depths(self, plan: Plan) -> Sequence[float | None]:
        """The depths of the plan, if `has_depth`."""
        return plan.depths if self.has_depth else (None,)

    def result(self, run: Run, length: int, depth: float | None) -> Result:
        """Asks the model the prompts of a length and depth, of which as many are in memory as the reader reads together."""
        settings = [
            setting
            for setting in run.plan.settings(length, self.has_depth, run.tokenizer, run.haystack)
            if setting.depth == depth
        ]
        vocab_size = getattr(run.tokenizer, "vocab_size", None)
        samples: list[Sample] = []
        seconds = 0.0
        for start in range(0, len(settings), run.reader.batch_size):
            some = settings[start : start + run.reader.batch_size]
            prompts = [self.make(setting) for setting in some]
            begun = time.perf_counter()
            outputs = run.reader.generate(
                [prompt.tokens for prompt in prompts], self.num_tokens, run.tokenizer, stop=[self.stop] * len(prompts),
                end_tokens=run.end_tokens, vocab_size=vocab_size,
            )  # fmt: skip
            seconds += time.perf_counter() - begun
            samples += [
                Sample(self.name, length, setting.depth, setting.seed, len(prompt.tokens), prompt.answers, output,
                       self.score(prompt, output))
                for setting, prompt, output in zip(some, prompts, outputs, strict=True)
            ]  # fmt: skip
        tokens = sum(sample.prompt_tokens for sample in samples)
        return Result(self.name, length, [_mean(samples, depth)], tokens, seconds, peak_memory(), samples)


@dataclasses.dataclass(frozen=True)
class TextTask:
    """A measurement of how well a model predicts a text.

    Attributes:
      name: its name.
      measure: (run, length) → values; the one of all tokens first.
      about: one line for lists of tasks.
    """

    needs_text: ClassVar[bool] = True
    name: str
    measure: Callable[[Run, int], list[Value]]
    about: str = ""

    def check(self, plan: Plan, tokenizer: Tokenizer, haystack: Haystack, tokens: np.ndarray) -> None:
        """ValueError if the text is shorter than a length."""
        for length in plan.lengths:
            check.integer(self.name, "length", length, 2)
            if len(tokens) < length:
                raise ValueError(
                    f"task {self.name!r}: the text has {len(tokens):,} tokens; a window has {length:,}. Give more text."
                )

    def depths(self, plan: Plan) -> Sequence[float | None]:
        """None."""
        return (None,)

    def result(self, run: Run, length: int, depth: float | None = None) -> Result:
        """Measures windows of one length."""
        begun = time.perf_counter()
        values = self.measure(run, length)
        return Result(self.name, length, values, values[0].count, time.perf_counter() - begun, peak_memory())


def peak_memory() -> int:
    """The largest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def standard_error(values: Sequence[float] | np.ndarray) -> float:
    """The standard error of the mean; NaN for a single value."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def joined(parts: Sequence[Result]) -> Result:
    """The result of a task at one length, from those of all its depths: the value of all samples, then theirs."""
    first = parts[0]
    if first.values[0].depth is None:
        return first
    samples = [sample for part in parts for sample in part.samples]
    return Result(
        first.task,
        first.length,
        [_mean(samples), *(value for part in parts for value in part.values)],
        sum(part.tokens for part in parts),
        sum(part.seconds for part in parts),
        max(part.peak_memory for part in parts),
        samples,
    )


def _mean(samples: Sequence[Sample], depth: float | None = None) -> Value:
    scores = [sample.score for sample in samples]
    return Value({"score": float(np.mean(scores))}, standard_error(scores), len(scores), depth)


TASKS: dict[str, Task] = {}


def add(task: Task) -> Task:
    """Puts a task into `TASKS` under its name."""
    TASKS[task.name] = task
    return task


def prompts(
    num_tokens: int,
    score: Callable[[Prompt, str], float],
    *,
    stop: tuple[str, ...] = (),
    has_depth: bool = True,
    about: str = "",
) -> Callable[[Callable[[Setting], Prompt]], Callable[[Setting], Prompt]]:
    """Decorates a function Setting → Prompt: adds the `PromptTask` of its name. Arguments: the fields of `PromptTask`."""

    def decorate(make: Callable[[Setting], Prompt]) -> Callable[[Setting], Prompt]:
        add(PromptTask(make.__name__, make, num_tokens, score, stop, has_depth, about))
        return make

    return decorate


def find(name: str) -> Task:
    """The task of a name, or your own by "package.module:object".

    Raises:
      ValueError: there is no such task, with a suggestion.
    """
    found = resolve("task", name, TASKS)
    for method in ("check", "depths", "result"):
        if not callable(getattr(found, method, None)):
            raise ValueError(
                f"task {name!r} is {found!r}, which has no {method}(); it must be a PromptTask or the like."
            )
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
