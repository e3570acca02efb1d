"""MAD: the accuracy of every family on six synthetic tasks.

    JAX_PLATFORMS=cpu python -m experiments.mad.run                                          # every model and task, three seeds
    JAX_PLATFORMS=cpu python -m experiments.mad.run --models attention atlas --tasks memorization --seeds 5
    python -m experiments.mad.run --report                                                   # only the table
    python -m experiments.mad.run --size paper                                               # prints the plan; --go runs it

Rows are lines of `<out>/<size>.jsonl`, one for each task, model, seed, rate and weight decay. All seeds and rates of a model
on a task train in one compiled program. Finished rows are skipped, so the same command resumes a stopped run.
"""

import dataclasses
import itertools
import operator
import pathlib

from atlasjax.names import lookup
from experiments import command
from experiments.mad.models import MODELS, macro_accuracy, model, network
from experiments.mad.report import write
from experiments.mad.tasks import TASKS, Task
from experiments.recall.training import Sequences, Training, epochs, one_length, train
from experiments.rows import Row, at_least_one

HERE = pathlib.Path(__file__).parent
SETTINGS = ("width", "steps", "batch_size", "test_sequences")


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
        at_least_one(self, "MAD", SETTINGS)


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


key_of = operator.itemgetter("task", "model", "seed", "learning_rate", "weight_decay")


def measure(task: str, name: str, recipe: Recipe, runs: list[command.Run], decay: float) -> list[Row]:
    """The rows of a model's runs on a task."""
    work = Work(TASKS[task], recipe)
    config = model(name, recipe.width, work.task.vocab_size, convolutions=recipe.convolutions)
    say = command.progress(f"{task}, {name}", work.steps)
    net = network(config, work.length, decodes_last=work.task.decodes_last)
    found = train(net, work, runs, say, decay=decay, score=macro_accuracy)
    fields = {"task": task, "model": name, "weight_decay": decay, **command.sizes(config, work.length)}
    return command.rows_of_runs(fields, runs, found, recipe)


def plan(tasks: list[str], models: list[str], recipe: Recipe, runs: int, out: str, seeds: int) -> str:
    """The cost of the runs, and their commands."""
    costs = {}
    for task, name in itertools.product(tasks, models):
        work = Work(TASKS[task], recipe)
        config = model(name, recipe.width, work.task.vocab_size, convolutions=recipe.convolutions)
        body, head = command.forward_flops(config, work.length)
        flops = 3 * (body + work.length * head) * work.steps * work.batch_size
        costs[f"{task}, {name}"] = command.sizes(config, work.length), flops
    first = (
        f"{len(models)} models × {len(tasks)} tasks × {runs} runs (seeds × rates × decays) = "
        f"{len(models) * len(tasks) * runs:,} runs of up to {recipe.steps:,} steps of {recipe.batch_size} sequences."
    )
    again = f"python -m experiments.mad.run --size paper --go --seeds {seeds}"
    return command.plan(first, costs, runs, again, models, out)


def main(argv: list[str] | None = None) -> None:
    parser = command.options(__doc__, HERE / "results")
    command.add_grid(parser, SIZES, MODELS, SETTINGS)
    parser.add_argument("--tasks", nargs="+", metavar="TASK", default=list(TASKS))
    parser.add_argument("--no-convolutions", action="store_true", help="with --size small: MAD's own layout of layers")
    options = parser.parse_args(argv)
    rates, decays = GRIDS[options.size]
    rates = tuple(options.rates or rates)
    try:
        command.check_seeds(options.seeds)
        recipe = command.changed(SIZES[options.size], options, SETTINGS)
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
    grid = itertools.product(options.tasks, options.models, decays)
    wanted = [{"task": task, "model": name, "weight_decay": decay} for task, name, decay in grid]
    of = lambda row, runs, _: measure(row["task"], row["model"], recipe, runs, row["weight_decay"])
    command.trained(options, options.size, recipe, key_of, wanted, rates, of, write)


if __name__ == "__main__":
    main()
