"""MQAR as Zoology defines it: accuracy against floats of state and against the number of pairs, for every family.

    JAX_PLATFORMS=cpu python -m experiments.mqar.run                                     # every model at width 16
    JAX_PLATFORMS=cpu python -m experiments.mqar.run --models attention titans --widths 32 64
    JAX_PLATFORMS=cpu python -m experiments.mqar.run --size long                         # 2,000 steps and higher rates
    JAX_PLATFORMS=cpu python -m experiments.mqar.run --report                            # only the table and the plots
    python -m experiments.mqar.run --size paper                                          # prints the plan; --go runs it

Rows are lines of `<out>/<size>.jsonl`, one for each model, width, seed and learning rate. All runs of a model and width train in
one compiled program. Finished rows are skipped, so the same command resumes a stopped run. A model that was stopped on the way goes
on from a copy of its state, which is written every five minutes.
"""

import dataclasses
import itertools
import operator
import pathlib

import numpy as np

from atlasjax.data.associative_recall import Filler, RecallConfig, recall_sequences
from experiments import command
from experiments.mqar.models import MODELS, model
from experiments.mqar.report import write
from experiments.recall.training import Sequences, Training, epochs, one_length, partial_path, train
from experiments.rows import Row, at_least_one

HERE = pathlib.Path(__file__).parent
NUMBERS = ("steps", "batch_size", "test_sequences")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings shared by all models of a table.

    Attributes:
      vocab_size, length: V and L of the task. L is the longest if `lengths` are given.
      pairs: numbers of pairs. Each sequence has one of them, equally often, and each has its own test.
      steps: number of optimizer steps.
      batch_size: sequences per step.
      sequences: number of training sequences, which repeat. None: no sequence is seen twice.
      test_sequences: for each number of pairs.
      lengths: L of each number of pairs, which needs `sizes`. None: `length` for all.
      sizes: different training sequences of each number of pairs, which then has batches of its own, as in Zoology. None: a batch
        has all numbers of pairs.
      filler: the tokens between queries, see `RecallConfig`.
      test_lengths: L of each number of pairs in its test. None: that of training.
    """

    vocab_size: int = 128
    length: int = 64
    pairs: list[int] = dataclasses.field(default_factory=lambda: [4, 8, 16])
    steps: int = 600
    batch_size: int = 32
    sequences: int | None = None
    test_sequences: int = 300
    lengths: list[int] | None = None
    sizes: list[int] | None = None
    filler: Filler = "zeros"
    test_lengths: list[int] | None = None

    def __post_init__(self) -> None:
        at_least_one(self, "MQAR", NUMBERS)
        if not self.pairs:
            raise ValueError("MQAR: needs at least one number of pairs.")
        for name in ("lengths", "sizes", "test_lengths"):
            value = getattr(self, name)
            if value is not None and len(value) != len(self.pairs):
                raise ValueError(f"MQAR: {name} needs one number for each of {self.pairs} pairs, got {value}.")
        for pairs in self.pairs:
            self._task(pairs)
            self._task(pairs, self.test_lengths)
        if self.lengths is not None and self.sizes is None:
            raise ValueError(f"MQAR: lengths={self.lengths} need sizes: a batch has one length.")
        if self.sizes is not None and min(self.sizes) < self.batch_size:
            raise ValueError(f"MQAR: sizes must be at least batch_size={self.batch_size}, got {self.sizes}.")

    def _length(self, pairs: int) -> int:
        return self.length if self.lengths is None else self.lengths[self.pairs.index(pairs)]

    def _task(self, pairs: int, lengths: list[int] | None = None) -> RecallConfig:
        """The task of a number of pairs, with its own of `lengths`, or as in training."""
        length = self._length(pairs) if lengths is None else lengths[self.pairs.index(pairs)]
        return RecallConfig(vocab_size=self.vocab_size, length=length, num_pairs=pairs, filler=self.filler)

    def shown(self) -> tuple[int, int]:
        """Tokens and queries of a whole training."""
        sizes = self.sizes or [1] * len(self.pairs)
        each = self.steps * self.batch_size / sum(sizes)
        tokens = sum(size * self._length(n) for n, size in zip(self.pairs, sizes, strict=True))
        return round(each * tokens), round(each * sum(size * n for n, size in zip(self.pairs, sizes, strict=True)))

    def training(self, seed: int) -> Training:
        """The batches of a seed. With one length, an equal share of each number of pairs, shuffled anew in each epoch."""
        if self.sizes is not None:
            return self._cells(seed, self.sizes)
        shown = self.steps * self.batch_size
        count = min(shown, self.sequences or shown)
        sizes = [count // len(self.pairs) + (i < count % len(self.pairs)) for i in range(len(self.pairs))]
        parts = [recall_sequences(self._task(n), size, seed) for n, size in zip(self.pairs, sizes, strict=True) if size]
        tokens, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
        return one_length((tokens, labels), epochs(shown, count, seed), self.batch_size)

    def _cells(self, seed: int, sizes: list[int]) -> Training:
        """Each number of pairs has batches of its own. An epoch has all whole batches, in a random order that all seeds share.

        So all runs of a compiled program have the same length at each step.
        """
        parts = [recall_sequences(self._task(n), size, seed) for n, size in zip(self.pairs, sizes, strict=True)]
        rng, orders = np.random.default_rng(seed), np.random.default_rng(0)
        whole = [size // self.batch_size for size in sizes]
        chosen, rows = [], []
        for _ in range(-(-self.steps // sum(whole))):
            shuffled = [
                rng.permutation(size)[: n * self.batch_size].reshape(n, -1)
                for size, n in zip(sizes, whole, strict=True)
            ]
            order = orders.permutation(sum(whole))
            chosen.append(np.repeat(np.arange(len(sizes)), whole)[order])
            rows.append(np.concatenate(shuffled)[order])
        return Training(parts, np.concatenate(chosen)[: self.steps], np.concatenate(rows)[: self.steps])

    def tests(self, seed: int) -> dict[int, Sequences]:
        """Test sequences by number of pairs."""
        tasks = {n: self._task(n, self.test_lengths) for n in self.pairs}
        return {n: recall_sequences(task, self.test_sequences, seed, split="test") for n, task in tasks.items()}


# "long": the models of "small" still improve after 600 steps, and their best rate is the highest.
# "paper": Zoology's mixture, in which Mamba-2 and Log-Linear Mamba-2 have replicated figures. 32 epochs of 390 + 4 · 78 batches.
# "paper_zeros": the same with zeros between queries, and tests of the lengths of training.
_ZEROS = Recipe(
    8192, 256, [4, 8, 16, 32, 64], 32 * (390 + 4 * 78), 256, None, 1000, lengths=[64, 128, 256, 256, 256],
    sizes=[100_000, 20_000, 20_000, 20_000, 20_000],
)  # fmt: skip
SIZES = {
    "small": Recipe(),
    "long": Recipe(steps=2000),
    "paper": dataclasses.replace(_ZEROS, filler="random", test_lengths=[64, 64, 64, 128, 256]),
    "paper_zeros": _ZEROS,
}
PLANNED = ("paper", "paper_zeros")  # sizes that are run with --go only
_RATES = (1e-3, 3e-3, 1e-2)
RATES = {"small": _RATES, "long": (1e-2, 3e-2), "paper": _RATES, "paper_zeros": _RATES}


key_of = operator.itemgetter("model", "width", "seed", "learning_rate")


def measure(
    name: str, width: int, recipe: Recipe, runs: list[command.Run], partial: pathlib.Path | None = None
) -> list[Row]:
    """The rows of a model's runs at one width. `partial`: see `training.fit`."""
    config = model(name, width, recipe.vocab_size)
    found = train(config, recipe, runs, command.progress(f"{name}, width {width}", recipe.steps), partial=partial)
    fields = {"model": name, "width": width, **command.sizes(config, recipe.length)}
    return command.rows_of_runs(fields, runs, found, recipe)


def plan(
    size: str, names: list[str], widths: list[int], rates: list[float], seeds: int, recipe: Recipe, out: str
) -> str:
    """The cost of the runs, and their commands."""
    tokens, queries = recipe.shown()
    costs = {}
    for name, width in itertools.product(names, widths):
        config = model(name, width, recipe.vocab_size)
        body, head = command.forward_flops(config, recipe.length)
        flops = 3 * (body / recipe.length * tokens + head * queries)
        costs[f"{name}, width {width}"] = command.sizes(config, recipe.length), flops
    runs = seeds * len(rates)
    first = (
        f"{tokens / 1e6:,.0f} million tokens per run; {len(names)} models × {len(widths)} widths × {seeds} seeds × {len(rates)} "
        f"rates = {len(names) * len(widths) * runs:,} runs."
    )
    again = f"python -m experiments.mqar.run --size {size} --go --widths {' '.join(map(str, widths))} --seeds {seeds}"
    return command.plan(first, costs, runs, again, names, out, size)


def main(argv: list[str] | None = None) -> None:
    parser = command.options(__doc__, HERE / "results")
    command.add_grid(parser, SIZES, MODELS, NUMBERS, seeds=5, planned=PLANNED)
    parser.add_argument(
        "--widths", nargs="+", type=int, metavar="WIDTH", help="default: 16; of both paper sizes: 16 32 64"
    )
    options = parser.parse_args(argv)
    rates = options.rates or list(RATES[options.size])
    widths = options.widths or ([16, 32, 64] if options.size in PLANNED else [16])
    try:
        command.check_seeds(options.seeds)
        recipe = command.changed(SIZES[options.size], options, NUMBERS)
        for name in options.models:
            for width in widths:
                model(name, width, recipe.vocab_size)  # fail before anything is trained
    except ValueError as error:
        parser.error(str(error))
    if options.size in PLANNED and not options.go and not options.report:
        print(plan(options.size, options.models, widths, rates, options.seeds, recipe, str(options.out)))
        return
    wanted = [{"model": name, "width": width} for width in widths for name in options.models]
    of = lambda row, runs, kept: measure(row["model"], row["width"], recipe, runs, kept)
    kept = lambda row, runs: partial_path(options.out, f"{row['model']}-{row['width']}", recipe, runs)
    command.trained(options, options.size, recipe, key_of, wanted, rates, of, write, kept)


if __name__ == "__main__":
    main()
