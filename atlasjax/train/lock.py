"""A lock that allows one job at a time in a run's folder. It is released when its process ends, however it ends.

In a bucket, which has no locks, a lease takes its place (`storage.lease`), which runs out a minute after a process was killed.
"""

import contextlib
import fcntl
import os
import pathlib
import socket
from collections.abc import Callable, Iterator

import jax
import numpy as np

from atlasjax.storage import AnyPath, StorePath, lease

_FILE = "lock"


@contextlib.contextmanager
def hold(run_dir: AnyPath) -> Iterator[Callable[[], None]]:
    """Holds the lock of an existing folder. With several processes the first one takes it for all.

    Gives a function that raises OSError if the lock is another job's by now, which only a lease can be.

    Raises:
      ValueError: another job holds the lock. The message names its process and machine.
      OSError: the lock file cannot be created, or the file system has no locks.
    """
    with contextlib.ExitStack() as held:
        failure: Exception | None = None
        confirm: Callable[[], None] = lambda: None
        if jax.process_index() == 0:
            try:
                if isinstance(run_dir, StorePath):
                    confirm = held.enter_context(lease.hold(run_dir, _owner()))
                else:
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
        yield confirm


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
        file.write(f"{_owner()}\n")
        file.flush()
        yield


def _owner() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
