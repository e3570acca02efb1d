"""Damaged checkpoints: the newest of three is damaged, and what is restored must be what one of them was saved with."""

import functools
import itertools
import pathlib
import random
import tempfile
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from atlasjax.train import CheckpointError, Checkpoints, TrainState
from experiments.faults import damage
from experiments.faults.run import Case, case, some

STEPS = (2, 4, 6)
CONFIG = {"model": {"dim": 4, "mixer": ["memory", "swa"]}, "seed": 0, "steps": 6}
_CASES = 450
Harm = Callable[[pathlib.Path], object]


def cases(seed: int, most: int | None = None) -> Iterator[Case]:
    """Damages of every kind to every file of a checkpoint, to its texts, and to folders."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place) / "saved"
        with Checkpoints(folder) as checkpoints:
            for step in STEPS:
                checkpoints.save(_state(step), [_position(step)], CONFIG)
        files = sorted(path.relative_to(folder / "6") for path in (folder / "6").rglob("*") if path.is_file())
        texts = [path for path in files if path.name == "data.json" or "METADATA" in path.name]
        every: list[tuple[str, Harm]] = list(_FOLDERS.items())
        on = lambda kind, path: (f"{path} {kind.__name__}", damage.on(f"6/{path}", kind, rng))
        every += [on(damage.other_json, path) for path in itertools.islice(itertools.cycle(texts), 12 * len(texts))]
        while len(every) < _CASES:
            every.append(on(rng.choice(damage.FILE), rng.choice(files)))
        for name, harm in some(every, most, rng):
            yield case(name, _restored, folder, pathlib.Path(place) / "copy", harm)


def _restored(saved: pathlib.Path, copy: pathlib.Path, harm: Harm) -> str:
    harm(damage.copied(saved, copy))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _state(6))
    try:
        with Checkpoints(copy) as checkpoints:
            restored = checkpoints.restore(abstract)
            config = checkpoints.newest_config()
    except CheckpointError:
        return "gave up"
    if restored.step not in STEPS or not _equal(restored.state, _state(restored.step)):
        return "wrong"
    if restored.positions != [_position(restored.step)] or config != CONFIG:
        return "wrong"
    return "right" if restored.step == STEPS[-1] else "fell back"


@functools.cache
def _state(step: int) -> TrainState:
    key = jax.random.key(step)
    params = {"layer": {"kernel": jax.random.normal(key, (32, 48))}, "bias": jnp.arange(8.0) + step}
    optimizer = jax.tree.map(lambda leaf: leaf + step, optax.adamw(1e-3).init(params))
    return TrainState(params, optimizer, key, jnp.int32(step))


def _position(step: int) -> dict[str, object]:
    return {"pipeline": {"source": "text", "seed": 0}, "position": {"next": step, "buffer": [step, step + 1]}}


def _equal(one: TrainState, other: TrainState) -> bool:
    raw = lambda x: np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
    return all(
        np.array_equal(raw(a), raw(b)) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def _strangers(folder: pathlib.Path) -> None:
    (folder / "notes.txt").write_text("x")
    (folder / "8").mkdir()
    (folder / "abc").mkdir()


_FOLDERS: dict[str, Harm] = {
    "moved": lambda folder: (folder / "6").rename(folder / "8"),
    "copied over": lambda folder: damage.copied(folder / "2", folder / "6"),
    "copied ahead": lambda folder: damage.copied(folder / "4", folder / "10"),
    "params of another step": lambda folder: damage.copied(folder / "4/params", folder / "6/params"),
    "position of another step": lambda folder: damage.copied(folder / "4/position", folder / "6/position"),
    "emptied": lambda folder: (damage.gone(folder / "6"), (folder / "6").mkdir()),
    "a file": lambda folder: damage.a_text(folder / "6"),
    "strangers": _strangers,
    "half saved": lambda folder: (folder / "6").rename(folder / "6.orbax-checkpoint-tmp"),
}
