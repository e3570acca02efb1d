"""The functional API of softmax memories: `scan`, `step`, `read`, `reference`, as in `atlasjax.memory.api`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from atlasjax.memory.check import check_gate_ranges, check_segments
from atlasjax.memory.gates import Gates
from atlasjax.memory.softmax import check
from atlasjax.memory.softmax.decode import read_state, xla_step
from atlasjax.memory.softmax.engine import xla_scan
from atlasjax.memory.softmax.reference import reference_scan
from atlasjax.memory.softmax.rule import SoftmaxRule
from atlasjax.memory.softmax.state import SoftmaxParams, SoftmaxState
from atlasjax.names import lookup

IMPLEMENTATIONS: dict[str, Callable] = {
    "xla": xla_scan,
    "reference": lambda rule, params, state, q, k, v, gates, segment_ids, max_segments: reference_scan(
        rule, params, state, q, k, v, gates, segment_ids
    ),
}


def scan(
    rule: SoftmaxRule,
    params: SoftmaxParams,
    state: SoftmaxState | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: Gates,
    *,
    segment_ids: jax.Array | None = None,
    max_segments: int | None = None,
    implementation: str | None = None,
    check_gates: bool = False,
) -> tuple[jax.Array, SoftmaxState]:
    """Writes and reads a sequence: for every token, one step of the rule, then y_t = M_t(φ*(q_t)).

    Splitting a sequence into several calls gives the outputs and the final state of one call. Works under jit, vmap, shard_map and
    reverse-mode differentiation. The backward pass stores no [time, time] array.

    Args:
      rule: the softmax rule, static under jit.
      params: its learned parameters (`init_params`).
      state: the memory so far. None starts from a fresh memory; with a full cache the returned state then has no room for more
        tokens, because its max_length is the call's length. To continue a sequence, start with `init_state`.
      q: queries, [batch, time, heads, key_dim], floating point. Any length ≥ 1.
      k: keys, like q.
      v: values, [batch, time, heads, value_dim], in q's dtype.
      gates: the gates that the rule uses, [batch, time, heads(, channels)]; see `SoftmaxRule.gate_channels`.
      segment_ids: optional integers ≥ 0, [batch, time]. Where the id changes, a new segment starts with a fresh memory and a new
        chunk, as if it were alone. The first segment continues from `state` if it has the id of the state's last token.
      max_segments: static bound on the number of segments in a row. Required under jit. If a row has more, its state and the
        outputs of tokens without a slot are NaN.
      implementation: None (the best available), "xla", or "reference" (the definition, slow).
      check_gates: check the gates' values: an error outside jit, a `checkify.check` under it.

    Returns:
      y: [batch, time, heads, value_dim], in q's dtype (NaN for tokens beyond a full cache's max_length), and the new state, float32
      (float64 for float64 inputs).

    Raises:
      TypeError, ValueError: invalid arguments, before anything is traced.
    """
    check.check_call(rule, params, state, q, k, v, gates, time=True, where="memory.scan")
    max_segments = check_segments(segment_ids, max_segments, q, "memory.scan")
    if segment_ids is not None:
        segment_ids = jnp.asarray(segment_ids, jnp.int32)
    if check_gates:
        check_gate_ranges(gates, "memory.scan")
    run = lookup("implementation", "xla" if implementation is None else implementation, IMPLEMENTATIONS)
    return run(rule, params, state, q, k, v, gates, segment_ids, max_segments)


def step(
    rule: SoftmaxRule,
    params: SoftmaxParams,
    state: SoftmaxState,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: Gates,
    *,
    check_gates: bool = False,
) -> tuple[jax.Array, SoftmaxState]:
    """One token: `scan` without the time axis, for decoding. Costs one read of the cache.

    Args:
      rule, params, state: as in `scan`, but the state is required.
      q, k: [batch, heads, key_dim]; v: [batch, heads, value_dim].
      gates: [batch, heads(, channels)].
      check_gates: as in `scan`.

    Returns:
      y: [batch, heads, value_dim] (NaN beyond a full cache's max_length), and the new state.

    Raises:
      TypeError, ValueError: invalid arguments, before anything is traced.
    """
    if state is None:
        raise ValueError("memory.step: state is None; start with memory.init_state.")
    check.check_call(rule, params, state, q, k, v, gates, time=False, where="memory.step")
    if check_gates:
        check_gate_ranges(gates, "memory.step")
    return xla_step(rule, params, state, q, k, v, gates)


def read(rule: SoftmaxRule, params: SoftmaxParams, state: SoftmaxState, q: jax.Array) -> jax.Array:
    """Reads without writing: M_t(φ*(q)) for any number of queries.

    Args:
      rule, params, state: as in `scan`.
      q: [batch, time, heads, key_dim], floating point.

    Returns:
      [batch, time, heads, value_dim], in q's dtype; NaN if the state has read more than its max_length.

    Raises:
      TypeError, ValueError: invalid arguments, before anything is traced.
    """
    check.check_read(rule, params, state, q, "memory.read")
    return read_state(rule, params, state, q)


def reference(
    rule: SoftmaxRule,
    params: SoftmaxParams,
    state: SoftmaxState | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: Gates,
    *,
    segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, SoftmaxState]:
    """The definition: token by token over the whole cache, with inner gradients from `jax.grad`. Slow. Arguments as in `scan`."""
    check.check_call(rule, params, state, q, k, v, gates, time=True, where="memory.reference")
    if segment_ids is not None:
        check_segments(segment_ids, q.shape[1], q, "memory.reference")
        segment_ids = jnp.asarray(segment_ids, jnp.int32)
    return reference_scan(rule, params, state, q, k, v, gates, segment_ids)
