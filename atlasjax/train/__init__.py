"""Training: `train(TrainConfig(...))` starts or resumes a run. Its parts are pure functions that can be used on their own.

config = default_config("atlas-tiny")
result = train(config)
model = load_run(config.run_dir).model
"""

import importlib
from typing import TYPE_CHECKING

from atlasjax.names import lazily

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

# Loaded on first use, so that importing the error classes does not import the data pipeline.
_home = lazily(
    __name__,
    {
        "config": "OptimizerConfig TrainConfig",
        "defaults": "default_config",
        "errors": "CheckpointError ConfigError Interrupted NonFiniteError ProcessDiedError RunError",
        "load": "load_run",
        "loop": "TrainResult train",
        "loss": "LossConfig",
        "saving.checkpoint": "Checkpoints",
        "state": "TrainState",
        "step": "accumulated_gradients jit_train_step loss_sums train_step",
    },
)


def __getattr__(name: str) -> object:
    if name in ("metrics", "plot"):  # in `reports`; the pages name them as modules of this package
        return importlib.import_module(f"{__name__}.reports.{name}")
    return _home(name)
