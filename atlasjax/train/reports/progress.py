"""Reports progress: a live bar on a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich import progress


def duration(seconds: float) -> str:
    """Returns seconds as "1h02m", "3m05s" or "12s"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


class Progress:
    """Shows step, loss, tokens per second and the time left. A context manager.

    The rate counts only the time between `start` and `pause`: not evaluation, compilation or saving. If the output cannot be
    written, because its reader or its terminal is gone or its disk is full, training goes on without it.

    Args:
      first_step: number of steps already done.
      steps: number of steps of the whole run.
      active: whether to show anything. Only one of several processes does.
    """

    def __init__(self, first_step: int, steps: int, *, active: bool = True):
        self._first, self._steps, self._active = first_step, steps, active
        self._bar: progress.Progress | None = None
        self._task: progress.TaskID | None = None
        self._clock: float | None = None
        self._seconds = 0.0
        self._tokens = 0.0
        self._timed_steps = 0

    def __enter__(self) -> "Progress":
        if self._active and sys.stdout.isatty():
            from rich import progress

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.TextColumn("{task.fields[text]}"),
            )
            self._bar.start()
            self._task = self._bar.add_task("training", total=self._steps, completed=self._first, text="compiling")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.stop()

    def start(self) -> None:
        """Start the clock: training continues."""
        self._clock = time.perf_counter()

    def pause(self, steps: int, tokens: float) -> float:
        """Stop the clock and count `steps` and `tokens` done since `start`. Returns the seconds since, 0 if the clock stood."""
        if self._clock is None:
            return 0.0
        seconds = time.perf_counter() - self._clock
        self._seconds += seconds
        self._timed_steps += steps
        self._tokens += tokens
        self._clock = None
        return seconds

    @property
    def paused(self) -> bool:
        """Whether the clock is stopped."""
        return self._clock is None

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of training so far, 0 before any were timed."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def report(self, step: int, loss: float) -> None:
        """Shows the progress after `step` steps."""
        if not self._active:
            return
        left = ""
        if self._timed_steps:
            left = f" · {duration((self._steps - step) * self._seconds / self._timed_steps)} left"
        text = f"step {step}/{self._steps} · loss {loss:.4f} · {self.tokens_per_second:,.0f} tokens/s{left}"
        if self._bar is not None:
            assert self._task is not None
            self._bar.update(self._task, completed=step, text=text)
        else:
            self.print(text)

    def print(self, line: str) -> None:
        """Prints a line without disturbing the bar."""
        if not self._active:
            return
        try:
            if self._bar is not None:
                self._bar.console.print(line, markup=False, highlight=False)
            else:
                print(line, flush=True)
        except OSError as error:
            self._active = False
            with contextlib.suppress(OSError):
                print(f"Nothing more is shown ({error}); training goes on.", file=sys.stderr, flush=True)
