"""MAD: the accuracy of every family on six synthetic tasks.

    JAX_PLATFORMS=cpu python -m experiments.mad.run                                          # every model and task, three seeds
    JAX_PLATFORMS=cpu python -m experiments.mad.run --models attention atlas --tasks memorization --seeds 5
    python -m experiments.mad.run --report                                                   # only the table
    python -m experiments.mad.run --size paper                                               # prints the plan; --go runs it

Rows are lines of `<out>/<size>.jsonl`, one for each task, model, seed, rate and weight decay. All seeds and rates of a model
on a task train in one compiled program. Finished rows are skipped, so the same command resumes a stopped run.
"""

import argparse
import dataclasses
import pathlib
import time

from atlasjax.names import lookup
from experiments.mad.report import table
from experiments.mad.tasks import TASKS, Task
from experiments.recall.training import Sequences, Training, epochs, one_length
from experiments.rows import Row, append_rows, commands_of_paper, rows_of_recipe

HERE = pathlib.Path(__file__).parent
SETTINGS = ("width", "steps", "batch_size", "test_sequences")
Key = tuple[str, str, int, float, float]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings shared by all models and tasks of a table.

    Attributes:
      width: of the residual stream.
      convolutions: the layout of the models (`models.model`).
      steps: number of optimizer steps.
      batch_size: sequences per step. Training sequences repeat after the benchmark's number of them.
      test_sequences: number of test sequences.
    """

    width: int = 32
    convolutions: bool = True
    steps: int = 400
    batch_size: int = 32
    test_sequences: int = 320

    def __post_init__(self) -> None:
        for name in SETTINGS:
            if getattr(self, name) < 1:
                raise ValueError(f"MAD: {name} must be at least 1, got {getattr(self, name)}.")


# "paper": MAD's own baseline setting, 200 epochs of 12,800 sequences. Grids: learning rates, and weight decays.
SIZES = {"small": Recipe(), "paper": Recipe(128, False, 20_000, 128, 1280)}
GRIDS = {"small": ((3e-3, 1e-2), (0.1,)), "paper": ((1e-4, 5e-4, 1e-3), (0.0, 0.1))}


@dataclasses.dataclass(frozen=True)
class Work:
    """A task as `train` takes it."""

    task: Task
    recipe: Recipe

    @property
    def length(self) -> int:
        return self.task.time

    @property
    def steps(self) -> int:
        """MAD's tasks have the same number of epochs, so the one with few sequences has fewer steps in the paper's setting."""
        epochs = self.recipe.steps * self.recipe.batch_size / 12_800
        if epochs <= 1:
            return self.recipe.steps
        return max(1, round(epochs * self.task.train_sequences / self.recipe.batch_size))

    @property
    def batch_size(self) -> int:
        return self.recipe.batch_size

    def training(self, seed: int) -> Training:
        """The batches of a seed: all sequences, shuffled anew in each epoch."""
        shown = self.steps * self.batch_size
        count = min(shown, self.task.train_sequences)
        return one_length(self.task.sequences(count, seed), epochs(shown, count, seed), self.batch_size)

    def tests(self, seed: int) -> dict[int, Sequences]:
        return {self.length: self.task.sequences(self.recipe.test_sequences, seed, "test")}


def key_of(row: Row) -> Key:
    return row["task"], row["model"], row["seed"], row["learning_rate"], row["weight_decay"]


def measure(task: str, name: str, recipe: Recipe, runs: list[tuple[int, float]], decay: float) -> list[Row]:
    """The rows of a model's runs on a task."""
    from atlasjax.nn.abstract import count_parameters, state_bytes
    from experiments.mad.models import macro_accuracy, model, network
    from experiments.recall.training import train

    work, started = Work(TASKS[task], recipe), time.perf_counter()
    config = model(name, recipe.width, work.task.vocab_size, convolutions=recipe.convolutions)

    def say(step: int, loss: float) -> None:
        if step % 200 == 0 or step == work.steps:
            spent = time.perf_counter() - started
            print(f"[{spent:5.0f} s] {task}, {name}: step {step}/{work.steps}, best loss {loss:.3f}", flush=True)

    net = network(config, work.length, decodes_last=work.task.decodes_last)
    found = train(net, work, runs, say, decay=decay, score=macro_accuracy)
    sizes = {
        "parameters": count_parameters(config),
        "state_floats": state_bytes(config, length=work.length) // 4,
    }
    return [
        {"task": task, "model": name, "seed": seed, "learning_rate": rate, "weight_decay": decay, **result, **sizes,
         "recipe": dataclasses.asdict(recipe)}
        for (seed, rate), result in zip(runs, found, strict=True)
    ]  # fmt: skip


def plan(tasks: list[str], models: list[str], recipe: Recipe, runs: int, out: str, seeds: int) -> str:
    """What the runs would take: parameters, floats of state and training FLOPs (three times the forward pass)."""
    from atlasjax.nn.abstract import count_parameters, state_bytes
    from experiments.mad.models import model
    from experiments.mqar.run import forward_flops

    lines = [
        f"{len(models)} models × {len(tasks)} tasks × {runs} runs (seeds × rates × decays) = "
        f"{len(models) * len(tasks) * runs:,} runs of up to {recipe.steps:,} steps of {recipe.batch_size} sequences.",
        f"{'task':20} {'model':12} {'parameters':>11} {'state floats':>12} {'PFLOP per run':>13}",
    ]
    total = 0.0
    for task in tasks:
        work = Work(TASKS[task], recipe)
        for name in models:
            config = model(name, recipe.width, work.task.vocab_size, convolutions=recipe.convolutions)
            body, head = forward_flops(config, work.length)
            flops = 3 * (body + work.length * head) * work.steps * work.batch_size
            total += flops * runs
            state = state_bytes(config, length=work.length) // 4
            lines.append(f"{task:20} {name:12} {count_parameters(config):11,} {state:12,} {flops / 1e15:13.3f}")
    lines += [
        f"Together {total / 1e15:,.0f} PFLOP: {total / 40e12 / 3600:,.0f} hours of one accelerator at 40 TFLOP/s.",
        *commands_of_paper(f"python -m experiments.mad.run --size paper --go --seeds {seeds}", models, out),
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    from experiments.mad.models import MODELS, model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--go", action="store_true", help="with --size paper: run it, do not only print the plan")
    parser.add_argument("--models", nargs="+", metavar="MODEL", default=list(MODELS))
    parser.add_argument("--tasks", nargs="+", metavar="TASK", default=list(TASKS))
    parser.add_argument("--rates", nargs="+", type=float, metavar="RATE")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, counted from 0")
    parser.add_argument("--width", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--test-sequences", type=int)
    parser.add_argument("--no-convolutions", action="store_true", help="with --size small: MAD's own layout of layers")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results")
    parser.add_argument("--report", action="store_true", help="train nothing, only write the table")
    options = parser.parse_args(argv)
    rates, decays = GRIDS[options.size]
    rates = tuple(options.rates or rates)
    changed = {n: getattr(options, n) for n in SETTINGS if getattr(options, n) is not None}
    try:
        if options.seeds < 1:
            raise ValueError(f"--seeds must be at least 1, got {options.seeds}.")
        recipe = dataclasses.replace(SIZES[options.size], **changed)
        if options.no_convolutions:
            recipe = dataclasses.replace(recipe, convolutions=False)
        for name in options.tasks:
            lookup("MAD task", name, TASKS)
        for name in options.models:
            model(name, recipe.width, 16, convolutions=recipe.convolutions)  # fail before anything is trained
    except ValueError as error:
        parser.error(str(error))
    if options.size == "paper" and not options.go and not options.report:
        runs = options.seeds * len(rates) * len(decays)
        print(plan(options.tasks, options.models, recipe, runs, str(options.out), options.seeds))
        return
    path = options.out / f"{options.size}.jsonl"
    rows = rows_of_recipe(path, recipe, key_of)
    grid = [(task, name, decay) for task in options.tasks for name in options.models for decay in decays]
    for task, name, decay in [] if options.report else grid:
        wanted = [(seed, rate) for seed in range(options.seeds) for rate in rates]
        missing = [run for run in wanted if (task, name, *run, decay) not in rows]
        if missing:
            found = measure(task, name, recipe, missing, decay)
            append_rows(path, found)
            rows |= {key_of(row): row for row in found}
    if rows:
        text = table(list(rows.values()))
        path.with_suffix(".md").write_text(text)
        print(text)


if __name__ == "__main__":
    main()
