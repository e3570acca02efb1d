"""How a run can end badly: errors whose message is for the user, not for a traceback."""

import contextlib
from collections.abc import Iterator


class RunError(RuntimeError):
    """The run cannot go on; the message says what happened, what is safe, and what to do. The command exits with 1."""


class ConfigError(ValueError):
    """What was asked for cannot be done; found before anything was compiled. The command exits with 2."""


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turns what is raised for a wrong value, or a file that is not there, into a ConfigError with the same message."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(str(error)) from error


class NonFiniteError(RunError):
    """A loss, gradient or state is NaN or infinite."""


class CheckpointError(RunError):
    """A checkpoint could not be written or read."""


class ProcessDiedError(RunError):
    """Another process of the run has ended. The command exits with 75: starting all processes again goes on."""


class Interrupted(RunError):
    """The run was asked to stop by a signal, after the step in progress was finished and saved.

    Attributes:
      signal: the signal's number; the command exits with 128 + signal, as shells do.
    """

    def __init__(self, message: str, signal: int):
        super().__init__(message)
        self.signal = signal
