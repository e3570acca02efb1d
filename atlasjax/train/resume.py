"""Resuming a run: what may change, the state and the position in the data that it goes on from."""

import json
import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from atlasjax import storage
from atlasjax.config_json import to_dict
from atlasjax.data.pipeline import BatchIterator, Position, merge_positions
from atlasjax.train import state as state_lib
from atlasjax.train.config import TrainConfig, changes_on_resume, run_folder, saved_config
from atlasjax.train.errors import CheckpointError, user_errors
from atlasjax.train.initial import base_params
from atlasjax.train.optimizer import run_optimizer
from atlasjax.train.saving.checkpoint import Checkpoints
from atlasjax.train.setup import Setup
from atlasjax.train.state import TrainState
from atlasjax.train.trainable import select, trainable_mask


def check_resumable(config: TrainConfig) -> list[str]:
    """Checks that the checkpoints in the run's folder, if any, are of the run that `config` describes.

    A run without steps has seen no data, so only its architecture is fixed.

    Returns:
      A line "field: old → new" for each difference that is allowed when a run is resumed. Empty without checkpoints.

    Raises:
      ValueError: the architecture or the data is another one; the message names the fields.
    """
    folder = run_folder(config.run_dir) / "checkpoints"
    if not lexists(folder):
        return []
    if not folder.is_dir():
        raise ValueError(
            f"run_dir is {config.run_dir!r}; 'checkpoints' in it is not a folder. Move it away, or give another run_dir."
        )
    with Checkpoints(folder, config.keep) as checkpoints:
        saved, started = checkpoints.newest_config(), checkpoints.steps() != [0]
    if saved is None:
        return []
    before = saved_config(saved, config.run_dir)
    architecture, fixed, free = changes_on_resume(to_dict(before), to_dict(config))
    options = [line for line in free if line.startswith("optimizer.options:")]
    if options and started and not (architecture or fixed) and not _same_optimizer_state(before, config):
        fixed = options
    if architecture or (fixed and started):
        what = (
            "a checkpoint of another architecture"
            if architecture
            else "a run with other settings, which must not change"
        )
        raise ValueError(
            f"{config.run_dir} holds {what} ({', '.join(architecture + fixed)}). Use another run_dir for a new run, or the "
            f"same settings to resume; init_from={config.run_dir} starts a new run from its parameters."
        )
    return free


def _same_optimizer_state(before: TrainConfig, after: TrainConfig) -> bool:
    """Whether the optimizers of two configs of the same model and trainable parameters have states of the same form."""
    _, shapes = state_lib.model_shapes(after.model)
    trainable = trainable_mask(after.optimizer.trainable, shapes)
    try:
        states = [
            jax.eval_shape(run_optimizer(config, trainable).init, select(shapes, trainable))
            for config in (before, after)
        ]
    except Exception:  # whatever a user's optimizer raises; `prepare` reports it
        return True
    return jax.tree.flatten(states[0]) == jax.tree.flatten(states[1])


def lexists(path: storage.AnyPath) -> bool:
    """Whether something is there, if only a link to nothing."""
    return path.exists() if isinstance(path, storage.StorePath) else os.path.lexists(path)


def first_state(setup: Setup, checkpoints: Checkpoints, data: BatchIterator) -> tuple[TrainState, int, list[str]]:
    """Returns (state, steps done, lines for the user), from the newest usable checkpoint or afresh."""
    if not checkpoints.steps():
        if setup.config.init_from is None:
            return setup.init_state(), 0, []
        params, lines = base_params(setup.config, setup.shardings.params)
        return setup.state_from(params), 0, lines
    if checkpoints.steps() == [0]:  # imported weights: no optimizer's state, and no position in the data
        return _given_state(setup, checkpoints)
    try:
        restored = checkpoints.restore(setup.abstract_state())
    except CheckpointError as error:
        if 0 not in checkpoints.steps():
            raise
        damaged = [(step, reason) for step, reason in error.skipped if step]
        try:
            return _given_state(setup, checkpoints, damaged)
        except CheckpointError:
            raise error from None
    with user_errors():
        data.set_state(merge_positions(restored.positions))
    # Orbax does not see those that are unreadable, so it would never delete an old one.
    older = [(step, reason) for step, reason in checkpoints.unreadable.items() if step < restored.step]
    notes = _set_aside(checkpoints, restored.skipped, "; using the one before it")
    notes += _set_aside(checkpoints, older)
    notes.append(f"Resuming from step {restored.step} ({checkpoints.path(restored.step)}).")
    return restored.state, restored.step, notes


def _given_state(
    setup: Setup, checkpoints: Checkpoints, damaged: Sequence[tuple[int, str]] = ()
) -> tuple[TrainState, int, list[str]]:
    """The first state, from a checkpoint of step 0 that has parameters and nothing else, such as imported ones."""
    params, _, _ = checkpoints.restore_params(setup.abstract_state().params, 0)
    notes = _set_aside(checkpoints, damaged)
    return setup.state_from(params), 0, [*notes, f"Starting from the parameters in {checkpoints.path(0)}."]


def _set_aside(checkpoints: Checkpoints, unusable: Sequence[tuple[int, str]], then: str = "") -> list[str]:
    """Sets checkpoints aside, and says so."""
    return [
        f"The checkpoint of step {step} is unusable: {reason}. It is now in {checkpoints.set_aside(step)}{then}."
        for step, reason in unusable
    ]


def all_positions(iterator: BatchIterator) -> list[Position]:
    """The data positions of all processes, known to each."""
    position = iterator.get_state()
    if jax.process_count() == 1:
        return [position]
    text = np.frombuffer(json.dumps(position).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.asarray(text.size))
    padded = np.zeros(int(np.max(sizes)), np.uint8)  # a collective gathers arrays of one shape
    padded[: text.size] = text
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(row[: int(size)])) for row, size in zip(rows, sizes)]
