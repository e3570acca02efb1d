"""Explains errors of the runtime to the user of a run."""

import contextlib
from collections.abc import Iterator

import jax

from atlasjax import storage
from atlasjax.distributed import processes
from atlasjax.train.errors import ProcessDiedError, RunError, SaveError
from atlasjax.train.saving.step_folders import complete_steps


@contextlib.contextmanager
def aborts_explained(run_dir: storage.AnyPath) -> Iterator[None]:
    """Within it, an abort by jax's coordination service says that another process has ended, and exits with the code for it."""
    if jax.process_count() == 1:
        yield
        return
    message = lambda: died(run_dir, "jax's coordination service aborts this one")
    with processes.aborts_explained(message, ProcessDiedError.code):
        yield


@contextlib.contextmanager
def explained(run_dir: storage.AnyPath) -> Iterator[None]:
    """Says what the runtime's errors mean: the other end of a collective is gone, or a device's memory is too small."""
    try:
        yield
    except Exception as error:
        # A store loses connections too; and if a process were lost, they could not have agreed that a save failed.
        alone = jax.process_count() == 1 or isinstance(error, storage.StoreError | SaveError)
        cause = None if alone else processes.lost_process(error)
        # A RunError is explained already, and a save whose disk is full says RESOURCE_EXHAUSTED too.
        if cause is None and "RESOURCE_EXHAUSTED" in str(error) and not isinstance(error, RunError | OSError):
            said = next(line for line in str(error).splitlines() if "RESOURCE_EXHAUSTED" in line)[:200].strip(" .")
            raise RunError(
                f"The step does not fit the device's memory ({said}). What helps: a larger accumulation, a shorter "
                "data.sequence_length, model.remat, a smaller model, or more devices."
            ) from error
        if cause is None:
            raise
        raise ProcessDiedError(died(run_dir, cause)) from error


def died(run_dir: storage.AnyPath, cause: str) -> str:
    """The message when another process is lost."""
    folder = run_dir / "checkpoints"
    steps = complete_steps(folder)
    last = f"The last checkpoint is {folder / str(steps[-1])}." if steps else "No checkpoint was saved yet."
    return f"Another process of this run has ended ({cause}). {last} Run the same commands for all processes to resume."
