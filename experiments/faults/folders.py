"""Damaged run folders: a run that stopped after four of six steps goes on, and is read, with one thing in its folder damaged."""

import contextlib
import functools
import io
import pathlib
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator

import jax
import numpy as np

from atlasjax.data import DataConfig
from atlasjax.distributed import MeshConfig
from atlasjax.nn import MemoryConfig, ModelConfig
from atlasjax.train import ConfigError, OptimizerConfig, RunError, TrainConfig, load_run, train
from atlasjax.train import state as state_lib
from experiments.faults import damage
from experiments.faults.run import Case

_FILES = ("metrics.jsonl", "config.json", "tokenizer/tokenizer.json", "tokenizer/bpe.json", "lock")
_IN_CHECKPOINT = (
    "position/data.json",
    "config/data.json",
    "integrity/data.json",
    "params/_METADATA",
    "_CHECKPOINT_METADATA",
)


def cases(seed: int, most: int | None = None) -> Iterator[Case]:
    """Each file of the folder damaged in each way, and folders; the run goes on in one case and is read in another."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        stopped = _config(folder, folder / "stopped", 4)
        with contextlib.redirect_stdout(io.StringIO()):
            train(stopped)
            whole = train(_config(folder, folder / "whole", 6))
        expected = {4: _params(load_run(stopped.run_dir)), 6: jax.device_get(whole.state.params)}
        expected[2] = _params(load_run(stopped.run_dir, step=2))
        every: list[tuple[str, Callable[[pathlib.Path], None]]] = [(kind.__name__, kind) for kind in _FOLDERS]
        for path in (*_FILES, *(f"checkpoints/4/{path}" for path in _IN_CHECKPOINT)):
            for kind in damage.FILE:
                every.append(
                    (f"{path} {kind.__name__}", functools.partial(_harm, kind, path, random.Random(rng.random())))
                )
        if most is not None:
            every = rng.sample(every, most)
        for name, harm in every:
            copy = functools.partial(_damaged, folder, harm)
            yield f"{name}, read", functools.partial(_read, copy, expected)
            if not name.startswith("checkpoints/4/") or "truncated" in name or "flipped" in name:
                yield (
                    f"{name}, gone on",
                    functools.partial(_gone_on, copy, _config(folder, folder / "copy", 6), expected),
                )


def _config(folder: pathlib.Path, run_dir: pathlib.Path, steps: int) -> TrainConfig:
    (folder / "text.txt").write_text("the memory learns while it reads, and forgets what it no longer needs. " * 60)
    memory = MemoryConfig(rule="linear_attention", chunk_size=8)
    return TrainConfig(
        model=ModelConfig(dim=16, num_layers=1, num_heads=2, mlp_dim=32, vocab_size=300, memory=memory, dtype="float32"),
        data=DataConfig(
            source="text", paths=(str(folder / "text.txt"),), tokenizer="bpe:300", sequence_length=16, batch_size=4
        ),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2, schedule="constant"),
        mesh=MeshConfig(1, 1, 1), steps=steps, run_dir=str(run_dir), eval_every=0, eval_batches=1, checkpoint_every=2,
        tensorboard=False,
    )  # fmt: skip


def _damaged(folder: pathlib.Path, harm: Callable[[pathlib.Path], None]) -> pathlib.Path:
    copy = damage.copied(folder / "stopped", folder / "copy")
    harm(copy)
    return copy


def _params(loaded) -> dict:
    return jax.device_get(state_lib.pure(_nnx_params(loaded.model)))


def _nnx_params(model):
    from flax import nnx

    return nnx.state(model, nnx.Param)


def _same(one, other) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def _read(copy: Callable[[], pathlib.Path], expected: dict[int, dict]) -> str:
    folder = copy()
    try:
        loaded = load_run(folder)
    except (ConfigError, RunError) as error:
        return _one_line(error)
    if not _same(_params(loaded), expected[loaded.step]):
        return "wrong"
    return "right" if loaded.step == 4 else "fell back"


def _gone_on(copy: Callable[[], pathlib.Path], config: TrainConfig, expected: dict[int, dict]) -> str:
    copy()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            result = train(config)
    except (ConfigError, RunError, OSError) as error:
        return _one_line(error)
    if not _same(jax.device_get(result.state.params), expected[6]):
        return "wrong"
    return "right" if result.resumed_from == 4 else "fell back"


def _one_line(error: Exception) -> str:
    return "refused" if len(str(error).splitlines()) == 1 else "traceback"


def _harm(kind: damage.Damage, path: str, rng: random.Random, folder: pathlib.Path) -> None:
    kind(folder / path, rng)


def _checkpoints_a_file(folder: pathlib.Path) -> None:
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").write_text("x")


def _checkpoints_elsewhere(folder: pathlib.Path) -> None:
    elsewhere = folder.parent / "elsewhere"
    shutil.rmtree(elsewhere, ignore_errors=True)
    (folder / "checkpoints").rename(elsewhere)
    (folder / "checkpoints").symlink_to(elsewhere)


def _no_tokenizer(folder: pathlib.Path) -> None:
    shutil.rmtree(folder / "tokenizer")


def _tokenizer_a_file(folder: pathlib.Path) -> None:
    shutil.rmtree(folder / "tokenizer")
    (folder / "tokenizer").write_text("x")


def _moved(folder: pathlib.Path) -> None:
    (folder / "checkpoints/4").rename(folder / "checkpoints/9")


def _links_at_temporary_names(folder: pathlib.Path) -> None:
    (folder / "precious").write_text("x")
    for name in ("config.json.partial", "metrics.partial", "tokenizer/.bpe.json.partial"):
        (folder / name).symlink_to(folder / "precious")


_FOLDERS = [
    _checkpoints_a_file, _checkpoints_elsewhere, _no_tokenizer, _tokenizer_a_file, _moved, _links_at_temporary_names,
]  # fmt: skip
