"""The functional API: `scan`, `step`, `read`, `reference`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from atlasjax.memory import check
from atlasjax.memory.engine import xla_scan, xla_step
from atlasjax.memory.reference import read_one, reference_scan
from atlasjax.memory.rule import MemoryRule
from atlasjax.memory.state import Gates, MemoryParams, MemoryState
from atlasjax.names import lookup


def _reference(rule, params, state, q, k, v, gates, segment_ids, max_segments):
    return reference_scan(rule, params, state, q, k, v, gates, segment_ids)


IMPLEMENTATIONS: dict[str, Callable] = {"xla": xla_scan, "reference": _reference}


def scan(
    rule: MemoryRule,
    params: MemoryParams,
    state: MemoryState | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: Gates,
    *,
    segment_ids: jax.Array | None = None,
    max_segments: int | None = None,
    implementation: str | None = None,
    check_gates: bool = False,
) -> tuple[jax.Array, MemoryState]:
    """Write and read a sequence: for every token, one step of the rule, then y_t = M_t(φ(q_t)).

    Cutting a sequence into calls at any places gives the outputs and the final state of one call. Batch elements and heads do
    not influence each other. Works under jit, grad, vmap and shard_map; the backward pass keeps one memory for each chunk.

    Args:
      rule: the memory rule, static under jit.
      params: its learned parameters (`init_params`).
      state: the memory so far; None for a fresh one (`init_state`), which is also faster: chunks are then aligned statically.
      q: queries, [batch, time, heads, key_dim], floating point. Any length ≥ 1.
      k: keys, like q.
      v: values, [batch, time, heads, value_dim], of q's dtype.
      gates: the gates that the rule uses, [batch, time, heads(, channels)]; see `MemoryRule.gate_channels`.
      segment_ids: optional integers ≥ 0, [batch, time]: where the id changes, a new segment starts with a fresh memory and a
        fresh chunk, as if it were alone. The first segment goes on from `state` if it has the id of the state's last token.
      max_segments: a static bound on the number of segments in a row; needed under jit. If a row has more, its outputs
        without a place and its state are NaN.
      implementation: None (the best available), "xla", or "reference" (the definition: slow).
      check_gates: check the gates' values: an error outside jit, a `checkify.check` under it.

    Returns:
      y: [batch, time, heads, value_dim], of q's dtype; and the new state, float32 (float64 for float64 inputs).

    Raises:
      TypeError, ValueError: an argument that does not fit, before anything is traced.
    """
    check.check_call(rule, params, state, q, k, v, gates, time=True, where="memory.scan")
    max_segments = check.check_segments(segment_ids, max_segments, q, "memory.scan")
    if segment_ids is not None:
        segment_ids = jnp.asarray(segment_ids, jnp.int32)
    if check_gates:
        check.check_gate_ranges(gates, "memory.scan")
    run = lookup("implementation", implementation or "xla", IMPLEMENTATIONS)
    return run(rule, params, state, q, k, v, gates, segment_ids, max_segments)


def step(
    rule: MemoryRule,
    params: MemoryParams,
    state: MemoryState,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: Gates,
    *,
    check_gates: bool = False,
) -> tuple[jax.Array, MemoryState]:
    """One token: `scan` without the time axis, for decoding. Its cost does not depend on how much was read.

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
    check.check_call(rule, params, state, q, k, v, gates, time=False, where="memory.step")
    if check_gates:
        check.check_gate_ranges(gates, "memory.step")
    return xla_step(rule, params, state, q, k, v, gates)


def read(rule: MemoryRule, params: MemoryParams, state: MemoryState, q: jax.Array) -> jax.Array:
    """Look without writing: M_t(φ(q)) for any number of queries.

    Args:
      rule, params, state: as in `scan`.
      q: [batch, time, heads, key_dim], floating point.

    Returns:
      [batch, time, heads, value_dim], of q's dtype.

    Raises:
      TypeError, ValueError: an argument that does not fit, before anything is traced.
    """
    check.check_read(rule, params, state, q)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    up = jax.tree.map(lambda x: x.astype(wide), params)
    one = lambda p, w, x: read_one(rule, p, w, x)
    over_time = jax.vmap(one, in_axes=(None, None, 0))
    over_heads = jax.vmap(over_time, in_axes=(0, 0, 1), out_axes=1)
    over_batch = jax.vmap(over_heads, in_axes=(None, 0, 0))
    return over_batch(up, state.memory, q.astype(wide)).astype(q.dtype)


def reference(
    rule: MemoryRule,
    params: MemoryParams,
    state: MemoryState | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: Gates,
    *,
    segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, MemoryState]:
    """The definition: token by token, inner gradients from `jax.grad`. Slow; arguments and results as in `scan`."""
    check.check_call(rule, params, state, q, k, v, gates, time=True, where="memory.reference")
    if segment_ids is not None:
        check.check_segments(segment_ids, q.shape[1], q, "memory.reference")
        segment_ids = jnp.asarray(segment_ids, jnp.int32)
    return reference_scan(rule, params, state, q, k, v, gates, segment_ids)
