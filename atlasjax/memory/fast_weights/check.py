"""Checks of arguments of a `MemoryRule`, before anything is traced or compiled."""

from typing import Any

import jax

from atlasjax.memory.check import check_floating, check_gates, check_leaves, check_range, check_shape
from atlasjax.memory.fast_weights.rule import MemoryRule
from atlasjax.memory.fast_weights.state import MemoryParams, MemoryState, check_params, infer_key_dim, init_state
from atlasjax.memory.gates import Gates


def check_call(
    rule: Any,
    params: MemoryParams,
    state: MemoryState | None,
    q: Any,
    k: Any,
    v: Any,
    gates: Gates,
    *,
    time: bool,
    where: str,
) -> None:
    """Shapes, dtypes, and which gates are given.

    Raises:
      TypeError: not an array, or not floating point.
      ValueError: a shape, a dtype or a gate that does not fit; the message names it, what it is and what it should be.
    """
    if not isinstance(rule, MemoryRule):
        raise TypeError(f"{where}: rule must be a MemoryRule, got {type(rule).__name__}.")
    check_params(rule, params, where)
    heads, value_dim = next(iter(params.weights.values())).shape[0], _value_dim(rule, params)
    key_dim = infer_key_dim(rule, params)
    lead: tuple[int | str, ...] = ("batch", "time", heads) if time else ("batch", heads)
    check_shape("q", q, (*lead, key_dim), where)
    lead = tuple(q.shape[: len(lead)])
    if 0 in lead:
        raise ValueError(f"{where}: q has shape {tuple(q.shape)}; batch and time must be at least 1.")
    check_shape("k", k, (*lead, key_dim), where)
    check_shape("v", v, (*lead, value_dim), where)
    for name, x in {"q": q, "k": k, "v": v}.items():
        check_floating(name, x, where)
        if x.dtype != q.dtype:
            raise ValueError(f"{where}: q, k and v must have one dtype, got q {q.dtype} and {name} {x.dtype}.")
    check_gates(rule.gate_channels(key_dim, value_dim), gates, lead, where)
    if state is not None:
        check_state(rule, params, state, lead[0], where)


def _value_dim(rule: MemoryRule, params: MemoryParams) -> int:
    outermost = next(iter(rule.structure.weight_shapes(1, 1)))
    return params.weights[outermost].shape[1]


def check_state(rule: MemoryRule, params: MemoryParams, state: MemoryState, batch: int | str, where: str) -> None:
    """Raise where `state` is not a state of this rule with these parameters and this batch size."""
    if not isinstance(state, MemoryState):
        raise TypeError(f"{where}: state must be a MemoryState, got {type(state).__name__}.")
    if isinstance(batch, str):
        batch = state.segment.shape[0]
    expected = jax.eval_shape(lambda p: init_state(rule, p, batch_size=batch), params)
    want_structure: Any = jax.tree.structure(expected)
    if want_structure != jax.tree.structure(state):
        raise ValueError(
            f"{where}: state is of another rule: it has {_fields(state)}, this rule's has {_fields(expected)}."
        )
    check_leaves("state", state, expected, where)
    if state.position is not None:  # of a rule with longer chunks it may be beyond the end of this rule's
        check_range("state.position", state.position, 0, rule.chunk_size - 1, where)
    if state.window_count is not None:
        check_range("state.window_count", state.window_count, 0, rule.window - 1, where)


def _fields(state: MemoryState) -> str:
    return ", ".join(name for name, value in state._asdict().items() if value is not None)


def check_read(rule: MemoryRule, params: MemoryParams, state: MemoryState, q: Any) -> None:
    """Arguments of `memory.read`."""
    check_params(rule, params, "memory.read")
    heads = next(iter(params.weights.values())).shape[0]
    check_state(rule, params, state, "batch", "memory.read")
    check_shape("q", q, (state.segment.shape[0], "time", heads, infer_key_dim(rule, params)), "memory.read")
    check_floating("q", q, "memory.read")
