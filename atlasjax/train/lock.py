"""A lock that allows one job at a time in a run's folder. It is released when its process ends, however it ends."""

import contextlib
import fcntl
import os
import pathlib
import socket
from collections.abc import Iterator

import jax
import numpy as np

_FILE = "lock"


@contextlib.contextmanager
def hold(run_dir: pathlib.Path) -> Iterator[None]:
    """Holds the lock of an existing folder. With several processes the first one takes it for all.

    Raises:
      ValueError: another job holds the lock. The message names its process and machine.
      OSError: the lock file cannot be created, or the file system has no locks.
    """
    with contextlib.ExitStack() as held:
        failure: Exception | None = None
        if jax.process_index() == 0:
            try:
                held.enter_context(_hold(run_dir))
            except (ValueError, OSError) as error:
                failure = error
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            failed = multihost_utils.process_allgather(np.asarray(failure is not None))
            if failure is None and np.any(failed):
                failure = ValueError(f"run_dir is {str(run_dir)!r}; process 0 could not lock it.")
        if failure is not None:
            raise failure
        yield


@contextlib.contextmanager
def _hold(run_dir: pathlib.Path) -> Iterator[None]:
    descriptor = os.open(run_dir / _FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    with open(descriptor, "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = " ".join(file.read(200).split()) or "an unknown process"
            raise ValueError(
                f"run_dir is {str(run_dir)!r}; another job trains in it ({holder}). Give another run_dir, or wait "
                "until it has ended."
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
