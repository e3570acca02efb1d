"""Runs tasks on a model: lengths × depths × seeds, read as streams."""

import dataclasses
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from atlasjax import check
from atlasjax.evaluate.long_context.haystack import Haystack
from atlasjax.evaluate.long_context.task import Prompt, Setting, Task, Tokenizer
from atlasjax.evaluate.scoring import Scorer
from atlasjax.nn import LanguageModel

# (prompts, tokens to generate, stop strings) → generated texts
Answer = Callable[[Sequence[Prompt], int, Sequence[str]], Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which prompts a task is asked.

    Attributes:
      lengths: tokens of prompt and answer together.
      depths: where the answer is, in [0, 1]; for tasks without a depth there is one number of samples for each length.
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

    def settings(self, task: Task, length: int, tokenizer: Tokenizer, haystack: Haystack) -> Iterator[Setting]:
        """The settings of a task at one length, seeds of one depth after another."""
        for depth in self.depths if task.has_depth else (None,):
            for seed in range(self.seed, self.seed + self.samples):
                yield Setting(seed, length, tokenizer, haystack, depth)


@dataclasses.dataclass(frozen=True)
class Sample:
    """One answer: the setting of its prompt, number of tokens of the prompt, expected and given answer, and score in [0, 1]."""

    task: str
    length: int
    depth: float | None
    seed: int
    prompt_tokens: int
    answers: tuple[str, ...]
    output: str
    score: float


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a model read the prompts of one task and length.

    Attributes:
      task, length: of the prompts.
      tokens: of all prompts.
      seconds: for reading and answering them, compilation included.
      peak_memory: largest resident memory of this process so far, in bytes.
    """

    task: str
    length: int
    tokens: int
    seconds: float
    peak_memory: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens of prompts read per second."""
        return self.tokens / self.seconds


def model_answers(model: LanguageModel, tokenizer: Any, *, batch_size: int = 8) -> Answer:
    """Greedy answers of a model, which reads prompts through its streaming cache.

    Args:
      model: the model.
      tokenizer: has `decode` and `vocab_size`.
      batch_size: prompts read together.
    """
    scorers: dict[int, Scorer] = {}

    def answer(prompts: Sequence[Prompt], num_tokens: int, stop: Sequence[str]) -> list[str]:
        rows = min(batch_size, len(prompts))
        scorer = scorers.setdefault(rows, Scorer(model, batch_size=rows))
        texts = [prompt.tokens for prompt in prompts]
        return scorer.generate(texts, num_tokens, tokenizer, stop=[stop] * len(texts), vocab_size=tokenizer.vocab_size)

    return answer


def check_fit(plan: Plan, tasks: Sequence[Task], tokenizer: Tokenizer, haystack: Haystack) -> None:
    """Makes every prompt once.

    Raises:
      ValueError: a length is too short for a task. Nothing is ever cut off a prompt.
    """
    for task in tasks:
        for length in plan.lengths:
            for setting in plan.settings(task, length, tokenizer, haystack):
                task.make(setting)


def run_task(
    task: Task, plan: Plan, answer: Answer, tokenizer: Tokenizer, haystack: Haystack, *, batch_size: int = 8
) -> Iterator[tuple[Reading, list[Sample]]]:
    """Asks a model a task, one length after another.

    Args:
      task: the task.
      plan: lengths, depths and seeds.
      answer: gives the texts that follow prompts (`model_answers`).
      tokenizer: counts the tokens.
      haystack: the text in which tasks hide what they ask for.
      batch_size: prompts in memory at once.

    Yields:
      For each length, how the prompts were read, and the answers.

    Raises:
      ValueError: a length is too short for the task.
    """
    for length in plan.lengths:
        settings = list(plan.settings(task, length, tokenizer, haystack))
        samples: list[Sample] = []
        seconds = 0.0
        for start in range(0, len(settings), batch_size):
            some = settings[start : start + batch_size]
            prompts = [task.make(setting) for setting in some]
            begun = time.perf_counter()
            outputs = answer(prompts, task.num_tokens, task.stop)
            seconds += time.perf_counter() - begun
            samples += [
                Sample(task.name, length, setting.depth, setting.seed, len(prompt.tokens), prompt.answers, output,
                       task.score(prompt, output))
                for setting, prompt, output in zip(some, prompts, outputs, strict=True)
            ]  # fmt: skip
        tokens = sum(sample.prompt_tokens for sample in samples)
        yield Reading(task.name, length, tokens, seconds, peak_memory()), samples


def mean_scores(samples: Sequence[Sample]) -> dict[tuple[int, float | None], tuple[float, float]]:
    """(length, depth) → mean score and its standard error (NaN of a single sample). Of several depths, depth None is all of them."""
    groups: dict[tuple[int, float | None], list[float]] = {}
    for sample in samples:
        for depth in {sample.depth, None}:
            groups.setdefault((sample.length, depth), []).append(sample.score)
    return {key: (float(np.mean(scores)), _standard_error(scores)) for key, scores in groups.items()}


def _standard_error(scores: Sequence[float]) -> float:
    return float(np.std(scores, ddof=1) / math.sqrt(len(scores))) if len(scores) > 1 else math.nan


def peak_memory() -> int:
    """The largest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
