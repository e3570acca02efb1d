"""ATLAS §6.4, Figure 6: which sequence mappings an MLP memory learns while it reads, and with which inner optimizer.

    python experiments/function_learning/run.py quick       # about a minute: is everything in place?
    python experiments/function_learning/run.py             # the run of README.md
    python experiments/function_learning/run.py wide        # more at d = 256: expansion 4, and Muon; an hour or two
    python experiments/function_learning/run.py full        # every shape and optimizer at d = 256; an accelerator's work

Each writes `results.jsonl`, `table.md` and one figure per width to `--out`: this folder, whose rows are on the page of evidence, or
runs/function_learning for `quick`. Rows in `results.jsonl` are not measured again, so the same command resumes a stopped run
(Ctrl-C), and a larger `--seeds` adds seeds.
"""

import argparse
import dataclasses
import math
import os
import pathlib
import sys
import time
from typing import Any

# When run as a script, Python searches only the folder of this file.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.function_learning.results import BLOCK, LAST, Row, Store
from experiments.rows import read_rows

HERE = pathlib.Path(__file__).resolve().parent
SETTINGS = ("low_rank", "mlp", "attention_mlp", "attention_as_input", "window_attention_mlp")
RATES = {
    "sgd": (0.01, 0.03, 0.1, 0.3, 1.0),
    "rmsprop": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    "adam": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    "muon": (3e-4, 1e-3, 3e-3, 1e-2),
}
SWEEP_SEED = 100  # never one of the reported seeds, which count from 0


@dataclasses.dataclass(frozen=True)
class Grid:
    """A part of a plan: all settings with these shapes and optimizers.

    Attributes:
      dim, length, rank, window: sizes of the mappings.
      shapes: (hidden layers, expansion) of the memories.
      optimizers: names of `RATES`.
      sweep_dim: width at which learning rates are chosen. None means `dim`.
    """

    dim: int
    length: int
    rank: int
    window: int
    shapes: tuple[tuple[int, int], ...]
    optimizers: tuple[str, ...]
    sweep_dim: int | None = None


_ELEMENTWISE = ("sgd", "rmsprop", "adam")
_SHAPES = ((2, 1), (3, 1), (2, 4), (3, 4))
PLANS = {
    "quick": (Grid(32, 512, 4, 64, ((2, 1),), tuple(RATES)),),
    "main": (
        Grid(256, 4096, 32, 512, ((2, 1), (3, 1)), _ELEMENTWISE),
        Grid(64, 4096, 8, 512, ((2, 1),), tuple(RATES)),
        Grid(32, 4096, 4, 512, _SHAPES, tuple(RATES)),
    ),
    "wide": (
        Grid(256, 4096, 32, 512, ((2, 4),), _ELEMENTWISE),
        # With Newton–Schulz of 256 × 256 matrices at each token, its sweep would take a CPU longer than everything else.
        Grid(256, 4096, 32, 512, ((2, 1),), ("muon",), sweep_dim=64),
    ),
    "full": (Grid(256, 4096, 32, 512, _SHAPES, tuple(RATES)),),
}


def sizes(grid: Grid, dim: int):
    from experiments.function_learning.mappings import Sizes

    # At another width the rank stays the same fraction of the width.
    return Sizes(dim, grid.length, max(1, grid.rank * dim // grid.dim), grid.window)


def losses(cell: Row, rates: list[float], seeds: list[int], say) -> list:
    """Losses, [tokens] each, of memories with the given rates and seeds. `cell` gives mapping, shape and optimizer."""
    import jax.numpy as jnp
    import numpy as np

    from experiments.function_learning import learner, mappings

    shape = mappings.Sizes(cell["dim"], cell["length"], cell["rank"], cell["window"])
    pairs = {seed: mappings.sample(cell["setting"], seed, shape) for seed in set(seeds)}
    inputs, outputs = (jnp.stack([pairs[seed][k] for seed in seeds]) for k in (0, 1))
    structure = learner.memory(cell["hidden_layers"], cell["expansion"])
    arguments = (structure, cell["optimizer"], jnp.asarray(rates), jnp.asarray(seeds), inputs, outputs)
    pieces = []
    for piece in learner.learn(*arguments):
        pieces.append(np.asarray(piece))
        say(sum(p.shape[1] for p in pieces) / cell["length"])
    return list(np.concatenate(pieces, axis=1))


def recent_mean_losses(setting: str, seed: int, shape) -> Any:
    """Losses [t − BLOCK] when the mean of the last `BLOCK` outputs is the prediction, a baseline that ignores the input."""
    import jax.numpy as jnp
    import numpy as np

    from experiments.function_learning import mappings

    _, o = mappings.sample(setting, seed, shape)
    sums = jnp.concatenate([jnp.zeros_like(o[:1]), jnp.cumsum(o, axis=0)])
    mean = (sums[BLOCK:-1] - sums[: -BLOCK - 1]) / BLOCK
    return np.asarray(jnp.sum((mean - o[BLOCK:]) ** 2, -1) / jnp.sum(o[BLOCK:] ** 2, -1))


def finite(x: float) -> float | None:
    """None for a diverged mean, because JSON has no NaN."""
    return float(f"{x:.5g}") if math.isfinite(x) else None


def measured(values) -> Row:
    curve = [finite(values[k : k + BLOCK].mean()) for k in range(0, len(values) - BLOCK + 1, BLOCK)]
    return {"last": finite(values[-LAST:].mean()), "curve": curve}


class Progress:
    def __init__(self) -> None:
        self.start = time.perf_counter()

    def __call__(self, what: str, share: float | None = None) -> None:
        """Prints one line per cell; on a terminal it is updated in place."""
        text = f"[{time.perf_counter() - self.start:6.0f} s] {what}"
        if share is None:
            print(f"\r{text}" if sys.stdout.isatty() else text, flush=True)
        elif sys.stdout.isatty():
            print(f"\r{text} {share:4.0%}", end="", flush=True)


def choose_rate(store: Store, cell: Row, report: Progress) -> float:
    """The rate with the lowest mean loss over the last tokens, with two hidden layers and a seed that is not reported.

    Raises:
      RuntimeError: every rate diverged.
    """
    cell = {**cell, "kind": "sweep", "hidden_layers": 2, "seed": SWEEP_SEED}
    trials = [{**cell, "learning_rate": rate} for rate in RATES[cell["optimizer"]]]
    missing = [row for row in trials if store.find(row) is None]
    name = f"sweep d={cell['dim']} {cell['expansion']}x {cell['setting']} {cell['optimizer']}"
    if missing:
        rates = [row["learning_rate"] for row in missing]
        values = losses(cell, rates, [SWEEP_SEED] * len(rates), lambda share: report(name, share))
        store.add([{**row, "last": measured(v)["last"]} for row, v in zip(missing, values, strict=True)])
    found = [(store.find(row)["last"], row["learning_rate"]) for row in trials]
    alive = [pair for pair in found if pair[0] is not None]
    if not alive:
        raise RuntimeError(f"{name}: every learning rate of {RATES[cell['optimizer']]} diverged.")
    best = min(alive)
    if missing:
        report(f"{name}: rate {best[1]:g}")
    return best[1]


def run_cell(store: Store, grid: Grid, setting: str, shape: tuple[int, int], optimizer: str, seeds, report) -> None:
    """Measures the missing rows of one setting, shape and optimizer."""
    mapping = dataclasses.asdict(sizes(grid, grid.dim))
    hidden_layers, expansion = shape
    memory = {"hidden_layers": hidden_layers, "expansion": expansion, "optimizer": optimizer}
    cell = {"kind": "run", **mapping, "setting": setting, **memory}
    missing = [seed for seed in seeds if store.find({**cell, "seed": seed}) is None]
    if not missing:
        return
    swept = dataclasses.asdict(sizes(grid, grid.sweep_dim or grid.dim))
    rate = choose_rate(store, {**cell, **swept}, report)
    name = f"d={grid.dim} {hidden_layers} hidden layers {expansion}x {setting} {optimizer}"
    values = losses(cell, [rate] * len(missing), missing, lambda share: report(name, share))
    rows = [{**cell, "seed": s, "learning_rate": rate, **measured(v)} for s, v in zip(missing, values, strict=True)]
    store.add(rows)
    report(f"{name}: last {LAST} " + " ".join("diverged" if r["last"] is None else f"{r['last']:.3f}" for r in rows))


def run_reference(store: Store, grid: Grid, setting: str, seeds) -> None:
    shape = sizes(grid, grid.dim)
    for seed in seeds:
        row = {"kind": "reference", **dataclasses.asdict(shape), "setting": setting, "seed": seed}
        if store.find(row) is None:
            store.add([{**row, **measured(recent_mean_losses(setting, seed, shape))}])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", nargs="?", default="main", choices=PLANS, help="what to measure (default: main)")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS, metavar="SETTING")
    parser.add_argument("--optimizers", nargs="+", choices=RATES, default=tuple(RATES), metavar="OPTIMIZER")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, counted from 0 (default: 3)")
    parser.add_argument(
        "--out", type=pathlib.Path, help="folder; default: this one, or runs/function_learning for quick"
    )
    parser.add_argument(
        "--report", action="store_true", help="only write table.md and the figures from the existing rows"
    )
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.seeds <= SWEEP_SEED:
        parser.error(f"--seeds must be from 1 to {SWEEP_SEED}, got {arguments.seeds}.")
    if arguments.out is None:
        arguments.out = pathlib.Path("runs/function_learning") if arguments.plan == "quick" else HERE
    results = arguments.out / "results.jsonl"
    if arguments.report and not read_rows(results):
        parser.error(f"--report: {results} has no rows. Give the --out of a run.")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.plan != "full":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    store = Store.open(arguments.out / "results.jsonl")
    report, seeds, stopped = Progress(), range(arguments.seeds), False
    try:
        for grid in () if arguments.report else PLANS[arguments.plan]:
            for setting in arguments.settings:
                run_reference(store, grid, setting, seeds)
                for shape in grid.shapes:
                    for optimizer in (name for name in grid.optimizers if name in arguments.optimizers):
                        run_cell(store, grid, setting, shape, optimizer, seeds, report)
    except KeyboardInterrupt:
        stopped = True
        print("\nstopped; the same command resumes from here.")
    from experiments.function_learning.report import write

    for path in write(store.rows, arguments.out):
        print(path)
    return 130 if stopped else 0


if __name__ == "__main__":
    sys.exit(main())
