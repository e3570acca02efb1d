"""The folder of what this machine keeps between processes: matrices that take long to make, and choices that were measured."""

import os
import pathlib


def folder() -> pathlib.Path:
    """$ATLASJAX_CACHE if set, else the folder atlasjax in $XDG_CACHE_HOME or ~/.cache.

    Raises:
      FileNotFoundError: neither is set, and this user has no home folder.
    """
    chosen = os.environ.get("ATLASJAX_CACHE")
    if chosen:
        return pathlib.Path(chosen)
    try:
        return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "atlasjax"
    except RuntimeError:
        raise FileNotFoundError("This user has no home folder for a cache; set ATLASJAX_CACHE to a folder.") from None
