"""`--config`: options of `atlasjax train` from a file."""

import tomllib
from collections.abc import Mapping
from typing import Any

from atlasjax import json_text, storage
from atlasjax.config_json import from_dict, to_dict
from atlasjax.train.config import TrainConfig
from atlasjax.train.errors import ConfigError, user_errors


def read_config(name: str) -> dict[str, Any]:
    """The values of a file of TOML or JSON, or of the config.json in a run's folder, with underscores in names.

    Raises:
      ConfigError: it cannot be read, or its content is not a table.
    """
    with user_errors():
        path = storage.path(name)
        if path.is_dir():
            path = path / "config.json"
        if not path.is_file():
            raise ConfigError(f"config is {name!r}, which is neither a file nor the folder of a run.")
        content, what = path.read_bytes(), f"The config file {str(path)!r}"
        if path.suffix.lower() == ".toml":
            values = _toml(content, what)
        elif path.suffix.lower() == ".json":
            values = json_text.parse(content, what, once=True)
        else:
            raise ConfigError(f"config is {name!r}; it must be a file .toml or .json, or the folder of a run.")
    if not isinstance(values, dict):
        raise ConfigError(
            f"{what} should have fields, like those of a run's config.json; it is a {type(values).__name__}."
        )
    return _underscored(values)


def _toml(content: bytes, what: str) -> dict[str, Any]:
    try:
        values = tomllib.loads(content.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{what} is not TOML: {error}.") from None
    if json_text.is_deep(values):
        raise ConfigError(f"{what} is nested too deep.")
    return values


def _underscored(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name.replace("-", "_"): _underscored(value) if isinstance(value, dict) else value
        for name, value in values.items()
    }


def configured(name: str, values: Mapping[str, Any], default: TrainConfig) -> TrainConfig:
    """A config with the values of a file in place of the defaults.

    Names of own parts in it are held to what a file may name (`atlasjax.trusted`). Compiled programs are code, which only a command
    line may ask for.

    Raises:
      ConfigError: a field is unknown, or its value is not sound.
    """
    with user_errors():
        try:
            merged = _merged(to_dict(default), values) | {"compilation_cache": default.compilation_cache}
            return from_dict(TrainConfig, merged, f"the config file {name}")
        except ValueError as error:
            raise ConfigError(f"the config file {name}: {error}") from None


def _merged(default: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    inner = {
        name: _merged(default[name], value)
        for name, value in values.items()
        if isinstance(value, Mapping) and isinstance(default.get(name), Mapping)
    }
    return {**default, **values, **inner}
