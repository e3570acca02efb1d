"""The config of a run, from its folder."""

import dataclasses

from atlasjax import storage
from atlasjax.distributed.processes import ProcessConfig
from atlasjax.train.config import TrainConfig, run_folder, saved_config
from atlasjax.train.errors import ConfigError, user_errors
from atlasjax.train.saving.checkpoint import Checkpoints


def checkpoint_folder(run_dir: str | storage.AnyPath) -> storage.AnyPath:
    """The folder of a run's checkpoints. Raises ConfigError if there is none."""
    with user_errors():
        folder = run_folder(run_dir) / "checkpoints"
        there = folder.is_dir()
    if not there:
        raise ConfigError(f"run_dir is {str(run_dir)!r}; there is no run in it (no folder 'checkpoints').")
    return folder


def run_config(run_dir: str | storage.AnyPath) -> TrainConfig | None:
    """The config of the run in a folder, from its newest checkpoint, or else its config.json; None if there is no run in it.

    Raises:
      ConfigError: there is a run, and its config cannot be used.
    """
    saved = None
    with user_errors():
        folder, file = run_folder(run_dir) / "checkpoints", run_folder(run_dir) / "config.json"
        there = folder.is_dir()
    if there:
        with Checkpoints(folder, clean=False) as checkpoints:
            saved = checkpoints.newest_config()
    if saved is None:
        if not file.is_file():
            return None
        try:
            saved = storage.read_json(file)
        except ValueError as error:
            raise ConfigError(f"{error} Give --preset and the run's options instead.") from None
    with user_errors():
        config = saved_config(saved, folder.parent)
    # Its processes are those of a job that has ended. Compiled programs are code, which only this job may ask for.
    return dataclasses.replace(config, run_dir=str(run_dir), processes=ProcessConfig(), compilation_cache=None)
