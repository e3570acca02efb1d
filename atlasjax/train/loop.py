"""The training loop: trains a model from a configuration, in a folder from which the run can be resumed."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from atlasjax import storage
from atlasjax.config_json import to_dict
from atlasjax.data.pipeline import BatchIterator
from atlasjax.data.windows import Batch
from atlasjax.distributed.processes import aborts_explained, initialize, key_value_store
from atlasjax.distributed.rendezvous import MissingProcessError
from atlasjax.distributed.sharding import global_batch
from atlasjax.evaluate.lm import LanguageModelResult
from atlasjax.train import preflight
from atlasjax.train import setup as setup_lib
from atlasjax.train.config import HELD_OUT, TrainConfig, run_folder
from atlasjax.train.errors import (
    CheckpointError,
    Interrupted,
    NonFiniteError,
    ProcessDiedError,
    RunError,
    user_errors,
)
from atlasjax.train.evaluations import Evaluations
from atlasjax.train.initial import base_params
from atlasjax.train.reports import runtime_errors
from atlasjax.train.reports.metrics import MetricsWriter
from atlasjax.train.reports.metrics import read as read_metrics
from atlasjax.train.reports.plot import plot_loss
from atlasjax.train.reports.progress import Progress
from atlasjax.train.reports.stalls import Stalls
from atlasjax.train.reports.timing import Timing, seconds, slow_input
from atlasjax.train.reports.trace import Trace
from atlasjax.train.reports.utilization import utilization_per_rate
from atlasjax.train.reports.watch import MemoryWatch
from atlasjax.train.saving import compiled_programs, lock, saves
from atlasjax.train.saving.checkpoint import Checkpoints, check_path
from atlasjax.train.saving.compiled_programs import CompiledPrograms
from atlasjax.train.setup import Setup
from atlasjax.train.signals import StopSignals
from atlasjax.train.state import TrainState
from atlasjax.train.step import Metrics, jit_eval_step, jit_train_step
from atlasjax.train.trackers import Trackers
from atlasjax.train.trainable import counted

ADVICE = "a lower optimizer.learning_rate, a longer optimizer.warmup_steps, a smaller optimizer.clip_norm, or model.dtype=float32"


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """The result of a run.

    Attributes:
      state: the final training state.
      setup: the parts of the run.
      resumed_from: the step that this call resumed from, 0 for a new run.
      evaluation: the last evaluation on held-out text. None if nothing is held out.
      evaluations: the last evaluation of each text, "held-out" and `evaluation_sets`, by name.
      ema_evaluations: those of the moving average of the parameters; empty if there is none.
      checkpoint: folder of the last checkpoint.
      seconds: wall time of this call.
    """

    state: TrainState
    setup: Setup
    resumed_from: int
    evaluation: LanguageModelResult | None
    evaluations: dict[str, LanguageModelResult]
    ema_evaluations: dict[str, LanguageModelResult]
    checkpoint: storage.AnyPath
    seconds: float

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.state.step)


def train(
    config: TrainConfig,
    *,
    on_start: Callable[[int], None] | None = None,
    on_step: Callable[[int], None] | None = None,
) -> TrainResult:
    """Trains until `config.steps` optimizer steps are done. Starts a run or resumes it.

    If the run's folder has checkpoints, the run resumes from the newest usable one. On the same machine and mesh, its numbers are
    equal in every bit to those of a run that was never stopped.

    Args:
      config: the run.
      on_start: called with the number of steps done before, once the run is known to be sound and before anything is compiled for
        its steps; in the main process only.
      on_step: called with the number of steps done after each step (and after what is saved then is being saved).

    Raises:
      ConfigError: the configuration or the data is wrong, or the folder holds another run; before anything is compiled.
      CheckpointError: a checkpoint could not be written, or none of those there can be read.
      ProcessDiedError: another process of the run has ended.
      NonFiniteError: a loss, gradient or state is NaN or infinite; nothing of it is saved.
      Interrupted: SIGINT, SIGTERM or SIGHUP; the step in progress was finished and saved, or none had begun.
    """
    started = time.perf_counter()
    with user_errors():
        run_dir = run_folder(config.run_dir)
        check_path(run_dir)
    hosts = _join(config)
    main = jax.process_index() == 0
    with StopSignals() as signals, contextlib.ExitStack() as held, runtime_errors.explained(run_dir):
        if jax.process_count() > 1:
            held.enter_context(
                aborts_explained(
                    lambda: runtime_errors.died(run_dir, "jax's coordination service aborts this one"),
                    ProcessDiedError.code,
                )
            )
        with user_errors():
            setup, changed, confirm = _prepare(config, run_dir, held)
        programs = held.enter_context(compiled_programs.kept(config, functools.partial(print, flush=True)))
        if jax.process_count() > 1:
            # A process that is late must not find the folder of checkpoints that an early one makes below: opening it is a
            # collective of all, once for each.
            multihost_utils.sync_global_devices("run prepared")
        checkpoints = held.enter_context(Checkpoints(run_dir / "checkpoints", config.keep))
        data = iter(setup.train_data)
        state, resumed_from, notes = _first_state(setup, checkpoints, data)
        if main:
            if on_start is not None:
                on_start(resumed_from)
            setup_lib.write_run_files(setup)
            if hosts:
                print(preflight.summary(hosts, setup.mesh), flush=True)
            if setup.trainable is not None:
                some, every = counted(state.params, setup.trainable)
                notes.append(f"{some:,} of {every:,} parameters train; the others are frozen.")
            for line in [*notes, *(f"changed: {line}" for line in changed if resumed_from), *setup.skipped]:
                print(line, flush=True)
        run = _Run(setup, checkpoints, data, hosts, confirm, programs)
        signals.remember()
        with (
            run.trace,
            MetricsWriter(
                run_dir, resumed_from, trackers=Trackers(config, resumed_from) if main else None, active=main
            ) as writer,
            Progress(resumed_from, config.steps, active=main) as progress,
            Stalls(
                key_value_store(),
                jax.process_index(),
                jax.process_count(),
                hosts,
                progress.print if main else functools.partial(print, flush=True),
                after=config.processes.stall,
            ) as stalls,  # fmt: skip
        ):
            state = run.steps(state, resumed_from, signals, writer, progress, stalls, on_step)
            if line := run.timing.summary():
                progress.print(line)
    if main and run.recorded:
        plot_loss(run_dir, title=run_dir.name)
    return TrainResult(
        state, setup, resumed_from, run.results.get(HELD_OUT), run.results, run.ema_results,
        checkpoints.path(int(state.step)), time.perf_counter() - started,
    )  # fmt: skip


def _join(config: TrainConfig) -> list[str]:
    """Joins the other processes of the run. Returns their hosts; none for a run of one process."""
    with user_errors():
        try:
            return initialize(config.processes, preflight.facts(config) if config.processes.distributed else None)
        except MissingProcessError as error:
            raise ProcessDiedError(str(error)) from None


def _prepare(
    config: TrainConfig, run_dir: storage.AnyPath, held: contextlib.ExitStack
) -> tuple[Setup, list[str], Callable[[], None]]:
    """Returns (parts of the run, its changes, what confirms its lock), with the lock held; bad input leaves no folder behind."""
    # In a bucket the lock comes first: it shows whether the bucket can be written, and giving it back leaves nothing.
    there = isinstance(run_dir, storage.StorePath) or setup_lib.lexists(run_dir)
    if there:
        if run_dir.is_file() or not (isinstance(run_dir, storage.StorePath) or run_dir.is_dir()):
            raise ValueError(f"run_dir is {config.run_dir!r}, which is not a folder.")
        confirm = held.enter_context(lock.hold(run_dir))
    changed = setup_lib.check_resumable(config)
    setup = setup_lib.prepare(config)
    if not there:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except (FileNotFoundError, FileExistsError, NotADirectoryError) as error:
            raise ValueError(f"run_dir is {config.run_dir!r}, which cannot be made: {error.strerror}.") from error
        confirm = held.enter_context(lock.hold(run_dir))
        changed = setup_lib.check_resumable(config)  # another job may have been in it meanwhile
    return setup, changed, confirm


def _first_state(setup: Setup, checkpoints: Checkpoints, data: BatchIterator) -> tuple[TrainState, int, list[str]]:
    """Returns (state, steps done, lines for the user), from the newest usable checkpoint or afresh."""
    if not checkpoints.steps():
        if setup.config.init_from is None:
            return setup.init_state(), 0, []
        params, lines = base_params(setup.config, setup.shardings.params)
        return setup.state_from(params), 0, lines
    if checkpoints.steps() == [0]:
        return _given_state(setup, checkpoints)
    try:
        restored = checkpoints.restore(setup.abstract_state())
    except CheckpointError as error:
        if 0 not in checkpoints.steps():
            raise
        damaged = [(step, reason) for step, reason in error.skipped if step]
        try:
            return _given_state(setup, checkpoints, damaged)
        except CheckpointError:
            raise error from None
    with user_errors():
        setup_lib.set_position(data, restored.positions)
    # Orbax does not see those that are unreadable, so it would never delete an old one.
    older = [(step, reason) for step, reason in checkpoints.unreadable.items() if step < restored.step]
    notes = _set_aside(checkpoints, restored.skipped, "; using the one before it")
    notes += _set_aside(checkpoints, older)
    notes.append(f"Resuming from step {restored.step} ({checkpoints.path(restored.step)}).")
    return restored.state, restored.step, notes


def _given_state(
    setup: Setup, checkpoints: Checkpoints, damaged: Sequence[tuple[int, str]] = ()
) -> tuple[TrainState, int, list[str]]:
    """The first state, from a checkpoint of step 0 that has parameters and nothing else, such as imported ones."""
    params, _, _ = checkpoints.restore_params(setup.abstract_state().params, 0)
    notes = _set_aside(checkpoints, damaged)
    return setup.state_from(params), 0, [*notes, f"Starting from the parameters in {checkpoints.path(0)}."]


def _set_aside(checkpoints: Checkpoints, unusable: Sequence[tuple[int, str]], then: str = "") -> list[str]:
    """Sets checkpoints aside, and says so."""
    return [
        f"The checkpoint of step {step} is unusable: {reason}. It is now in {checkpoints.set_aside(step)}{then}."
        for step, reason in unusable
    ]


class _Run:
    """The mutable part of a run, and what happens between steps."""

    def __init__(
        self, setup: Setup, checkpoints: Checkpoints, data: BatchIterator, hosts: list[str], confirm: Callable[[], None],
        programs: CompiledPrograms | None,
    ):  # fmt: skip
        self.setup, self.checkpoints, self.data, self.hosts = setup, checkpoints, data, hosts
        self.confirm, self.programs = confirm, programs
        self.config = setup.config
        self.timing = Timing(
            _tokens_per_step(self.config),
            utilization_per_rate(self.config, list(setup.mesh.devices.flat)),
            setup.mesh.local_devices,
        )
        self.trace = Trace(self.config.profile, run_folder(self.config.run_dir) / "profile")
        self.results: dict[str, LanguageModelResult] = {}
        self.ema_results: dict[str, LanguageModelResult] = {}
        self.recorded = False
        self._pending: list[tuple[int, Metrics]] = []
        self._watch = MemoryWatch(self.config.model, self.config.memory_norm_limit)
        self._train_step = jit_train_step(
            setup.graphdef, setup.optimizer, setup.schedule, setup.shardings, setup.mesh,
            microbatches=self.config.accumulation, max_segments=setup.train_data.max_segments, loss=self.config.loss,
            trainable=setup.trainable, ema_decay=self.config.optimizer.ema_decay,
        )  # fmt: skip
        self._put = functools.partial(global_batch, mesh=setup.mesh)
        eval_step = lambda max_segments: jit_eval_step(
            setup.graphdef, setup.shardings.params, setup.mesh, setup.tokenizer.bytes_per_token, max_segments=max_segments
        )  # fmt: skip
        self._evaluations = Evaluations(setup.evaluation_data, eval_step, self.config.eval_batches, self._put)

    def steps(
        self, state: TrainState, first: int, signals: StopSignals, writer: MetricsWriter, progress: Progress, stalls: Stalls,
        on_step: Callable[[int], None] | None,
    ) -> TrainState:  # fmt: skip
        """Takes the remaining steps, and evaluates, saves and reports between them."""
        config = self.config
        done = first >= config.steps
        if done:
            progress.print(f"All {config.steps} steps are done. Set a larger number of steps to continue.")
        missed = self._missed_evaluation(first)
        if (done or missed) and self._evaluate(state) and missed:
            self._record_evaluation(first, writer, progress)
        if not first and config.init_from is not None and self._evaluate(state):
            self._record_evaluation(0, writer, progress)  # what the other run's model can do here
        for step in range(first + 1, config.steps + 1):
            self.trace.begin(step, state)
            stalls.at(step)
            with self.timing.spend("input"), stalls.doing("reading its batch"):
                batch = self._next_batch(step)
            with stalls.doing("compiling or starting its step"):
                state, metrics = self._train_step(state, self._put(batch))
            self._pending.append((step, metrics))
            if line := self.trace.end(step, state):
                progress.print(line)
            last, log = step == config.steps, step % config.log_every == 0
            stop = signals.received(step, agree=log)
            evaluating = last or _every(step, config.eval_every)
            saving = last or bool(stop) or _every(step, config.checkpoint_every)
            if log or saving or evaluating or step == first + 1:
                loss = self._flush(writer, progress)
                if log or last:
                    progress.report(step, loss)
            if log and saves.failed_meanwhile(self.checkpoints, progress.print):
                saving = True  # this state: the arrays of the other were donated
            if evaluating and not stop and self._evaluate(state):
                self._record_evaluation(step, writer, progress)
            if saving:
                self._save(state, step, writer, progress, wait=last or bool(stop))
            if self.programs is not None and (saving or step == first + 1):
                self.programs.save()
            if on_step is not None:
                on_step(step)
            if stop and not (last and not self.setup.evaluation_data):
                raise Interrupted(
                    f"Stopped by signal {stop} after step {step}, saved in {self.checkpoints.path(step)}. Run the same "
                    "command to resume.",
                    stop,
                )
            if progress.paused and not last:
                progress.start()
        return state

    def _next_batch(self, step: int) -> Batch:
        try:
            return next(self.data)
        except (ValueError, OSError) as error:
            raise RunError(f"The batch of step {step} cannot be read. {error}") from error

    def _flush(self, writer: MetricsWriter, progress: Progress) -> float:
        """Waits for the steps in progress, records them, and returns the last loss."""
        config = self.config
        records = [(step, jax.device_get(metrics)) for step, metrics in self._pending]
        self._pending, last = [], records[-1][0]
        tokens_per_step = _tokens_per_step(config)
        elapsed = progress.pause(len(records), len(records) * tokens_per_step)
        self.recorded = True
        self._time(last, len(records), elapsed, writer, progress)
        for step, metrics in records:
            norms = metrics.pop("memory_norm")
            values = {name: float(value) for name, value in metrics.items()}
            by_layer = {f"memory_norm/{layer}": float(heads.max()) for layer, heads in sorted(norms.items())}
            writer.write(step, "train", {**values, "tokens_seen": step * tokens_per_step, **by_layer})
            if line := self._watch.report(step, norms):
                progress.print(line)
            for name in ("loss", "gradient_norm"):
                if not math.isfinite(values[name]):
                    raise NonFiniteError(
                        self._non_finite(f"The {name.replace('_', ' ')} of step {step} is {values[name]}.")
                    )
        return values["loss"]

    def _time(self, step: int, steps: int, elapsed: float, writer: MetricsWriter, progress: Progress) -> None:
        """Records where the time of the last `steps` steps went, and names a process whose input is late."""
        values = self.timing.interval(steps, elapsed)
        if values:
            writer.write(step, "timing", values)
        if jax.process_count() > 1:
            waits = multihost_utils.process_allgather(np.asarray(values.get("input_seconds", 0.0)))
            if values and (line := slow_input(waits.tolist(), values["step_seconds"], self.hosts)):
                progress.print(f"step {step}: {line}")

    def _evaluate(self, state: TrainState) -> bool:
        if not self.setup.evaluation_data:
            return False
        with self.timing.spend("evaluation"):
            self.results = self._evaluations(state.params)
            if state.ema is not None:
                self.ema_results = self._evaluations(state.averaged)
        return True

    def _missed_evaluation(self, first: int) -> bool:
        """Whether the step that a run resumes from was due for evaluation, and a signal stopped the run before it."""
        due = first and (first >= self.config.steps or _every(first, self.config.eval_every))
        if not due or not self.setup.evaluation_data:
            return False
        found = False
        if jax.process_index() == 0:
            records = read_metrics(run_folder(self.config.run_dir) / "metrics.jsonl")
            found = any(record["step"] == first and record["kind"].startswith("evaluation") for record in records)
        return not multihost_utils.broadcast_one_to_all(np.asarray(found))

    def _record_evaluation(self, step: int, writer: MetricsWriter, progress: Progress) -> None:
        seen = step * _tokens_per_step(self.config)
        for kind, suffix, results in (
            ("evaluation", "", self.results),
            ("evaluation_ema", ", moving average", self.ema_results),
        ):
            for name, result in results.items():
                own = kind if name == HELD_OUT else f"{kind}/{name}"
                writer.write(step, own, {**result.as_dict(), "tokens_seen": seen})
                progress.print(
                    f"step {step}/{self.config.steps} · {name}{suffix}: {result.bits_per_byte:.4f} bits per byte, perplexity "
                    f"{result.perplexity:.2f}"
                )

    def _save(self, state: TrainState, step: int, writer: MetricsWriter, progress: Progress, *, wait: bool) -> None:
        first = self.timing.stop_seconds is None

        def save() -> None:
            with self.timing.spend("checkpoint"):
                self.confirm()
                writer.commit()
                positions = setup_lib.all_positions(self.data)
                self.checkpoints.save(state, positions, to_dict(self.config), self.setup.tokenizer.fingerprint)
            if first or wait:  # the first one, to learn how long one takes
                self.checkpoints.wait()

        with self.timing.spend("checkpoint written") if first else contextlib.nullcontext():
            try:
                saves.repeated(save, self.checkpoints, progress.print)
            except NonFiniteError:
                raise NonFiniteError(self._non_finite(f"The training state after step {step} is not finite.")) from None
        if first and jax.process_count() > 1 and (worst := self.timing.stop_seconds) is not None:
            progress.print(
                f"After a preemption notice, this run needs up to {seconds(worst)}: two steps and a checkpoint."
            )

    def _non_finite(self, what: str) -> str:
        with contextlib.suppress(CheckpointError):  # of an earlier step, which is not the reason to end
            self.checkpoints.wait()
        steps = self.checkpoints.steps()
        last, then = (
            (f"The last good checkpoint is {self.checkpoints.path(steps[-1])}.", "resume from that checkpoint")
            if steps
            else ("No checkpoint was saved yet.", "start again")
        )
        memories = self._watch.summary()
        helps = [ADVICE] + [self._watch.helps] * bool(memories)
        if self._watch.suspected:
            helps.reverse()
        found = " ".join(filter(None, (what, last, memories)))
        return f"{found} What helps: {'; '.join(helps)}. Run the same command with the change to {then}."


def _tokens_per_step(config: TrainConfig) -> int:
    return config.data.batch_size * config.data.sequence_length


def _every(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
