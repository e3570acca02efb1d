"""Reading of the files of public weights. What a clone or a cache left incomplete is told from what is damaged."""

import json
import os
import pathlib

from atlasjax.storage import AnyPath
from atlasjax.train.errors import ConfigError

_POINTER = b"version https://git-lfs"


def check_file(file: pathlib.Path) -> None:
    """Raises ConfigError if a file is a link to nothing, or a Git LFS pointer instead of its content."""
    if file.is_symlink() and not file.exists():
        raise ConfigError(f"{str(file)!r} is a link to {os.readlink(file)!r}, which is missing.")
    if file.is_file():
        with open(file, "rb") as opened:
            if opened.read(len(_POINTER)) == _POINTER:
                raise ConfigError(f"{str(file)!r} is a Git LFS pointer; run `git lfs pull`.")


def read_json(file: AnyPath) -> dict[str, object]:
    """The object of JSON that a file has.

    Raises:
      ConfigError: it is not JSON, another value, or has a key twice.
    """
    try:
        found = json.loads(file.read_bytes(), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{str(file)!r} is not JSON: {error}.") from None
    except KeyError as error:
        raise ConfigError(f"{str(file)!r} has the key {error.args[0]!r} twice; it should have it once.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{str(file)!r} is not an object of JSON.")
    return found


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise KeyError(key)
        found[key] = value
    return found
