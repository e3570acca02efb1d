"""SIGINT, SIGTERM and SIGHUP stop a run after the step in progress."""

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
    """Catches SIGINT, SIGTERM and SIGHUP inside a `with` block. A second signal has its usual effect, except SIGHUP.

    SIGHUP, which a terminal sends when it closes, is left alone if it is ignored, as under nohup.

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
            caught = [signal.SIGINT] if self._service else [signal.SIGINT, signal.SIGTERM]
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                caught.append(signal.SIGHUP)
            for number in caught:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore(list(self._before))

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self._received:
            return  # SIGHUP again: a closing terminal and its shell each send it, and the step still has to be saved
        self._received = number
        self._restore([caught for caught in self._before if caught != signal.SIGHUP])
        if not self._remembers:
            self._stop()

    def remember(self) -> None:
        """From now on a signal is remembered, for `received`. Raises Interrupted for one from before, whose exception was lost."""
        self._remembers = True
        if self._received:
            self._stop()

    def _stop(self) -> None:
        raise Interrupted(
            f"Stopped by signal {self._received} before the first step. Run the same command to start again or to resume from "
            "the last checkpoint.",
            self._received,
        )

    def _restore(self, numbers: list[int]) -> None:
        for number in numbers:
            signal.signal(number, self._before.pop(number))

    def received(self, step: int, *, agree: bool) -> int:
        """Returns the signal's number, or 0: the same in all processes.

        Args:
          step: the step that is being done. All processes call this once in every step.
          agree: whether to ask all processes now for a signal that only Python received. This costs a collective. Otherwise, with
            several processes, such a signal is not reported, because one process must not stop alone.
        """
        if self._service and multihost_utils.reached_preemption_sync_point(step):
            return signal.SIGTERM
        if jax.process_count() == 1:
            return self._received
        return int(np.max(multihost_utils.process_allgather(np.asarray(self._received)))) if agree else 0
