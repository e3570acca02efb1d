"""The training loop: trains a model from a configuration, in a folder from which the run can be resumed."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable

import jax
from jax.experimental import multihost_utils

from atlasjax import storage
from atlasjax.config_json import to_dict
from atlasjax.data.pipeline import BatchIterator
from atlasjax.data.windows import Batch
from atlasjax.distributed.processes import initialize
from atlasjax.distributed.rendezvous import MissingProcessError
from atlasjax.distributed.sharding import global_batch
from atlasjax.evaluate.lm import LanguageModelResult
from atlasjax.train import ahead, preflight, resume
from atlasjax.train import setup as setup_lib
from atlasjax.train.config import HELD_OUT, TrainConfig, run_folder
from atlasjax.train.errors import CheckpointError, Interrupted, NonFiniteError, ProcessDiedError, RunError, user_errors
from atlasjax.train.reports import runtime_errors
from atlasjax.train.reports.plot import plot_loss
from atlasjax.train.reports.reporter import Reporter
from atlasjax.train.reports.timing import seconds
from atlasjax.train.saving import compiled_programs, lock, saves
from atlasjax.train.saving.checkpoint import Checkpoints
from atlasjax.train.saving.step_folders import check_path, complete_steps
from atlasjax.train.setup import Setup
from atlasjax.train.signals import StopSignals
from atlasjax.train.state import TrainState
from atlasjax.train.trainable import counted

_ADVICE = "a lower optimizer.learning_rate, a longer optimizer.warmup_steps, a smaller optimizer.clip_norm, or model.dtype=float32"


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
    meanwhile: Callable[[Setup, ahead.Ahead], None] | None = None,
) -> TrainResult:
    """Trains until `config.steps` optimizer steps are done. Starts a run or resumes it.

    If the run's folder has checkpoints, the run resumes from the newest usable one. On the same machine and mesh, its numbers are
    equal in every bit to those of a run that was never stopped.

    Args:
      config: the run.
      on_start: called with the number of steps done before, once the run is known to be sound and before anything is compiled for
        its steps; in the main process only.
      on_step: called with the number of steps done after each step (and after what is saved then is being saved).
      meanwhile: called while the programs of the steps are compiled, with the parts of the run and what compiles more programs
        after them; in the main process only, and not if no step is left.

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
    with StopSignals() as signals, contextlib.ExitStack() as held, runtime_errors.explained(run_dir):
        # Held, not inside `explained`: a lost process aborts this one also while the checkpoints wait for their save.
        held.enter_context(runtime_errors.aborts_explained(run_dir))
        with user_errors():
            setup, changed, confirm = _prepare(config, run_dir, held)
        programs = held.enter_context(compiled_programs.kept(config, functools.partial(print, flush=True)))
        if jax.process_count() > 1:
            # A process that is late must not find the folder of checkpoints that an early one makes below: opening it is a
            # collective of all, once for each.
            multihost_utils.sync_global_devices("run prepared")
        compiling = held.enter_context(ahead.Ahead())
        done = max(complete_steps(run_dir / "checkpoints"), default=0)
        steps = ahead.begin(setup, compiling, trains=done < config.steps)
        checkpoints = held.enter_context(Checkpoints(run_dir / "checkpoints", config.keep))
        data = iter(setup.train_data)
        state, resumed_from, notes = resume.first_state(setup, checkpoints, data)
        if jax.process_index() == 0:
            if on_start is not None:
                on_start(resumed_from)
            _begin(setup, state, hosts, notes, changed if resumed_from else [])
        reporter = Reporter(config, setup.mesh, resumed_from, hosts)
        run = _Run(setup, steps, checkpoints, data, reporter, confirm, programs)
        signals.remember()
        if meanwhile is not None and jax.process_index() == 0 and resumed_from < config.steps:
            meanwhile(setup, compiling)
        with reporter:
            state = run.steps(state, resumed_from, signals, on_step)
    if jax.process_index() == 0 and reporter.recorded:
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
    # lexists: a link to nothing is there as well, and a folder cannot be made in its place.
    there = isinstance(run_dir, storage.StorePath) or resume.lexists(run_dir)
    if there:
        if run_dir.is_file() or not (isinstance(run_dir, storage.StorePath) or run_dir.is_dir()):
            raise ValueError(f"run_dir is {config.run_dir!r}, which is not a folder.")
        confirm = held.enter_context(lock.hold(run_dir))
    changed = resume.check_resumable(config)
    setup = setup_lib.prepare(config)
    if not there:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except (FileNotFoundError, FileExistsError, NotADirectoryError) as error:
            raise ValueError(f"run_dir is {config.run_dir!r}, which cannot be made: {error.strerror}.") from error
        confirm = held.enter_context(lock.hold(run_dir))
        changed = resume.check_resumable(config)  # another job may have been in it meanwhile
    return setup, changed, confirm


def _begin(setup: Setup, state: TrainState, hosts: list[str], notes: list[str], changed: list[str]) -> None:
    """Writes the run's files, and says what the run is."""
    setup_lib.write_run_files(setup)
    if hosts:
        print(preflight.summary(hosts, setup.mesh), flush=True)
    if setup.trainable is not None:
        some, every = counted(state.params, setup.trainable)
        notes = [*notes, f"{some:,} of {every:,} parameters train; the others are frozen."]
    for line in [*notes, *(f"changed: {line}" for line in changed), *setup.skipped]:
        print(line, flush=True)


class _Run:
    """The mutable part of a run, and what happens between steps."""

    def __init__(
        self, setup: Setup, steps: ahead.Programs, checkpoints: Checkpoints, data: BatchIterator, reporter: Reporter,
        confirm: Callable[[], None], programs: compiled_programs.CompiledPrograms | None,
    ):  # fmt: skip
        self.setup, self.checkpoints, self.data, self.reporter = setup, checkpoints, data, reporter
        self.confirm, self.programs = confirm, programs
        self.config = setup.config
        self.results: dict[str, LanguageModelResult] = {}
        self.ema_results: dict[str, LanguageModelResult] = {}
        self._train_step, self._evaluated, self._compiled = steps
        self._put = functools.partial(global_batch, mesh=setup.mesh)

    def steps(
        self, state: TrainState, first: int, signals: StopSignals, on_step: Callable[[int], None] | None
    ) -> TrainState:
        """Takes the remaining steps, and evaluates, saves and reports between them."""
        try:
            self._catch_up(state, first)
            for step in range(first + 1, self.config.steps + 1):
                state = self._step(state, step)
                stop = self._between(state, step, signals, begins=step == first + 1)
                if on_step is not None:
                    on_step(step)
                # A signal in the last step stops nothing but the evaluation at the end.
                if stop and not (step == self.config.steps and not self.setup.evaluation_data):
                    raise Interrupted(
                        f"Stopped by signal {stop} after step {step}, saved in {self.checkpoints.path(step)}. Run the same "
                        "command to resume.",
                        stop,
                    )
                if step < self.config.steps:
                    self.reporter.go_on()
        except NonFiniteError as error:
            raise NonFiniteError(f"{error} {self._advice()}") from None
        return state

    def _catch_up(self, state: TrainState, first: int) -> None:
        """Before the first step: evaluates what the steps before should have, and a model that another run has trained."""
        done = first >= self.config.steps
        if done:
            self.reporter.say(f"All {self.config.steps} steps are done. Set a larger number of steps to continue.")
        # A signal may have stopped the run before the evaluation of its last step.
        due = first and (done or _every(first, self.config.eval_every))
        missed = due and self.setup.evaluation_data and not self.reporter.has_evaluation(first)
        # The result of `train` has an evaluation, also of a run that is done.
        if (done or missed) and self._evaluate(state) and missed:
            self._record_evaluations(first)
        if not first and self.config.init_from is not None and self._evaluate(state):
            self._record_evaluations(0)  # what the other run's model can do here

    def _step(self, state: TrainState, step: int) -> TrainState:
        """Starts a step. Its result may not be there yet when this returns."""
        self.reporter.begin(step, state)
        with self.reporter.reading():
            batch = self._next_batch(step)
        with self.reporter.starting():
            # Only starts the step. The next batch is read while the devices work.
            state, metrics = self._train_step(state, self._put(batch))
        self.reporter.started(step, state, metrics)
        return state

    def _between(self, state: TrainState, step: int, signals: StopSignals, *, begins: bool) -> int:
        """Records, evaluates and saves after a step, where that is due. Returns the signal that stops the run, or 0."""
        config = self.config
        last, log = step == config.steps, step % config.log_every == 0
        # Processes must stop at the same step, or the others would wait in a collective; they agree only now and then, which
        # costs time.
        stop = signals.received(step, agree=log)
        evaluating = last or _every(step, config.eval_every)
        saving = last or bool(stop) or _every(step, config.checkpoint_every)
        if log or saving or evaluating or begins:
            self.reporter.record(show=log or last)
        if log and saves.failed_meanwhile(self.checkpoints, self.reporter.say):
            saving = True  # this state: the arrays of the other were donated
        if evaluating and not stop and self._evaluate(state):
            self._record_evaluations(step)
        if saving:
            self._save(state, step, wait=last or bool(stop))
        if self.programs is not None and (saving or begins):
            self.programs.save()
        return stop

    def _next_batch(self, step: int) -> Batch:
        try:
            return next(self.data)
        except (ValueError, OSError) as error:
            raise RunError(f"The batch of step {step} cannot be read. {error}") from error

    def _evaluate(self, state: TrainState) -> bool:
        if not self.setup.evaluation_data:
            return False
        with self.reporter.timing.spend("evaluation"):
            self.results = self._evaluated(state.params)
            if state.ema is not None:
                self.ema_results = self._evaluated(state.averaged)
        return True

    def _record_evaluations(self, step: int) -> None:
        self.reporter.record_evaluations(step, self.results, self.ema_results)

    def _save(self, state: TrainState, step: int, *, wait: bool) -> None:
        self._compiled()
        timing = self.reporter.timing
        first = timing.stop_seconds is None

        def save() -> None:
            with timing.spend("checkpoint"):
                # Another job may have taken the folder while this one was suspended.
                self.confirm()
                # Metrics first: a resumed run then finds those of all steps that its checkpoint has.
                self.reporter.commit()
                positions = resume.all_positions(self.data)
                self.checkpoints.save(state, positions, to_dict(self.config), self.setup.tokenizer.fingerprint)
            if first or wait:  # the first one, to learn how long one takes
                self.checkpoints.wait()

        with timing.spend("checkpoint written") if first else contextlib.nullcontext():
            saves.repeated(save, self.checkpoints, self.reporter.say)
        if first and jax.process_count() > 1 and (worst := timing.stop_seconds) is not None:
            self.reporter.say(
                f"After a preemption notice, this run needs up to {seconds(worst)}: two steps and a checkpoint."
            )

    def _advice(self) -> str:
        """The advice for a user whose run has a value that is not finite."""
        with contextlib.suppress(CheckpointError):  # of an earlier step, which is not the reason to end
            self.checkpoints.wait()
        steps = self.checkpoints.steps()
        last, then = (
            (f"The last good checkpoint is {self.checkpoints.path(steps[-1])}.", "resume from that checkpoint")
            if steps
            else ("No checkpoint was saved yet.", "start again")
        )
        memories = self.reporter.memories.summary()
        helps = [_ADVICE] + [self.reporter.memories.helps] * bool(memories)
        if self.reporter.memories.suspected:
            helps.reverse()
        found = " ".join(filter(None, (last, memories)))
        return f"{found} What helps: {'; '.join(helps)}. Run the same command with the change to {then}."


def _every(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
