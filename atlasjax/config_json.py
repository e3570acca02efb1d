"""Conversion of config dataclasses to JSON values and back."""

import dataclasses
import sys
import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeVar

from atlasjax import trusted
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


def from_dict(cls: type[C], values: Mapping[str, object], file: str | None = "a config") -> C:
    """The inverse of `to_dict`.

    Args:
      cls: the dataclass to build.
      values: field name → JSON value. Missing fields keep their defaults.
      file: what the values are from, for the line that says what is imported. None: from another process of this program, whose
        names of objects are resolved; names in a file only if they are trusted (`atlasjax.trusted`).

    Raises:
      ValueError: an unknown field (the message suggests the closest one), a missing field without a default, a value of the wrong
        type, a value that the dataclass rejects, or the name of an object that a file may not give.
    """
    if file is None:
        return _from_dict(cls, values)
    with trusted.reading(file, values):
        return _from_dict(cls, values)


def completed(values: object, config: "DataclassInstance") -> object:
    """The fields of a config in a file, with the defaults of fields that did not exist yet when it was written. Builds no config.

    Args:
      values: from `to_dict`, read from a file; anything else is returned as it is.
      config: a config of the kind that it should be, whose class has the defaults.
    """
    if not isinstance(values, dict):
        return values
    defaults: dict[str, object] = {}
    for field in dataclasses.fields(config):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = _to_json(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = _to_json(field.default_factory())
    inner = {name: getattr(config, name, None) for name in values}
    own = {name: completed(values[name], one) for name, one in inner.items() if dataclasses.is_dataclass(one)}  # type: ignore[arg-type]
    return defaults | values | own


def _from_dict(cls: type[C], values: Mapping[str, object]) -> C:
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
            return _from_dict(option, value)  # type: ignore[arg-type, type-var]
        if typing.get_origin(option) is Literal:
            choices = typing.get_args(option)
            if value in choices:
                return value
            raise ValueError(f"{where}: must be one of {', '.join(map(repr, choices))}, got {value!r}.")
        if typing.get_origin(option) is tuple and isinstance(value, list | tuple):
            return tuple(_from_json(f"{where}[{i}]", typing.get_args(option)[0], x) for i, x in enumerate(value))
        if type(value) is option:
            return value
        # JSON has one kind of number: 1.0 may have been written as 1.
        if option is float and type(value) is int and abs(value) <= sys.float_info.max:
            return float(value)
    raise ValueError(f"{where}: must be {' or '.join(map(_name, options))}, got {value!r:.200}.")


def _name(kind: type) -> str:
    if typing.get_origin(kind) is tuple:
        return f"a list of {_name(typing.get_args(kind)[0])}"
    return "None" if kind is type(None) else kind.__name__
