"""A lock that allows one job at a time in a run's folder. It is released when its process ends, however it ends.

In a bucket, which has no locks, a lease takes its place (`storage.lease`), which runs out a minute after a process was killed.
"""

import contextlib
import pathlib
from collections.abc import Callable, Iterator

import jax
import numpy as np

from atlasjax.storage import AnyPath, StorePath, lease, locks

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
        confirm: Callable[[], None] = lambda: None  # a lock of the file system cannot be lost
        if jax.process_index() == 0:
            try:
                if isinstance(run_dir, StorePath):
                    confirm = held.enter_context(lease.hold(run_dir, locks.owner()))
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
    try:
        lock = locks.take(run_dir / _FILE)
    except locks.HeldError as error:
        raise ValueError(
            f"run_dir is {str(run_dir)!r}; another job trains in it ({error.holder}). Give another run_dir, or wait "
            "until it has ended."
        ) from None
    with lock:
        yield
