"""Checks of arrays, sizes and segment ids, made before tracing and compilation."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jaxtyping import PyTree

from atlasjax.check import integer, is_number, plain_array

ARRAYS = (jax.Array, np.ndarray, np.generic)  # a tracer is a jax.Array; a jax.ShapeDtypeStruct has no values
Arrays = jax.Array | np.ndarray | np.generic
FLOATS = tuple(map(np.dtype, (jnp.bfloat16, np.float16, np.float32, np.float64)))


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
        raise TypeError(f"{where}: {name} must be an array of shape {pretty(expected)}, got {type(x).__name__}.")
    plain_array(where, name, x)
    fits = len(x.shape) == len(expected) and all(
        isinstance(want, str) or have == want for have, want in zip(x.shape, expected)
    )
    if not fits:
        raise ValueError(f"{where}: {name} has shape {tuple(x.shape)}, must be {pretty(expected)}.")
    return x


def pretty(expected: tuple[int | str, ...]) -> str:
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
    if x.dtype not in FLOATS:
        raise TypeError(
            f"{where}: {name} must be floating point, got {x.dtype}; it may be {', '.join(map(str, FLOATS))}."
        )


def check_range(name: str, x: Arrays, low: int, high: int, where: str) -> None:
    """Raises ValueError unless all integers of an array are in [low, high]. Not for traced arrays and shards on other hosts."""
    if isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True):
        return
    values = np.asarray(x)
    if values.size and not (low <= values.min() and values.max() <= high):
        wrong = values.min() if values.min() < low else values.max()
        raise ValueError(f"{where}: {name} has the value {wrong}, must be in [{low}, {high}].")


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


def check_fresh(rule: str, state: object) -> None:
    """Raises ValueError for a state where `Partition.time` needs a fresh memory. rule: the name of its class."""
    if state is not None:
        raise ValueError(
            f"Partition: time divides the tokens of a {rule} only from a fresh memory; state must be None."
        )
