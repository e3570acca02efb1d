"""The programs of a run, compiled beside each other before they are called."""

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

_TOGETHER = 2  # programs that are compiled at the same time, besides what the main thread does


class Programs(NamedTuple):
    """What a run calls.

    Attributes:
      step: (state, batch) → (state, metrics).
      evaluated: params → the result of each evaluation, by name.
    """

    step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    evaluated: Callable[[PyTree], dict[str, LanguageModelResult]]


class Ahead:
    """Compiles programs in threads: XLA holds no lock of Python. A context manager that waits on exit for those in progress.

    JAX keeps what they compile, and a later call of the same program with the same shapes finds it. A call in another setting, such
    as another default precision, compiles its own, and so does one with other shapes.
    """

    def __init__(self) -> None:
        # Several processes compile as they always did: each program when all of them are there.
        self._threads = (
            concurrent.futures.ThreadPoolExecutor(_TOGETHER, "compile") if jax.process_count() == 1 else None
        )

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def begin(self, program: jax.stages.Wrapped, *shapes: Any) -> Callable[..., Any]:
        """`program`, which is compiled from now on for arguments of these shapes (static ones as they are).

        A call waits for it. An error of tracing or compiling is that of the call.
        """
        if self._threads is None:
            return program
        begun = self._threads.submit(lambda: program.trace(*shapes).lower().compile())

        def call(*arguments: Any) -> Any:
            concurrent.futures.wait([begun])
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
    step = ahead.begin(program, state, _shapes(setup, setup.train_data)) if trains else program

    def eval_step(max_segments: int | None) -> EvalStep:
        program = jit_eval_step(
            setup.graphdef, setup.shardings.params, setup.mesh, setup.tokenizer.bytes_per_token, max_segments=max_segments
        )  # fmt: skip
        if not (trains and setup.tokenizer.is_exact):  # else a batch may have the bytes of its tokens
            return program
        first = next(each for each in setup.evaluation_data.values() if each.max_segments == max_segments)
        return ahead.begin(program, state.params, _shapes(setup, first))

    put = functools.partial(global_batch, mesh=setup.mesh)
    evaluated = evaluator(setup.evaluation_data, eval_step, setup.config.eval_batches, put)
    if trains:
        integrity.begin(ahead.begin, state)
    return Programs(step, evaluated)


def _shapes(setup: Setup, data: Pipeline) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a batch of all processes."""
    size = (data.identity["batch_size"], data.identity["sequence_length"])
    dtypes = {"inputs": np.int32, "targets": np.int32, "weights": np.float32}
    if data.max_segments is not None:
        dtypes["segment_ids"] = np.int32
    place = batch_sharding(setup.mesh)
    return {name: jax.ShapeDtypeStruct(size, dtype, sharding=place) for name, dtype in dtypes.items()}
