"""SIGINT and SIGTERM stop a run after the step in progress."""

import signal
import threading
from collections.abc import Callable
from types import FrameType

import jax
import numpy as np
from jax.experimental import multihost_utils

from atlasjax.distributed.processes import preemption_service
from atlasjax.train.errors import Interrupted


class StopSignals:
    """Catches SIGINT and SIGTERM inside a `with` block. A second signal has its usual effect.

    Before `remember` is called, no step has begun, and the first signal raises Interrupted at once. Afterwards it is remembered.

    In a job of several processes SIGTERM belongs to jax's preemption service, which knows of all of them.

    Outside the main thread, where Python has no signals, nothing is caught.
    """

    def __init__(self) -> None:
        self._service = preemption_service()
        self._received = 0
        self._remembers = False
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT,) if self._service else (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _receive(self, number: int, _: FrameType | None) -> None:
        self._received = number
        self._restore()
        if not self._remembers:
            raise Interrupted(
                f"Stopped by signal {number} before the first step. Run the same command to start again or to "
                "resume from the last checkpoint.",
                number,
            )

    def remember(self) -> None:
        """From now on a signal is remembered, for `received`."""
        self._remembers = True

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def received(self, step: int, *, agree: bool) -> int:
        """Returns the signal's number, or 0: the same in all processes.

        Args:
          step: the step that is being done. All processes call this once in every step.
          agree: whether to ask all processes now for a signal that only Python received. That costs a collective. Otherwise, with
            several processes, such a signal is not reported, because one process must not stop alone.
        """
        if self._service and multihost_utils.reached_preemption_sync_point(step):
            return signal.SIGTERM
        if jax.process_count() == 1:
            return self._received
        return int(np.max(multihost_utils.process_allgather(np.asarray(self._received)))) if agree else 0
