"""The rows: a small Granite-4.0-H is trained and exported, then imported by each arm, trained on and tested."""

import dataclasses
import itertools
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from atlasjax.data.config import DataConfig
from atlasjax.distributed.mesh import MeshConfig
from atlasjax.interop import checksums, export_weights, import_weights
from atlasjax.nn import ModelConfig
from atlasjax.presets import get_preset
from atlasjax.train import state as state_lib
from atlasjax.train.config import OptimizerConfig, TrainConfig
from atlasjax.train.initial import base_params
from atlasjax.train.load import load_run
from atlasjax.train.loop import train
from atlasjax.train.reports import metrics
from atlasjax.train.setup import prepare
from experiments import command
from experiments.added_memory import text
from experiments.added_memory.arms import ARMS, IMPORTED
from experiments.rows import Row, at_least_one

PRESET, FAMILY = "granite-h-tiny", "granitemoehybrid"
FIRST, PUBLIC = "first", "public"  # the run of the model that is exported, and the folder of its weights
SHORTEST = 64  # upper end of the first bucket of positions and distances


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings shared by all rows of a file.

    Attributes:
      steps: optimizer steps of the model that is exported.
      added_steps: further steps of every arm.
      batch_size: pages per step.
      length: bytes of a page, which is a training sequence.
      times: length of the tests, in pages.
      learning_rate, added_rate: peaks of AdamW's rate in both trainings.
      facts: names in a page that has facts, which is every second one.
      asked: names in a test of recall.
      windows: tests of text.
      needles: tests of recall.
      text: name and hash of the text.

    Raises:
      ValueError: a number is out of range.
    """

    steps: int = 1500
    added_steps: int = 60
    batch_size: int = 8
    length: int = 256
    times: int = 8
    learning_rate: float = 4e-3
    added_rate: float = 2e-3
    facts: int = 8
    asked: int = 16
    windows: int = 32
    needles: int = 32
    text: str = "library"

    def __post_init__(self) -> None:
        at_least_one(self, "added_memory", ("steps", "added_steps", "batch_size", "times", "windows", "needles"))
        if self.length % SHORTEST:
            raise ValueError(f"added_memory: length must be a multiple of {SHORTEST}, got {self.length}.")

    @property
    def edges(self) -> list[int]:
        """Ends of the buckets of positions and of distances: 0, 64, 128, … up to the length of the tests."""
        found = [0, SHORTEST]
        while found[-1] < self.length * self.times:
            found.append(min(2 * found[-1], self.length * self.times))
        return found


@dataclasses.dataclass(frozen=True)
class Tests:
    """The tests of a seed.

    Attributes:
      windows: uint8 [windows, length of tests + 1]; the same for all seeds.
      needles: uint8 [needles, length of tests].
      asked: see `text.needles`.
    """

    windows: np.ndarray
    needles: np.ndarray
    asked: np.ndarray

    @classmethod
    def of(cls, recipe: Recipe, held_out: np.ndarray, seed: int) -> "Tests":
        """Raises ValueError if the held-out text is too short, or no fact is near or none is far."""
        length = recipe.length * recipe.times
        tokens, asked = text.needles(held_out, recipe.needles, length, recipe.asked, seed)
        if not asked[..., 1].min() < recipe.length <= asked[..., 1].max():
            raise ValueError(f"added_memory: no fact is on one side of {recipe.length} bytes; give more needles.")
        return cls(text.windows(held_out, recipe.windows, length), tokens, asked)


def run_path(folder: pathlib.Path, name: str, seed: int) -> pathlib.Path:
    """Where the run of an arm is, or that of the model that is exported."""
    return folder / (name if name == FIRST else f"{name}-{seed}")


def run_config(recipe: Recipe, model: ModelConfig, folder: pathlib.Path, name: str, seed: int) -> TrainConfig:
    """The run as in `atlasjax train`: of the model that is exported, `FIRST`, or of an arm. Its pages are beside it."""
    first = name == FIRST
    run = run_path(folder, name, seed)
    steps, rate = (recipe.steps, recipe.learning_rate) if first else (recipe.added_steps, recipe.added_rate)
    return TrainConfig(
        model=model,
        data=DataConfig(
            source="text", paths=(f"{run}.txt",), validation_fraction=0.0, sequence_length=recipe.length,
            batch_size=recipe.batch_size, seed=seed,
        ),
        optimizer=OptimizerConfig(learning_rate=rate, warmup_steps=max(1, steps // 10)),
        mesh=MeshConfig(data=1), steps=steps, seed=seed, run_dir=str(run),
        init_from=None if first else str(folder / IMPORTED),
        eval_every=0, checkpoint_every=50, log_every=50, tensorboard=False,
    )  # fmt: skip


def write_pages(recipe: Recipe, training: np.ndarray, folder: pathlib.Path, name: str, seed: int) -> None:
    """Writes the pages of a run as its text."""
    first = name == FIRST
    count = recipe.batch_size * (recipe.steps if first else recipe.added_steps)
    pages = text.pages(training, count + 1, recipe.length, recipe.facts, seed, added=not first)
    folder.mkdir(parents=True, exist_ok=True)
    # One byte of the last page is the last target of the page before it.
    pathlib.Path(f"{run_path(folder, name, seed)}.txt").write_bytes(
        np.concatenate([*pages[:-1], pages[-1][:1]]).tobytes()
    )


def make_public(recipe: Recipe, training: np.ndarray, folder: pathlib.Path) -> None:
    """Trains a small Granite-4.0-H, exports it as transformers writes that family, and imports these files as a run.

    What is there already is not made again.
    """
    if (folder / IMPORTED).exists():
        return
    if not (folder / PUBLIC).exists():
        write_pages(recipe, training, folder, FIRST, 0)
        config = run_config(recipe, get_preset(PRESET), folder, FIRST, 0)
        train(config)
        written = export_weights(config.run_dir, folder / PUBLIC)
        assert written.family == FAMILY, written
    import_weights(folder / PUBLIC, folder / IMPORTED, tokenizer="byte")


Scores = Callable[[Any, np.ndarray], tuple[np.ndarray, np.ndarray]]


def scores(model: ModelConfig, batch: int = 4) -> Scores:
    """Parameters and tokens [n, time + 1] → (nats of each next token, whether it is the most likely one), [n, time]."""
    graphdef = state_lib.model_shapes(model)[0]

    @jax.jit
    def of_batch(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = state_lib.merge(graphdef, params)(tokens[:, :-1])
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return nats, logits.argmax(-1) == tokens[:, 1:]

    def of(params: Any, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens = tokens.astype(np.int32)
        starts = range(0, len(tokens), batch)
        # The last batch is filled with its first row: one program serves all.
        full = [np.concatenate([tokens[i : i + batch], np.repeat(tokens[i : i + 1], batch, 0)])[:batch] for i in starts]
        nats, right = zip(*(of_batch(params, one) for one in full), strict=True)
        return np.concatenate(nats)[: len(tokens)], np.concatenate(right)[: len(tokens)]

    return of


def tested(of: Scores, params: Any, tests: Tests, edges: list[int]) -> Row:
    """Bits per byte of text by the position in it, and recall by the distance of the fact.

    Returns:
      by_position: start of a bucket → bits per byte. by_distance: start of a bucket → share of right answers, or None if none was
      asked; asked: start of a bucket → number of questions.
    """
    nats, _ = of(params, tests.windows)
    _, right = of(params, np.concatenate([tests.needles, tests.needles[:, :1]], axis=1))
    place, distance = tests.asked[..., 0], tests.asked[..., 1]
    hits = np.take_along_axis(right, place - 1, axis=1)
    by_position, by_distance, asked = {}, {}, {}
    for start, end in itertools.pairwise(edges):
        here = (distance >= start) & (distance < end)
        by_position[str(start)] = round(float(nats[:, start:end].mean() / np.log(2)), 5)
        by_distance[str(start)] = round(float(hits[here].mean()), 4) if here.any() else None
        asked[str(start)] = int(here.sum())
    return {"by_position": by_position, "by_distance": by_distance, "asked": asked}


def measure(name: str, seed: int, recipe: Recipe, training: np.ndarray, tests: Tests, folder: pathlib.Path) -> Row:
    """The row of an arm, or of the imported model.

    Args:
      name: key of `ARMS`, or `IMPORTED`.
      seed, recipe, tests: of the row.
      training: the text of training.
      folder: has what `make_public` made.

    Returns:
      arm, seed, base: the beginning of the SHA-256 of the public weights, parameters, state_floats of a text as long as the tests,
      start_difference: the largest difference of a token's loss from the imported model before the first step, in nats, on tests of
      text, loss: of the last ten steps, in nats per token, the numbers of `tested`, cpu_seconds, recipe.
    """
    started = time.process_time()
    base = load_run(folder / IMPORTED)
    old = state_lib.pure(nnx.state(base.model, nnx.Param))
    digest = (folder / PUBLIC / checksums.FILE).read_text()[:16]
    model, row = base.config.model, {"arm": name, "seed": seed, "base": digest}
    if name == IMPORTED:
        of, params, more = scores(model), old, {"start_difference": 0.0, "loss": None}
    else:
        model = ARMS[name].added(model)
        write_pages(recipe, training, folder, name, seed)
        config = run_config(recipe, model, folder, name, seed)
        of = scores(model)
        new, _ = base_params(config, prepare(config).shardings.params)
        few = tests.windows[:4]
        difference = np.abs(of(new, few)[0] - scores(base.config.model)(old, few)[0]).max()
        result = train(config)
        params = result.state.params
        more = {"start_difference": float(difference), "loss": _last_loss(run_path(folder, name, seed))}
    return {
        **row, **command.sizes(model, recipe.length * recipe.times), **more, **tested(of, params, tests, recipe.edges),
        "cpu_seconds": round(time.process_time() - started, 1), "recipe": dataclasses.asdict(recipe),
    }  # fmt: skip


def _last_loss(run: pathlib.Path) -> float:
    losses = [record["loss"] for record in metrics.read(run / "metrics.jsonl") if record["kind"] == "train"]
    return round(float(np.mean(losses[-10:])), 4)
