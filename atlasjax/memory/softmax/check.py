"""Checks of arguments, before anything is traced or compiled."""

from typing import Any

import jax

from atlasjax.memory.check import check_floating, check_gates, check_leaves, check_range, check_shape
from atlasjax.memory.gates import Gates
from atlasjax.memory.softmax.rule import SoftmaxRule
from atlasjax.memory.softmax.state import SoftmaxParams, SoftmaxState, check_params, init_state


def check_call(
    rule: SoftmaxRule,
    params: SoftmaxParams,
    state: SoftmaxState | None,
    q: Any,
    k: Any,
    v: Any,
    gates: Gates,
    *,
    time: bool,
    where: str,
) -> None:
    """Checks shapes, dtypes, and which gates are given.

    Raises:
      TypeError: an argument is not an array, or not floating point.
      ValueError: a wrong shape, dtype or gate. The message gives the argument, its value and the expected one.
    """
    if not isinstance(rule, SoftmaxRule):
        raise TypeError(f"{where}: rule must be a SoftmaxRule, got {type(rule).__name__}.")
    check_params(rule, params)
    heads = _heads(params)
    lead: tuple[int | str, ...] = ("batch", "time", heads) if time else ("batch", heads)
    check_shape("q", q, (*lead, params.key_dim), where)
    lead = tuple(q.shape[: len(lead)])
    if 0 in lead:
        raise ValueError(f"{where}: q has shape {tuple(q.shape)}; batch, time and heads must be at least 1.")
    check_shape("k", k, (*lead, params.key_dim), where)
    check_shape("v", v, (*lead, params.value_dim), where)
    for name, x in {"q": q, "k": k, "v": v}.items():
        check_floating(name, x, where)
        if x.dtype != q.dtype:
            raise ValueError(f"{where}: q, k and v must have one dtype, got q {q.dtype} and {name} {x.dtype}.")
    check_gates(rule.gate_channels(params.key_dim, params.value_dim), gates, lead, where)
    if state is not None:
        check_state(rule, params, state, lead[0], where)


def _heads(params: SoftmaxParams) -> int | str:
    """The number of heads. Any number fits a matrix memory, which has no parameter per head."""
    return next(iter(params.weights.values())).shape[0] if params.weights else "heads"


def check_state(rule: SoftmaxRule, params: SoftmaxParams, state: SoftmaxState, batch: int | str, where: str) -> None:
    """Raises an error if `state` does not belong to this rule, these parameters and this batch size."""
    if not isinstance(state, SoftmaxState):
        raise TypeError(f"{where}: state must be a SoftmaxState, got {type(state).__name__}.")
    if isinstance(batch, str):
        batch = state.segment.shape[0]
    length = state.keys.shape[2] if state.keys.ndim == 4 else 1
    fresh = lambda p: init_state(rule, p, batch_size=batch, max_length=max(1, length))
    expected = jax.eval_shape(fresh, params)
    want_structure: Any = jax.tree.structure(expected)
    if want_structure != jax.tree.structure(state):
        raise ValueError(f"{where}: state is of another rule: its leaves are not those of {rule!r}.")
    check_leaves("state", state, expected, where, heads=bool(params.weights))
    check_range("state.position", state.position, 0, max(0, rule.chunk_size - 1), where)


def check_read(rule: SoftmaxRule, params: SoftmaxParams, state: SoftmaxState, q: Any, where: str) -> None:
    """Checks the arguments of `read`."""
    if not isinstance(rule, SoftmaxRule):
        raise TypeError(f"{where}: rule must be a SoftmaxRule, got {type(rule).__name__}.")
    check_params(rule, params)
    check_state(rule, params, state, "batch", where)
    check_shape("q", q, (state.segment.shape[0], "time", state.keys.shape[1], params.key_dim), where)
    check_floating("q", q, where)
