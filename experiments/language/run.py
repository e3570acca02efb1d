"""Tiny models of text with contexts of 1,024 tokens: held-out bits per byte by the position in the context.

    python -m experiments.language.run                                # every model, three seeds
    python -m experiments.language.run --only titans titans-grm       # some of them
    python -m experiments.language.run --text a.txt b.txt             # texts of your own
    python -m experiments.language.run --report                       # only the table and the plot of existing rows
    python -m experiments.language.run --size paper                   # prints the runs of a pod, their FLOPs and commands

Without --text the texts are Moby Dick and tinyshakespeare in `--texts-dir`, or the embedded text if they are not there. A row is a
line of `<out>/<name>.jsonl`: a short run of a model with a learning rate, or a whole run of a model and a seed at its best rate.
Finished rows are skipped, so the same command resumes a stopped one. All models have a first seed before any has a second. On a
machine with a GPU set JAX_PLATFORMS=cpu.
"""

import operator
import pathlib

from experiments import command
from experiments.language.compare import rates
from experiments.language.measure import BOOKS, SWEEP_SEED, Recipe, measure, sweep
from experiments.language.models import MODELS, model
from experiments.language.paper import plan
from experiments.language.report import write
from experiments.rows import Row, append_row, rows_of_recipe, text_identity, text_name

HERE = pathlib.Path(__file__).parent
TEXTS_DIR = HERE.parents[2] / "shared" / "data"
RATES = (1e-3, 3e-3, 1e-2)
key_of = operator.itemgetter("kind", "model", "seed", "learning_rate")


def texts_of(text: list[str] | None, texts_dir: pathlib.Path) -> tuple[str, tuple[str, ...]]:
    """The name of the texts and their files; no files for the embedded text.

    Raises:
      ValueError: a file is missing.
    """
    books = [texts_dir / name for name in BOOKS]
    if text is None:
        return ("books", tuple(map(str, books))) if all(book.is_file() for book in books) else ("embedded", ())
    for file in text:
        if not pathlib.Path(file).is_file():
            raise ValueError(f"--text {file}: no such file.")
    return text_name(text), tuple(text)


def main(argv: list[str] | None = None) -> None:
    parser = command.options(__doc__, HERE / "results")
    parser.add_argument("--size", choices=("small", "paper"), default="small")
    parser.add_argument("--only", nargs="+", metavar="MODEL", default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, counted from 0")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="learning rates of the short runs")
    parser.add_argument("--text", nargs="+", help="UTF-8 text files")
    parser.add_argument("--texts-dir", type=pathlib.Path, default=TEXTS_DIR)
    command.add_fields(parser, Recipe)
    options = parser.parse_args(argv)
    if options.size == "paper":
        print(plan())
        return
    try:
        command.check_seeds(options.seeds)
        if min(options.rates) <= 0:
            raise ValueError(f"--rates must be above 0, got {min(options.rates)}.")
        for chosen in options.only:
            model(chosen)  # fail on a wrong name before anything is trained
        name, texts = texts_of(options.text, options.texts_dir)
        recipe = command.recipe_of(Recipe, options, text=text_identity(options.text) if options.text else None)
        path = options.out / f"{name}.jsonl"
        rows = rows_of_recipe(path, recipe, key_of)
    except ValueError as error:
        parser.error(str(error))

    def keep(row: Row) -> None:
        rows[key_of(row)] = row
        append_row(path, row)

    failed = []
    for seed, chosen in [] if options.report else [(s, m) for s in range(options.seeds) for m in options.only]:
        for rate in options.rates:
            if ("rate", chosen, SWEEP_SEED, rate) not in rows:
                keep(sweep(chosen, rate, recipe, texts))
        best = rates(rows.values()).get(chosen)
        if best is None or ("run", chosen, seed, best) in rows:
            continue
        try:
            keep(row := measure(chosen, seed, best, recipe, texts))
        except FloatingPointError as error:  # one diverging model must not stop the others
            failed.append(f"{chosen}, seed {seed}")
            print(f"{chosen}, seed {seed} FAILED: {error}", flush=True)
            continue
        print(f"{chosen}, seed {seed}: {row['bits_per_byte']:.3f} bits per byte, {row['seconds']:.0f} s", flush=True)
    command.finish(path, rows, failed, write)


if __name__ == "__main__":
    main()
