"""Checkpoints: one folder per step with model, optimizer, PRNG key, step, data position and configuration (Orbax v1).

    checkpoints/<step>/params, optimizer, progress      arrays (Orbax OCDBT); ema, if there is a moving average
    checkpoints/<step>/position, config, integrity      JSON; integrity has the fingerprint of the run's tokenizer too

A step is written next to the others under a temporary name, and renamed when complete. A bucket has no rename: there a step has
its final name from the start, and is complete once it contains commit_success.txt, which is written last.
"""

import concurrent.futures
import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
from jaxtyping import PyTree

from atlasjax import storage
from atlasjax.train.errors import CheckpointError, ConfigError, NonFiniteError, ProcessDiedError, SaveError
from atlasjax.train.saving import integrity, step_folders
from atlasjax.train.saving.quiet import join_writers, no_leftovers, quiet, root_cause
from atlasjax.train.saving.saves import agreed_cause, agreed_done
from atlasjax.train.trainable import replaced

if TYPE_CHECKING:  # so that `runs` costs no more than jax: with the state come Flax and Optax
    from orbax.checkpoint import v1 as ocp

    from atlasjax.data.pipeline import Position
    from atlasjax.train.state import TrainState

DEADLINE = 300  # seconds for a save of several processes: when one fails, the others wait for it until then
LONGEST = 1200  # each failure doubles the deadline, in case the save was only slow, up to Orbax's own


@dataclasses.dataclass(frozen=True)
class Restored:
    """The content of a checkpoint.

    Attributes:
      state: the training state, with the requested shardings.
      positions: the data position of each process.
      step: optimizer steps done.
      skipped: newer checkpoints that could not be used, as (step, reason), newest first.
    """

    state: "TrainState"
    positions: "list[Position | None]"
    step: int
    skipped: list[tuple[int, str]]


class Checkpoints:
    """The checkpoints of one run. A context manager that waits on exit for the save in progress.

    Args:
      directory: the folder that holds (or will hold) one folder per step.
      keep: number of checkpoints to keep. The oldest are deleted.
      clean: delete leftovers of killed saves. Use False where another process may be saving.
      at_a_time: bytes of arrays that a save copies and compresses at a time, above those of the largest. None: all of them.

    Attributes:
      directory: the folder.
      failures: the saves in a row that have failed.
    """

    def __init__(
        self, directory: str | storage.AnyPath, keep: int = 3, *, clean: bool = True, at_a_time: int | None = None
    ):
        self.directory = storage.path(directory).absolute()
        self.failures = 0
        self._keep, self._clean, self._at_a_time = keep, clean, at_a_time
        self._opened = 0
        self._folders = step_folders.StepFolders()
        with contextlib.ExitStack() as silent:
            silent.enter_context(quiet("absl"))
            self._checkpointer = self._open()
            self._exit = silent.pop_all()
        # Orbax's response can only be waited for. In a thread of ours, `check` can ask whether it has come.
        self._waiter = concurrent.futures.ThreadPoolExecutor(1, "save")
        self._pending: tuple[int, concurrent.futures.Future[object]] | None = None
        self._failed_step: int | None = None
        self._saving = contextlib.ExitStack()  # contexts that are active during a save
        self._other_threads: set[threading.Thread] = set()  # threads that were running before the save

    def _open(self) -> "ocp.training.Checkpointer":
        """Orbax's checkpointer. All processes call this together."""
        from orbax.checkpoint import v1 as ocp

        registry = ocp.handlers.local_registry()
        for name in integrity.JSON:
            registry.add(ocp.handlers.JsonHandler, checkpointable_name=name)
        context = ocp.Context()
        context.checkpointables.registry = registry
        # Within one process, replicas that write a slice each gain nothing, and every slice is a program to compile.
        context.array.saving.use_replica_parallel = jax.process_count() > 1
        context.memory.write_concurrent_bytes = self._at_a_time
        if jax.process_count() > 1:
            context.async_options.timeout_secs = min(DEADLINE * 2**self.failures, LONGEST)
            # A barrier that one process has missed cannot be used again.
            context.multiprocessing_options.barrier_sync_key_prefix = f"opened_{self._opened}"
        self._opened += 1
        with storage.explaining(self.directory):
            return ocp.training.Checkpointer(
                str(self.directory),
                context=context,
                preservation_policy=ocp.training.preservation_policies.LatestN(self._keep),
                step_name_format=self._folders,
                cleanup_tmp_directories=self._clean,
            )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is not None and issubclass(error_type, ProcessDiedError):
            return  # a save would wait for all processes
        try:
            self._wait(agree=error_type is None)  # after an error the other processes may be elsewhere
        except CheckpointError:
            if error_type is None:  # otherwise the first error is the one to report
                raise
        finally:
            with self._exit:
                with contextlib.suppress(Exception):  # Orbax raises the error of a failed save again
                    self._checkpointer.close()
                if self._failed_step is not None:
                    join_writers(self._other_threads)
                self._waiter.shutdown()
            self._clear_failed()

    def steps(self) -> list[int]:
        """The complete checkpoints, oldest first, damaged ones included."""
        with storage.explaining(self.directory):
            return sorted([*self._folders.unreadable, *(found.step for found in self._checkpointer.checkpoints)])

    @property
    def unreadable(self) -> dict[int, str]:
        """Step → why it cannot be read, for the checkpoints whose metadata cannot be interpreted."""
        return {step: f"cannot be read ({cause})" for step, cause in self._folders.unreadable.items()}

    def path(self, step: int) -> storage.AnyPath:
        """The folder of a step."""
        return self.directory / str(step)

    def save(
        self, state: "TrainState", positions: "Sequence[Position | None]", config: Mapping[str, object],
        tokenizer: str | None = None,
    ) -> None:  # fmt: skip
        """Starts saving a state and returns as soon as its arrays are copied. First waits for the previous save.

        Args:
          state: the state. Its `step` names the folder. A step that is already saved is not saved again. A state at
            step 0 may have None as its optimizer state: a run that starts from it makes a new one.
          positions: the data position of each process, JSON-serializable.
          config: JSON form of the run's TrainConfig.
          tokenizer: the fingerprint of the run's tokenizer.

        Raises:
          NonFiniteError: a parameter, a moment of it or its moving average has a NaN or infinite value. Nothing is written.
          SaveError: this save could not start, or the previous one failed. Another attempt is possible, also with another state.
          CheckpointError: the disk is full; or with several processes this save could not start.
        """
        self.wait()
        step = int(state.step)
        if self.failures:
            self._reopen(step)
        if step in self.steps():
            return
        # Before anything is written: a run that resumes from NaN would never recover.
        fingerprint = integrity.describe(state, unchecked=integrity.statistics(state))
        if not fingerprint["finite"]:
            raise NonFiniteError(f"The training state after step {step} has NaN or infinite values. It was not saved.")
        missing = step_folders.missing_space(self.directory, (state.params, state.optimizer, state.ema))
        if (cause := agreed_cause(missing)) is not None:
            raise CheckpointError(self._failure(step, cause))
        content = {
            "params": state.params,
            **{name: tree for name, tree in (("optimizer", state.optimizer), ("ema", state.ema)) if tree is not None},
            "progress": {"key": state.key, "step": state.step},
            "position": list(positions),
            "config": config,
            "integrity": integrity.content(fingerprint["sums"], list(positions), config, tokenizer),
        }
        # To know Orbax's threads, which come after these, should a save fail.
        self._other_threads = set(threading.enumerate())
        with contextlib.ExitStack() as saving, self._starting(step):
            saving.enter_context(quiet("asyncio", "concurrent.futures"))
            response = self._checkpointer.save_checkpointables_async(step, content, force=True)
            self._saving = saving.pop_all()
        self._pending = (step, self._waiter.submit(response.result))

    def wait(self) -> None:
        """Waits until the save in progress is on disk. All processes call it together, and do the same afterwards.

        Raises:
          SaveError: the save failed, in any process. Earlier checkpoints are intact, and nothing of the failed one is left.
        """
        self._wait(agree=True)

    def check(self) -> None:
        """Raises SaveError if the save in progress has ended by now and failed. All processes call it together."""
        if self._pending is not None and agreed_done(self._pending[1].done()):
            self.wait()

    def set_aside(self, step: int) -> storage.AnyPath:
        """Moves a damaged checkpoint to another folder, so that its step can be saved again. Returns its new path."""
        target = self.directory.parent / "damaged" / f"{step}"
        # The same step may be damaged again.
        while target.exists():
            target = target.with_name(target.name + "_")
        if jax.process_index() == 0:
            target.parent.mkdir(exist_ok=True)
            self.path(step).rename(str(target))
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices("damaged checkpoint set aside")
        with storage.explaining(self.directory):
            self._checkpointer.reload()
        return target

    def config(self, step: int) -> dict[str, object]:
        """The TrainConfig that a step was saved with, in its JSON form.

        Raises:
          CheckpointError: it cannot be read, or differs from what was saved.
        """
        try:
            return self._load(step, {})["config"]
        except CheckpointError as error:
            raise CheckpointError(f"Checkpoint {self.path(step)}: {error}") from error

    def newest_tokenizer(self) -> tuple[int, str | None] | None:
        """The newest checkpoint that can be read: its step and the fingerprint of the run's tokenizer. None: there is none.

        Checkpoints of older versions, and those saved without it, have no fingerprint.
        """
        for step in reversed(self.steps()):
            with contextlib.suppress(CheckpointError):
                return step, self._load(step, {})["integrity"].get("tokenizer")
        return None

    def newest_config(self) -> dict[str, object] | None:
        """The config of the newest checkpoint whose config can be read, or None."""
        for step in reversed(self.steps()):
            with contextlib.suppress(CheckpointError):
                return self.config(step)
        return None

    def restore(self, abstract: "TrainState", step: int | None = None) -> Restored:
        """Reads the newest usable checkpoint, or the checkpoint of `step`.

        A checkpoint is skipped if it cannot be read, or if its arrays differ in any bit from those that were saved.

        Args:
          abstract: shapes, dtypes and shardings of the state.
          step: which checkpoint. None means the newest usable one.

        Raises:
          CheckpointError: no checkpoint is usable. The message gives the reason for each.
          ConfigError: there is none of this step.
        """
        target = {
            "params": abstract.params,
            "optimizer": abstract.optimizer,
            "progress": {"key": abstract.key, "step": abstract.step},
            **({} if abstract.ema is None else {"ema": abstract.ema}),
        }
        loaded, used, skipped = self._load_newest(target, step)
        arrays = {name: loaded.get(name) for name in ("params", "optimizer", "ema")}
        state = dataclasses.replace(abstract, **arrays, **loaded["progress"])
        return Restored(state, loaded["position"], used, skipped)

    def restore_params(
        self, abstract: PyTree, step: int | None = None, *, ema: PyTree | None = None
    ) -> tuple[PyTree, int, list[tuple[int, str]]]:
        """Like `restore`, but reads only the model's parameters, for evaluation and generation.

        Args:
          abstract: nested dict of the parameters' shapes, dtypes and shardings.
          step: which checkpoint. None means the newest usable one.
          ema: the part of `abstract` that trains, to get its moving average. None: the parameters themselves.

        Returns:
          The parameters, their step, and the newer checkpoints that were skipped.
        """
        loaded, used, skipped = self._load_newest({"params": abstract, **({} if ema is None else {"ema": ema})}, step)
        return replaced(loaded["params"], loaded.get("ema", {})), used, skipped

    def _load_newest(
        self, target: dict[str, PyTree], step: int | None
    ) -> tuple[dict[str, PyTree], int, list[tuple[int, str]]]:
        steps = self.steps()
        if step is not None and step not in steps:
            raise ConfigError(f"There is no checkpoint of step {step} in {self.directory}; there are {steps}.")
        skipped: list[tuple[int, str]] = []
        for candidate in [step] if step is not None else reversed(steps):
            try:
                return self._load(candidate, target), candidate, skipped
            except CheckpointError as error:
                skipped.append((candidate, str(error)))
        reasons = "; ".join(f"{self.path(step)}: {reason}" for step, reason in skipped) or "there is none"
        none_usable = CheckpointError(f"No usable checkpoint in {self.directory}: {reasons}")
        none_usable.skipped = skipped
        raise none_usable

    def _load(self, step: int, target: dict[str, PyTree]) -> dict[str, PyTree]:
        if step in self.unreadable:
            raise CheckpointError(self.unreadable[step])
        cause: str | None = None
        away: storage.StoreError | None = None
        with quiet("asyncio", "concurrent.futures"), no_leftovers():
            try:
                loaded = self._checkpointer.load_checkpointables(step, {**target, **dict.fromkeys(integrity.JSON)})
            except Exception as error:  # whatever the storage libraries raise on damaged files
                if storage.is_outage(error):  # of the store; the checkpoint may be intact
                    away = storage.explained(str(self.path(step)), error)
                cause = root_cause(error)
        if away is not None:
            raise away
        if cause is not None:
            raise CheckpointError(f"cannot be read ({cause})")
        if wrong := integrity.altered(loaded, list(target), step):
            self._check_dtypes(step, loaded.get("params", {}))
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise CheckpointError(f"damaged: checksum mismatch in {wrong[0]}{more}")
        return loaded

    def _check_dtypes(self, step: int, params: PyTree) -> None:
        """Raises CheckpointError if the parameters were saved in other dtypes. Orbax casts them, so their checksums differ."""
        saved = self._checkpointer.checkpointables_metadata(step).metadata["params"]
        dtypes = {path: leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(saved)}
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if dtypes.get(path, leaf.dtype) != leaf.dtype:
                name = jax.tree_util.keystr(path)
                raise CheckpointError(f".params{name} was saved as {dtypes[path]}, the model has {leaf.dtype}")

    def _wait(self, *, agree: bool) -> None:
        if self._pending is None:
            return
        (step, response), self._pending = self._pending, None
        with self._saving:
            error = response.exception()
            cause = None if error is None else root_cause(error)
            if error is not None:
                join_writers(self._other_threads)  # before process 0 removes what they have written
            elif jax.process_index() == 0:
                cause = step_folders.unmerged(self.path(step))
            if agree:
                cause = agreed_cause(cause)
            if cause is not None:
                raise SaveError(self._failed(step, cause)) from error
        self.failures = 0

    def _reopen(self, step: int) -> None:
        """After a failed save: Orbax has already forgotten the checkpoints that it would have replaced."""
        for end in (self._checkpointer.wait, self._checkpointer.close):
            with contextlib.suppress(Exception):  # the error of the failed save again
                end()
        with self._starting(step):
            self._checkpointer = self._open()

    @contextlib.contextmanager
    def _starting(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever the storage libraries raise: OSError, ValueError, XlaRuntimeError
            join_writers(self._other_threads)
            # The other processes wait for this one in the middle of their start. They can only learn of it by its end.
            kind = SaveError if jax.process_count() == 1 else CheckpointError
            raise kind(self._failed(step, root_cause(error))) from error

    def _failed(self, step: int, cause: str) -> str:
        self.failures += 1
        self._failed_step = step
        self._clear_failed()
        return self._failure(step, cause)

    def _clear_failed(self) -> None:
        """Removes what a failed save has written. Its other threads may continue to write until the checkpointer is closed."""
        if self._failed_step is not None and jax.process_index() == 0:
            step_folders.remove_incomplete(self.directory, self._failed_step)

    def _failure(self, step: int, cause: str) -> str:
        try:
            intact = [done for done in step_folders.complete_steps(self.directory) if done != step]
        except OSError:  # the store itself has failed
            intact = [done for done in self.steps() if done != step]
        kept = f"The checkpoints before it are intact; the newest is {self.path(intact[-1])}." if intact else (
            "There is no earlier checkpoint."
        )  # fmt: skip
        return f"Saving the checkpoint of step {step} failed: {cause}. {kept}"
