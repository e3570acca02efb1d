"""How the loss of tiny models falls with their size, their context in training, and the window of the Omega rule (A Fig. 8 and 5).

    JAX_PLATFORMS=cpu python -m experiments.scaling.run                        # every case, one seed
    JAX_PLATFORMS=cpu python -m experiments.scaling.run --only atlas titans    # some models
    python -m experiments.scaling.run --report                                 # only the table and the plot of existing rows

All cases read the same number of tokens, from the texts of `experiments.language`, at the rate that was the best of three there for
each of these models. A row is a line of `<out>/<texts>.jsonl`; finished rows are skipped, so the same command resumes.
"""

import dataclasses
import pathlib
import time

from atlasjax.nn import ModelConfig
from atlasjax.presets import has_memory
from experiments import command
from experiments.language import models
from experiments.language.measure import Recipe as LanguageRecipe
from experiments.language.measure import held_out, run_config
from experiments.language.run import TEXTS_DIR, texts_of
from experiments.rows import Row, at_least_one, rows_of_recipe, text_identity
from experiments.scaling.report import write
from experiments.studies.measure import sums
from experiments.zoo import training

HERE = pathlib.Path(__file__).parent
MODELS = ("titans", "omeganet", "atlas", "gated-deltanet", "transformer++")
WIDTHS = (32, 64, 96, 128)
CONTEXTS = (128, 512, 2048)
WINDOWS = (1, 16, 64)  # beside the 4 of the preset
MIDDLE = 512  # the context of all sizes
RATE = 3e-3
TRAINING_PASSES = 3  # forward passes that a step costs


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings shared by all rows of a file.

    Attributes:
      steps: optimizer steps.
      tokens: of a step, in as many sequences as the context allows.
      text: names and hash of the texts (`rows.text_identity`). None: the books of --texts-dir, or the embedded text.
    """

    steps: int = 192
    tokens: int = 2048
    text: str | None = None

    def __post_init__(self) -> None:
        at_least_one(self, "scaling", ("steps", "tokens"))
        if self.tokens % max(CONTEXTS):
            raise ValueError(f"scaling: tokens must be a multiple of {max(CONTEXTS)}, got {self.tokens}.")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its width, its context in training, and the window of its Omega rule (None: as in its preset)."""

    model: str
    width: int = max(WIDTHS)
    context: int = MIDDLE
    window: int | None = None
    seed: int = 0


def cases(only: tuple[str, ...] = MODELS, seeds: int = 1) -> list[Case]:
    """The cases of both figures, each once; all of a seed before the next."""
    found = {
        **{Case(name, width): None for width in WIDTHS[::-1] for name in only},
        **{Case(name, context=context): None for context in CONTEXTS for name in only},
        **{
            Case("omeganet", context=context, window=c): None
            for c in WINDOWS
            for context in CONTEXTS
            if "omeganet" in only
        },
    }
    return [dataclasses.replace(case, seed=seed) for seed in range(seeds) for case in found]


def config_of(case: Case) -> ModelConfig:
    """The tiny model of the language experiment at a width, with as many heads and layers; its heads and feed-forward networks
    are narrower in proportion."""
    config = models.model(case.model, case.context)
    assert config.mlp_dim is not None  # the tiny presets have one
    config = dataclasses.replace(config, dim=case.width, mlp_dim=config.mlp_dim * case.width // config.dim)
    if case.window is not None:
        config = dataclasses.replace(config, memory=dataclasses.replace(config.memory, window=case.window))
    return config


def measure(case: Case, recipe: Recipe, texts: tuple[str, ...]) -> Row:
    """Trains a case and tests it on all held-out text, in contexts as long as in training, each from an empty state.

    Returns:
      The row: the fields of the case, the numbers of `training.train`, bits_per_byte, parameters, flops (of all steps: three
      forward passes each, without what is computed again), c (the window that the memory has, or None), seconds, recipe.

    Raises:
      FloatingPointError: the loss of a step is not finite.
    """
    started = time.perf_counter()
    config, batch_size = config_of(case), recipe.tokens // case.context
    language = LanguageRecipe(steps=recipe.steps, batch_size=batch_size, length=case.context, bin=case.context)
    run = run_config(config, language, texts, seed=case.seed, rate=RATE, steps=recipe.steps)
    result, params = training.train(run, progress=name_of(case))
    bits, tokens = sums(config, params, held_out(run.data, case.context, language), case.context)
    layers, head = command.forward_flops(config, case.context)
    forward = batch_size * (layers + case.context * head)
    return {
        **dataclasses.asdict(case),
        **result,
        "bits_per_byte": round(float(bits.sum() / tokens.sum()), 4),
        "parameters": command.sizes(config, case.context)["parameters"],
        "flops": TRAINING_PASSES * recipe.steps * forward,
        "c": getattr(config.memory.build(), "window", None) if has_memory(config) else None,
        "seconds": round(time.perf_counter() - started, 1),
        "recipe": dataclasses.asdict(recipe),
    }


def key_of(row: Row) -> Case:
    return Case(**{field.name: row[field.name] for field in dataclasses.fields(Case)})


def name_of(case: Case) -> str:
    window = "" if case.window is None else f", c = {case.window}"
    return f"{case.model}, width {case.width}, context {case.context}{window}, seed {case.seed}"


def main(argv: list[str] | None = None) -> None:
    parser = command.options(__doc__, HERE / "results")
    parser.add_argument("--only", nargs="+", metavar="MODEL", default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds, counted from 0")
    parser.add_argument("--text", nargs="+", help="UTF-8 text files")
    parser.add_argument("--texts-dir", type=pathlib.Path, default=TEXTS_DIR)
    command.add_fields(parser, Recipe)
    options = parser.parse_args(argv)
    try:
        command.check_seeds(options.seeds)
        wanted = cases(tuple(options.only), options.seeds)
        for case in wanted:
            config_of(case)  # fail on a wrong name before anything is trained
        name, texts = texts_of(options.text, options.texts_dir)
        recipe = command.recipe_of(Recipe, options, text=text_identity(options.text) if options.text else None)
        path = options.out / f"{name}.jsonl"
        rows = rows_of_recipe(path, recipe, key_of)
    except ValueError as error:
        parser.error(str(error))
    todo = {} if options.report else {case: name_of(case) for case in wanted if case not in rows}
    failed = command.measure_each(path, rows, todo, lambda case: measure(case, recipe, texts))
    command.finish(path, rows, failed, write)


if __name__ == "__main__":
    main()
