"""All that a run tells its user while it trains: the loop says what happened, and this decides what is shown and recorded."""

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping
from types import TracebackType

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import PyTree

from atlasjax.distributed.processes import key_value_store
from atlasjax.evaluate.lm import LanguageModelResult
from atlasjax.train.config import HELD_OUT, TrainConfig, run_folder
from atlasjax.train.errors import NonFiniteError
from atlasjax.train.reports import metrics as metrics_lib
from atlasjax.train.reports.progress import Progress
from atlasjax.train.reports.stalls import Stalls
from atlasjax.train.reports.timing import Timing, slow_input
from atlasjax.train.reports.trace import Trace
from atlasjax.train.reports.utilization import utilization_per_rate
from atlasjax.train.reports.watch import MemoryWatch
from atlasjax.train.step import Metrics
from atlasjax.train.trackers import Trackers


class Reporter:
    """The metrics, progress, times, trace and warnings of one call of `train`. A context manager.

    Nothing is written or shown before it is entered. Only the first process writes and shows.

    Args:
      config: the run.
      mesh: its devices.
      first: number of steps done before.
      hosts: the host of each process; empty for a run of one process.

    Attributes:
      timing: where the time goes, from the moment when this object is created.
      memories: what is known of the memories' norms.
      recorded: whether a step was recorded.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, first: int, hosts: list[str]):
        self._config, self._first, self._hosts = config, first, hosts
        self._main = jax.process_index() == 0
        self._run_dir = run_folder(config.run_dir)
        self._tokens_per_step = config.data.batch_size * config.data.sequence_length
        utilization = utilization_per_rate(config, list(mesh.devices.flat))
        self.timing = Timing(self._tokens_per_step, utilization, mesh.local_devices)
        self.memories = MemoryWatch(config.model, config.memory_norm_limit)
        self.recorded = False
        self._progress = Progress(first, config.steps, active=self._main)
        self._trace = Trace(config.profile, self._run_dir / "profile")
        self._stalls = Stalls(
            key_value_store(),
            jax.process_index(),
            jax.process_count(),
            hosts,
            # Any process may be the first that can speak of the one that hangs, so the others print too.
            self.say if self._main else functools.partial(print, flush=True),
            after=config.processes.stall,
        )
        self._writer: metrics_lib.MetricsWriter
        self._pending: list[tuple[int, Metrics]] = []

    def __enter__(self) -> "Reporter":
        with contextlib.ExitStack() as entered:
            entered.enter_context(self._trace)
            trackers = Trackers(self._config, self._first) if self._main else None
            self._writer = entered.enter_context(
                metrics_lib.MetricsWriter(self._run_dir, self._first, trackers=trackers, active=self._main)
            )
            entered.enter_context(self._progress)
            entered.enter_context(self._stalls)
            self._exit = entered.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and (line := self.timing.summary()):
            self.say(line)
        self._exit.__exit__(kind, error, trace)

    def say(self, line: str) -> None:
        """Shows a line, without disturbing the progress bar."""
        self._progress.print(line)

    def begin(self, step: int, state: PyTree) -> None:
        """A step begins, with the state that it starts from."""
        self._trace.begin(step, state)
        self._stalls.at(step)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Within it, the batch of the step is read."""
        with self.timing.spend("input"), self._stalls.doing("reading its batch"):
            yield

    def starting(self) -> contextlib.AbstractContextManager[None]:
        """Within it, the step is compiled or started."""
        return self._stalls.doing("compiling or starting its step")

    def started(self, step: int, state: PyTree, metrics: Metrics) -> None:
        """A step was started, whose state and metrics need not be there yet."""
        self._pending.append((step, metrics))
        if line := self._trace.end(step, state):
            self.say(line)

    def record(self, *, show: bool) -> None:
        """Waits for the steps in progress and records them; shows the last loss too.

        Raises:
          NonFiniteError: a loss or a gradient is NaN or infinite.
        """
        records = [(step, jax.device_get(metrics)) for step, metrics in self._pending]
        self._pending, last = [], records[-1][0]
        elapsed = self._progress.pause(len(records), len(records) * self._tokens_per_step)
        self.recorded = True
        self._record_times(last, len(records), elapsed)
        for step, metrics in records:
            norms, shares = metrics.pop("memory_norm"), metrics.pop("expert_share")
            values = {name: float(value) for name, value in metrics.items()}
            by_layer = {f"memory_norm/{layer}": float(heads.max()) for layer, heads in sorted(norms.items())}
            by_layer |= {f"expert_share/{layer}": float(share) for layer, share in sorted(shares.items())}
            self._writer.write(step, "train", {**values, "tokens_seen": step * self._tokens_per_step, **by_layer})
            if line := self.memories.report(step, norms):
                self.say(line)
            for name in ("loss", "gradient_norm"):
                if not math.isfinite(values[name]):
                    raise NonFiniteError(f"The {name.replace('_', ' ')} of step {step} is {values[name]}.")
        if show:
            self._progress.report(last, values["loss"])

    def _record_times(self, step: int, steps: int, elapsed: float) -> None:
        """Records where the time of the last `steps` steps went, and names a process whose input is late."""
        values = self.timing.interval(steps, elapsed)
        if values:
            self._writer.write(step, "timing", values)
        if jax.process_count() > 1:
            waits = multihost_utils.process_allgather(np.asarray(values.get("input_seconds", 0.0)))
            if values and (line := slow_input(waits.tolist(), values["step_seconds"], self._hosts)):
                self.say(f"step {step}: {line}")

    def record_evaluations(
        self, step: int, results: Mapping[str, LanguageModelResult], ema_results: Mapping[str, LanguageModelResult]
    ) -> None:
        """Records and shows the evaluations of the parameters and of their moving average, by the name of the text."""
        for kind, suffix, found in (
            ("evaluation", "", results),
            ("evaluation_ema", ", moving average", ema_results),
        ):
            for name, result in found.items():
                own = kind if name == HELD_OUT else f"{kind}/{name}"
                self._writer.write(step, own, {**result.as_dict(), "tokens_seen": step * self._tokens_per_step})
                self.say(
                    f"step {step}/{self._config.steps} · {name}{suffix}: {result.bits_per_byte:.4f} bits per byte, perplexity "
                    f"{result.perplexity:.2f}"
                )

    def has_evaluation(self, step: int) -> bool:
        """Whether an evaluation of this step is recorded. A collective."""
        found = False
        if self._main:  # one reads for all: they evaluate together, so they must agree
            records = metrics_lib.read(self._run_dir / "metrics.jsonl")
            found = any(record["step"] == step and record["kind"].startswith("evaluation") for record in records)
        return bool(multihost_utils.broadcast_one_to_all(np.asarray(found)))

    def commit(self) -> None:
        """Makes what was recorded visible to others."""
        self._writer.commit()

    def go_on(self) -> None:
        """Starts the clock of the progress again, after the loop has done something else than steps."""
        if self._progress.paused:
            self._progress.start()
