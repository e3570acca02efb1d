"""The smallest runs that still have every part: a model, text on disk, checkpoints."""

import json
import os
import pathlib
import subprocess
import sys

import jax

from atlasjax.data import DataConfig
from atlasjax.distributed import MeshConfig
from atlasjax.nn import MemoryConfig, ModelConfig
from atlasjax.train import OptimizerConfig, TrainConfig

TEXT = "the memory learns while it reads, and forgets what it no longer needs; a long text fits in little. " * 30
MODEL = ModelConfig(
    dim=16,
    num_layers=2,
    num_heads=2,
    mlp_dim=32,
    memory=MemoryConfig(rule="linear_attention", chunk_size=8),
    dtype="float32",
)


def data(folder: pathlib.Path, **changes) -> DataConfig:
    path = folder / "text.txt"
    path.write_text(TEXT)
    return DataConfig(**{"source": "text", "paths": (str(path),), "sequence_length": 16, "batch_size": 8, **changes})


def config(folder: pathlib.Path, *, model: ModelConfig = MODEL, data_changes=None, **changes) -> TrainConfig:
    arguments = {
        "optimizer": OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        "mesh": MeshConfig(1, 1, 1),
        "steps": 4,
        "run_dir": str(folder / "run"),
        "eval_every": 0,
        "eval_batches": 1,
        "checkpoint_every": 2,
        "tensorboard": False,
        **changes,
    }
    return TrainConfig(model=model, data=data(folder, **(data_changes or {})), **arguments)


def child(module: str, *arguments: object, devices: int = 1, wait: bool = True):
    """Runs `python -m module`; its arguments are passed as JSON where they are not strings. It compiles as this process does."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"  # the last one counts
    fast = str(jax.config.read("jax_disable_most_optimizations"))
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": fast}
    command = [sys.executable, "-m", module, *(x if isinstance(x, str) else json.dumps(x) for x in arguments)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return finish(process) if wait else process


def finish(process: subprocess.Popen) -> subprocess.CompletedProcess:
    out, err = process.communicate(timeout=240)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def train_losses(run_dir: str | pathlib.Path) -> list[tuple[int, float]]:
    from atlasjax.train.reports import metrics

    records = metrics.read(pathlib.Path(run_dir) / "metrics.jsonl")
    return [(record["step"], record["loss"]) for record in records if record["kind"] == "train"]
