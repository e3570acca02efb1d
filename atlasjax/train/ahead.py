"""The programs of a run, compiled before they are called, beside what the main thread does."""

import concurrent.futures
import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from atlasjax.data.pipeline import Pipeline
from atlasjax.distributed.sharding import batch_sharding, global_batch
from atlasjax.evaluate.lm import LanguageModelResult
from atlasjax.train.evaluations import evaluator
from atlasjax.train.saving import integrity
from atlasjax.train.setup import Setup
from atlasjax.train.state import TrainState
from atlasjax.train.step import Batch, EvalStep, Metrics, jit_eval_step


class Programs(NamedTuple):
    """The compiled programs that a run calls.

    Attributes:
      step: (state, batch) → (state, metrics).
      evaluated: params → the result of each evaluation, by name.
      wait: waits for the program of a checkpoint's checksums, if it is still being compiled.
    """

    step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    evaluated: Callable[[PyTree], dict[str, LanguageModelResult]]
    wait: Callable[[], object]


class Ahead:
    """Compiles programs in a thread: XLA holds no lock of Python. A context manager that waits on exit for the one in progress.

    One after the other, so that the first one is not late. JAX keeps what the thread compiles, and a later call of the same program
    with the same shapes finds it. A call in another setting, such as another default precision, compiles its own, and so does one
    with other shapes.
    """

    def __init__(self) -> None:
        # Several processes compile as they always did: each program when all of them are there.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "compile") if jax.process_count() == 1 else None

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def begin(self, program: jax.stages.Wrapped, *shapes: Any, **options: Any) -> Callable[[], object]:
        """Compiles a program for arguments of these shapes, static ones as they are. What it returns waits for it."""
        if self._thread is None:
            return lambda: None
        begun = self._thread.submit(lambda: program.trace(*shapes, **options).lower().compile())
        return lambda: concurrent.futures.wait([begun])

    def called(self, program: jax.stages.Wrapped, *shapes: Any) -> Callable[..., Any]:
        """`program`, which `begin` compiles; a call waits for it, and has its errors."""
        wait = self.begin(program, *shapes)

        def call(*arguments: Any) -> Any:
            wait()
            return program(*arguments)

        return call


def begin(setup: Setup, ahead: Ahead, *, trains: bool) -> Programs:
    """The programs of a run, of which those that it needs first come first.

    Args:
      setup: the run.
      ahead: compiles them.
      trains: whether steps are left to do.
    """
    state = setup.abstract_state()
    program = setup.jit_step(setup.train_data.max_segments)
    step = ahead.called(program, state, _shapes(setup, setup.train_data)) if trains else program
    # Before the evaluation: a run that is stopped saves without one.
    wait = integrity.begin(ahead.begin, state) if trains else lambda: None

    def eval_step(max_segments: int | None) -> EvalStep:
        program = jit_eval_step(
            setup.graphdef, setup.shardings.params, setup.mesh, setup.tokenizer.bytes_per_token, max_segments=max_segments
        )  # fmt: skip
        if not (trains and setup.tokenizer.is_exact):  # else a batch may have the bytes of its tokens
            return program
        first = next(each for each in setup.evaluation_data.values() if each.max_segments == max_segments)
        return ahead.called(program, state.params, _shapes(setup, first))

    put = functools.partial(global_batch, mesh=setup.mesh)
    evaluated = evaluator(setup.evaluation_data, eval_step, setup.config.eval_batches, put)
    return Programs(step, evaluated, wait)


def _shapes(setup: Setup, data: Pipeline) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a batch of all processes."""
    size = (data.identity["batch_size"], data.identity["sequence_length"])
    dtypes = {"inputs": np.int32, "targets": np.int32, "weights": np.float32}
    if data.max_segments is not None:
        dtypes["segment_ids"] = np.int32
    place = batch_sharding(setup.mesh)
    return {name: jax.ShapeDtypeStruct(size, dtype, sharding=place) for name, dtype in dtypes.items()}
