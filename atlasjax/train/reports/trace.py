"""Writes a profiler trace of some steps of a run."""

import contextlib
import pathlib

import jax
from jaxtyping import PyTree

from atlasjax import storage


class Trace:
    """Traces the steps first to last of a run (`TrainConfig.profile`). A context manager, which writes the trace at its end.

    Args:
      steps: "first:last"; None traces nothing.
      folder: where the trace is written, for TensorBoard's profiler (xprof). In a store it is copied there when it is complete.
    """

    def __init__(self, steps: str | None, folder: storage.AnyPath):
        self._first, self._last = (0, 0) if steps is None else map(int, steps.split(":"))
        self._folder = folder
        self._running = False
        self._written, self._temporary = folder, contextlib.ExitStack()

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def begin(self, step: int, state: PyTree) -> None:
        """Call before each step, with the state that it starts from. A resumed run may begin within the steps."""
        if not self._running and self._first <= step <= self._last:
            # Steps are dispatched ahead: without waiting, the trace would begin within an earlier one.
            jax.block_until_ready(state)
            if isinstance(self._folder, storage.StorePath):
                self._written = self._temporary.enter_context(storage.temporary_folder("trace"))
            jax.profiler.start_trace(str(self._written))
            self._running = True

    def end(self, step: int, state: PyTree) -> str | None:
        """Call after each step, with its state. Returns a line for the user if the trace was written."""
        if not self._running or step < self._last:
            return None
        jax.block_until_ready(state)  # otherwise the trace would end before this step
        self._stop()
        return f"The trace of steps {self._first} to {self._last} is in {self._folder}."

    def _stop(self) -> None:
        if self._running:
            self._running = False
            with self._temporary:
                jax.profiler.stop_trace()
                if isinstance(self._written, pathlib.Path) and self._written != self._folder:
                    for file in filter(pathlib.Path.is_file, self._written.rglob("*")):
                        name = file.relative_to(self._written).as_posix()
                        storage.write_whole(self._folder / name, file.read_bytes())
