"""Keeps the storage libraries quiet: their threads, their logs, and their errors within errors."""

import contextlib
import gc
import logging
import sys
import threading
import time
import warnings
from collections.abc import Iterator

from atlasjax.names import causes


def join_writers(others: set[threading.Thread], seconds: float = 30.0) -> None:
    """Waits for threads that a failed save left running. Orbax does not, and they would raise errors when the interpreter exits.

    They are Orbax's own threads and the workers of its event loops, recognized by asyncio's names. If a writer ends
    after the event loop of the failed save is closed, asyncio and concurrent.futures log it.

    Args:
      others: threads that do not belong to the save.
      seconds: total time to wait.
    """
    deadline = time.monotonic() + seconds
    for thread in set(threading.enumerate()) - others - {threading.current_thread()}:
        if type(thread).__module__.startswith("orbax.") or thread.name.startswith("asyncio_"):
            with contextlib.suppress(Exception):  # Orbax raises the error of the thread again
                thread.join(timeout=max(0.0, deadline - time.monotonic()))
    gc.collect()  # tasks of the closed loop log an error when they are collected; do it now, while asyncio's logger is silent


def root_cause(error: BaseException) -> str:
    """The first line of the innermost error, which the libraries wrap in several layers."""
    *_, innermost = causes(error)
    lines = str(innermost).strip().splitlines()
    line = lines[0] if lines else type(innermost).__name__
    if "No space left on device" in line:  # TensorStore says RESOURCE_EXHAUSTED, as a device whose memory is full
        line = f"the disk is full ({line.removeprefix('RESOURCE_EXHAUSTED: ')[:250]})"
    return line[:300].rstrip(". ")


@contextlib.contextmanager
def no_leftovers() -> Iterator[None]:
    """Collects the coroutines that a failed load leaves behind: they would warn when they are collected later."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
            gc.collect()
    finally:
        sys.unraisablehook = hook


@contextlib.contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Silences loggers. The storage libraries log pages of tracebacks, also in background threads; we report their errors once."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
