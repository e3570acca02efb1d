"""Import and export of public weights: numbers and lists of any size in config.json, damage to every file, and kills.

The sizes in config.json are compared with the tensors before anything of that size is made; memory is limited here. What a killed
import leaves is never taken for a run: the next import is whole, and nothing of the killed one is left beside it.
"""

import contextlib
import functools
import io
import json
import math
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax.config_json import to_dict
from atlasjax.data.tokenizers import ByteTokenizer
from atlasjax.interop import export_weights, import_weights
from atlasjax.nn import LanguageModel, ModelConfig, SSMConfig
from atlasjax.train import Checkpoints, TrainConfig, TrainState, load_run
from atlasjax.train import state as state_lib
from experiments.faults import amounts, damage, small
from experiments.faults.run import Case, Slow, case, some

_SHARED: dict[str, Any] = {"dim": 12, "num_layers": 2, "num_heads": 2, "vocab_size": 256, "dtype": "float32"}
_MODELS = {
    "mamba2": ModelConfig(
        mixer="mamba2", ffn="none", ssm=SSMConfig(state_dim=4, head_dim=6), tie_embeddings=False, **_SHARED
    ),
    "mamba": ModelConfig(mixer="mamba", ffn="none", ssm=SSMConfig(state_dim=4), **_SHARED),
}
_SIZES: tuple[Any, ...] = (
    10**9, 2**31, 2**63, 10**21, 10**400, 0, -1, 1.5, 1e308, math.inf, math.nan, "9" * 21, True, None, [], {}, [[]],
)  # fmt: skip
_KILLS = 12


def cases(seed: int, most: int | None = None) -> Iterator[Case]:
    """Every number of every family's config.json, lists of ten million entries, every damage to every file, and kills."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as place, amounts.limited_memory(6 * 2**30):
        folder = pathlib.Path(place)
        every: list[Case] = []
        for name, model in _MODELS.items():
            source = _exported(folder, name, model)
            given = json.loads((source / "config.json").read_text())
            whole = functools.partial(_imported, folder, source)
            for field, value in given.items():
                for other in _SIZES if isinstance(value, int | float | list) else ():
                    every.append(case(f"{name} {field} = {str(other)[:24]}", _changed, whole, {field: other}))
            for field in ("layer_types", "attn_layer_idx", "time_step_limit", "architectures"):
                every.append(case(f"{name} {field} with ten million entries", _changed, whole, {field: [0] * 10**7}))
            for file in ("config.json", "model.safetensors"):
                every += [
                    case(f"{name} {file} {kind.__name__}", whole, damage.on(file, kind, rng)) for kind in damage.FILE
                ]
        source = folder / "mamba2"
        for n in range(_KILLS):
            delay = rng.random() * 0.3
            every.append((f"import killed {n}", Slow(functools.partial(_killed, folder, source, delay))))
        yield from some(every, most, rng)


def _exported(folder: pathlib.Path, name: str, model: ModelConfig) -> pathlib.Path:
    """The public form of an untrained model."""
    run_dir, target = folder / f"{name}-run", folder / name
    params = state_lib.pure(nnx.state(LanguageModel(model, rngs=nnx.Rngs(0)), nnx.Param))
    config = to_dict(TrainConfig(model, run_dir=str(run_dir)))
    run_dir.mkdir()
    ByteTokenizer().save(run_dir / "tokenizer")
    (run_dir / "config.json").write_text(json.dumps(config))
    with Checkpoints(run_dir / "checkpoints") as checkpoints:
        checkpoints.save(TrainState(params, None, jax.random.key(0), jnp.zeros((), jnp.int32)), [None], config)
    export_weights(run_dir, target)
    return target


def _imported(folder: pathlib.Path, source: pathlib.Path, harm: Any) -> str:
    """The outcome of an import of damaged weights. Nothing may be left of one that is refused."""
    copy, target = damage.copied(source, folder / "copy"), folder / "imported"
    whole = damage.copied(source, folder / "source")
    harm(copy)
    before = set(os.listdir(folder))
    try:
        how = small.refused(
            lambda: import_weights(copy, target, tokenizer="byte"), ("config.json", "tensor", "safetensors", "model"),
            right=lambda _: _as_from(folder, whole, target),
        )  # fmt: skip
    finally:
        left = set(os.listdir(folder)) - before - {"expected"}
        for name in left | {"expected"}:
            damage.gone(folder / name)
    return "wrong" if how == "refused" and left else how


def _as_from(folder: pathlib.Path, whole: pathlib.Path, target: pathlib.Path) -> bool:
    """Whether a run has the parameters of undamaged weights: what was changed has no effect on them."""
    import_weights(whole, folder / "expected", tokenizer="byte")
    return small.same(small.params(load_run(target).model), small.params(load_run(folder / "expected").model))


def _changed(imported: Any, change: dict[str, Any]) -> str:
    def harm(copy: pathlib.Path) -> None:
        file = copy / "config.json"
        text = json.dumps(json.loads(file.read_text()) | change)
        huge = [str(value) for value in change.values() if isinstance(value, int) and value > 10**300]
        file.write_text(text.replace("Infinity", huge[0]) if huge else text)

    return imported(harm)


def _killed(folder: pathlib.Path, source: pathlib.Path, delay: float) -> str:
    place = folder / "place"
    damage.gone(place)
    place.mkdir()
    options = ["import", str(source), "--run-dir", str(place / "run"), "--tokenizer", "byte"]
    command = [sys.executable, "-m", "atlasjax.cli", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 300
    while not os.listdir(place) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.002)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()
    whole = (place / "run").exists()  # it appeared, so it must be whole
    if not whole:
        with contextlib.redirect_stdout(io.StringIO()):
            import_weights(source, place / "run", tokenizer="byte")
    right = _as_from(folder, source, place / "run")
    damage.gone(folder / "expected")
    left = [name for name in os.listdir(place) if name != "run"]
    if left and not whole:
        raise AssertionError(f"{left} is left of a killed import")
    return "right" if right else "wrong"
