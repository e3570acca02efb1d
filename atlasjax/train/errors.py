"""Errors that end a run. Their messages are for the user, without a traceback."""

import contextlib
from collections.abc import Iterator, Sequence

from atlasjax.storage import AccessError


class RunError(RuntimeError):
    """The run cannot continue. The message says what happened, what is saved, and what to do. The command exits with 1."""


class ConfigError(ValueError):
    """The configuration is invalid. This is found before anything is compiled. The command exits with 2."""


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turns the errors for an invalid value, a missing file or a refused access into a ConfigError with the same message."""
    try:
        yield
    except (ValueError, FileNotFoundError, AccessError) as error:
        raise ConfigError(str(error)) from error


class NonFiniteError(RunError):
    """A loss, gradient or state is NaN or infinite."""


class CheckpointError(RunError):
    """A checkpoint could not be written or read.

    Attributes:
      skipped: if none is usable, all that were tried, as (step, reason).
    """

    skipped: Sequence[tuple[int, str]] = ()


class SaveError(CheckpointError):
    """A checkpoint was not written, which all processes know. Nothing of it is left, and the state can be saved again."""


class ProcessDiedError(RunError):
    """Another process of the run has ended. The command exits with `code`, 75. Starting all processes again resumes the run.

    A Python program that catches this should end with `os._exit(error.code)`, as the command does. An ordinary exit waits for jax
    and for a save in progress, and both wait for the lost process, up to the save's deadline.
    """

    code = 75  # as in sysexits.h: try again


class Interrupted(RunError):
    """A signal asked the run to stop. The step in progress was finished and saved.

    Attributes:
      signal: the signal's number. The command exits with 128 + signal, as shells do.
    """

    def __init__(self, message: str, signal: int):
        super().__init__(message)
        self.signal = signal
