"""Validation of arguments and config fields, with one wording for all error messages.

A number is an int or a float. A bool counts as neither an integer nor a number.
"""

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Literal, TypeGuard, get_args, get_origin, get_type_hints

from atlasjax.names import lookup

MOST = 2**63 - 1  # no machine counts further
_LONGEST = 200  # characters of a value in a message


def is_integer(value: object, least: int | None = None, *, kinds: type | tuple[type, ...] = int) -> TypeGuard[int]:
    """Whether `value` is an integer of 64 bits, at least `least`. kinds=`numbers.Integral`: NumPy integers are accepted too."""
    if not isinstance(value, kinds) or isinstance(value, bool):
        return False
    # Python's integers have no end; those that do not fit fail much later, in arrays or files.
    return -MOST - 1 <= value <= MOST and (least is None or value >= least)  # type: ignore[operator]


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is an int or a float."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[float]:
    """Whether `value` is an int or a float that is finite as a float. NaN and integers too large for a float are not."""
    try:
        return is_number(value) and math.isfinite(value)
    except OverflowError:
        return False


def integer(
    owner: str,
    name: str,
    value: object,
    least: int = 1,
    *,
    optional: bool = False,
    kinds: type | tuple[type, ...] = int,
) -> None:
    """Raise ValueError unless `value` is an integer ≥ `least`, or None if `optional`.

    Args:
      owner: name of the config class or function, used in the message.
      name: name of the argument or field, used in the message.
      kinds: as in `is_integer`.
    """
    if not is_integer(value, least, kinds=kinds) and not (optional and value is None):
        too_large = isinstance(value, int) and value > MOST
        range_ = f"≥ {least}{' and below 2^63' if too_large else ''}"
        raise ValueError(f"{owner}: {name} must be an integer {range_}{_or_none(optional)}, got {shown(value)}.")


def integers(config: object, least: Mapping[str, int], optional: Iterable[str] = ()) -> None:
    """Raise ValueError unless each field of `least` is an integer ≥ least[field]. Fields in `optional` may be None."""
    for name, low in least.items():
        integer(type(config).__name__, name, getattr(config, name), low, optional=name in optional)


def number(
    owner: str,
    name: str,
    value: object,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    optional: bool = False,
) -> None:
    """Raise ValueError unless `value` is a number within the given bounds, or None if `optional`.

    `above` and `below` are exclusive bounds, `least` and `most` inclusive ones. A number that is not finite as a float is rejected.
    """
    if optional and value is None:
        return
    low, high = above if least is None else least, below if most is None else most
    inside = is_finite(value) and (
        (above is None or value > above)
        and (least is None or value >= least)
        and (below is None or value < below)
        and (most is None or value <= most)
    )
    if inside:
        return
    if low is not None and high is not None:
        what = f" in {'(' if least is None else '['}{low}, {high}{')' if most is None else ']'}"
    elif low is not None:
        what = f" {'>' if least is None else '≥'} {low}"
    else:
        what = "" if high is None else f" {'<' if most is None else '≤'} {high}"
    raise ValueError(f"{owner}: {name} must be a number{what}{_or_none(optional)}, got {shown(value)}.")


def boolean(owner: str, name: str, value: object) -> None:
    """Raise ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{owner}: {name} must be True or False, got {shown(value)}.")


def choice(owner: str, name: str, value: object, choices: Iterable[object]) -> None:
    """Raise ValueError unless `value` is one of `choices`. The message lists all of them."""
    known = tuple(choices)
    if value not in known:
        raise ValueError(f"{owner}: {name} must be {' or '.join(map(repr, known))}, got {shown(value)}.")


def declared(config: object) -> None:
    """Raise ValueError unless the fields of a config that are annotated as bool or as a Literal, or None, have such a value."""
    owner = type(config).__name__
    kind: type = type(config)
    for name, choices in _declared(kind).items():
        if choices is None:
            boolean(owner, name, getattr(config, name))
        else:
            choice(owner, name, getattr(config, name), choices)


@functools.cache
def _declared(config: type) -> dict[str, tuple[object, ...] | None]:
    """The values of the fields that are annotated as a Literal; None for bool."""
    found: dict[str, tuple[object, ...] | None] = {}
    for name, kind in get_type_hints(config).items():
        parts = (kind,) if get_origin(kind) is Literal else get_args(kind)
        if kind is bool:
            found[name] = None
        elif any(get_origin(part) is Literal for part in parts):
            found[name] = tuple(one for part in parts for one in get_args(part) or (None,))
    return found


def literal(kind: str, value: str, choices: object) -> None:
    """Raise ValueError, with a did-you-mean, unless `value` is one of the strings of the Literal `choices`."""
    lookup(kind, value, dict.fromkeys(get_args(choices)))


def instance(owner: str, name: str, value: object, kind: type, *, optional: bool = False) -> None:
    """Raise ValueError unless `value` is an instance of the class `kind`, or None if `optional`."""
    if not isinstance(value, kind) and not (optional and value is None):
        raise ValueError(f"{owner}: {name} must be a {kind.__name__}{_or_none(optional)}, got {shown(value)}.")


def plain_array(owner: str, name: str, value: object) -> None:
    """Raise TypeError if `value` is a NumPy array that would silently be read as another one; so too in lists and dicts.

    That is a masked array, whose mask NumPy and JAX ignore when they convert it, an array of another byte order, and one of times:
    NumPy counts durations among the integers. Everything else passes, for other checks to refuse.
    """
    import numpy as np  # here, for callers without arrays

    if isinstance(value, Mapping):
        for key, part in value.items():
            plain_array(owner, f"{name}[{key!r}]", part)
    elif isinstance(value, list | tuple):
        for part in value:
            if not isinstance(part, int):  # of which a prompt has many
                plain_array(owner, name, part)
    elif isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{owner}: {name} must be an ordinary array, got a masked one, whose mask would be ignored; give it filled, or without "
            "what is masked."
        )
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "mM":
        raise TypeError(f"{owner}: {name} must be an array of numbers, got times ({value.dtype.name}).")
    elif isinstance(value, np.ndarray | np.generic) and not value.dtype.isnative:
        native = value.dtype.newbyteorder("=").name
        raise TypeError(
            f"{owner}: {name} must be an array in this machine's byte order, got {value.dtype.str}; give it as .astype({native!r})."
        )


def require(condition: bool, name: str, value: object, what: str) -> None:
    """Raise ValueError "{name} is {value}; it must be {what}." unless `condition` holds; `name` is a command-line option."""
    if not condition:
        beyond = " It has more than 64 bits." if isinstance(value, int) and abs(value) > MOST else ""
        raise ValueError(f"{name} is {shown(value)}; it must be {what}.{beyond}")


def shown(value: object) -> str:
    """A value on one line of at most some 200 characters."""
    if isinstance(value, int) and value.bit_length() > 1024:  # Python refuses to write integers that are longer still
        return f"{'a negative' if value < 0 else 'an'} integer of more than 300 digits"
    text = " ".join(repr(value).split()) if not isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def _or_none(optional: bool) -> str:
    return " or None" if optional else ""
