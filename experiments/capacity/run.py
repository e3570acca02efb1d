"""How many key–value pairs a memory of given floats holds and reads back (ATLAS, Propositions 1 and 2, Theorem 1).

    JAX_PLATFORMS=cpu python -m experiments.capacity.run                                   # every row
    JAX_PLATFORMS=cpu python -m experiments.capacity.run --memories linear "deep 2" --passes 1
    JAX_PLATFORMS=cpu python -m experiments.capacity.run --budgets 4096 --keys independent --out runs/capacity
    JAX_PLATFORMS=cpu python -m experiments.capacity.run --report                          # only the table and the plots

A budget of 0 means keys of 16 numbers and a memory of any size. Rows are lines of `<out>/capacity.jsonl`, one for each kind of
keys, budget, number of passes and memory. Finished rows are skipped, so the same command resumes a stopped run.
"""

import dataclasses
import itertools
import operator
import pathlib
import time

import numpy as np

from atlasjax.names import lookup
from experiments import command
from experiments.capacity.measure import KEYS, Recipe, read_back
from experiments.capacity.memories import MEMORIES, floats, rates, shapes
from experiments.capacity.report import write
from experiments.rows import Row, append_row, rows_of_recipe

HERE = pathlib.Path(__file__).parent
BUDGETS = (1024, 0, 256)
PASSES = (1, 30)
Key = tuple[str, int, int, str]
key_of = operator.itemgetter("keys", "budget", "passes", "memory")


def measure(keys: str, budget: int, passes: int, name: str, recipe: Recipe) -> Row:
    """One row. For each number of pairs, shape and gates are those that are best on the tuning seeds."""
    started = time.perf_counter()
    spec, tried = MEMORIES[name], shapes(name, budget or None)
    gates = [rates(spec, shape) for shape in tried]
    seeds = [*range(recipe.seeds), *range(1000, 1000 + recipe.tuning_seeds)]
    found = [
        read_back(shape, keys, passes, g, seeds, recipe.pairs) for shape, g in zip(tried, gates, strict=True)
    ]  # each [gates, seeds, pairs], twice
    labels = [(shape, g) for shape, group in zip(tried, gates, strict=True) for g in group]
    row: Row = {"keys": keys, "budget": budget, "passes": passes, "memory": name}
    for part, criterion in enumerate(("recalled", "stored")):
        fractions = np.concatenate([each[part] for each in found])
        best = fractions[:, recipe.seeds :].mean(1).argmax(0)  # [pairs]
        reported = fractions[best, : recipe.seeds, np.arange(len(recipe.pairs))]  # [pairs, seeds]
        row[criterion] = np.round(reported.T.astype(float), 4).tolist()
        row[f"{criterion}_by"] = [
            {"shape": labels[i][0].label, **{n: float(f"{x:.3g}") for n, x in labels[i][1].items()}} for i in best
        ]
    row["floats"] = max(floats(shape, pairs=recipe.pairs[-1]) for shape in tried)
    row["weights"] = max(floats(shape, free=True) for shape in tried)
    row["tried"] = len(labels)
    row["seconds"] = round(time.perf_counter() - started, 1)
    return {**row, "recipe": dataclasses.asdict(recipe)}


def _order(key: Key) -> tuple[bool, bool]:
    """One pass first, and Muon's many passes, which take most of the time, last."""
    _, _, passes, name = key
    return passes > 1, passes > 1 and MEMORIES[name].optimizer == "muon"


def main(argv: list[str] | None = None) -> None:
    parser = command.options(__doc__, HERE / "results")
    parser.add_argument("--memories", nargs="+", metavar="MEMORY", default=list(MEMORIES))
    parser.add_argument("--keys", nargs="+", metavar="KIND", default=list(KEYS))
    parser.add_argument("--budgets", nargs="+", type=int, metavar="FLOATS", default=list(BUDGETS))
    parser.add_argument("--passes", nargs="+", type=int, default=list(PASSES))
    parser.add_argument("--seeds", type=int, default=Recipe.seeds, help="reported seeds, counted from 0")
    parser.add_argument("--tuning-seeds", type=int, default=Recipe.tuning_seeds)
    parser.add_argument("--pairs", nargs="+", type=int, default=Recipe().pairs, help="numbers of pairs")
    options = parser.parse_args(argv)
    try:
        recipe = command.recipe_of(Recipe, options)
        for name in options.memories:
            lookup("memory", name, MEMORIES)
        for name in options.keys:
            lookup("keys", name, KEYS)
        if min(options.passes) < 1 or min(options.budgets) < 0:
            raise ValueError("--passes must be at least 1, and --budgets at least 0.")
        wanted = itertools.product(options.keys, options.budgets, options.passes, options.memories)
        # A memory's keys come one after another, because they share their compiled programs.
        wanted = sorted(wanted, key=lambda k: (_order(k), options.budgets.index(k[1]), options.memories.index(k[3])))
        for budget, name in itertools.product(options.budgets, options.memories):
            if not shapes(name, budget or None):
                print(f"Left out: memory {name!r} has no size within {budget} floats.")
        wanted = [key for key in wanted if shapes(key[3], key[1] or None)]
        # Segments would hold the same pairs again in every pass, which is not a longer memory.
        cached = [name for name in options.memories if MEMORIES[name].caching]
        if cached and max(options.passes) > 1:
            print(f"Left out with more than one pass, because they read each pair once: {'; '.join(cached)}.")
        wanted = [key for key in wanted if key[2] == 1 or not MEMORIES[key[3]].caching]
    except ValueError as error:
        parser.error(str(error))
    path = options.out / "capacity.jsonl"
    rows = rows_of_recipe(path, recipe, key_of)
    for key in [] if options.report else wanted:
        if key in rows:
            continue
        row = rows[key] = measure(*key, recipe)
        append_row(path, row)
        at = recipe.pairs.index(64) if 64 in recipe.pairs else -1
        mean = np.mean([seed[at] for seed in row["recalled"]])
        print(f"{key}: {mean:.2f} of {recipe.pairs[at]} pairs recalled, {row['seconds']:.0f} s", flush=True)
    if rows:
        print(write(list(rows.values()), options.out))


if __name__ == "__main__":
    main()
