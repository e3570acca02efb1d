"""The smallest run that has every part, and how a refusal is told from an accident."""

import contextlib
import dataclasses
import io
import pathlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np

from atlasjax import cli
from atlasjax.cli import train as train_command
from atlasjax.data import DataConfig
from atlasjax.distributed import MeshConfig
from atlasjax.nn import MemoryConfig, ModelConfig
from atlasjax.train import ConfigError, OptimizerConfig, RunError, TrainConfig, resume, train
from atlasjax.train import setup as setup_lib
from atlasjax.train import state as state_lib
from atlasjax.train.errors import user_errors

TEXT = "the memory learns while it reads, and forgets what it no longer needs. "
MODEL = ModelConfig(
    dim=16, num_layers=1, num_heads=2, mlp_dim=32, vocab_size=300, dtype="float32",
    memory=MemoryConfig(rule="linear_attention", chunk_size=8),
)  # fmt: skip


def config(folder: pathlib.Path, run_dir: pathlib.Path, steps: int, **changes: Any) -> TrainConfig:
    """A run of `MODEL` on `TEXT`, which is written to `folder`, with a checkpoint after every second step."""
    (folder / "text.txt").write_text(TEXT * 60)
    data = DataConfig(
        source="text", paths=(str(folder / "text.txt"),), tokenizer="bpe:300", sequence_length=16, batch_size=4
    )
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=2, schedule="constant")
    config = TrainConfig(
        MODEL, data, optimizer, mesh=MeshConfig(1, 1, 1), eval_every=0, eval_batches=1, checkpoint_every=2, tensorboard=False
    )  # fmt: skip
    return dataclasses.replace(config, steps=steps, run_dir=str(run_dir), **changes)


def trained(folder: pathlib.Path, run_dir: pathlib.Path, steps: int, **changes: Any) -> TrainConfig:
    """Trains such a run, and says nothing."""
    made = config(folder, run_dir, steps, **changes)
    with contextlib.redirect_stdout(io.StringIO()):
        train(made)
    return made


def params(model: Any) -> Any:
    """The parameters of a model, on the host."""
    from flax import nnx

    return jax.device_get(state_lib.pure(nnx.state(model, nnx.Param)))


def same(one: Any, other: Any) -> bool:
    """Whether two trees have the same arrays, bit for bit."""
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def refused(call: Callable[[], Any], words: Sequence[str], *, right: Callable[[Any], bool] = lambda _: False) -> str:
    """How a call of the library ends: refused in one line with one of the words; or right, if its result is; or wrong."""
    try:
        result = call()
    except (ConfigError, RunError, TypeError, ValueError, OSError) as error:
        said = str(error)
        if len(said.splitlines()) == 1 and any(word in said for word in words):
            return "refused"
        raise
    return "right" if right(result) else "wrong"


def asked(
    line: Sequence[str],
    words: Sequence[str],
    patches: Sequence[Any] = (),
    *,
    right: Callable[[str], bool] = lambda _: True,
) -> str:
    """How a command line ends: refused in one line with one of the words; or right, if what it printed is; or wrong."""
    printed, output = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(contextlib.redirect_stderr(printed))
        stack.enter_context(contextlib.redirect_stdout(output))
        code = cli.main(list(line))
    if code == 0:
        return "right" if right(output.getvalue()) else "wrong"
    lines = printed.getvalue().splitlines()
    if code in (cli.USER_ERROR, cli.RUN_ERROR) and len(lines) == 1 and any(word in lines[0] for word in words):
        return "refused"
    raise AssertionError(f"exit code {code}, {len(lines)} lines: {printed.getvalue()[-400:]!r}")


def nothing(*_: Any, **__: Any) -> None:
    """In place of what a case leaves out."""


def not_trained() -> list[Any]:
    """Patches of `atlasjax train`: the run is prepared as it always is, and no step is taken."""

    def prepared(config: TrainConfig, **_: Any) -> None:
        with user_errors():
            resume.check_resumable(config)
            setup_lib.prepare(config)

    return [
        left_out(train_command, "train", prepared),
        *(left_out(train_command, name) for name in ("_report", "use_cores")),
    ]


def not_served() -> list[Any]:
    """Patches of `atlasjax serve`: it ends where it would begin to answer requests, and does not say that it loads for long."""
    from atlasjax.serve import batching, loading, server

    patient = left_out(loading, "_QUIET_SECONDS", 3600.0)
    return [left_out(server.Server, "run"), left_out(batching.Batcher, "warm_up"), patient]


def left_out(target: Any, name: str, by: Any = nothing) -> Any:
    """A patch that leaves out the work of a command after its checks."""
    return mock.patch.object(target, name, by)
