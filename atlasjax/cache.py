"""The folder of what this machine keeps between processes: matrices that take long to make, and choices that were measured."""

import os
import pathlib


def folder() -> pathlib.Path:
    """$ATLASJAX_CACHE if set, else the folder atlasjax in $XDG_CACHE_HOME or ~/.cache."""
    chosen = os.environ.get("ATLASJAX_CACHE")
    if chosen:
        return pathlib.Path(chosen)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "atlasjax"
