"""Checks of the arguments of a `CachedRule` in addition to those of its inner rule, made before tracing and compilation."""

from typing import Any

from atlasjax.memory import check
from atlasjax.memory.caching.rule import CachedRule
from atlasjax.memory.caching.state import CachedState
from atlasjax.memory.gates import Gates


def check_call(
    rule: CachedRule, params: Any, state: Any, q: Any, k: Any, v: Any, gates: Any, *, time: bool, where: str
) -> None:
    """Raises TypeError or ValueError for an invalid argument of a call."""
    connector, blend = (gates.connector, gates.blend) if isinstance(gates, Gates) else (None, None)
    plain = gates._replace(connector=None, blend=None) if isinstance(gates, Gates) else gates
    rule.rule.check_call(params, None, q, k, v, plain, time=time, where=where)
    channels = rule.connector_channels(q.shape[-1])
    needed = channels is not None
    shape = (*q.shape[:-1], channels)
    if needed and connector is None:
        raise ValueError(
            f"{where}: gates.connector is missing; this rule needs it with shape {list(shape)} "
            '(or CachedRule(connector="query")).'
        )
    if not needed and connector is not None:
        raise ValueError(
            f"{where}: gates.connector is given, but aggregation={rule.aggregation!r} with connector={rule.connector!r} and "
            f"gate={rule.gate!r} does not use it."
        )
    if needed:
        check.check_shape("gates.connector", connector, shape, where)
        check.check_floating("gates.connector", connector, where)
    if rule.blended != (blend is not None):
        raise ValueError(
            f"{where}: gates.blend is missing; this rule has blended=True and needs it with shape {list(q.shape[:-1])}."
            if rule.blended
            else f"{where}: gates.blend is given, but only a CachedRule with blended=True uses it."
        )
    if rule.blended:
        check.check_shape("gates.blend", blend, tuple(q.shape[:-1]), where)
        check.check_floating("gates.blend", blend, where)
    if state is not None:
        rule.check_state(params, state, q.shape[0], q.shape[-2], where)


def check_capacity(rule: CachedRule, state: Any, where: str) -> None:
    """Raises ValueError if a state's cache does not have the rule's capacity."""
    if not isinstance(state, CachedState) or state.keys.ndim != 4 or rule.capacity is None:
        return
    if state.keys.shape[2] != rule.capacity:
        raise ValueError(
            f"{where}: state has a cache for {state.keys.shape[2]} memories, should be capacity={rule.capacity}."
        )
