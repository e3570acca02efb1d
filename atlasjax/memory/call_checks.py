"""Checks of a call's arguments against its rule, shared by all families, made before tracing and compilation."""

import functools
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.tree_util import PyTreeDef
from jaxtyping import Array, Int, PyTree

from atlasjax.check import is_number, plain_array
from atlasjax.memory.check import ARRAYS, FLOATS, check_floating, check_leaves, check_shape, check_time, pretty
from atlasjax.memory.gates import Gates
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.tokens import Tokens

T = TypeVar("T")


class AnyRule(Protocol):
    """The traits of a rule that the checks need."""

    def __hash__(self) -> int: ...

    def gate_channels(self, key_dim: int, value_dim: int | None = None) -> dict[str, int | None]: ...

    def sizes(self, params: PyTree) -> tuple[int | None, int, int]: ...

    def init_state(self, params: PyTree, *, batch_size: int, max_length: int | None = None) -> PyTree: ...

    def max_length(self, state: object) -> int | None: ...

    def room(self, state: PyTree) -> Int[Array, " batch"] | None: ...

    def check_params(self, params: PyTree, where: str) -> None: ...

    def check_state(self, params: PyTree, state: PyTree, batch: int, heads: int, where: str) -> None: ...


class _Structure(Protocol):
    @property
    def residual(self) -> bool: ...

    @property
    def norm(self) -> bool: ...


_VECTORS = ("connector", "removal_key")  # gates that are vectors, like keys; any floating-point dtype is allowed


def whole_gates(rule: AnyRule, tokens: Tokens, where: str) -> Gates:
    """Broadcasts gates, given as numbers or arrays, to [batch, time, heads(, channels)].

    Gates that do not broadcast are returned unchanged and refused by the check of the call.

    Args:
      rule: any rule; only its `gate_channels` is used.
      tokens: with `Gates` of numbers and arrays.
      where: the function's name, for messages.

    Raises:
      TypeError: a gate of fewer than 32 bits.
    """
    q, _, v, gates, _ = tokens
    arrays = all(isinstance(x, ARRAYS) and x.ndim >= 3 and x.dtype in FLOATS for x in (q, v))
    if not isinstance(gates, Gates) or not arrays or not hasattr(rule, "gate_channels"):
        return gates
    wide, lead = wide_dtype(q.dtype), tuple(q.shape[:-1])
    expected = rule.gate_channels(q.shape[-1], v.shape[-1])

    def whole(name: str, gate: T) -> T | jax.Array:
        if gate is None or name not in expected:
            return gate
        channels = expected[name]
        shape = lead if channels is None else (*lead, channels)
        plain_array(where, f"gates.{name}", gate)
        if is_number(gate):
            return jnp.full(shape, gate, wide)
        if not isinstance(gate, ARRAYS) or not jnp.issubdtype(gate.dtype, jnp.floating):
            return gate
        if jnp.finfo(gate.dtype).bits < 32 and name not in _VECTORS:
            raise TypeError(
                f"{where}: gates.{name} is {gate.dtype}, must be float32: rounding a gate near 1 to {gate.dtype} changes the "
                "result after many tokens. Compute gates in float32; q, k and v may have any floating point dtype."
            )
        fits = len(gate.shape) <= len(shape) and all(a in (1, b) for a, b in zip(gate.shape[::-1], shape[::-1]))
        if tuple(gate.shape) == shape or not fits or (channels is not None and tuple(gate.shape) == lead):
            return gate  # already complete, or for the check to refuse: [batch, time, heads] lacks the channel axis
        return jnp.broadcast_to(jnp.asarray(gate), shape)

    return Gates(**{name: whole(name, gate) for name, gate in gates._asdict().items()})


def check_output(structure: _Structure, key_dim: int, value_dim: int) -> None:
    """Raises ValueError if a structure has a residual and key_dim ≠ value_dim, or a norm and values of one number."""
    if structure.norm and value_dim == 1:
        raise ValueError(
            f"memory.init_params: {structure!r} has a LayerNorm, which is zero for a single number; value_dim must be ≥ 2, got 1, "
            "or the structure without a norm."
        )
    if structure.residual and key_dim != value_dim:
        raise ValueError(
            f"memory.init_params: {structure!r} adds its input to its output, so key_dim must equal value_dim, "
            f"got key_dim={key_dim}, value_dim={value_dim}. Others do not: dataclasses.replace(rule, "
            "structure=structures.PlainMLP()), or structures.Matrix()."
        )


def check_call(rule: AnyRule, params: PyTree, state: PyTree | None, tokens: Tokens, *, time: bool, where: str) -> None:
    """Checks shapes, dtypes, and which gates are given.

    Raises:
      TypeError: an argument is not an array, or not floating point.
      ValueError: a wrong shape, dtype or gate. The message names the argument, what it is and what it must be.
    """
    rule.check_params(params, where)
    q, k, v, gates, _ = tokens
    num_heads, key_dim, value_dim = rule.sizes(params)
    heads: int | str = "heads" if num_heads is None else num_heads
    lead: tuple[int | str, ...] = ("batch", "time", heads) if time else ("batch", heads)
    check_shape("q", q, (*lead, key_dim), where)
    lead = tuple(q.shape[: len(lead)])
    if time:
        check_time("q", q.shape[1], where)
    if 0 in lead:
        raise ValueError(f"{where}: q has shape {tuple(q.shape)}; batch, time and heads must be at least 1.")
    check_shape("k", k, (*lead, key_dim), where)
    check_shape("v", v, (*lead, value_dim), where)
    for name, x in {"q": q, "k": k, "v": v}.items():
        check_floating(name, x, where)
        if x.dtype != q.dtype:
            raise ValueError(f"{where}: q, k and v must have the same dtype, got q {q.dtype} and {name} {x.dtype}.")
    check_gates(rule.gate_channels(key_dim, value_dim), gates, lead, where)
    if state is not None:
        rule.check_state(params, state, q.shape[0], q.shape[-2], where)


def check_state(rule: AnyRule, params: PyTree, state: PyTree, batch: int, heads: int, where: str) -> None:
    """Raises TypeError or ValueError if `state` does not belong to this rule, these parameters, batch size and number of heads."""
    leaves, structure = jax.tree.flatten(params)
    shapes = tuple((x.shape, x.dtype) for x in leaves)
    expected = _fresh_state(
        rule, structure, shapes, batch, rule.max_length(state), jax.dtypes.canonicalize_dtype(float)
    )
    bare = isinstance(expected, jax.ShapeDtypeStruct)  # an array, of which `expected` is only the shape
    if not bare and type(state) is not type(expected):
        raise TypeError(f"{where}: state must be a {type(expected).__name__}, got {type(state).__name__}.")
    want_structure: object = jax.tree.structure(expected)
    if want_structure != jax.tree.structure(state):
        raise ValueError(
            f"{where}: state belongs to another rule: it has {_leaves(state)}, this rule's has {_leaves(expected)}."
        )
    shape = lambda x: x.shape if len(x.shape) < 2 else (x.shape[0], heads, *x.shape[2:])
    check_leaves("state", state, jax.tree.map(lambda x: jax.ShapeDtypeStruct(shape(x), x.dtype), expected), where)


def batch_and_heads(rule: AnyRule, params: PyTree, state: PyTree, where: str) -> tuple[int, int]:
    """Batch size and number of heads of a state, which has not been checked.

    Raises:
      ValueError: it has no arrays of such axes.
    """
    shapes = [x.shape for x in jax.tree.leaves(state) if getattr(x, "ndim", 0)]
    heads, _, _ = rule.sizes(params)
    if heads is None:
        heads = next((shape[1] for shape in shapes if len(shape) > 1), None)
    if not shapes or heads is None:
        raise ValueError(f"{where}: state has no arrays [batch, heads, …].")
    return shapes[0][0], heads


@functools.lru_cache(maxsize=1024)
def _fresh_state(
    rule: AnyRule,
    structure: PyTreeDef,
    shapes: tuple[tuple[tuple[int, ...], np.dtype], ...],
    batch: int,
    max_length: int | None,
    _float: np.dtype,
) -> PyTree:
    """Shapes and dtypes of a fresh state, which may depend on what a Python float is (`jax.enable_x64`).

    They are kept, because tracing costs more than a small step outside jit.
    """
    params = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*x) for x in shapes])
    return jax.eval_shape(lambda p: rule.init_state(p, batch_size=batch, max_length=max_length), params)


def _leaves(state: PyTree) -> str:
    return ", ".join(jax.tree_util.keystr(path)[1:] for path, _ in jax.tree_util.tree_flatten_with_path(state)[0])


def check_read(rule: AnyRule, params: PyTree, state: PyTree, q: jax.Array, where: str) -> None:
    """Checks the arguments of `memory.read`."""
    rule.check_params(params, where)
    num_heads, key_dim, _ = rule.sizes(params)
    shape = next((x.shape for x in jax.tree.leaves(state) if getattr(x, "ndim", 0) > 1), (1, 1))
    heads = shape[1] if num_heads is None else num_heads
    rule.check_state(params, state, shape[0], heads, where)
    check_shape("q", q, (shape[0], "time", heads, key_dim), where)
    check_floating("q", q, where)


def check_gates(expected: dict[str, int | None], gates: object, lead: tuple[int | str, ...], where: str) -> None:
    """Raises unless exactly the gates in `expected` (`gate_channels`) are given, each floating point and [*lead(, channels)]."""
    if not isinstance(gates, Gates):
        raise TypeError(f"{where}: gates must be memory.Gates, got {type(gates).__name__}.")
    for name, gate in gates._asdict().items():
        if name not in expected:
            if gate is not None:
                raise ValueError(
                    f"{where}: gates.{name} is given, but this rule has no such gate (it has {', '.join(expected)})."
                )
            continue
        channels = expected[name]
        shape = lead if channels is None else (*lead, channels)
        if gate is None:
            raise ValueError(f"{where}: gates.{name} is missing; this rule needs it with shape {pretty(shape)}.")
        if isinstance(gate, ARRAYS):
            check_floating(f"gates.{name}", gate, where)
        check_shape(f"gates.{name}", gate, shape, where)


_RANGES = {
    "retention": (0.0, 1.0),
    "momentum_decay": (0.0, 1.0),
    "write_size": (0.0, 1.0),
    "window_weights": (0.0, 1.0),
    "step_size": (0.0, np.inf),
    "threshold": (0.0, np.inf),
    "removal_key": (-np.inf, np.inf),
    "removal": (0.0, 1.0),
    "connector": (-np.inf, np.inf),
    "blend": (-np.inf, np.inf),
}


def check_room(rule: AnyRule, state: PyTree, time: int, where: str) -> None:
    """Raises ValueError if a state does not have room for `time` more tokens. Traced ones are not known: their outputs are NaN."""
    room = rule.room(state)
    if room is None or isinstance(room, jax.core.Tracer) or not getattr(room, "is_fully_addressable", True):
        return
    least = max(0, int(np.min(np.asarray(room))))
    if time > least:
        raise ValueError(
            f"{where}: state has room for {least} more tokens, got {time}; "
            "start with memory.init_state(…, max_length=…) for all tokens that will be read."
        )


def check_gate_ranges(gates: Gates, where: str) -> None:
    """Checks the values of gates: raises an error for concrete arrays, and is a `checkify.check` for traced ones."""
    for name, gate in gates._asdict().items():
        if gate is None:
            continue
        low, high = _RANGES[name]
        inside = (gate > low) if name == "threshold" else (gate >= low)
        inside &= (gate <= high) & jnp.isfinite(gate)
        first, last = "(" if name == "threshold" or low == -np.inf else "[", ")" if high == np.inf else "]"
        message = f"{where}: gates.{name} must be in {first}{low:g}, {high:g}{last}, got "
        if isinstance(inside, jax.core.Tracer):
            worst = jnp.ravel(gate)[jnp.argmin(jnp.ravel(inside))]
            checkify.check(jnp.all(inside), message + "{worst}", worst=worst)
        elif not bool(jnp.all(inside)):
            index = tuple(int(i) for i in np.argwhere(~np.asarray(inside))[0])
            raise ValueError(f"{message}{float(np.asarray(gate, np.float64)[index]):g} at index {index}.")
