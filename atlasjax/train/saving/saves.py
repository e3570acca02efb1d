"""Saves that fail are repeated, by all processes together: what one of them knows of a save, the others are told first."""

import time
from collections.abc import Callable
from typing import Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from atlasjax.distributed.processes import lost_process
from atlasjax.train.errors import SaveError

REPEATS = 3  # in a row: most outages of a store end within them, and a full disk stays full
PAUSE = 5.0  # seconds before each
_BYTES = 400  # of a cause that is told to the others


class Saving(Protocol):
    """An object whose saves are repeated (see `checkpoint.Checkpoints`)."""

    failures: int

    def check(self) -> None:
        """Raises SaveError if the save in progress has failed by now."""


def repeated(save: Callable[[], None], checkpoints: Saving, say: Callable[[str], None]) -> None:
    """Calls `save` until it raises no SaveError. All processes call this together.

    Args:
      save: saves a state. It is called again after a pause, at most until `REPEATS` repetitions in a row have failed.
      checkpoints: counts the failures.
      say: is told of each failure, in one line.

    Raises:
      SaveError: the last repetition has failed too.
    """
    while True:
        try:
            return save()
        except SaveError as error:
            _announce(error, checkpoints, say)


def failed_meanwhile(checkpoints: Saving, say: Callable[[str], None]) -> bool:
    """Whether the save in progress has failed by now, so that the present state must be saved. Else as `repeated`."""
    try:
        checkpoints.check()
    except SaveError as error:
        _announce(error, checkpoints, say)
        return True
    return False


def _announce(error: SaveError, checkpoints: Saving, say: Callable[[str], None]) -> None:
    if checkpoints.failures > REPEATS:
        raise error
    say(f"{error} Saving again in {PAUSE:g} s ({checkpoints.failures} of {REPEATS}).")
    time.sleep(PAUSE)


def agreed_done(done: bool) -> bool:
    """Whether all processes are done. A collective."""
    return done if jax.process_count() == 1 else bool(np.all(multihost_utils.process_allgather(np.asarray(done))))


def agreed_cause(cause: str | None) -> str | None:
    """The cause of a failure for all processes, or None if none of them has one. A collective.

    Args:
      cause: what failed in this process. A cause that only says that another process did not come is taken if there is no other.
    """
    if jax.process_count() == 1:
        return cause
    # Text of a fixed length in bytes: all processes must give arrays of one shape.
    told = np.zeros(_BYTES, np.uint8)
    if cause is not None:
        text = (cause or "no reason given").encode()[:_BYTES]
        told[: len(text)] = list(text)
    causes = {
        index: bytes(row).rstrip(b"\0").decode(errors="ignore")
        for index, row in enumerate(multihost_utils.process_allgather(told))
        if row.any()
    }
    # A process that only waited is not the cause of anything.
    own = {index: text for index, text in causes.items() if not _only_waited(text)} or causes
    return next((f"{text} (in process {index})" for index, text in own.items()), None)


def _only_waited(cause: str) -> bool:
    """Whether a cause only says that another process did not come in time."""
    return "timed out" in cause or lost_process(RuntimeError(cause)) is not None
