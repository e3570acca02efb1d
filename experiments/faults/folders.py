"""Damaged run folders: a run that stopped after four of six steps goes on, and is read, with one thing in its folder damaged."""

import contextlib
import io
import pathlib
import random
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax

from atlasjax.train import ConfigError, RunError, TrainConfig, load_run, train
from experiments.faults import damage, small
from experiments.faults.run import Case, case, some

_FILES = ("metrics.jsonl", "config.json", "tokenizer/tokenizer.json", "tokenizer/bpe.json", "lock")
_IN_CHECKPOINT = (
    "position/data.json", "config/data.json", "integrity/data.json", "params/_METADATA", "_CHECKPOINT_METADATA",
)  # fmt: skip
Harm = Callable[[pathlib.Path], object]


def cases(seed: int, most: int | None = None) -> Iterator[Case]:
    """Each file of the folder damaged in each way, and folders; the run goes on in one case and is read in another."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        stopped = small.trained(folder, folder / "stopped", 4)
        with contextlib.redirect_stdout(io.StringIO()):
            whole = train(small.config(folder, folder / "whole", 6))
        expected = {step: small.params(load_run(stopped.run_dir, step=step).model) for step in (2, 4)}
        expected[6] = jax.device_get(whole.state.params)
        every: list[tuple[str, Harm]] = list(_FOLDERS.items())
        for path in (*_FILES, *(f"checkpoints/4/{path}" for path in _IN_CHECKPOINT)):
            for kind in damage.FILE:
                every.append((f"{path} {kind.__name__}", damage.on(path, kind, rng)))
        for name, harm in some(every, most, rng):
            yield case(f"{name}, read", _read, folder, harm, expected)
            if not name.startswith("checkpoints/4/") or "truncated" in name or "flipped" in name:
                yield case(
                    f"{name}, gone on", _gone_on, folder, harm, small.config(folder, folder / "copy", 6), expected
                )


def _read(folder: pathlib.Path, harm: Harm, expected: dict[int, Any]) -> str:
    harm(damage.copied(folder / "stopped", folder / "copy"))
    try:
        loaded = load_run(folder / "copy")
    except (ConfigError, RunError) as error:
        return _one_line(error)
    if not small.same(small.params(loaded.model), expected[loaded.step]):
        return "wrong"
    return "right" if loaded.step == 4 else "fell back"


def _gone_on(folder: pathlib.Path, harm: Harm, config: TrainConfig, expected: dict[int, Any]) -> str:
    harm(damage.copied(folder / "stopped", folder / "copy"))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            result = train(config)
    except (ConfigError, RunError, OSError) as error:
        return _one_line(error)
    if not small.same(jax.device_get(result.state.params), expected[6]):
        return "wrong"
    return "right" if result.resumed_from == 4 else "fell back"


def _one_line(error: Exception) -> str:
    return "refused" if len(str(error).splitlines()) == 1 else "traceback"


def _checkpoints_elsewhere(folder: pathlib.Path) -> None:
    elsewhere = folder.parent / "elsewhere"
    damage.gone(elsewhere)
    (folder / "checkpoints").rename(elsewhere)
    (folder / "checkpoints").symlink_to(elsewhere)


def _links_at_temporary_names(folder: pathlib.Path) -> None:
    (folder / "precious").write_text("x")
    for name in ("config.json.partial", "metrics.partial", "tokenizer/.bpe.json.partial"):
        (folder / name).symlink_to(folder / "precious")


_FOLDERS: dict[str, Harm] = {
    "checkpoints a file": lambda folder: damage.a_text(folder / "checkpoints"),
    "checkpoints elsewhere": _checkpoints_elsewhere,
    "no tokenizer": lambda folder: damage.gone(folder / "tokenizer"),
    "tokenizer a file": lambda folder: damage.a_text(folder / "tokenizer"),
    "moved": lambda folder: (folder / "checkpoints/4").rename(folder / "checkpoints/9"),
    "links at temporary names": _links_at_temporary_names,
}
