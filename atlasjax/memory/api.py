"""The functional API: `init_params`, `init_state`, `scan`, `step`, `read`, `reference`.

A rule is a `MemoryRule`, a `SoftmaxRule`, whose memory is a cache of tokens, or a `CachedRule`, which keeps the memories of
earlier segments; the functions are the same.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from atlasjax.memory import backends, caching, check, softmax
from atlasjax.memory.caching import CachedRule, CachedState
from atlasjax.memory.fast_weights import check as fast_check
from atlasjax.memory.fast_weights import state as state_lib
from atlasjax.memory.fast_weights.engine import xla_step
from atlasjax.memory.fast_weights.kernels import PALLAS
from atlasjax.memory.fast_weights.reference import read_state, reference_scan
from atlasjax.memory.fast_weights.rule import MemoryRule
from atlasjax.memory.fast_weights.state import MemoryParams, MemoryState
from atlasjax.memory.gates import Gates
from atlasjax.memory.meshes import on_any_mesh
from atlasjax.memory.partition import Partition, partitioned
from atlasjax.memory.softmax import SoftmaxParams, SoftmaxRule, SoftmaxState

for _backend in PALLAS:
    backends.register_backend(_backend)

Rule = MemoryRule | SoftmaxRule
AnyRule = Rule | CachedRule
Params = MemoryParams | SoftmaxParams
State = MemoryState | SoftmaxState | CachedState


def init_params(rule: AnyRule, key: jax.Array, *, num_heads: int, key_dim: int, value_dim: int) -> Any:
    """Fresh learned parameters of a rule: `state.init_params`, `softmax.init_params`. Every leaf has the heads axis first."""
    _check_rule(rule, "memory.init_params")
    if isinstance(rule, CachedRule):
        rule = rule.rule
    module: Any = softmax if isinstance(rule, SoftmaxRule) else state_lib
    return module.init_params(rule, key, num_heads=num_heads, key_dim=key_dim, value_dim=value_dim)


def init_state(rule: AnyRule, params: Any, *, batch_size: int, max_length: int | None = None) -> Any:
    """A fresh memory for every batch element: `state.init_state`, `softmax.init_state`, `caching.init_state`.

    Args:
      rule: the rule.
      params: what `init_params` gave (or a trained version of it).
      batch_size: number of batch elements.
      max_length: the most tokens that will be read; needed by what keeps everything: a softmax memory with a full cache, a
        cached rule without a capacity.

    Raises:
      ValueError: parameters of another rule; max_length missing where it is needed.
    """
    _check_rule(rule, "memory.init_state")
    sizes = {"batch_size": batch_size} | ({} if max_length is None else {"max_length": max_length})
    for name, value in sizes.items():
        if (
            not isinstance(value, bool | float | str | None) and value >= 1
        ):  # an integer, or a symbolic size of jax.export
            continue
        raise ValueError(f"memory.init_state: {name} must be an integer ≥ 1, got {value!r}.")
    module: Any = _module(rule) or state_lib
    return module.init_state(rule, params, batch_size=batch_size, max_length=max_length)


def _check_rule(rule: Any, where: str) -> None:
    if not isinstance(rule, MemoryRule | SoftmaxRule | CachedRule):
        raise TypeError(
            f"{where}: rule must be a MemoryRule, a SoftmaxRule or a CachedRule, got {type(rule).__name__}."
        )


def _module(rule: Any) -> Any:
    """The module of these functions for a rule of another kind; None for a `MemoryRule`."""
    if isinstance(rule, SoftmaxRule):
        return softmax
    return caching if isinstance(rule, CachedRule) else None


def scan(
    rule: AnyRule,
    params: Any,
    state: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: Gates,
    *,
    segment_ids: jax.Array | None = None,
    max_segments: int | None = None,
    implementation: str | None = None,
    partition: Partition | None = None,
    check_gates: bool = False,
) -> tuple[jax.Array, Any]:
    """Write and read a sequence: for every token, one step of the rule, then y_t = M_t(φ(q_t)).

    Cutting a sequence into calls at any places gives the outputs and the final state of one call. Batch elements and heads do
    not influence each other. Works under jit, grad, vmap, shard_map and on meshes with explicit axes; the backward pass keeps one
    memory for each chunk.

    Args:
      rule: the memory rule, static under jit; a `MemoryRule`, a `SoftmaxRule` or a `CachedRule`.
      params: its learned parameters (`init_params`).
      state: the memory so far; None for a fresh one (`init_state`), which is also faster: chunks are then aligned statically.
      q: queries, [batch, time, heads, key_dim], floating point. Any length ≥ 1.
      k: keys, like q.
      v: values, [batch, time, heads, value_dim], of q's dtype.
      gates: the gates that the rule uses (`MemoryRule.gate_channels`): numbers or float32 arrays that broadcast to
        [batch, time, heads(, channels)]. `suggested_gates` has values to begin with.
      segment_ids: optional integers ≥ 0, [batch, time]: where the id changes, a new segment starts with a fresh memory and a
        fresh chunk, as if it were alone. The first segment goes on from `state` if it has the id of the state's last token.
      max_segments: a static bound on the number of segments in a row; needed under jit. If a row has more, its outputs
        without a place and its state are NaN.
      implementation: "xla", "pallas_tpu" or "pallas_gpu" (kernels of `pallas_kernels`; no forward-mode derivative), "reference"
        (the definition: slow), a registered one of your own (`register_backend`), or None: a kernel where one is recorded as faster
        (`memory.fastest`), serves the call, and XLA need not split it over devices; else "xla".
      partition: split the call over the devices of a mesh, batch elements and heads; a `MemoryRule` only. Kernels need it where
        arrays are sharded and the call is not inside a `shard_map`; what XLA compiles it also partitions.
      check_gates: check the gates' values: an error outside jit, a `checkify.check` under it.

    Returns:
      y: [batch, time, heads, value_dim], of q's dtype; and the new state, float32 (float64 for float64 inputs).

    Raises:
      TypeError, ValueError: an argument that does not fit, before anything is traced.
    """
    module = _module(rule)
    if partition is not None and module is not None:
        raise ValueError(f"memory.scan: partition is for a MemoryRule, rule is a {type(rule).__name__}.")
    if implementation is not None and not isinstance(implementation, str):
        raise TypeError(f"memory.scan: implementation must be a name or None, got {implementation!r}.")
    gates = check.whole_gates(rule, gates, q, v, "memory.scan")
    options: dict[str, Any] = {"max_segments": max_segments, "implementation": implementation}
    if module is not None:

        def call(*arguments: Any) -> Any:
            *tokens, ids = arguments
            return module.scan(rule, *tokens, segment_ids=ids, check_gates=check_gates, **options)

    else:
        fast_check.check_call(rule, params, state, q, k, v, gates, time=True, where="memory.scan")
        max_segments = check.check_segments(segment_ids, max_segments, q, "memory.scan")
        if segment_ids is not None:
            segment_ids = jnp.asarray(segment_ids, jnp.int32)
        if check_gates:
            check.check_gate_ranges(gates, "memory.scan")
        assert isinstance(rule, MemoryRule)  # as `check_call` found
        call = functools.partial(backends.run, implementation, rule, max_segments=max_segments)
        if partition is not None:
            call = partitioned(partition, rule, call)
    check.check_arrays("memory.scan", params=params, state=state, q=q, k=k, v=v, gates=gates, segment_ids=segment_ids)
    return _on_any_mesh(rule, call)(params, state, q, k, v, gates, segment_ids)


def _on_any_mesh(rule: AnyRule, call: Callable[..., Any]) -> Callable[..., Any]:
    def run(params: Any, state: Any, q: Any, *rest: Any) -> Any:
        if not hasattr(q, "shape"):
            return call(params, state, q, *rest)  # which says so
        fresh = lambda params: init_state(rule, params, batch_size=q.shape[0], max_length=q.shape[1])
        return on_any_mesh(call, fresh)(params, state, q, *rest)

    return run


def step(
    rule: AnyRule,
    params: Any,
    state: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: Gates,
    *,
    check_gates: bool = False,
) -> tuple[jax.Array, Any]:
    """One token: `scan` without the time axis, for decoding. Its cost does not depend on how much was read.

    (A softmax memory costs one read of its cache, and a cached rule reads of its memories: sizes fixed when the state is made.)

    Args:
      rule, params, state: as in `scan`; the state is required.
      q, k: [batch, heads, key_dim]; v: [batch, heads, value_dim].
      gates: [batch, heads(, channels)].
      check_gates: as in `scan`.

    Returns:
      y: [batch, heads, value_dim], and the new state.

    Raises:
      TypeError, ValueError: an argument that does not fit, before anything is traced.
    """
    if state is None:
        raise ValueError("memory.step: state is None; start with memory.init_state.")
    gates = check.whole_gates(rule, gates, q, v, "memory.step")
    module = _module(rule)
    if module is not None:
        call = lambda *arguments: module.step(rule, *arguments, check_gates=check_gates)
    else:
        fast_check.check_call(rule, params, state, q, k, v, gates, time=False, where="memory.step")
        if check_gates:
            check.check_gate_ranges(gates, "memory.step")
        assert isinstance(rule, MemoryRule)  # as `check_call` found
        call = functools.partial(xla_step, rule)
    check.check_arrays("memory.step", params=params, state=state, q=q, k=k, v=v, gates=gates)
    return _on_any_mesh(rule, call)(params, state, q, k, v, gates)


def read(rule: AnyRule, params: Any, state: Any, q: jax.Array, connector: jax.Array | None = None) -> jax.Array:
    """Look without writing: M_t(φ(q)) for any number of queries.

    Args:
      rule, params, state: as in `scan`.
      q: [batch, time, heads, key_dim], floating point.
      connector: u of a cached rule, like q; None: the queries.

    Returns:
      [batch, time, heads, value_dim], of q's dtype.

    Raises:
      TypeError, ValueError: an argument that does not fit, before anything is traced.
    """
    if isinstance(rule, CachedRule):
        check.check_arrays("memory.read", params=params, state=state, q=q, connector=connector)
        return caching.read(rule, params, state, q, connector)
    if connector is not None:
        raise ValueError(f"memory.read: connector is given, but {type(rule).__name__} has no use for one.")
    if isinstance(rule, SoftmaxRule):
        return softmax.read(rule, params, state, q)
    fast_check.check_read(rule, params, state, q)
    return read_state(rule, params, state.memory, q)


def reference(
    rule: AnyRule,
    params: Any,
    state: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: Gates,
    *,
    segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """The definition: token by token, inner gradients from `jax.grad`. Slow; arguments and results as in `scan`."""
    gates = check.whole_gates(rule, gates, q, v, "memory.reference")
    if (module := _module(rule)) is not None:
        return module.reference(rule, params, state, q, k, v, gates, segment_ids=segment_ids)
    fast_check.check_call(rule, params, state, q, k, v, gates, time=True, where="memory.reference")
    if segment_ids is not None:
        check.check_segments(segment_ids, q.shape[1], q, "memory.reference")
        segment_ids = jnp.asarray(segment_ids, jnp.int32)
    assert isinstance(rule, MemoryRule)  # as `check_call` found
    return reference_scan(rule, params, state, q, k, v, gates, segment_ids)
