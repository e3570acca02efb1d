"""Directions of Elastic Memory and Memory Caching on small models of text: samplings, sizes, corruption and gates.

    python -m experiments.studies.run                                   # every model, three seeds, the embedded text
    python -m experiments.studies.run --only block elastic-exp-1x       # some of them
    python -m experiments.studies.run --seeds 10                        # more seeds
    python -m experiments.studies.run --text input.txt                  # a text of your own, e.g. tinyshakespeare
    python -m experiments.studies.run --report                          # only the table and the plot of existing rows
    python -m experiments.studies.run --size paper                      # prints the papers' runs and their commands
    python -m experiments.studies.run --run-dir runs/elastic   # tests a run of `atlasjax train`: sampling and corruption

A row is a line of `<out>/<text>.jsonl`: a model and a seed. Finished rows are skipped, so the same command resumes a stopped one.
All models have a first seed before any has a second. On a machine with a GPU set JAX_PLATFORMS=cpu.
"""

import itertools
import json
import operator
import pathlib

from experiments import command
from experiments.rows import Row, rows_of_recipe, text_identity, text_name
from experiments.studies.measure import Recipe, measure, memory_layer, tested
from experiments.studies.models import MODELS, model
from experiments.studies.paper import plan
from experiments.studies.report import write

HERE = pathlib.Path(__file__).parent


key_of = operator.itemgetter("model", "seed")


def tests_of(run_dir: pathlib.Path, batches: int | None) -> Row:
    """`measure.tested` of a run with attention within blocks.

    Raises:
      ValueError: the run has other mixers, or packed documents.
    """
    from flax import nnx

    from atlasjax.data.pipeline import make_pipeline
    from atlasjax.train import state as state_lib
    from atlasjax.train.load import load_run

    run = load_run(run_dir)
    config = run.config.model
    place = memory_layer(config)
    if place is None:
        raise ValueError(f"{run_dir}: not all of its layers attend within blocks; its mixer is {config.mixer!r}.")
    if run.config.data.packing != "contiguous":
        raise ValueError(
            f"{run_dir}: its sequences are packed documents; the last block must have a past (data.packing)."
        )
    held_out = itertools.islice(make_pipeline(run.config.data, run.tokenizer, "validation"), batches)
    mixer = getattr(config, config.pattern[place])  # the config of a mixer has its name
    params = state_lib.pure(nnx.split(run.model, nnx.Param)[1])
    return tested(config, params, list(held_out), mixer.block_size)


def main(argv: list[str] | None = None) -> None:
    parser = command.options(__doc__, HERE / "results")
    parser.add_argument("--size", choices=("small", "paper"), default="small")
    parser.add_argument("--only", nargs="+", metavar="MODEL", default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, counted from 0")
    parser.add_argument("--text", help="a UTF-8 text file; without it the embedded text")
    command.add_fields(parser, Recipe, eval_batches="batches of held-out text; default: all of it")
    parser.add_argument("--run-dir", type=pathlib.Path, help="train nothing; test this run's elastic memory and print")
    options = parser.parse_args(argv)
    if options.size == "paper":
        print(plan())
        return
    try:
        if options.run_dir is not None:
            print(json.dumps(tests_of(options.run_dir, options.eval_batches), indent=1))
            return
        command.check_seeds(options.seeds)
        if options.text is not None and not pathlib.Path(options.text).is_file():
            raise ValueError(f"--text {options.text}: no such file.")
        for chosen in options.only:
            model(chosen)  # fail on a wrong name before anything is trained
        text = [] if options.text is None else [options.text]
        path = options.out / f"{text_name(text) if text else 'embedded'}.jsonl"
        recipe = command.recipe_of(Recipe, options, text=text_identity(text) if text else None)
        rows = rows_of_recipe(path, recipe, key_of)
    except ValueError as error:
        parser.error(str(error))
    wanted = [(chosen, seed) for seed in range(options.seeds) for chosen in options.only]
    todo = {} if options.report else {key: "{}, seed {}".format(*key) for key in wanted if key not in rows}
    failed = command.measure_each(path, rows, todo, lambda key: measure(*key, recipe, options.text))
    command.finish(path, rows, failed, write)


if __name__ == "__main__":
    main()
