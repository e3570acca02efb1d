"""`atlasjax evaluate --tasks` with long-context tasks."""

import dataclasses
import datetime
import hashlib
import json
import math
from collections.abc import Sequence

import numpy as np

import atlasjax
from atlasjax import json_text, storage
from atlasjax.cli.options.evaluate import LongContextOptions
from atlasjax.data.config import DataConfig
from atlasjax.data.prepared import load_tokens
from atlasjax.data.sources import embedded_documents, load_text
from atlasjax.evaluate.long_context import TASKS, Haystack, Plan, Result, Run, Task, figures, find, joined, report
from atlasjax.evaluate.scoring import Scorer
from atlasjax.generate.room import check_room
from atlasjax.interop.text_ends import text_ends
from atlasjax.machine import check_fits, machine_memory
from atlasjax.train.config import run_folder
from atlasjax.train.errors import user_errors
from atlasjax.train.load import LoadedRun

_BYTES_OF_TOKEN = 16  # at least, of its text and its id while a prompt is made


def is_long_context(name: str) -> bool:
    """Whether a task is one of these: by its name, or "package.module:object". All others are tasks of lm-eval."""
    return name in TASKS or (":" in name and not name.endswith((".yaml", ".yml")))


def checked(names: Sequence[str], options: LongContextOptions) -> tuple[dict[str, Task], Plan]:
    """Tasks by name, and what they are asked. Raises ConfigError for an unknown name or a number out of range."""
    with user_errors():
        return {name: find(name) for name in names}, Plan(*options.numbers(), options.samples, options.seed)


@dataclasses.dataclass(frozen=True)
class LongContext:
    """Tasks that are ready to run: every prompt was made once.

    Attributes:
      run: what they are run on.
      tasks: by name.
      folder: of the results.
      about: what was asked, as values of JSON.
      text_sha256: of the texts in `run`.
    """

    run: Run
    tasks: dict[str, Task]
    folder: storage.AnyPath
    about: dict[str, object]
    text_sha256: str


def prepare_long_context(
    run_dir: str, loaded: LoadedRun, names: Sequence[str], options: LongContextOptions, *, text: DataConfig | None,
    batch_size: int, ema: bool = False,
) -> LongContext:  # fmt: skip
    """Reads the texts and makes every prompt once.

    Args:
      run_dir, loaded, ema: the run, and which of its parameters were loaded.
      names: of the tasks.
      options: what they are asked.
      text: prompts hide their answers in this text, and its loss is measured. None: the text that comes with the library, and the
        run's own held-out text.
      batch_size: rows read together.

    Raises:
      ConfigError: a length is too short for a task or too long for the model, or there is too little text.
    """
    tasks, plan = checked(names, options)
    needs_text = any(task.needs_text for task in tasks.values())
    with user_errors():
        loaded.model.check_length(max(plan.lengths), "lengths")
        check_room(loaded.model, ("batch_size", batch_size), ("lengths", max(plan.lengths)))
        check_fits("lengths", max(plan.lengths), 0, _BYTES_OF_TOKEN, machine_memory(), "one prompt")
        data = text or loaded.config.data
        words = load_text(text, "validation") if text else "\n".join(embedded_documents().texts)
        nothing = np.zeros((2, 0), np.int32)
        tokens, sizes = load_tokens(data, loaded.tokenizer, "validation") if needs_text else nothing
        if not needs_text:  # no more rows than a cell fills: each costs time and memory
            batch_size = math.ceil(plan.samples / math.ceil(plan.samples / batch_size))
        reader = Scorer(loaded.model, batch_size=batch_size)
        run = Run(plan, reader, loaded.tokenizer, Haystack(words), tokens, text_ends(run_dir).ends, sizes)
        for task in tasks.values():
            task.check(plan, run.tokenizer, run.haystack, run.tokens)
        folder = run_folder(run_dir) / "evaluations"
    about = {
        "run_dir": run_dir,
        "step": loaded.step,
        "ema": ema,
        "text": list(text.paths) if text else [],
        **dataclasses.asdict(plan),
    }
    digest = hashlib.sha256(words.encode() + tokens.tobytes()).hexdigest()
    return LongContext(run, tasks, folder, about, digest)


def run_long_context(ready: LongContext, *, log_samples: bool) -> None:
    """Runs tasks, prints their tables and saves the results. log_samples: saves the answers too.

    Each cell (a task, a length, a depth) is saved as soon as it is finished. If the command is interrupted, the same command goes
    on after the last one.

    Raises:
      ConfigError: the saved cells cannot be read.
    """
    run, plan = ready.run, ready.run.plan
    with user_errors():
        cells = _Cells(ready)
    if cells.found:
        print(f"going on after {cells.found} cells of an interrupted command, in {cells.file}")
    results: list[Result] = []
    with user_errors():
        for name, task in ready.tasks.items():
            print(f"{name}: {task.about}")
            for length in plan.lengths:
                parts = []
                for depth in task.depths(plan):
                    part = cells.get(name, length, depth)
                    if part is None:
                        part = task.result(run, length, depth)
                        cells.add(name, depth, part)
                    parts.append(part)
                results.append(joined(parts))
                print(f"  {report.line(results[-1])}", flush=True)
    about = ready.about
    print(
        f"{about['run_dir']}, step {about['step']}; samples: {plan.samples}, seed: {plan.seed}, batch_size: {run.reader.batch_size}"
    )
    print(report.table(results))
    for file, content in _files(results, about, log_samples).items():
        storage.write_whole(ready.folder / file, content)
        print(f"results: {ready.folder / file}")
    cells.remove()


class _Cells:
    """The finished cells of one command in a file: JSON lines, of which the first says what was asked.

    Raises:
      ValueError: the file is damaged.
    """

    def __init__(self, ready: LongContext):
        asked = {name: value for name, value in ready.about.items() if name not in ("run_dir", "text")}
        asked |= {"tasks": list(ready.tasks), "text_sha256": ready.text_sha256, "atlasjax": atlasjax.__version__}
        first = json.dumps(asked, sort_keys=True)
        digest = hashlib.sha256(first.encode()).hexdigest()[:12]
        self.file: storage.AnyPath = ready.folder / f"long_context_unfinished_{digest}.jsonl"
        self._lines, self._results = [first], {}
        if not self.file.is_file():
            ready.folder.mkdir(parents=True, exist_ok=True)
            return
        try:
            # Not `splitlines`: answers may have other characters that end a line.
            for line in self.file.read_bytes().decode().removesuffix("\n").split("\n")[1:]:
                name, depth, fields = json_text.parse(line, "a line")
                self._results[name, fields["length"], depth] = report.of_json(fields)
                self._lines.append(line)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{str(self.file)!r} is damaged; remove it to begin anew ({error}).") from None

    @property
    def found(self) -> int:
        return len(self._results)

    def get(self, name: str, length: int, depth: float | None) -> Result | None:
        return self._results.get((name, length, depth))

    def add(self, name: str, depth: float | None, result: Result) -> None:
        self._results[name, result.length, depth] = result
        self._lines.append(json.dumps([name, depth, report.as_json(result, samples=True)], ensure_ascii=False))
        storage.write_whole(self.file, "".join(f"{line}\n" for line in self._lines).encode())

    def remove(self) -> None:
        self.file.unlink()


def _files(results: list[Result], about: dict[str, object], log_samples: bool) -> dict[str, bytes]:
    """long_context_<time>.json, <task>_<time>.png for each task, and samples_<task>_<time>.jsonl if asked for."""
    time = datetime.datetime.now().isoformat().replace(":", "-")
    dump = lambda value, indent=None: json.dumps(value, indent=indent, ensure_ascii=False)
    files = {
        f"long_context_{time}.json": dump(
            {**about, "results": [report.as_json(result) for result in results]}, 2
        ).encode()
    }
    for task in dict.fromkeys(result.task for result in results):
        own = [result for result in results if result.task == task]
        files[f"{task}_{time}.png"] = figures.draw(own)
        samples = [dump(dataclasses.asdict(sample)) + "\n" for result in own for sample in result.samples]
        if log_samples and samples:
            files[f"samples_{task}_{time}.jsonl"] = "".join(samples).encode()
    return files
