"""Names the process that the others wait for.

When one process of a job hangs, all others wait in a collective and say nothing. Here each process tells the job's key-value store
every few seconds which step it is at and what it is doing, from a thread of its own. If there is no progress for a while, the first
process that can speak reads what all have told and names those that are not waiting themselves.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from atlasjax.distributed.processes import KeyValueStore
from atlasjax.train.reports.timing import seconds

_PREFIX = "atlasjax/progress/"
_REPORTS = 6  # of each process in the time after which one is named; that time is doubled each time
_SILENT = 4  # reports that a process misses before it counts as silent

WAITING = "waiting"  # for its devices or for other processes


class Report(NamedTuple):
    """A process's report on itself.

    Attributes:
      step: the step that it is at.
      doing: what it is doing, in words that follow "is".
      since: seconds for which it has been doing this.
      silent: seconds for which nothing was heard of it, beyond the time between two reports.
    """

    step: int
    doing: str
    since: float
    silent: float


def late(reports: Sequence[Report | None], hosts: Sequence[str]) -> str | None:
    """One line that names the processes for which the others wait, or None if no process is different from the others.

    Args:
      reports: one for each process; None for a process that was never heard of.
      hosts: the host of each process; empty if they are not known.
    """
    found = []
    for index, report in enumerate(reports):
        host = f" ({hosts[index]})" if hosts else ""
        if report is None:
            found.append(f"process {index}{host} has said nothing")
        elif report.silent > 0:
            found.append(
                f"nothing was heard of process {index}{host} for {seconds(report.silent)}, at step {report.step}"
            )
        elif report.doing != WAITING:
            found.append(
                f"process {index}{host} has been {report.doing} for {seconds(report.since)}, at step {report.step}"
            )
    if not found or len(found) == len(reports):
        return None
    shown = "; ".join(found[:8]) + (f"; and {len(found) - 8} more" if len(found) > 8 else "")
    return f"{shown}. The others wait."


class Stalls:
    """Reports what this process is doing, and names processes that are late. A context manager; without a store it does nothing.

    Args:
      store: the job's key-value store, None for a job of one process.
      index, hosts: of this process, and the hosts of all; empty if they are not known.
      count: number of processes.
      say: prints a line.
      after: seconds without progress before a process is named.
    """

    def __init__(
        self,
        store: KeyValueStore | None,
        index: int,
        count: int,
        hosts: Sequence[str],
        say: Callable[[str], None],
        *,
        after: float,
    ):
        self._store, self._index, self._count, self._hosts, self._say = store, index, count, hosts, say
        self._every, self._after = after / _REPORTS, after
        self._stop = threading.Event()
        # A daemon: a process that ends with an error must not wait for it.
        self._thread = threading.Thread(target=self._run, name="stalls", daemon=True)
        self._now: tuple[int, str, float] = (0, WAITING, time.monotonic())
        self._beats = 0
        self._heard: dict[int, tuple[str, float]] = {}

    def __enter__(self) -> "Stalls":
        if self._store is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._store is not None:
            self._thread.join(timeout=self._every)

    def at(self, step: int) -> None:
        """Says that this process has come to a step. It counts as waiting there, unless `doing` says something else."""
        self._now = (step, WAITING, time.monotonic())

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Says what this process is doing, in words that follow "is"."""
        step, before, _ = self._now
        self._now = (step, what, time.monotonic())
        try:
            yield
        finally:
            self._now = (self._now[0], before, time.monotonic())

    def _run(self) -> None:
        quiet = self._after  # doubled after each message, so that a long compilation does not fill the log
        while not self._stop.wait(self._every):
            # A store that cannot be reached belongs to a job that is ending, of which jax tells.
            with contextlib.suppress(Exception):
                self._tell()
                stalled = time.monotonic() - self._now[2]
                if stalled < self._after:
                    quiet = self._after
                elif stalled >= quiet and (line := self._look()):
                    self._say(f"No progress for {seconds(stalled)}: {line}")
                    quiet = 2 * stalled

    def _tell(self) -> None:
        assert self._store is not None
        step, doing, since = self._now
        self._beats += 1
        report = json.dumps([self._beats, step, doing, time.monotonic() - since])
        self._store.key_value_set(f"{_PREFIX}{self._index}", report, allow_overwrite=True)

    def _look(self) -> str | None:
        """`late`, if this is the first process that can speak."""
        assert self._store is not None
        told = {int(key.rpartition("/")[2]): value for key, value in self._store.key_value_dir_get(_PREFIX)}
        reports = [self._report(index, told.get(index)) for index in range(self._count)]
        speakers = [index for index, report in enumerate(reports) if report is not None and report.silent <= 0]
        return late(reports, self._hosts) if speakers[:1] == [self._index] else None

    def _report(self, index: int, told: str | None) -> Report | None:
        if told is None:
            return None
        now = time.monotonic()
        if (
            self._heard.get(index, ("", 0.0))[0] != told
        ):  # clocks of hosts differ: it counts when this process sees a change
            self._heard[index] = (told, now)
        _, step, doing, since = json.loads(told)
        age = now - self._heard[index][1]
        return Report(step, doing, since + age, age if age > _SILENT * self._every else 0.0)
