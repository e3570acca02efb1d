"""GAM's training recipe (G §4): GAM, its ablations, and the paper's Transformer and Mamba, trained in the same way on one text.

    python -m experiments.gam.train                                           # small models, the embedded text
    python -m experiments.gam.train --text input.txt                          # a text of your own
    python -m experiments.gam.train --size paper --models gam transformer mamba --text train.txt --validation-text valid.txt
    python -m experiments.gam.train --report                                  # only write the table and plot of existing rows

A byte-level BPE of 10,000 tokens trained on the training text, sequences of 256 tokens, AdamW with a peak of 3e-4, 100 steps of
warm-up, cosine decay to zero, β = (0.9, 0.95), decay 0.1, gradients clipped at norm 1, dropout 0.1, 5 epochs (G §4.1–4.3).

A run is stored in `<runs>/<text>-<size>/<model>` and resumes from its last checkpoint. A finished one is a line of
`<out>/<text>-<size>.jsonl` and is skipped. Table and plot are rewritten from these lines each time.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from typing import Any

from experiments import pages
from experiments.gam.models import MODELS, small
from experiments.rows import append_row, by_model, rows_of_recipe

HERE = pathlib.Path(__file__).parent
VOCABULARY, SEQUENCE_LENGTH = 10_000, 256


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings shared by all models of a table.

    Attributes:
      size: "paper" is width 512 with 6 layers, "small" width 128 with 4 layers.
      text: a text file. None means the embedded text.
      validation_text: the held-out text. None means a part of `text`.
      epochs: passes over the training text.
      steps: number of optimizer steps, instead of epochs.
      batch_size: sequences of 256 tokens per step.
      seed: seed of parameters, dropout and data order.
    """

    size: str = "small"
    text: str | None = None
    validation_text: str | None = None
    epochs: int = 5
    steps: int | None = None
    batch_size: int = 8
    seed: int = 0

    @property
    def name(self) -> str:
        """Name of the result files."""
        return f"{'embedded' if self.text is None else pathlib.Path(self.text).stem}-{self.size}"


def train_config(model: str, recipe: Recipe, runs: pathlib.Path) -> Any:
    """The run of one model as in `atlasjax train`. Trains the tokenizer of the text the first time.

    Raises:
      ValueError: the text has fewer tokens than one batch.
    """
    from atlasjax.data import DataConfig, load_documents, load_tokenizer, make_tokenizer
    from atlasjax.data.windows import token_stream
    from atlasjax.distributed import MeshConfig
    from atlasjax.train import OptimizerConfig, TrainConfig

    source: dict[str, Any] = {}
    if recipe.text is not None:
        validation = () if recipe.validation_text is None else (recipe.validation_text,)
        source = {"source": "text", "paths": (recipe.text,), "validation_paths": validation}
    sizes = {"sequence_length": SEQUENCE_LENGTH, "batch_size": recipe.batch_size, "seed": recipe.seed}
    data = DataConfig(**source, tokenizer=f"bpe:{VOCABULARY}", **sizes)
    shared = runs / recipe.name / "tokenizer"
    if not (shared / "tokenizer.json").exists():
        make_tokenizer(data).save(shared)
    tokenizer = load_tokenizer(shared)
    run_dir = runs / recipe.name / model
    tokenizer.save(run_dir / "tokenizer")  # a copy per run of the tokenizer trained once
    tokens = len(token_stream(load_documents(data, "train"), tokenizer, data.separator))
    epoch = (tokens - 1) // (SEQUENCE_LENGTH * recipe.batch_size)
    if not epoch:
        raise ValueError(
            f"the training text has {tokens} tokens; a batch of {recipe.batch_size} sequences needs more than "
            f"{SEQUENCE_LENGTH * recipe.batch_size}."
        )
    config = MODELS[model] if recipe.size == "paper" else small(MODELS[model])
    return TrainConfig(
        model=config, data=data, mesh=MeshConfig(data=-1 if recipe.size == "paper" else 1), seed=recipe.seed,
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100, final_fraction=0.0, weight_decay=0.1),
        steps=recipe.epochs * epoch if recipe.steps is None else recipe.steps, run_dir=str(run_dir), eval_every=epoch,
        eval_batches=None, checkpoint_every=epoch, log_every=10, tensorboard=False,
    )  # fmt: skip


def run_model(model: str, recipe: Recipe, runs: pathlib.Path) -> dict[str, Any]:
    """Trains one model, or resumes its training, and returns its row of the table."""
    from atlasjax.nn import count_parameters
    from atlasjax.train import train
    from atlasjax.train.reports import metrics

    config = train_config(model, recipe, runs)
    result = train(config)
    assert result.evaluation is not None
    records = metrics.read(pathlib.Path(config.run_dir) / "metrics.jsonl")
    return {
        "model": model,
        "parameters": count_parameters(config.model),
        "steps": config.steps,
        "perplexity": round(result.evaluation.perplexity, 2),
        "bits_per_byte": round(result.evaluation.bits_per_byte, 4),
        "curve": [[r["tokens_seen"], round(r["bits_per_byte"], 4)] for r in records if r["kind"] == "evaluation"],
        "recipe": dataclasses.asdict(recipe),
    }


def table(rows: list[dict[str, Any]], recipe: Recipe, command: str) -> str:
    """The results as a Markdown page, best first."""
    text = "the embedded text" if recipe.text is None else f"`{pathlib.Path(recipe.text).name}`"
    lines = [
        f"Generated by `{command}`: {text}, {rows[0]['steps']:,} steps of {recipe.batch_size} × {SEQUENCE_LENGTH} tokens, "
        f"seed {recipe.seed}. Held-out text; perplexity is per token of this text's own BPE.",
        "",
        "| model | parameters | bits per byte | perplexity |",
        "|---|---:|---:|---:|",
    ]
    for row in sorted(rows, key=lambda row: row["bits_per_byte"]):
        lines.append(
            f"| {row['model']} | {row['parameters']:,} | {row['bits_per_byte']:.3f} | {row['perplexity']:,.1f} |"
        )
    return "\n".join(lines) + "\n"


def plot(rows: list[dict[str, Any]], path: pathlib.Path, title: str) -> None:
    """Plots held-out bits per byte against training tokens, with one line per model."""
    figure = pages.figure(7, 4.5)
    axes = figure.subplots()
    for row in rows:
        axes.plot(*zip(*row["curve"], strict=True), marker="o", markersize=4, label=row["model"])
    axes.set_xlabel("training tokens")
    axes.set_ylabel("held-out bits per byte")
    axes.set_title(title)
    axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 5))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    """The command; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("small", "paper"), default=Recipe.size)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--text")
    parser.add_argument("--validation-text")
    parser.add_argument("--epochs", type=int, default=Recipe.epochs)
    parser.add_argument("--steps", type=int, help="optimizer steps instead of epochs")
    parser.add_argument("--batch-size", type=int, help="sequences per step: 32 as the paper, 8 for small models")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("runs/gam"))
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results")
    parser.add_argument("--report", action="store_true", help="train nothing, only write table and plot")
    options = parser.parse_args()
    from atlasjax.train import RunError

    if options.validation_text is not None and options.text is None:
        parser.error("--validation-text needs --text, the training text that belongs to it.")
    if options.batch_size is None:
        options.batch_size = 32 if options.size == "paper" else 8
    recipe = Recipe(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Recipe)})
    path = options.out / f"{recipe.name}.jsonl"
    rows = rows_of_recipe(path, recipe, by_model)
    for model in [] if options.report else [name for name in options.models if name not in rows]:
        print(f"{model}: training in {options.runs / recipe.name / model}", flush=True)
        try:
            rows[model] = run_model(model, recipe, options.runs)
        except (RunError, ValueError, FileNotFoundError) as error:  # errors whose messages are meant for the user
            sys.exit(f"{model}: {error}")
        append_row(path, rows[model])
        print(json.dumps({**rows[model], "curve": None, "recipe": None}), flush=True)
    if not rows:
        sys.exit(f"{path} has no rows yet.")
    command = " ".join(["python -m experiments.gam.train", *sys.argv[1:]]).replace(" --report", "")
    page = table(list(rows.values()), recipe, command)
    path.with_suffix(".md").write_text(page)
    plot(list(rows.values()), path.with_suffix(".png"), f"GAM's recipe on {recipe.name}")
    print(page)


if __name__ == "__main__":
    main()
