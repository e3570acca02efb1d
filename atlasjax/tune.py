"""Checks and times the backends of a memory on this machine's device, and remembers the fastest that is right.

choice, results = tune(sizes_of(default_config("titans-340m"))[0])
"""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from atlasjax import memory
from atlasjax.distributed.mesh import make_mesh
from atlasjax.distributed.sharding import batch_shards
from atlasjax.memory import tuned
from atlasjax.memory.backends import BACKENDS, Backend
from atlasjax.memory.fast_weights.fastest import LEAST_RATIO
from atlasjax.memory.tuned import Choice
from atlasjax.nn.mixers import memory_calls
from atlasjax.train.config import TrainConfig

# The largest error, relative to the largest entry of the exact result, at which a result counts as right. Rounding errors in
# Newton–Schulz grow by its first coefficient in each step, and bfloat16 would turn them into noise.
TOLERANCES = {"bfloat16": 5e-2, "float32": 1e-3}
MUON_TOLERANCE = 1e-2
_SHORTEST = 0.02  # seconds of one measurement; starting a call takes longer than a small call
_FEWEST = 3  # rounds
_FIRST = 5  # tokens before a state that is inside a chunk, and of the first of two documents
_KERNEL_CHUNK = 64  # tokens of a kernel's chunk where a rule's own has no effect; the largest that kernels choose


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The calls of one memory layer on one device.

    Attributes:
      rule: the memory rule.
      batch_size, time, num_heads, key_dim, value_dim: of a call.
      dtype: of tokens.
    """

    rule: memory.MemoryRule
    batch_size: int
    time: int
    num_heads: int
    key_dim: int
    value_dim: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one backend.

    Attributes:
      name: the backend.
      problem: why it cannot be taken: what it does not support, where it is wrong, or how it failed. "" if it can.
      seconds: forward and backward, the median over rounds; None if it was not timed.
      error: the largest error of outputs and gradients in the check, relative to the largest entry; None if it was not checked.
    """

    name: str
    problem: str = ""
    seconds: float | None = None
    error: float | None = None


def sizes_of(config: TrainConfig) -> list[Sizes]:
    """The different calls that a training run makes on each of its devices, those that kernels could run. Most models make one.

    Raises:
      ValueError: the model has no memory that kernels could run, or the mesh does not fit the devices.
    """
    model = config.model
    calls = memory_calls(model)
    served = [call for call in calls if call.rule.has_kernels]
    if not served:
        what = f"a {type(calls[0].rule).__name__}, for which there are no kernels" if calls else "no memory"
        raise ValueError(f"the model has {what}; there is nothing to choose.")
    mesh = make_mesh(config.mesh)
    batch = config.data.batch_size // config.accumulation // batch_shards(mesh)
    tensor, parts = mesh.shape["tensor"], mesh.shape.get("sequence", 1)
    time = -(-config.data.sequence_length // parts)
    # A device with a part of a sequence also runs a channel for each feature (`sequence_parallel`).
    more = lambda rule, key_dim: rule.features.dim(key_dim) if parts > 1 and rule.undivided is None else 0
    share = lambda heads: heads if heads % tensor else heads // tensor
    return [
        Sizes(  # rules with kernels are MemoryRules
            rule,  # type: ignore[arg-type]
            max(batch, 1), time, share(heads), key_dim, value_dim + more(rule, key_dim), model.dtype,
        )
        for rule, heads, key_dim, value_dim in served
    ]  # fmt: skip


def candidates() -> list[Backend]:
    """The backends for the platform of jax's default device, in the place of the XLA engine."""
    platform = tuned.platform()
    return [backend for backend in BACKENDS.values() if backend.platform == platform]


def is_open(sizes: Sizes) -> bool:
    """Whether a backend could run these calls on this device, and nothing was measured for them yet."""
    key = tuned.key_of(sizes.rule, sizes.key_dim, sizes.value_dim, sizes.dtype)
    return key not in tuned.read() and any(_could_run(sizes, backend) for backend in candidates())


def _could_run(sizes: Sizes, backend: Backend) -> bool:
    try:
        return _unsupported(sizes, backend) is None
    except Exception:  # `tune` reports it
        return False


def tune(
    sizes: Sizes, *, seconds: float = 120.0, say: Callable[[str], None] = print, save: bool = True
) -> tuple[Choice, list[Result]]:
    """Measures every backend for the platform of jax's default device, beside the XLA engine, and saves the choice.

    A backend is first compared with the definition, `memory.reference`, on two chunks and a few tokens more, values and
    gradients. One that is wrong is never chosen. Then all are timed in turn at the full size, forward and backward.

    Args:
      sizes: the calls to measure.
      seconds: about how long all of it may take, with compilation. Every backend has at least three rounds.
      say: is told each result, one line each.
      save: whether the choice is saved in the cache folder, where `memory.scan` finds it. If there is only the XLA engine,
        nothing is saved.

    Returns:
      The choice, and the result of each backend, "xla" first.
    """
    deadline = time.perf_counter() + seconds
    results = {"xla": Result("xla")} | {backend.name: _checked(sizes, backend) for backend in candidates()}
    programs: dict[str, Callable[[], PyTree]] = {}
    for name, result in results.items():
        if result.problem:
            continue
        try:
            programs[name] = _compiled(sizes, name)
            jax.block_until_ready(programs[name]())
        except Exception as error:  # of a compiler or an allocator; the other backends go on
            programs.pop(name, None)
            results[name] = dataclasses.replace(result, problem=f"failed: {_first_line(error)}")
    if "xla" not in programs:
        raise RuntimeError(f"the XLA engine cannot run this size: {results['xla'].problem}")
    for name, taken in _in_turn(programs, deadline).items():
        results[name] = dataclasses.replace(results[name], seconds=taken)
    for result in results.values():
        say(_line(result, results["xla"].seconds))
    choice = _choose(sizes, results)
    if save and len(results) > 1:
        tuned.write(choice)
    return choice, list(results.values())


def _choose(sizes: Sizes, results: dict[str, Result]) -> Choice:
    own = results["xla"].seconds
    assert own is not None
    ratios = {name: own / result.seconds for name, result in results.items() if result.seconds and name != "xla"}
    best = max(ratios, key=ratios.__getitem__, default="xla")
    ratio = ratios.get(best, 0.0)
    return choice_of(sizes, best if ratio > LEAST_RATIO else "xla", round(ratio, 3))


def choice_of(sizes: Sizes, implementation: str, ratio_to_xla: float) -> Choice:
    """A choice for these calls on this machine's device."""
    key = tuned.key_of(sizes.rule, sizes.key_dim, sizes.value_dim, sizes.dtype)
    own = tuned.own_sources(BACKENDS[implementation])
    return Choice(*key, (sizes.batch_size, sizes.time, sizes.num_heads), implementation, own, ratio_to_xla)


def _line(result: Result, xla: float | None) -> str:
    if result.problem:
        return f"{result.name:<12} {result.problem}"
    assert result.seconds is not None
    beside = "" if result.name == "xla" or not xla else f", {xla / result.seconds:.2f} times as fast as xla"
    right = "" if result.error is None else f", largest error {result.error:.1e}"
    return f"{result.name:<12} {1e3 * result.seconds:.3g} ms forward and backward{beside}{right}"


def _checked(sizes: Sizes, backend: Backend) -> Result:
    """The result of a backend before it is timed: whether it supports the calls and gives the definition's numbers."""
    try:
        reason = _unsupported(sizes, backend)
    except Exception as problem:
        return Result(backend.name, f"failed: {_first_line(problem)}")
    if reason is not None:
        return Result(backend.name, f"not supported: {reason}")
    muon = not sizes.rule.optimizer.is_linear
    time = 2 * max(sizes.rule.chunk_size, _KERNEL_CHUNK) + 4  # a delta rule's own chunk is one token
    small = dataclasses.replace(sizes, batch_size=1, num_heads=2, time=time, dtype="float32" if muon else sizes.dtype)
    most, largest = MUON_TOLERANCE if muon else TOLERANCES[small.dtype], 0.0
    for what, call in _CALLS.items():
        try:
            if not call.is_for(small, backend):
                continue
            error = _error(call.run(small, backend.name, False), _definition(what, small))
        except Exception as problem:
            return Result(backend.name, f"failed{what}: {_first_line(problem)}")
        largest = max(largest, error)
        if not error <= most:
            problem_of = f"wrong{what}: relative error {error:.1e}, allowed {most:g}; please report it with this line"
            return Result(backend.name, problem_of, error=error)
    return Result(backend.name, error=largest)


def _unsupported(sizes: Sizes, backend: Backend, packed: bool = False, with_state: bool = False) -> str | None:
    shape = sizes.batch_size, sizes.time, sizes.num_heads, sizes.key_dim
    params = jax.eval_shape(lambda: _params(sizes))
    start = jax.eval_shape(lambda params: memory.init_state(sizes.rule, params, batch_size=sizes.batch_size), params)
    q: PyTree = jax.ShapeDtypeStruct(shape, jnp.dtype(sizes.dtype))
    return backend.unsupported(sizes.rule, params, start if with_state else None, q, packed)


def _error(found: PyTree, expected: PyTree) -> float:
    largest = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if a.shape != b.shape:
            return math.inf
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error = float(np.abs(a - b).max() / (np.abs(b).max() or 1.0))
        largest = max(largest, error) if math.isfinite(error) else math.inf
    return largest


class _Call(NamedTuple):
    """A call that is compared with the definition.

    Attributes:
      is_for: (sizes, backend) → whether the backend says that it can run it.
      run: (sizes, implementation, exact) → the arrays to compare; see `_arrays`.
    """

    is_for: Callable[[Sizes, Backend], bool]
    run: Callable[[Sizes, str, bool], PyTree]


@functools.lru_cache(maxsize=3)
def _definition(what: str, sizes: Sizes) -> PyTree:
    """The result of `memory.reference` for one of `_CALLS`, in float32 with exact products."""
    with jax.default_matmul_precision("highest"):
        return _CALLS[what].run(sizes, "reference", True)


def _whole(sizes: Sizes, implementation: str, exact: bool) -> PyTree:
    """Outputs and gradients of a sequence from a fresh memory."""
    return _function(sizes, implementation)(*_arrays(sizes, exact))


def _continued(sizes: Sizes, implementation: str, exact: bool) -> PyTree:
    """Outputs and the final state of a sequence that goes on inside a chunk."""
    params, *tokens, _ = _arrays(sizes, exact)
    _, *first, _ = _arrays(sizes, True)
    _, state = memory.reference(sizes.rule, params, None, *jax.tree.map(lambda x: x[:, :_FIRST], first))
    rest = jax.tree.map(lambda x: x[:, _FIRST:], tokens)
    y, after = memory.scan(sizes.rule, params, state, *rest, implementation=implementation)
    return y, after


def _packed(sizes: Sizes, implementation: str, exact: bool) -> PyTree:
    """Outputs of two documents in one row."""
    params, *tokens, _ = _arrays(sizes, exact)
    ids = (jnp.arange(sizes.time) >= _FIRST).astype(jnp.int32)[None]
    options: dict[str, Any] = {"segment_ids": ids, "max_segments": 2, "implementation": implementation}
    return memory.scan(sizes.rule, params, None, *tokens, **options)[0]


def _arrays(sizes: Sizes, exact: bool) -> tuple[Any, ...]:
    """`_inputs`; with `exact` the same numbers in float32."""
    arrays = _inputs(sizes)
    return jax.tree.map(lambda x: x.astype(jnp.float32), arrays) if exact else arrays


def _supports(packed: bool, with_state: bool) -> Callable[[Sizes, Backend], bool]:
    return lambda sizes, backend: _unsupported(sizes, backend, packed, with_state) is None


_CALLS = {
    "": _Call(lambda *_: True, _whole),
    " after a state": _Call(_supports(packed=False, with_state=True), _continued),
    " for packed documents": _Call(_supports(packed=True, with_state=False), _packed),
}


def _params(sizes: Sizes) -> memory.MemoryParams:
    return memory.init_params(
        sizes.rule, jax.random.key(0), num_heads=sizes.num_heads, key_dim=sizes.key_dim, value_dim=sizes.value_dim
    )


def _inputs(
    sizes: Sizes,
) -> tuple[memory.MemoryParams, jax.Array, jax.Array, jax.Array, memory.Gates, jax.Array]:
    """(params, q, k, v, gates, cotangent): queries and keys of unit length, gates near those that a model starts with."""
    rng = np.random.default_rng(0)
    shape = sizes.batch_size, sizes.time, sizes.num_heads
    dtype = jnp.dtype(sizes.dtype)

    def normal(width: int) -> np.ndarray:
        return rng.standard_normal((*shape, width), np.float32)

    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    q, k = unit(normal(sizes.key_dim)), unit(normal(sizes.key_dim))
    v, dy = normal(sizes.value_dim), normal(sizes.value_dim)
    gates = memory.suggested_gates(
        sizes.rule, batch_size=sizes.batch_size, time=sizes.time, num_heads=sizes.num_heads, key_dim=sizes.key_dim
    )
    arrays = [jnp.asarray(x, dtype) for x in (q, k, v)]
    return _params(sizes), arrays[0], arrays[1], arrays[2], gates, jnp.asarray(dy, dtype)


def _function(sizes: Sizes, implementation: str) -> jax.stages.Wrapped:
    """Returns the jitted (params, q, k, v, gates, cotangent) → (y, gradients of all but the cotangent)."""

    def run(*arguments: PyTree) -> tuple[jax.Array, tuple[PyTree, ...]]:
        *inputs, dy = arguments
        y, pullback = jax.vjp(functools.partial(_scan, sizes.rule, implementation), *inputs)
        return y, pullback(dy)

    return jax.jit(run)


def _scan(
    rule: memory.MemoryRule,
    implementation: str,
    params: memory.MemoryParams,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: memory.Gates,
) -> jax.Array:
    return memory.scan(rule, params, None, q, k, v, gates, implementation=implementation)[0]


def _compiled(sizes: Sizes, implementation: str) -> Callable[[], PyTree]:
    arrays = jax.tree.map(jnp.asarray, _inputs(sizes))
    program = _function(sizes, implementation).lower(*arrays).compile()
    return lambda: program(*arrays)


def _in_turn(programs: dict[str, Callable[[], PyTree]], deadline: float) -> dict[str, float]:
    """The median time of each program, which has run before, over rounds in which all take turns."""
    calls = {}
    for name, program in programs.items():
        started = time.perf_counter()
        jax.block_until_ready(program())
        calls[name] = max(1, min(100, math.ceil(_SHORTEST / (time.perf_counter() - started))))
    rounds: dict[str, list[float]] = {name: [] for name in programs}
    while len(next(iter(rounds.values()))) < _FEWEST or (
        time.perf_counter() < deadline and len(next(iter(rounds.values()))) < 9 * _FEWEST
    ):
        for name, program in programs.items():
            started = time.perf_counter()
            for _ in range(calls[name]):
                out = program()
            jax.block_until_ready(out)
            rounds[name].append((time.perf_counter() - started) / calls[name])
    return {name: statistics.median(taken) for name, taken in rounds.items()}


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
