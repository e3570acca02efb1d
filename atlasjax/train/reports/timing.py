"""Where the time of a run goes: steps, waiting for input, checkpoints, evaluation."""

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

import jax

from atlasjax.train.reports.progress import duration

_SLOW = 0.1  # a process is named if it waits for its input for more than this fraction of a step
_TIMES = 3.0  # and more than this many times as long as the median process


class Timing:
    """Adds up the wall time of one call of `train`, from the moment when this object is created.

    Args:
      tokens_per_step: number of tokens per step, over all processes.
      utilization_per_rate: the model FLOPs utilization at one token per second (see `utilization`); None leaves it out.
      devices: devices of this process, whose peak memory is reported.
    """

    def __init__(
        self, tokens_per_step: int, utilization_per_rate: float | None = None, devices: Sequence[jax.Device] = ()
    ):
        self._tokens_per_step = tokens_per_step
        self._utilization_per_rate = utilization_per_rate
        self._devices = devices
        self._started = time.perf_counter()
        self._spent: dict[str, list[float]] = defaultdict(list)
        self._since: dict[str, float] = defaultdict(float)  # since the last interval
        self._steps = 0
        self._seconds = 0.0
        self._per_step: list[float] = []

    @contextlib.contextmanager
    def spend(self, what: str) -> Iterator[None]:
        """Times a part of the run: "input", "checkpoint", "evaluation"."""
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self._spent[what].append(seconds)
            self._since[what] += seconds

    def interval(self, steps: int, seconds: float) -> dict[str, float]:
        """Counts `steps` steps that took `seconds` in total, and returns the values to record.

        Returns:
          step_seconds and input_seconds, per step, where input is the time that this process waited for its batches;
          tokens_per_second; utilization and peak_memory_bytes (see `peak_memory`), if they are known.
        """
        waited = self._since.pop("input", 0.0)
        if not steps or not seconds:
            return {}
        self._steps += steps
        self._seconds += seconds
        self._per_step.append(seconds / steps)
        rate = steps * self._tokens_per_step / seconds
        values = {"step_seconds": seconds / steps, "input_seconds": waited / steps, "tokens_per_second": rate}
        if self._utilization_per_rate is not None:
            values["utilization"] = rate * self._utilization_per_rate
        if (memory := peak_memory(self._devices)) is not None:
            values["peak_memory_bytes"] = float(memory[0])
        return values

    @property
    def stop_seconds(self) -> float | None:
        """Seconds from a preemption notice until the checkpoint is written, at worst: two steps and a checkpoint.

        None before a step and a whole checkpoint were timed.
        """
        saved = self._spent["checkpoint written"]
        return 2 * max(self._per_step) + max(saved) if self._per_step and saved else None

    def summary(self) -> str:
        """One line for the user, "" if no step was timed."""
        if not self._per_step:
            return ""
        total = time.perf_counter() - self._started
        rate = self._steps * self._tokens_per_step / self._seconds
        parts = [
            f"{rate:,.0f} tokens/s",
            f"step {seconds(statistics.median(self._per_step))} (median), {seconds(max(self._per_step))} (slowest interval)",
            f"waiting for input {self._share('input', self._seconds)}",
        ]
        if self._utilization_per_rate is not None:
            parts.insert(1, f"MFU {rate * self._utilization_per_rate:.1%}")
        if self._spent["checkpoint"]:
            parts.append(f"checkpoints {self._share('checkpoint', total)}{self._checkpoint_times()}")
        if self._spent["evaluation"]:
            parts.append(f"evaluation {self._share('evaluation', total)}")
        if (memory := peak_memory(self._devices)) is not None:
            parts.append(f"peak memory {memory[0] / 2**30:.2f} of {memory[1] / 2**30:.2f} GiB")
        parts.append(f"goodput {self._seconds / total:.0%} of {duration(total)}")
        return "timing: " + " · ".join(parts)

    def _checkpoint_times(self) -> str:
        """The two times of a checkpoint: how long it holds the steps up, and how long until it is safe."""
        written = self._spent["checkpoint written"]
        if not written:
            return ""
        return f" ({seconds(statistics.median(self._spent['checkpoint']))} each, written after {seconds(max(written))})"

    def _share(self, what: str, whole: float) -> str:
        return f"{sum(self._spent[what]) / whole:.1%}"


def peak_memory(devices: Sequence[jax.Device]) -> tuple[int, int] | None:
    """The most memory in use on any of the devices since the process began, and what that device has, in bytes.

    None if no device reports it, as CPUs.
    """
    reports = [device.memory_stats() or {} for device in devices]
    known = [
        (report["peak_bytes_in_use"], report["bytes_limit"])
        for report in reports
        if {"peak_bytes_in_use", "bytes_limit"} <= report.keys()
    ]
    return max(known, default=None)


def seconds(value: float) -> str:
    """Returns seconds with three digits and their unit: "12.3 ms", "1.25 s"."""
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def slow_input(waits: Sequence[float], step_seconds: float, hosts: Sequence[str]) -> str | None:
    """One line that names the process whose input is late, or None.

    Args:
      waits: seconds per step that each process waited for its batches.
      step_seconds: seconds per step.
      hosts: the host of each process; empty if they are not known.
    """
    worst = max(range(len(waits)), key=waits.__getitem__)
    if waits[worst] < _SLOW * step_seconds or waits[worst] < _TIMES * statistics.median(waits):
        return None
    host = f" ({hosts[worst]})" if hosts else ""
    return (
        f"process {worst}{host} waits {seconds(waits[worst])} per step for its input, the median process "
        f"{seconds(statistics.median(waits))}; a step takes {seconds(step_seconds)}."
    )
