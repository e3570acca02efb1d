"""The rows: one short run for each learning rate, and whole runs tested by the position in the context."""

import dataclasses
import time
from typing import Any

import numpy as np

from atlasjax.nn import ModelConfig
from experiments.language.models import LENGTH, model
from experiments.rows import Row, at_least_one
from experiments.studies.measure import Batch, sums
from experiments.zoo import training

TIMES = (1, 2, 4)  # contexts of the test, in contexts of training
SWEEP_SEED = 1000  # of the short runs, so that no seed of the whole runs has chosen its own rate
BOOKS = ("gutenberg_moby_dick/2701-0.txt", "tinyshakespeare/input.txt")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings shared by all rows of a file.

    Attributes:
      steps: optimizer steps of a whole run.
      sweep_steps: of a short run that tries a learning rate.
      batch_size: sequences per step.
      length: tokens (bytes) per sequence.
      bin: positions of the context that share a number.
      held_out: fraction of each text that is not trained on, its end.
      text: names and hash of the texts (`rows.text_identity`). None: the books of --texts-dir, or the embedded text.

    Raises:
      ValueError: a number is out of range.
    """

    steps: int = 1024
    sweep_steps: int = 256
    batch_size: int = 2
    length: int = LENGTH
    bin: int = 64
    held_out: float = 0.1
    text: str | None = None

    def __post_init__(self) -> None:
        at_least_one(self, "language", ("steps", "sweep_steps", "batch_size", "length", "bin"))
        if self.length % self.bin:
            raise ValueError(f"language: bin must divide length, got {self.bin} and {self.length}.")
        if not 0 < self.held_out <= 0.5:
            raise ValueError(f"language: held_out must be above 0 and at most 0.5, got {self.held_out}.")


def run_config(
    config: ModelConfig, recipe: Recipe, texts: tuple[str, ...], *, seed: int, rate: float, steps: int
) -> Any:
    """The run as in `atlasjax train`. texts: files; none: the embedded text, of which blocks of 4 KiB are held out."""
    run = training.train_config(
        config,
        training.Recipe(
            steps=steps, batch_size=recipe.batch_size, sequence_length=recipe.length, learning_rate=rate, seed=seed
        ),
    )
    source: dict[str, Any] = {"source": "text", "paths": texts, "held_out": "tail"} if texts else {}
    data = dataclasses.replace(run.data, validation_fraction=recipe.held_out, **source)
    return dataclasses.replace(run, data=data)


def sweep(name: str, rate: float, recipe: Recipe, texts: tuple[str, ...]) -> Row:
    """A short run with one learning rate. Its number is the training loss of its last ten steps: less than an epoch is read, so no
    step has seen its text before, and the held-out text has no part in the choice.

    Returns:
      The row: kind "rate", model, seed, learning_rate, loss in nats per byte (None if it diverged), recipe.
    """
    started = time.perf_counter()
    config = run_config(model(name, recipe.length), recipe, texts, seed=SWEEP_SEED, rate=rate, steps=recipe.sweep_steps)
    try:
        loss = training.train(config, progress=f"{name}, rate {rate:g}")[0]["final_training_loss"]
    except FloatingPointError:
        loss = None
    return {
        "kind": "rate", "model": name, "seed": SWEEP_SEED, "learning_rate": rate, "loss": loss,
        "seconds": round(time.perf_counter() - started, 1), "recipe": dataclasses.asdict(recipe),
    }  # fmt: skip


def measure(name: str, seed: int, rate: float, recipe: Recipe, texts: tuple[str, ...]) -> Row:
    """A whole run, tested on held-out text.

    Returns:
      The row: kind "run", model, seed, learning_rate, the numbers of `training.train` and of `tested`, parameters, recipe.

    Raises:
      FloatingPointError: the loss of a step is not finite.
    """
    from atlasjax.nn.abstract import count_parameters

    started = time.perf_counter()
    config = model(name, recipe.length)
    run = run_config(config, recipe, texts, seed=seed, rate=rate, steps=recipe.steps)
    result, params = training.train(run, progress=f"{name}, seed {seed}")
    return {
        "kind": "run", "model": name, "seed": seed, "learning_rate": rate,
        **result,
        **tested(config, params, run.data, recipe),
        "parameters": count_parameters(config),
        "seconds": round(time.perf_counter() - started, 1),
        "recipe": dataclasses.asdict(recipe),
    }  # fmt: skip


def tested(config: ModelConfig, params: Any, data: Any, recipe: Recipe) -> Row:
    """The loss on all held-out text, in windows of each length that are read from an empty state and do not overlap.

    Args:
      config, params: the model.
      data: the `DataConfig` of its run.
      recipe: has the length of training and the positions that share a number.

    Returns:
      held_out_tokens, bits_per_byte: of windows as long as in training. by_position: length of the windows → bits per byte of each
      bin of positions.
    """
    by_position, whole = {}, None
    for times in TIMES:
        length = times * recipe.length
        bits, tokens = sums(config, params, held_out(data, length, recipe), recipe.bin)
        by_position[str(length)] = [round(float(x), 4) for x in bits / tokens]
        whole = whole or {
            "held_out_tokens": int(tokens.sum()),
            "bits_per_byte": round(float(bits.sum() / tokens.sum()), 4),
        }
    return {**(whole or {}), "by_position": by_position}


def held_out(data: Any, length: int, recipe: Recipe) -> list[Batch]:
    """The held-out text in windows of a length, with as many tokens in a batch as in training if a window is not longer."""
    from atlasjax.data import make_pipeline
    from atlasjax.data.tokenizers import ByteTokenizer

    batch_size = max(1, recipe.batch_size * recipe.length // length)
    longer = dataclasses.replace(data, sequence_length=length, batch_size=batch_size)
    return [
        {name: np.asarray(batch[name]) for name in ("inputs", "targets", "weights")}
        for batch in make_pipeline(longer, ByteTokenizer(), "validation")
    ]
