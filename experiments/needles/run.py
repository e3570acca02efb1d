"""Needles in haystacks and questions about places: small models, trained here, and tested in texts up to eight times as long.

    JAX_PLATFORMS=cpu python -m experiments.needles.run                          # every model, three seeds
    JAX_PLATFORMS=cpu python -m experiments.needles.run --models attention titans titans-grm
    JAX_PLATFORMS=cpu python -m experiments.needles.run --size long              # 6,000 steps at one rate
    python -m experiments.needles.run --report                                   # only the table and the plot
    python -m experiments.needles.run --size paper                               # prints the plan; --go runs it

Rows are lines of `<out>/<size>.jsonl`, one for each model, seed and learning rate. All runs of a model train in one compiled
program. Finished rows are skipped, so the same command resumes a stopped run. A model that was stopped on the way goes on from a
copy of its state, which is written every five minutes.
"""

import dataclasses
import operator
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax.data.associative_recall import IGNORE
from atlasjax.nn.abstract import count_parameters, state_bytes
from experiments import command
from experiments.needles.models import MODELS, Variant, model, variants
from experiments.needles.report import write
from experiments.needles.tasks import TASKS, VOCAB_SIZE, Split
from experiments.recall.training import (
    Measure,
    Network,
    Sequences,
    Training,
    epochs,
    fit,
    language_model,
    last_loss,
    measurement,
    one_length,
    partial_path,
)
from experiments.rows import Row, at_least_one

HERE = pathlib.Path(__file__).parent
NUMBERS = ("width", "steps", "batch_size", "test_sequences")
Scores = dict[str, dict[str, float]]  # task → length → accuracy


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings shared by all models of a table.

    Attributes:
      width: of the residual stream.
      length: tokens of a training sequence.
      lengths: tokens of the test sequences, increasing.
      steps: number of optimizer steps.
      batch_size: sequences per step. Each task has an equal share of all, and no sequence is seen twice.
      test_sequences: for each task and length.

    Raises:
      ValueError: a number is below one, or a length is too short for the tasks.
    """

    width: int = 32
    length: int = 128
    lengths: list[int] = dataclasses.field(default_factory=lambda: [128, 256, 512, 1024])
    steps: int = 1500
    batch_size: int = 16
    test_sequences: int = 50

    def __post_init__(self) -> None:
        at_least_one(self, "needles", (*NUMBERS, "length"))
        if not self.lengths or self.lengths != sorted(set(self.lengths)):
            raise ValueError(f"needles: lengths must increase, got {self.lengths}.")
        for task in TASKS.values():
            for length in (self.length, self.lengths[0]):
                task.sequences(1, length, 0)

    def training(self, seed: int) -> Training:
        """The batches of a seed: an equal share of each task, shuffled; each sequence once."""
        count = self.steps * self.batch_size
        sizes = [count // len(TASKS) + (i < count % len(TASKS)) for i in range(len(TASKS))]
        parts = [
            task.sequences(size, self.length, seed) for task, size in zip(TASKS.values(), sizes, strict=True) if size
        ]
        tokens, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
        return one_length((tokens, labels), epochs(count, count, seed), self.batch_size)

    def tests(self, seed: int) -> dict[int, Sequences]:
        """Test sequences by length, of all tasks in turn: [tasks * test_sequences, length]."""
        split: Split = "test"
        return {
            length: tuple(  # type: ignore[misc]
                np.concatenate(part)
                for part in zip(
                    *(task.sequences(self.test_sequences, length, seed, split) for task in TASKS.values()), strict=True
                )
            )
            for length in self.lengths
        }


# "long": after 1,500 steps the loss of deep memories still falls. The lower rate of "small" is the better one for all its models.
# "paper": lengths of ATLAS's Table 3, for models of a width at which one accelerator takes an hour.
SIZES = {
    "small": Recipe(),
    "long": Recipe(steps=6000),
    "paper": Recipe(256, 2048, [2048, 4096, 8192, 16384], 20_000, 64, 500),
}
RATES = {"small": (3e-3, 1e-2), "long": (3e-3,), "paper": (3e-3, 1e-2)}


def answered(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The share of greedy answers that are right, for each task [tasks]: all labels of a sequence are the argmax of the logits.

    Args:
      logits: [tasks * n, time, vocab_size].
      labels: integers [tasks * n, time]; `IGNORE` where nothing is asked.
    """
    right = jnp.all((logits.argmax(-1) == labels) | (labels == IGNORE), axis=-1)
    return right.reshape(len(TASKS), -1).mean(-1)


key_of = operator.itemgetter("model", "seed", "learning_rate")


def measure(name: str, recipe: Recipe, runs: list[command.Run], partial: pathlib.Path | None = None) -> list[Row]:
    """The rows of a model's runs. `partial`: see `training.fit`."""
    config, started = model(name, recipe.width, VOCAB_SIZE), time.perf_counter()
    network = language_model(config)
    params, losses = fit(network, recipe, runs, command.progress(name, recipe.steps), partial=partial)
    tests = {seed: recipe.tests(seed) for seed in {seed for seed, _ in runs}}

    def scores(network: Network, lengths: list[int]) -> list[Scores]:
        """The scores of each run."""
        program: Measure = measurement(network, answered)
        found: list[Scores] = [{task: {} for task in TASKS} for _ in runs]
        for length in lengths:
            each = program(params, [tests[seed][length] for seed, _ in runs])  # [runs, tasks]
            for mine, of_run in zip(found, each, strict=True):
                for task, score in zip(TASKS, of_run, strict=True):
                    mine[task][str(length)] = round(float(score), 4)
        return found

    plain = scores(network, recipe.lengths)
    tested: list[tuple[Variant, list[Scores]]] = [
        (variant, scores(variant.network(config), recipe.lengths[:2])) for variant in variants(config)
    ]
    fields = {
        "model": name,
        "seconds_of_all": round(time.perf_counter() - started, 1),
        "parameters": count_parameters(config),
        "state_floats": {str(n): state_bytes(config, length=n) // 4 for n in recipe.lengths},
    }
    results = (
        {
            "loss": last_loss(losses[i]),
            "accuracy": round(float(np.mean([list(by.values()) for by in plain[i].values()])), 4),
            "scores": plain[i],
            "variants": [dataclasses.asdict(variant) | {"scores": found[i]} for variant, found in tested],
        }
        for i in range(len(runs))
    )
    return command.rows_of_runs(fields, runs, results, recipe)


def plan(models: list[str], rates: list[float], seeds: int, recipe: Recipe, out: str) -> str:
    """The cost of the runs, with the state after the longest text, and their commands."""
    tokens, runs = recipe.steps * recipe.batch_size * recipe.length, seeds * len(rates)
    costs = {}
    for name in models:
        config = model(name, recipe.width, VOCAB_SIZE)
        body, _ = command.forward_flops(config, recipe.length)  # the head reads only the answers
        costs[name] = command.sizes(config, recipe.lengths[-1]), 3 * body / recipe.length * tokens
    first = (
        f"{tokens / 1e6:,.0f} million tokens per run; {len(models)} models × {seeds} seeds × {len(rates)} rates = "
        f"{len(models) * runs:,} runs. States are those after {recipe.lengths[-1]:,} tokens."
    )
    again = f"python -m experiments.needles.run --size paper --go --seeds {seeds}"
    return command.plan(first, costs, runs, again, models, out)


def main(argv: list[str] | None = None) -> None:
    parser = command.options(__doc__, HERE / "results")
    command.add_grid(parser, SIZES, MODELS, NUMBERS)
    parser.add_argument("--lengths", nargs="+", type=int, metavar="TOKENS", help="of the tests")
    options = parser.parse_args(argv)
    rates = options.rates or list(RATES[options.size])
    try:
        command.check_seeds(options.seeds)
        recipe = command.changed(SIZES[options.size], options, (*NUMBERS, "lengths"))
        for name in options.models:
            model(name, recipe.width, VOCAB_SIZE)  # fail before anything is trained
    except ValueError as error:
        parser.error(str(error))
    if options.size == "paper" and not options.go and not options.report:
        print(plan(options.models, rates, options.seeds, recipe, str(options.out)))
        return
    wanted = [{"model": name} for name in options.models]
    of = lambda row, runs, kept: measure(row["model"], recipe, runs, kept)
    kept = lambda row, runs: partial_path(options.out, row["model"], recipe, runs)
    command.trained(options, options.size, recipe, key_of, wanted, rates, of, write, kept)


if __name__ == "__main__":
    main()
