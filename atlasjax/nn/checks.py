"""Checks that configurations share."""

from collections.abc import Iterable, Mapping


def is_number(value: object) -> bool:
    """Whether it is an int or a float; a bool is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_integers(config: object, least: Mapping[str, int], optional: Iterable[str] = ()) -> None:
    """Raise ValueError unless each field is an integer of at least so much, or None where that is allowed."""
    for name, low in least.items():
        value = getattr(config, name)
        if value is None and name in optional:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ValueError(f"{type(config).__name__}: {name} must be an integer ≥ {low}, got {value!r}.")
