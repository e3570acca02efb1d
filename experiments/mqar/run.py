"""MQAR as Zoology defines it: accuracy against floats of state and against the number of pairs, for every family.

    JAX_PLATFORMS=cpu python -m experiments.mqar.run                                     # every model at width 16
    JAX_PLATFORMS=cpu python -m experiments.mqar.run --models attention titans --widths 32 64
    JAX_PLATFORMS=cpu python -m experiments.mqar.run --size long                         # 2,000 steps and higher rates
    JAX_PLATFORMS=cpu python -m experiments.mqar.run --report                            # only the table and the plots
    python -m experiments.mqar.run --size paper                                          # prints the plan; --go runs it

Rows are lines of `<out>/<size>.jsonl`, one for each model, width, seed and learning rate. All runs of a model and width train in
one compiled program. Finished rows are skipped, so the same command resumes a stopped run, model by model.
"""

import argparse
import dataclasses
import pathlib
import time
from typing import Any

import numpy as np

from atlasjax.data.associative_recall import RecallConfig, recall_sequences
from experiments.mqar.models import MODELS, model
from experiments.mqar.report import write
from experiments.recall.training import Sequences
from experiments.rows import Row, append_rows, commands_of_paper, rows_of_recipe

HERE = pathlib.Path(__file__).parent
Key = tuple[str, int, int, float]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings shared by all models of a table.

    Attributes:
      vocab_size, length: V and L of the task, padded with zeros.
      pairs: numbers of pairs. Each sequence has one of them, equally often, and each has its own test.
      steps: number of optimizer steps.
      batch_size: sequences per step.
      sequences: number of training sequences, which repeat. None: no sequence is seen twice.
      test_sequences: for each number of pairs.
    """

    vocab_size: int = 128
    length: int = 64
    pairs: list[int] = dataclasses.field(default_factory=lambda: [4, 8, 16])
    steps: int = 600
    batch_size: int = 32
    sequences: int | None = None
    test_sequences: int = 300

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "test_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"MQAR: {name} must be at least 1, got {getattr(self, name)}.")
        if not self.pairs:
            raise ValueError("MQAR: needs at least one number of pairs.")
        for pairs in self.pairs:
            self._task(pairs)

    def _task(self, pairs: int) -> RecallConfig:
        return RecallConfig(vocab_size=self.vocab_size, length=self.length, num_pairs=pairs)

    def training(self, seed: int) -> Sequences:
        """All sequences of a seed in the order of training: an equal share of each number of pairs, shuffled."""
        shown = self.steps * self.batch_size
        count = min(shown, self.sequences or shown)
        sizes = [count // len(self.pairs) + (i < count % len(self.pairs)) for i in range(len(self.pairs))]
        parts = [recall_sequences(self._task(n), size, seed) for n, size in zip(self.pairs, sizes, strict=True) if size]
        tokens, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
        rng = np.random.default_rng(seed)
        order = np.concatenate([rng.permutation(count) for _ in range(-(-shown // count))])[:shown]
        return tokens[order], labels[order]

    def tests(self, seed: int) -> dict[int, Sequences]:
        """Test sequences by number of pairs."""
        return {n: recall_sequences(self._task(n), self.test_sequences, seed, split="test") for n in self.pairs}


# "long": the models of "small" still improve after 600 steps, and their best rate is the highest.
# "paper": the setting of the replicated figures of Mamba-2 and Log-Linear Mamba-2, 100,000 sequences and 32 epochs.
SIZES = {
    "small": Recipe(),
    "long": Recipe(steps=2000),
    "paper": Recipe(8192, 256, [4, 8, 16, 32, 64], 100_000 * 32 // 256, 256, 100_000, 1000),
}
RATES = {"small": (1e-3, 3e-3, 1e-2), "long": (1e-2, 3e-2), "paper": (1e-3, 3e-3, 1e-2)}


def key_of(row: Row) -> Key:
    return row["model"], row["width"], row["seed"], row["learning_rate"]


def measure(name: str, width: int, recipe: Recipe, runs: list[tuple[int, float]]) -> list[Row]:
    """The rows of a model's runs at one width."""
    from atlasjax.nn.abstract import count_parameters, state_bytes
    from experiments.recall.training import train

    config, started = model(name, width, recipe.vocab_size), time.perf_counter()

    def say(step: int, loss: float) -> None:
        if step % 200 == 0 or step == recipe.steps:
            spent = time.perf_counter() - started
            print(
                f"[{spent:5.0f} s] {name}, width {width}: step {step}/{recipe.steps}, best loss {loss:.3f}", flush=True
            )

    found = train(config, recipe, runs, say)
    sizes = {
        "parameters": count_parameters(config),
        "state_floats": state_bytes(config, length=recipe.length) // 4,
    }
    return [
        {"model": name, "width": width, "seed": seed, "learning_rate": rate, **result, **sizes,
         "recipe": dataclasses.asdict(recipe)}
        for (seed, rate), result in zip(runs, found, strict=True)
    ]  # fmt: skip


def plan(names: list[str], widths: list[int], rates: list[float], seeds: int, recipe: Recipe, out: str) -> str:
    """What the runs would take: parameters, floats of state and training FLOPs (three times the forward pass)."""
    from atlasjax.nn.abstract import count_parameters, state_bytes

    tokens = recipe.steps * recipe.batch_size * recipe.length
    command = f"python -m experiments.mqar.run --size paper --go --widths {' '.join(map(str, widths))} --seeds {seeds}"
    lines = [
        f"{tokens / 1e6:,.0f} million tokens per run; {len(names)} models × {len(widths)} widths × {seeds} seeds × {len(rates)} "
        f"rates = {len(names) * len(widths) * seeds * len(rates):,} runs.",
        f"{'model':24} {'width':>5} {'parameters':>11} {'state floats':>12} {'PFLOP per run':>13}",
    ]
    total = 0.0
    for name in names:
        for width in widths:
            config = model(name, width, recipe.vocab_size)
            flops = 3 * forward_flops(config, recipe.length) / recipe.length * tokens
            total += flops * seeds * len(rates)
            state = state_bytes(config, length=recipe.length) // 4
            lines.append(f"{name:24} {width:5} {count_parameters(config):11,} {state:12,} {flops / 1e15:13.2f}")
    lines += [
        f"Together {total / 1e15:,.0f} PFLOP: {total / 40e12 / 3600:,.0f} hours of one accelerator at 40 TFLOP/s.",
        *commands_of_paper(command, names, out),
    ]
    return "\n".join(lines)


def forward_flops(config: Any, length: int) -> int:
    """Of one sequence."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from atlasjax.flops import count_flops
    from atlasjax.nn.abstract import abstract_model

    graphdef, params = nnx.split(abstract_model(config), nnx.Param)
    return count_flops(lambda p, x: nnx.merge(graphdef, p)(x), params, jax.ShapeDtypeStruct((1, length), jnp.int32))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--go", action="store_true", help="with --size paper: run it, do not only print the plan")
    parser.add_argument("--models", nargs="+", metavar="MODEL", default=list(MODELS))
    parser.add_argument("--widths", nargs="+", type=int, metavar="WIDTH", help="default: 16; paper: 16 32 64")
    parser.add_argument(
        "--rates", nargs="+", type=float, metavar="RATE", help="learning rates; the default depends on --size"
    )
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, counted from 0")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--test-sequences", type=int)
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results")
    parser.add_argument("--report", action="store_true", help="train nothing, only write the table and the plots")
    options = parser.parse_args(argv)
    rates = options.rates or list(RATES[options.size])
    widths = options.widths or ([16, 32, 64] if options.size == "paper" else [16])
    changed = {n: getattr(options, n) for n in ("steps", "batch_size", "test_sequences") if getattr(options, n)}
    try:
        if options.seeds < 1:
            raise ValueError(f"--seeds must be at least 1, got {options.seeds}.")
        recipe = dataclasses.replace(SIZES[options.size], **changed)
        for name in options.models:
            for width in widths:
                model(name, width, recipe.vocab_size)  # fail before anything is trained
    except ValueError as error:
        parser.error(str(error))
    if options.size == "paper" and not options.go and not options.report:
        print(plan(options.models, widths, rates, options.seeds, recipe, str(options.out)))
        return
    path = options.out / f"{options.size}.jsonl"
    rows = rows_of_recipe(path, recipe, key_of)
    for width in [] if options.report else widths:
        for name in options.models:
            wanted = [(seed, rate) for seed in range(options.seeds) for rate in rates]
            missing = [run for run in wanted if (name, width, *run) not in rows]
            if missing:
                found = measure(name, width, recipe, missing)
                append_rows(path, found)
                rows |= {key_of(row): row for row in found}
    if rows:
        print(write(list(rows.values()), path))


if __name__ == "__main__":
    main()
