"""`atlasjax evaluate --tasks` with long-context tasks."""

import dataclasses
import datetime
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from atlasjax import storage
from atlasjax.data.config import DataConfig
from atlasjax.data.prepared import load_tokens
from atlasjax.data.sources import embedded_documents, load_text
from atlasjax.evaluate.long_context import TASKS, Haystack, Plan, Result, Run, Task, figures, find, report
from atlasjax.evaluate.scoring import Scorer
from atlasjax.interop.text_ends import text_ends
from atlasjax.train.config import run_folder
from atlasjax.train.errors import ConfigError, user_errors
from atlasjax.train.evaluations import text_data
from atlasjax.train.load import LoadedRun, load_run

_UNITS = {"": 1, "k": 1024, "m": 1024**2}


@dataclasses.dataclass(frozen=True)
class LongContextOptions:
    """Options of long-context tasks."""

    lengths: tuple[str, ...] = ("1k", "2k", "4k", "8k")
    """Tokens of prompt and answer together: numbers, with k for 1,024 and m for 1,048,576."""
    depths: tuple[float, ...] = (0.0, 25.0, 50.0, 75.0, 100.0)
    """Where in the prompt the answer is, in percent: 0 is its beginning, 100 its end."""
    samples: int = 10
    """Prompts for each length and depth, or windows of text for each length."""
    seed: int = 0
    """Seed of the first prompt. The next ones have the numbers after it."""

    def plan(self) -> Plan:
        """What is asked. Raises ConfigError for a number out of range."""
        for name, least in (("samples", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it should be at least {least}.")
        for name in ("lengths", "depths"):
            if not getattr(self, name):
                raise ConfigError(f"--{name} needs at least one number.")
        for depth in self.depths:
            if not 0 <= depth <= 100:
                raise ConfigError(f"depths has {depth:g}; it should be in [0, 100].")
        depths = dict.fromkeys(depth / 100 for depth in self.depths)
        return Plan(tuple(dict.fromkeys(map(_length, self.lengths))), tuple(depths), self.samples, self.seed)


def _length(text: str) -> int:
    match = re.fullmatch(r"0*([1-9]\d*)([km]?)", text.lower())
    if match is None:
        raise ConfigError(f"lengths has {text!r}; it should be a number of tokens such as 4096 or 4k.")
    return int(match[1]) * _UNITS[match[2]]


def is_long_context(name: str) -> bool:
    """Whether a task is one of these: by its name, or "package.module:object". All others are those of lm-eval."""
    return name in TASKS or (":" in name and not name.endswith((".yaml", ".yml")))


def checked(names: Sequence[str], options: LongContextOptions) -> tuple[dict[str, Task], Plan]:
    """Tasks by name, and what they are asked. Raises ConfigError for an unknown name or a number out of range."""
    with user_errors():
        return {name: find(name) for name in names}, options.plan()


def run_long_context(
    run_dir: str, step: int | None, names: Sequence[str], options: LongContextOptions, *, text: tuple[str, ...], batch_size: int,
    log_samples: bool, ema: bool = False,
) -> None:  # fmt: skip
    """Runs tasks, prints their tables and saves the results.

    Args:
      run_dir, step: the run and its checkpoint. None: the newest usable one.
      names: of the tasks.
      options: what they are asked.
      text: text files or folders. Prompts hide their answers in this text, and its loss is measured. None given: the text that
        comes with the library, and the run's own held-out text.
      batch_size: rows read together.
      log_samples: saves the answers too.

    Raises:
      ConfigError: a length is too short for a task or too long for the model, there is too little text, or no run.
    """
    tasks, plan = checked(names, options)
    with user_errors():
        folder = run_folder(run_dir) / "evaluations"
    loaded = load_run(run_dir, step, ema=ema)
    for unusable, reason in loaded.skipped:
        print(f"atlasjax: the checkpoint of step {unusable} is unusable: {reason}", file=sys.stderr)
    results: list[Result] = []
    with user_errors():
        run = _run(run_dir, loaded, plan, text, batch_size, any(task.needs_text for task in tasks.values()))
        for task in tasks.values():
            task.check(plan, run.tokenizer, run.haystack, run.tokens)
        for name, task in tasks.items():
            print(f"{name}: {task.about}")
            for length in plan.lengths:
                results.append(task.result(run, length))
                print(f"  {report.line(results[-1])}", flush=True)
    print(
        f"{run_dir}, step {loaded.step}; samples: {plan.samples}, seed: {plan.seed}, batch_size: {run.reader.batch_size}"
    )
    print(report.table(results))
    about = {"run_dir": run_dir, "step": loaded.step, "text": list(text), **dataclasses.asdict(plan)}
    for name, content in _files(results, about, log_samples).items():
        folder.mkdir(parents=True, exist_ok=True)
        storage.write_whole(folder / name, content)
        print(f"results: {folder / name}")


def _run(run_dir: str, loaded: LoadedRun, plan: Plan, text: tuple[str, ...], batch_size: int, needs_text: bool) -> Run:
    loaded.model.check_length(max(plan.lengths), "lengths")
    data: DataConfig = text_data(loaded.config.data, text) if text else loaded.config.data
    haystack = Haystack(load_text(data, "validation") if text else "\n".join(embedded_documents().texts))
    tokens = load_tokens(data, loaded.tokenizer, "validation") if needs_text else np.zeros(0, np.int32)
    # No more rows than there are prompts: each costs time and memory.
    reader = Scorer(loaded.model, batch_size=min(batch_size, plan.samples * len(plan.depths)))
    return Run(plan, reader, loaded.tokenizer, haystack, tokens, text_ends(run_dir).ends)


def _files(results: list[Result], about: dict[str, Any], log_samples: bool) -> dict[str, bytes]:
    """long_context_<time>.json, <task>_<time>.png for each task, and samples_<task>_<time>.jsonl if asked for."""
    time = datetime.datetime.now().isoformat().replace(":", "-")
    dump = lambda value, indent=None: json.dumps(value, indent=indent, ensure_ascii=False)
    files = {f"long_context_{time}.json": dump({**about, "results": report.as_json(results)}, 2).encode()}
    for task in dict.fromkeys(result.task for result in results):
        own = [result for result in results if result.task == task]
        files[f"{task}_{time}.png"] = figures.draw(own)
        samples = [dump(dataclasses.asdict(sample)) + "\n" for result in own for sample in result.samples]
        if log_samples and samples:
            files[f"samples_{task}_{time}.jsonl"] = "".join(samples).encode()
    return files
