"""Checks of array arguments by named axes, and of the sizes of a state."""

import functools
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from atlasjax.check import plain_array
from atlasjax.memory.check import ARRAYS, check_floating, check_time


def check_shapes(
    where: str,
    axes: Mapping[str, str],
    *,
    optional: Collection[str] = (),
    integers: Collection[str] = (),
    empty: Collection[str] = (),
    known: Mapping[str, int] | None = None,
    any_time: bool = False,
    **arguments: object,
) -> dict[str, int]:
    """Checks ranks, and that axes of the same name have the same size.

    Args:
      where: name of the calling function, for messages.
      axes: array → its axes, e.g. "batch time channels". A number is an axis of that size. "state.keys" is the attribute `keys` of
        the argument `state`. Arrays of arguments that are not given are ignored.
      optional: arguments that may be None.
      integers: arrays of integers. All others must be floating point.
      empty: axes that may be empty.
      known: sizes of axes that are known already.
      any_time: whether the axis "time" may be a symbolic size of `jax.export`, as that of the batch may.
      **arguments: the arguments.

    Returns:
      The sizes by axis name, with those of `known`.

    Raises:
      TypeError: an array is missing or something else, or its dtype is wrong.
      ValueError: a wrong shape or an empty axis. The message gives the array, its shape and the expected shape.
    """
    sizes = dict(known or {})
    for name, named in axes.items():
        argument, *path = name.split(".")
        if argument not in arguments or (arguments[argument] is None and argument in optional):
            continue
        x: Any = functools.reduce(lambda value, field: getattr(value, field, None), path, arguments[argument])
        names = named.split()
        if not isinstance(x, ARRAYS):
            raise TypeError(f"{where}: {name} must be an array [{', '.join(names)}], got {type(x).__name__}.")
        plain_array(where, name, x)
        own = dict(zip(names, x.shape))
        wanted = own | {n: int(n) for n in names if n.isdigit()} | sizes
        fits = len(x.shape) == len(names) and tuple(wanted[n] for n in names) == tuple(x.shape)
        if not fits or any(size == 0 and n not in empty for n, size in own.items()):
            want = ", ".join(f"{n}={sizes[n]}" if n in sizes else n for n in names)
            more = "" if empty else ", with no empty axis"
            raise ValueError(f"{where}: {name} has shape {tuple(x.shape)}, must be [{want}]{more}.")
        if "time" in own and not any_time:
            check_time(name, own["time"], where)
        if name not in integers:
            check_floating(name, x, where)
        elif not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{where}: {name} must be integers, got {x.dtype}.")
        sizes |= {n: size for n, size in own.items() if not n.isdigit()}
    return sizes


def check_series(where: str, name: str, x: object, axes: str) -> None:
    """Raises TypeError or ValueError unless x is a floating-point array of at least two axes, none of them empty."""
    if not isinstance(x, ARRAYS):
        raise TypeError(f"{where}: {name} must be an array {axes}, got {type(x).__name__}.")
    check_floating(name, x, where)
    if x.ndim < 2 or 0 in x.shape:
        raise ValueError(f"{where}: {name} has shape {x.shape}, must be {axes}, with no empty axis.")


def check_dtype(where: str, dtype: Any) -> None:
    """Raises TypeError unless `dtype` is a dtype of floating point numbers."""
    try:
        named = jax.ShapeDtypeStruct((), jnp.dtype(dtype))
    except (TypeError, ValueError):
        raise TypeError(f"{where}: dtype must be one of floating point, got {dtype!r}.") from None
    check_floating("dtype", named, where)  # type: ignore[arg-type]
