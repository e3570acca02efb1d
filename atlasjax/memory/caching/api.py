"""`scan`, `step`, `read` and `reference` of a `CachedRule`, called through `atlasjax.memory`."""

from typing import Any

import jax
import jax.numpy as jnp

from atlasjax.memory import check
from atlasjax.memory.caching import memories, parallel, streaming
from atlasjax.memory.caching.reference import reference_cached
from atlasjax.memory.caching.rule import CachedRule
from atlasjax.memory.caching.state import AnyParams, CachedState, init_state, tokens_of
from atlasjax.memory.gates import Gates
from atlasjax.names import lookup

IMPLEMENTATIONS = ("xla", "reference")


def _check(
    rule: CachedRule, params: AnyParams, state: Any, q: Any, k: Any, v: Any, gates: Any, *, time: bool, where: str
) -> None:
    connector = gates.connector if isinstance(gates, Gates) else None
    plain = gates._replace(connector=None) if isinstance(gates, Gates) else gates
    memories.check_call(rule, params, q, k, v, plain, time=time, where=where)
    needed = "connector" in rule.gate_channels(q.shape[-1])
    if needed and connector is None:
        raise ValueError(
            f"{where}: gates.connector is missing; this rule needs it with shape {list(q.shape)} "
            '(or CachedRule(connector="query")).'
        )
    if not needed and connector is not None:
        raise ValueError(
            f"{where}: gates.connector is given, but aggregation={rule.aggregation!r} with connector={rule.connector!r} "
            "does not use it."
        )
    if needed:
        check.check_shape("gates.connector", connector, tuple(q.shape), where)
        check.check_floating("gates.connector", connector, where)
    if state is not None:
        check_state(rule, params, state, q.shape[0], where)


def check_state(rule: CachedRule, params: AnyParams, state: Any, batch: int, where: str) -> None:
    """Raises an error if `state` does not belong to this rule, these parameters and this batch size."""
    if not isinstance(state, CachedState):
        raise TypeError(f"{where}: state must be a CachedState, got {type(state).__name__}.")
    places = state.keys.shape[2] if state.keys.ndim == 4 else 1
    if rule.capacity is not None and places != rule.capacity:
        raise ValueError(f"{where}: state has a cache for {places} memories, should be capacity={rule.capacity}.")
    length = places * rule.segment_size + 1
    expected = jax.eval_shape(lambda p: init_state(rule, p, batch_size=batch, max_length=length), params)
    structure: Any = jax.tree.structure(expected)
    if structure != jax.tree.structure(state):
        raise ValueError(f"{where}: state is of another rule.")
    check.check_leaves("state", state, expected, where)


def scan(
    rule: CachedRule,
    params: AnyParams,
    state: CachedState | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: Gates,
    *,
    segment_ids: jax.Array | None = None,
    max_segments: int | None = None,
    implementation: str | None = None,
    check_gates: bool = False,
) -> tuple[jax.Array, CachedState]:
    """`memory.scan` of a cached rule.

    Args:
      state: None starts from a fresh memory and computes the segments in parallel. The returned state then has room only for the
        memories of this call, unless the rule has a capacity. To continue a sequence, start with `init_state`.
      segment_ids: packed documents; only with state=None.
      implementation: None, "xla", or "reference" (y from the definition, state from the engine).
      Other arguments: as in `memory.scan`.

    Raises:
      TypeError, ValueError: invalid arguments, before anything is traced.
    """
    where = "memory.scan"
    _check(rule, params, state, q, k, v, gates, time=True, where=where)
    max_segments = check.check_segments(segment_ids, max_segments, q, where)
    if segment_ids is not None:
        if state is not None:
            raise ValueError(
                f"{where}: segment_ids of a cached rule need state=None: documents cannot continue from a state."
            )
        segment_ids = jnp.asarray(segment_ids, jnp.int32)
    if check_gates:
        check.check_gate_ranges(gates, where)
    name = "xla" if implementation is None else implementation
    lookup("implementation", name, dict.fromkeys(IMPLEMENTATIONS))
    tokens = tokens_of(rule, q, k, v, gates)
    if state is None:
        y, after = parallel.parallel_scan(rule, params, tokens, segment_ids, max_segments)
    else:
        y, after = streaming.streamed_scan(rule, params, state, tokens)
    if name == "reference":
        if state is not None:
            raise ValueError(f'{where}: implementation="reference" of a cached rule needs state=None.')
        y = reference_cached(rule, params, tokens, segment_ids).astype(q.dtype)
    return y, after


def step(
    rule: CachedRule,
    params: AnyParams,
    state: CachedState,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: Gates,
    *,
    check_gates: bool = False,
) -> tuple[jax.Array, CachedState]:
    """`memory.step` of a cached rule: one step of the rule and one read of the cache (with "ssc", of top_k memories)."""
    _check(rule, params, state, q, k, v, gates, time=False, where="memory.step")
    if check_gates:
        check.check_gate_ranges(gates, "memory.step")
    return streaming.step(rule, params, state, tokens_of(rule, q, k, v, gates))


def read(
    rule: CachedRule, params: AnyParams, state: CachedState, q: jax.Array, connector: jax.Array | None = None
) -> jax.Array:
    """`memory.read` of a cached rule: a read as by the last token. u = q if no connector is given."""
    batch = state.position.shape[0] if isinstance(state, CachedState) else 1
    check_state(rule, params, state, batch, "memory.read")
    shape = (batch, "time", *memories.sizes(rule, params))
    check.check_shape("q", q, shape, "memory.read")
    check.check_floating("q", q, "memory.read")
    if connector is not None:
        check.check_shape("connector", connector, tuple(q.shape), "memory.read")
    return streaming.read_state(rule, params, state, q, connector)


def reference(
    rule: CachedRule,
    params: AnyParams,
    state: None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: Gates,
    *,
    segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, CachedState]:
    """The definition, from a fresh memory, with Python loops over tokens and explicit memories and soups. Very slow."""
    return scan(
        rule, params, state, q, k, v, gates, segment_ids=segment_ids,
        max_segments=None if segment_ids is None else q.shape[1], implementation="reference",
    )  # fmt: skip
