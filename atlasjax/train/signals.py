"""SIGINT and SIGTERM stop a run after the step in progress."""

import signal
import threading
from types import FrameType
from typing import Any

import jax
import numpy as np

from atlasjax.train.errors import Interrupted


class StopSignals:
    """Catches SIGINT and SIGTERM inside a `with` block. A second signal has its usual effect.

    Before `remember` is called, no step has begun, and the first signal raises Interrupted at once. Afterwards it is remembered.

    Outside the main thread, where Python has no signals, nothing is caught.
    """

    def __init__(self) -> None:
        self._received = 0
        self._remembers = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _receive(self, number: int, _: FrameType | None) -> None:
        self._received = number
        self._restore()
        if not self._remembers:
            raise Interrupted(
                f"Stopped by signal {number} before the first step. The same command starts again, or goes on "
                "from the last checkpoint.",
                number,
            )

    def remember(self) -> None:
        """From now on a signal is remembered, for `received`."""
        self._remembers = True

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def received(self, *, agree: bool) -> int:
        """Returns the signal's number, or 0.

        Args:
          agree: whether all processes call this now. Then all get the same result. Otherwise, with several processes, the result
            is 0, because one process must not stop alone.
        """
        if jax.process_count() == 1:
            return self._received
        if not agree:
            return 0
        from jax.experimental import multihost_utils

        return int(np.max(multihost_utils.process_allgather(np.asarray(self._received))))
