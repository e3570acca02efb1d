"""Conversion of config dataclasses to JSON values and back."""

import dataclasses
import sys
import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeVar

from atlasjax.names import lookup

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")


def to_dict(config: "DataclassInstance") -> dict[str, object]:
    """A config dataclass, including nested ones, as a dictionary of JSON values. Tuples become lists."""
    return {field.name: _to_json(getattr(config, field.name)) for field in dataclasses.fields(config)}


def _to_json(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    return [_to_json(item) for item in value] if isinstance(value, tuple | list) else value


def from_dict(cls: type[C], values: Mapping[str, object]) -> C:
    """The inverse of `to_dict`.

    Args:
      cls: the dataclass to build.
      values: field name → JSON value. Missing fields keep their defaults.

    Raises:
      ValueError: an unknown field (the message suggests the closest one), a missing field without a default, a value of the wrong
        type, or a value that the dataclass rejects.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{cls.__name__}: expected a dictionary of fields, got {values!r}.")
    hints = typing.get_type_hints(cls)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    arguments: dict[str, object] = {}
    for name, value in values.items():
        kind = lookup(f"field of {cls.__name__}", name, fields)
        arguments[name] = _from_json(f"{cls.__name__}.{name}", kind, value)
    needed = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING]
    missing = [name for name in needed if name not in arguments]
    if missing:
        raise ValueError(f"{cls.__name__}: {', '.join(missing)} must be given.")
    return cls(**arguments)


def _from_json(where: str, kind: object, value: object) -> object:
    """Convert `value` to a field of type `kind`: nested dataclasses, scalars, tuple[X, ...], X | Y, and Literal."""
    options = typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)
    if type(None) in options and value is None:
        return None
    for option in options:
        if dataclasses.is_dataclass(option):
            return from_dict(option, value)  # type: ignore[arg-type]
        if typing.get_origin(option) is Literal:
            choices = typing.get_args(option)
            if value in choices:
                return value
            raise ValueError(f"{where}: must be one of {', '.join(map(repr, choices))}, got {value!r}.")
        if typing.get_origin(option) is tuple and isinstance(value, list | tuple):
            return tuple(_from_json(f"{where}[{i}]", typing.get_args(option)[0], x) for i, x in enumerate(value))
        if type(value) is option:
            return value
        if option is float and type(value) is int and abs(value) <= sys.float_info.max:
            return float(value)
    raise ValueError(f"{where}: must be {' or '.join(map(_name, options))}, got {value!r:.200}.")


def _name(kind: type) -> str:
    if typing.get_origin(kind) is tuple:
        return f"a list of {_name(typing.get_args(kind)[0])}"
    return "None" if kind is type(None) else kind.__name__
