"""Rows of the capacity experiment on seeds on which nothing was chosen.

    JAX_PLATFORMS=cpu python -m experiments.evidence.fresh                                 # every row that a condition predicts
    JAX_PLATFORMS=cpu python -m experiments.evidence.fresh --memories linear "deep 2" --passes 1

Each memory has the shapes and gates of its row in `../capacity/results/capacity.jsonl`, which tuning seeds chose, and reads the
pairs of seeds 10 to 19. So a row costs one set of gates, and not all that were tried. Rows are lines of `results/fresh.jsonl`, and
finished ones are skipped. They test the conditions of `experiments.evidence.conditions`, which were written from seeds 0 to 9.
"""

import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import command
from experiments.capacity.measure import draw, recalled_and_stored
from experiments.capacity.memories import MEMORIES, Shape, shapes
from experiments.capacity.run import key_of
from experiments.evidence.conditions import rows_wanted
from experiments.rows import Row, append_row, read_rows

HERE = pathlib.Path(__file__).parent
CAPACITY = HERE.parent / "capacity" / "results" / "capacity.jsonl"
SEEDS = tuple(range(10, 20))


@jax.jit(static_argnums=0)
def _compiled(shape: Shape, k: Any, v: Any, seeds: Any, gates: Any, pairs: Any, passes: Any) -> Any:
    """Fractions recalled, [pairs, seeds]: one set of gates for each number of pairs."""
    return jax.lax.map(
        lambda at: jax.vmap(lambda k, v, seed: recalled_and_stored(shape, at[0], passes, k, v, seed, at[1])[0])(
            k, v, seeds
        ),
        (pairs, gates),
    )


def replay(row: Row, seeds: Sequence[int] = SEEDS) -> list[list[float]]:
    """Fractions recalled with a row's shapes and gates on other seeds, [seeds][pairs]."""
    by_label = {shape.label: shape for shape in shapes(row["memory"], row["budget"] or None)}
    pairs, chosen = np.asarray(row["recipe"]["pairs"]), row["recalled_by"]
    labels = np.asarray([each["shape"] for each in chosen])
    optional = {"connector": 0.0, "erasing": 0.0, "global_step": 0.0}
    numbers = [optional | {n: x for n, x in each.items() if n != "shape"} for each in chosen]
    gates = {name: jnp.asarray([each[name] for each in numbers], jnp.float32) for name in numbers[0]}
    found = np.zeros((len(pairs), len(seeds)))
    for label in dict.fromkeys(labels):
        shape = by_label[label]
        drawn = [draw(row["keys"], shape.key_dim, pairs[-1], seed) for seed in seeds]
        k, v = (jnp.asarray(np.stack(part)) for part in zip(*drawn, strict=True))
        own = np.where(labels == label, pairs, 1)  # the others are another shape's: one pair, left out
        read = _compiled(shape, k, v, jnp.asarray(seeds), gates, jnp.asarray(own), jnp.asarray(row["passes"]))
        found = np.where((labels == label)[:, None], np.asarray(read), found)
    return np.round(found.T, 4).tolist()


def main(argv: list[str] | None = None) -> None:
    parser = command.options(__doc__, HERE / "results")
    parser.add_argument("--memories", nargs="+", metavar="MEMORY", default=list(MEMORIES))
    parser.add_argument("--passes", nargs="+", type=int, default=[1, 30])
    options = parser.parse_args(argv)
    path, wanted = options.out / "fresh.jsonl", rows_wanted()
    done = {key_of(row) for row in read_rows(path)}
    rows = [row for row in read_rows(CAPACITY) if key_of(row) in wanted - done]
    rows = [row for row in rows if row["memory"] in options.memories and row["passes"] in options.passes]
    cost: dict[tuple[str, int], float] = {}  # the kinds of keys and the passes of a memory share their compiled program
    for row in rows:
        group = row["memory"], row["budget"]
        cost[group] = max(cost.get(group, 0.0), row["seconds"] / row["tried"])
    for row in [] if options.report else sorted(rows, key=lambda r: (cost[r["memory"], r["budget"]], *key_of(r)[::-1])):
        started = time.process_time()
        recalled = replay(row)
        kept = {name: row[name] for name in ("keys", "budget", "passes", "memory", "floats")}
        recipe = {"pairs": row["recipe"]["pairs"], "first_seed": SEEDS[0], "seeds": len(SEEDS)}
        seconds = round(time.process_time() - started, 1)
        append_row(path, {**kept, "recalled": recalled, "processor_seconds": seconds, "recipe": recipe})
        print(f"{key_of(row)}: {seconds} processor seconds", flush=True)


if __name__ == "__main__":
    main()
