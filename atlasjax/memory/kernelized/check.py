"""Checks of arguments, before anything is traced or compiled."""

from typing import Any

import jax

from atlasjax.memory.check import _floating, _shape, check_gates
from atlasjax.memory.kernelized.rule import KernelRule
from atlasjax.memory.kernelized.state import KernelParams, KernelState, check_params, init_state
from atlasjax.memory.state import Gates


def check_call(
    rule: KernelRule,
    params: KernelParams,
    state: KernelState | None,
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
    if not isinstance(rule, KernelRule):
        raise TypeError(f"{where}: rule must be a KernelRule, got {type(rule).__name__}.")
    check_params(rule, params)
    heads = _heads(params)
    lead: tuple[int | str, ...] = ("batch", "time", heads) if time else ("batch", heads)
    _shape("q", q, (*lead, params.key_dim), where)
    lead = tuple(q.shape[: len(lead)])
    if 0 in lead:
        raise ValueError(f"{where}: q has shape {tuple(q.shape)}; batch, time and heads must be at least 1.")
    _shape("k", k, (*lead, params.key_dim), where)
    _shape("v", v, (*lead, params.value_dim), where)
    for name, x in {"q": q, "k": k, "v": v}.items():
        _floating(name, x, where)
        if x.dtype != q.dtype:
            raise ValueError(f"{where}: q, k and v must have one dtype, got q {q.dtype} and {name} {x.dtype}.")
    check_gates(rule.gate_channels(params.key_dim, params.value_dim), gates, lead, where)
    if state is not None:
        check_state(rule, params, state, lead[0], where)


def _heads(params: KernelParams) -> int | str:
    """The number of heads. Any number fits a matrix memory, which has no parameter per head."""
    return next(iter(params.weights.values())).shape[0] if params.weights else "heads"


def check_state(rule: KernelRule, params: KernelParams, state: KernelState, batch: int | str, where: str) -> None:
    """Raises an error if `state` does not belong to this rule, these parameters and this batch size."""
    if not isinstance(state, KernelState):
        raise TypeError(f"{where}: state must be a KernelState, got {type(state).__name__}.")
    if isinstance(batch, str):
        batch = state.segment.shape[0]
    length = state.keys.shape[2] if state.keys.ndim == 4 else 1
    fresh = lambda p: init_state(rule, p, batch_size=batch, max_length=max(1, length))
    expected = jax.eval_shape(fresh, params)
    want_structure: Any = jax.tree.structure(expected)
    if want_structure != jax.tree.structure(state):
        raise ValueError(f"{where}: state is of another rule: its leaves are not those of {rule!r}.")
    flat, _ = jax.tree_util.tree_flatten_with_path(expected)
    for (path, want), have in zip(flat, jax.tree.leaves(state)):
        shape = want.shape if params.weights else (want.shape[0], "heads", *want.shape[2:])[: len(want.shape)]
        _shape(f"state{jax.tree_util.keystr(path)}", have, shape, where)


def check_read(rule: KernelRule, params: KernelParams, state: KernelState, q: Any, where: str) -> None:
    """Checks the arguments of `read`."""
    if not isinstance(rule, KernelRule):
        raise TypeError(f"{where}: rule must be a KernelRule, got {type(rule).__name__}.")
    check_params(rule, params)
    check_state(rule, params, state, "batch", where)
    _shape("q", q, (state.segment.shape[0], "time", state.keys.shape[1], params.key_dim), where)
    _floating("q", q, where)
