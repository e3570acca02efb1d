"""Checks of the arguments of a `CachedRule` in addition to those of its inner rule, made before tracing and compilation."""

import jax

from atlasjax.memory import check
from atlasjax.memory.caching.spec import CachedSpec
from atlasjax.memory.caching.state import CachedState
from atlasjax.memory.gates import Gates


def check_read_gates(rule: CachedSpec, q: jax.Array, gates: Gates, where: str) -> None:
    """Raises TypeError or ValueError if u or λ is missing, is not used, or is wrong."""
    connector, blend = gates.connector, gates.blend
    channels = rule.connector_channels(q.shape[-1])
    if channels is None and connector is not None:
        raise ValueError(
            f"{where}: gates.connector is given, but aggregation={rule.aggregation!r} with connector={rule.connector!r} and "
            f"gate={rule.gate!r} does not use it."
        )
    if channels is not None:
        shape = (*q.shape[:-1], channels)
        if connector is None:
            raise ValueError(
                f"{where}: gates.connector is missing; this rule needs it with shape {list(shape)} "
                '(or CachedRule(connector="query")).'
            )
        name = "gates.connector"
        check.check_floating(name, check.check_shape(name, connector, shape, where), where)
    if rule.blended != (blend is not None):
        raise ValueError(
            f"{where}: gates.blend is missing; this rule has blended=True and needs it with shape {list(q.shape[:-1])}."
            if rule.blended
            else f"{where}: gates.blend is given, but only a CachedRule with blended=True uses it."
        )
    if rule.blended:
        name = "gates.blend"
        check.check_floating(name, check.check_shape(name, blend, tuple(q.shape[:-1]), where), where)


def check_capacity(rule: CachedSpec, state: object, where: str) -> None:
    """Raises ValueError if a state's cache does not have the rule's capacity."""
    if not isinstance(state, CachedState) or getattr(state.keys, "ndim", 0) != 4 or rule.capacity is None:
        return
    if state.keys.shape[2] != rule.capacity:
        raise ValueError(
            f"{where}: state has a cache for {state.keys.shape[2]} memories, must be capacity={rule.capacity}."
        )
