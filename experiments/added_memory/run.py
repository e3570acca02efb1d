"""Does a memory that is added to a trained Mamba-2 hybrid help, and does it keep helping as the context grows?

    JAX_PLATFORMS=cpu python -m experiments.added_memory.run                    # three seeds, the sources of Python's library
    JAX_PLATFORMS=cpu python -m experiments.added_memory.run --seeds 10         # seven more
    JAX_PLATFORMS=cpu python -m experiments.added_memory.run --text book.txt    # texts of your own
    python -m experiments.added_memory.run --report                             # only the table and the plot

A small Granite-4.0-H is trained, exported as public weights and imported again. From there every arm trains on, in each seed on the
same pages in the same order: with nothing added, with parameters alone, with a window, with cached states, with a deep memory.
A row is one arm of one seed. Finished rows are skipped, so the same command resumes; the weights and unfinished runs are in
`<out>/partial`.
"""

import operator
import pathlib
import shutil

from experiments import command
from experiments.added_memory import text
from experiments.added_memory.arms import ARMS, IMPORTED
from experiments.added_memory.measure import Recipe, Tests, make_public, measure, run_path
from experiments.added_memory.report import write
from experiments.rows import append_row, rows_of_recipe

HERE = pathlib.Path(__file__).parent
key_of = operator.itemgetter("seed", "arm")


def main(argv: list[str] | None = None) -> None:
    parser = command.options(__doc__, HERE / "results")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, counted from 0")
    parser.add_argument(
        "--only", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM", help=", ".join(ARMS)
    )
    parser.add_argument("--text", nargs="+", default=[], help="UTF-8 text files")
    command.add_fields(parser, Recipe)
    options = parser.parse_args(argv)
    try:
        command.check_seeds(options.seeds)
        name, identity = text.identity(options.text)
        recipe = command.recipe_of(Recipe, options, text=identity)
        training, held_out = text.split(options.text)
        Tests.of(recipe, held_out, 0)  # fail on sizes that do not fit before anything is trained
        path = options.out / f"{name}.jsonl"
        rows = rows_of_recipe(path, recipe, key_of)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    folder = options.out / "partial" / name
    for seed in [] if options.report else range(options.seeds):
        wanted = [arm for arm in (IMPORTED, *options.only) if (seed, arm) not in rows]
        if wanted:
            make_public(recipe, training, folder)
            tests = Tests.of(recipe, held_out, seed)
        for arm in wanted:
            rows[seed, arm] = row = measure(arm, seed, recipe, training, tests, folder)
            append_row(path, row)
            shutil.rmtree(run_path(folder, arm, seed), ignore_errors=True)
            beyond, spent = row["by_position"][str(recipe.length)], row["cpu_seconds"]
            print(
                f"seed {seed}, {arm}: {beyond:.3f} bits per byte from {recipe.length}, {spent:.0f} s of a core",
                flush=True,
            )
    if rows:
        print(write(list(rows.values()), path))


if __name__ == "__main__":
    main()
