"""Speed of training and of decoding against the length of the text, relative to Transformer++.

    python -m experiments.efficiency.run                                     # every model, 512 to 8,192 tokens
    python -m experiments.efficiency.run --only titans titans-grm            # some of them
    python -m experiments.efficiency.run --kinds decoding --lengths 16384    # one part, other lengths
    python -m experiments.efficiency.run --report                            # only the table and the plot of existing rows

A row is a line of `<out>/<platform>-<size>.jsonl`: a model, a length, and training or decoding. The model and Transformer++ are
timed in turn within a row, so that a shared machine slows both. Finished rows are skipped, so the same command resumes a stopped
one. It runs on the device that jax finds; on a machine with a GPU or TPU set JAX_PLATFORMS=cpu for the CPU.
"""

import operator
import pathlib

from experiments import command
from experiments.efficiency.measure import KINDS, MODELS, REFERENCE, Recipe, config_of, measure, program
from experiments.efficiency.report import write
from experiments.rows import append_row, rows_of_recipe

HERE = pathlib.Path(__file__).parent
LENGTHS = (512, 1024, 2048, 4096, 8192)


key_of = operator.itemgetter("kind", "model", "length")


def main(argv: list[str] | None = None) -> None:
    parser = command.options(__doc__, HERE / "results")
    parser.add_argument("--only", nargs="+", metavar="MODEL", default=list(MODELS), choices=MODELS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), help="tokens of the text")
    command.add_fields(parser, Recipe)
    options = parser.parse_args(argv)
    import jax

    try:
        if min(options.lengths) < 1:
            raise ValueError(f"--lengths must be at least 1, got {min(options.lengths)}.")
        recipe = command.recipe_of(Recipe, options)
        for name in (REFERENCE, *options.only):
            config_of(name, max(options.lengths), recipe)  # fail on a wrong size before anything is measured
        path = options.out / f"{jax.default_backend()}-{recipe.size}.jsonl"
        rows = rows_of_recipe(path, recipe, key_of)
    except ValueError as error:
        parser.error(str(error))
    for length, kind in [] if options.report else [(a, b) for a in options.lengths for b in options.kinds]:
        todo = [name for name in options.only if (kind, name, length) not in rows]
        reference = program(kind, REFERENCE, length, recipe) if todo else None
        for name in todo:
            assert reference is not None
            row = measure(kind, name, length, recipe, reference)
            rows[key_of(row)] = row
            append_row(path, row)
            print({key: value for key, value in row.items() if key != "recipe"}, flush=True)
    if rows:
        print(write(list(rows.values()), path))


if __name__ == "__main__":
    main()
