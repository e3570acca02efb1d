"""Checks of arguments shared by all families of rules, made before tracing and compilation."""

import functools
import numbers
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.export import is_symbolic_dim
from jax.tree_util import PyTreeDef
from jaxtyping import Array, Int, PyTree

from atlasjax.check import integer, is_number, plain_array
from atlasjax.memory.gates import Gates
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.tokens import Tokens

ARRAYS = (jax.Array, np.ndarray, np.generic)  # a tracer is a jax.Array; a jax.ShapeDtypeStruct has no values
Arrays = jax.Array | np.ndarray | np.generic
_FLOATS = tuple(map(np.dtype, (jnp.bfloat16, np.float16, np.float32, np.float64)))

T = TypeVar("T")


class AnyRule(Protocol):
    """What the checks ask of a rule."""

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


def check_arrays(where: str, **arguments: object) -> None:
    """Raises TypeError unless all leaves of the arguments are arrays that JAX accepts. Gates may be numbers. None is skipped."""
    for name, tree in arguments.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            if name == "gates" and isinstance(leaf, int | float):
                continue
            if not isinstance(leaf, ARRAYS):
                raise TypeError(
                    f"{where}: {name}{jax.tree_util.keystr(path)} must be an array, got {type(leaf).__name__}."
                )
            plain_array(where, f"{name}{jax.tree_util.keystr(path)}", leaf)


def check_concrete(where: str, **arguments: object) -> None:
    """Raises TypeError if a leaf of the arguments is being traced, as inside jit, so that it has no values."""
    for name, tree in arguments.items():
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree)):
            raise TypeError(f"{where}: {name} has no values while it is traced; call this outside jit, grad and vmap.")


def check_key(where: str, key: object) -> None:
    """Raises TypeError or ValueError unless `key` is a single PRNG key, of `jax.random.key` or of `jax.random.PRNGKey`."""
    if not isinstance(key, ARRAYS):
        raise TypeError(f"{where}: key must be a PRNG key such as jax.random.key(0), got {type(key).__name__}.")
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed and (key.dtype != jnp.uint32 or not key.shape):
        raise TypeError(f"{where}: key must be a PRNG key such as jax.random.key(0), got an array of {key.dtype}.")
    several = key.shape if typed else key.shape[:-1]
    if several:
        raise ValueError(f"{where}: key must be a single PRNG key, got keys of shape {several}.")


def check_shape(name: str, x: object, expected: tuple[int | str, ...], where: str) -> Arrays:
    """x. Raises TypeError or ValueError unless it is an array of shape `expected`: sizes, or names of free sizes."""
    if not isinstance(x, ARRAYS):
        raise TypeError(f"{where}: {name} must be an array of shape {_pretty(expected)}, got {type(x).__name__}.")
    plain_array(where, name, x)
    fits = len(x.shape) == len(expected) and all(
        isinstance(want, str) or have == want for have, want in zip(x.shape, expected)
    )
    if not fits:
        raise ValueError(f"{where}: {name} has shape {tuple(x.shape)}, should be {_pretty(expected)}.")
    return x


def _pretty(expected: tuple[int | str, ...]) -> str:
    return "[" + ", ".join(str(e) for e in expected) + "]"


def check_sizes(where: str, **sizes: Any) -> None:
    """Raises ValueError unless all sizes are integers ≥ 1, or symbolic sizes of `jax.export`."""
    for name, size in sizes.items():
        if not (is_symbolic_dim(size) and size >= 1):
            integer(where, name, size, kinds=numbers.Integral)


def check_time(name: str, time: Any, where: str) -> None:
    """Raises ValueError if a number of tokens is unknown, or beyond int32, in which positions are counted.

    A symbolic size of `jax.export` is unknown: tokens are laid out in blocks of known number.
    """
    if is_symbolic_dim(time):
        raise ValueError(
            f"{where}: {name} has the symbolic time {time}; the number of tokens must be known. Export a program for each length; "
            "the batch size may be symbolic."
        )
    if time >= 2**31:
        raise ValueError(
            f"{where}: {name} has {time:,} tokens; it must have fewer than 2^31. Read them in pieces, with the state between."
        )


def check_floating(name: str, x: Arrays, where: str) -> None:
    """Raises TypeError unless x, an array or a `jax.ShapeDtypeStruct`, is floating point, and an array that JAX reads as it is."""
    if not hasattr(x, "dtype"):
        raise TypeError(f"{where}: {name} must be an array, got {type(x).__name__}.")
    plain_array(where, name, x)
    if x.dtype not in _FLOATS:
        raise TypeError(
            f"{where}: {name} must be floating point, got {x.dtype}; it may be {', '.join(map(str, _FLOATS))}."
        )


def check_range(name: str, x: Arrays, low: int, high: int, where: str) -> None:
    """Raises ValueError unless all integers of an array are in [low, high]. Not for traced arrays and shards on other hosts."""
    if isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True):
        return
    values = np.asarray(x)
    if values.size and not (low <= values.min() and values.max() <= high):
        wrong = values.min() if values.min() < low else values.max()
        raise ValueError(f"{where}: {name} has the value {wrong}, should be in [{low}, {high}].")


def check_leaves(name: str, tree: PyTree, expected: PyTree, where: str) -> None:
    """Raises TypeError or ValueError unless the leaves of a tree have the expected shapes and dtypes.

    Args:
      name: the tree's name, for messages.
      expected: shapes and dtypes, in a tree of the same structure. Integer leaves must have exactly that dtype; others must be
        floating point.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(expected)
    for (path, want), have in zip(flat, jax.tree.leaves(tree)):
        leaf = f"{name}{jax.tree_util.keystr(path)}"
        check_shape(leaf, have, want.shape, where)
        if jnp.issubdtype(want.dtype, jnp.floating):
            check_floating(leaf, have, where)
        elif have.dtype != want.dtype:
            raise TypeError(f"{where}: {leaf} must be {want.dtype}, got {have.dtype}.")


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
    arrays = all(isinstance(x, ARRAYS) and x.ndim >= 3 and x.dtype in _FLOATS for x in (q, v))
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
                f"{where}: gates.{name} is {gate.dtype}, should be float32: rounding a gate near 1 to {gate.dtype} changes the "
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
      ValueError: a wrong shape, dtype or gate. The message names the argument, what it is and what it should be.
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
            raise ValueError(f"{where}: gates.{name} is missing; this rule needs it with shape {_pretty(shape)}.")
        if isinstance(gate, ARRAYS):
            check_floating(f"gates.{name}", gate, where)
        check_shape(f"gates.{name}", gate, shape, where)


def whole_layer(layer: jax.Array | int, states: PyTree, where: str) -> jax.Array:
    """The number of a layer as int32 [].

    Raises:
      TypeError: it is not an integer.
      ValueError: it is not traced and not in [0, layers).
    """
    plain_array(where, "layer", layer)
    integral = is_number(layer) or (isinstance(layer, ARRAYS) and layer.ndim == 0)
    if isinstance(layer, bool) or not integral or not jnp.issubdtype(jnp.asarray(layer).dtype, jnp.integer):
        raise TypeError(f"{where}: layer must be an integer or None, got {layer!r}.")
    layers = min((x.shape[0] for x in jax.tree.leaves(states) if isinstance(x, ARRAYS) and x.ndim), default=1)
    check_range("layer", layer if isinstance(layer, ARRAYS) else np.asarray(layer), 0, layers - 1, where)
    return jnp.asarray(layer, jnp.int32)


def whole_weights(weights: object, count: int, where: str) -> jax.Array:
    """The weights of a soup as an array [count].

    Raises:
      TypeError: they are not real numbers.
      ValueError: their number is not `count`.
    """
    plain_array(where, "weights", weights)
    try:
        found = jnp.asarray(weights)
    except (TypeError, ValueError):
        raise TypeError(f"{where}: weights must be {count} real numbers, got {weights!r}.") from None
    if not (jnp.issubdtype(found.dtype, jnp.floating) or jnp.issubdtype(found.dtype, jnp.integer)):
        raise TypeError(f"{where}: weights must be {count} real numbers, got {found.dtype}.")
    check_shape("weights", found, (count,), where)
    return found


def whole_segments(
    segment_ids: jax.Array | None, max_segments: int | None, q: jax.Array, where: str
) -> tuple[jax.Array | None, int | None]:
    """Segment ids as int32, and the static bound on their number, after `check_segments`."""
    most = check_segments(segment_ids, max_segments, q, where)
    return (None if segment_ids is None else jnp.asarray(segment_ids, jnp.int32)), most


def check_ids(segment_ids: jax.Array, shape: tuple[int, ...], where: str) -> np.ndarray | None:
    """Segment ids as a NumPy array, None where they are traced. Raises unless they are integers in [0, 2^31) of that shape.

    Under jit larger ids cannot be seen: without `jax_enable_x64`, JAX has cut an argument's int64 to int32 before it is traced.
    """
    check_shape("segment_ids", segment_ids, shape, where)
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise TypeError(f"{where}: segment_ids must be integers, got {segment_ids.dtype}.")
    if isinstance(segment_ids, jax.core.Tracer) or not getattr(segment_ids, "is_fully_addressable", True):
        return None
    ids = np.asarray(segment_ids)
    if ids.min() < 0 or ids.max() >= 2**31:  # ids are stored as int32, where larger ones would collide
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(f"{where}: segment_ids must be ≥ 0 and below 2^31, got {wrong}.")
    return ids


def check_segments(segment_ids: jax.Array | None, max_segments: int | None, q: jax.Array, where: str) -> int | None:
    """The static bound on the number of segments per row: the given one, or counted if `segment_ids` is a concrete array."""
    if segment_ids is None:
        if max_segments is not None:
            raise ValueError(f"{where}: max_segments={max_segments} is given without segment_ids.")
        return None
    ids = check_ids(segment_ids, q.shape[:2], where)
    most = None if ids is None else int((ids[:, 1:] != ids[:, :-1]).sum(1).max()) + 1
    if max_segments is None:
        if most is None:
            raise ValueError(
                f"{where}: under jit, segment_ids need max_segments, a static bound on the number of segments in a row."
            )
        return most
    integer(where, "max_segments", max_segments)
    if most is not None and most > max_segments:
        raise ValueError(f"{where}: max_segments={max_segments}, but segment_ids has a row with {most} segments.")
    return max_segments


_RANGES = {
    "retention": (0.0, 1.0),
    "momentum_decay": (0.0, 1.0),
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
