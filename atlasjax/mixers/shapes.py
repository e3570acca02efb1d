"""Checks of array arguments by named axes."""

from collections.abc import Collection

from atlasjax.memory.check import ARRAYS, check_floating


def check_shapes(
    where: str, axes: dict[str, str], *, optional: Collection[str] = (), **arrays: object
) -> dict[str, int]:
    """Checks ranks, and that axes of the same name have the same size.

    Args:
      where: name of the calling function, for messages.
      axes: argument → its axes, e.g. "batch time channels".
      optional: arguments that may be None.
      **arrays: the arguments, floating point.

    Returns:
      The sizes by axis name.

    Raises:
      TypeError: an argument is not an array, or not floating point.
      ValueError: a wrong shape or an empty axis. The message gives the argument, its shape and the expected shape.
    """
    sizes: dict[str, int] = {}
    for name, x in arrays.items():
        if x is None and name in optional:
            continue
        names = axes[name].split()
        if not isinstance(x, ARRAYS):
            raise TypeError(f"{where}: {name} must be an array [{', '.join(names)}], got {type(x).__name__}.")
        fits = len(x.shape) == len(names) and all(sizes.get(n, size) == size for n, size in zip(names, x.shape))
        if not fits or 0 in x.shape:
            want = ", ".join(f"{n}={sizes[n]}" if n in sizes else n for n in names)
            raise ValueError(f"{where}: {name} has shape {tuple(x.shape)}, should be [{want}], with no empty axis.")
        check_floating(name, x, where)
        sizes |= dict(zip(names, x.shape))
    return sizes
