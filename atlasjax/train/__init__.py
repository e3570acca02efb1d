"""Training: `train(TrainConfig(...))` starts or resumes a run. Its parts are pure functions that can be used on their own.

config = default_config("atlas-tiny")
result = train(config)
model = load_run(config.run_dir).model
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atlasjax.train.config import OptimizerConfig, TrainConfig
    from atlasjax.train.defaults import default_config
    from atlasjax.train.errors import (
        CheckpointError,
        ConfigError,
        Interrupted,
        NonFiniteError,
        ProcessDiedError,
        RunError,
    )
    from atlasjax.train.load import load_run
    from atlasjax.train.loop import TrainResult, train
    from atlasjax.train.loss import LossConfig
    from atlasjax.train.reports import metrics as metrics
    from atlasjax.train.reports import plot as plot
    from atlasjax.train.saving.checkpoint import Checkpoints
    from atlasjax.train.state import TrainState
    from atlasjax.train.step import accumulated_gradients, jit_train_step, loss_sums, train_step

# Loaded on first use, so that importing the error classes does not import the data pipeline.
_HOME = {
    "Checkpoints": "saving.checkpoint",
    "OptimizerConfig": "config",
    "TrainConfig": "config",
    "default_config": "defaults",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "Interrupted": "errors",
    "NonFiniteError": "errors",
    "ProcessDiedError": "errors",
    "RunError": "errors",
    "load_run": "load",
    "TrainResult": "loop",
    "train": "loop",
    "LossConfig": "loss",
    "TrainState": "state",
    "accumulated_gradients": "step",
    "jit_train_step": "step",
    "loss_sums": "step",
    "train_step": "step",
}

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "ConfigError",
    "Interrupted",
    "LossConfig",
    "NonFiniteError",
    "OptimizerConfig",
    "ProcessDiedError",
    "RunError",
    "TrainConfig",
    "TrainResult",
    "TrainState",
    "accumulated_gradients",
    "default_config",
    "jit_train_step",
    "load_run",
    "loss_sums",
    "train",
    "train_step",
]


_MODULES = {"metrics", "plot"}  # in `reports`; the pages name them as modules of this package


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.reports.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
