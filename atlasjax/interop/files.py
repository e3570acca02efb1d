"""Reading of the files of public weights. An incomplete clone or cache is told from a damaged file."""

import os
import pathlib

from atlasjax.storage import AnyPath
from atlasjax.storage import read_json as read_any
from atlasjax.train.errors import ConfigError

_POINTER = b"version https://git-lfs"
_MOST_BYTES = 2**26  # of a JSON file; the index of the largest public weights has some ten MB


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
      ConfigError: it is not JSON, another value, has a key twice, or is too large to be a description of weights.
    """
    size = file.stat().st_size
    if size > _MOST_BYTES:
        raise ConfigError(
            f"{str(file)!r} has {size:,} bytes; a file of JSON beside weights should have at most {_MOST_BYTES:,}."
        )
    try:
        found = read_any(file, once=True)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(found, dict):
        raise ConfigError(f"{str(file)!r} is not an object of JSON.")
    return found
