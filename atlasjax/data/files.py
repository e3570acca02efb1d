"""Finds the files that a configuration names, on disk or in a store."""

import functools
import glob
import logging
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from atlasjax import storage

COMPRESSIONS = (".gz", ".zst")
_NAMED = 3  # of each kind of what is left out
_log = logging.getLogger(__name__)


@functools.cache
def say_once(line: str) -> None:
    """Log a warning, once in a process. Without a handler of your own, it is printed to stderr."""
    _log.warning("atlasjax: %s", line)


class LeftOut:
    """Files and folders that lie in folders or match patterns, but are not read."""

    def __init__(self) -> None:
        self._kinds: dict[str, list[str]] = {}

    def add(self, kind: str, path: storage.AnyPath | str) -> None:
        """Count a file or folder as one of a kind, such as "empty"."""
        self._kinds.setdefault(kind, []).append(str(path))

    def __str__(self) -> str:
        """The number and the first names of each kind; "" if nothing was left out."""
        parts = []
        for kind, names in sorted(self._kinds.items()):
            more = ", …" if len(names) > _NAMED else ""
            parts.append(f"{kind}: {len(names):,} ({', '.join(map(repr, sorted(names)[:_NAMED]))}{more})")
        return "; ".join(parts)

    def say(self, paths: Sequence[str]) -> None:
        """Say it once, in one line."""
        if self._kinds:
            say_once(f"left out of {', '.join(map(repr, paths[:_NAMED]))}{', …' * (len(paths) > _NAMED)}: {self}.")


class Files(NamedTuple):
    """The files behind paths.

    Attributes:
      files: without duplicates, in the order of the paths, and sorted within each folder or pattern.
      found: those that were found in a folder or by a pattern, not named.
      left_out: what else is there.
    """

    files: list[storage.AnyPath]
    found: set[storage.AnyPath]
    left_out: LeftOut


def expand(paths: Sequence[str], suffixes: Sequence[str]) -> Files:
    """List the files behind `paths`.

    Args:
      paths: files, folders (searched recursively, without hidden files and folders, and without links to folders) or glob
        patterns. May be URLs.
      suffixes: suffixes of the files to take from folders, e.g. (".txt", ".md"), case-insensitive. Compressed files (.txt.gz,
        .txt.zst) are included.

    Raises:
      FileNotFoundError: a path does not exist, a pattern matches nothing, or a folder has no such file.
      ValueError: a path is a device or a pipe, or a URL of an unknown kind.
    """
    files: dict[storage.AnyPath, None] = {}
    found: set[storage.AnyPath] = set()
    left_out = LeftOut()
    inside: Sequence[storage.AnyPath]
    wanted = tuple(suffix.lower() for suffix in suffixes)
    for name in paths:
        path = storage.fetched(name)
        if path.is_dir():
            inside = []
            for file in _visible_below(path, left_out):
                if _suffix(file) in wanted:
                    inside.append(file)
                else:
                    left_out.add("other kinds", file)
            if not inside:
                kinds = ", ".join(f"*{suffix}" for suffix in suffixes)
                others = f" Left out: {left_out}." if str(left_out) else ""
                raise FileNotFoundError(
                    f"The data folder {str(path)!r} contains no {kinds} file, not even in subfolders.{others}"
                )
        elif path.exists():
            if not path.is_file():  # a device such as /dev/zero may be endless; a pipe can be read only once
                raise ValueError(f"The data path {name!r} is neither a file nor a folder.")
            files[path] = None
            continue
        elif glob.has_magic(name):
            inside = _matches(path, left_out)
            if not inside:
                raise FileNotFoundError(f"No file matches the data pattern {name!r}.")
        else:
            raise FileNotFoundError(f"The data path {name!r} does not exist.")
        found.update(file for file in inside if file not in files)
        files.update(dict.fromkeys(inside))
    return Files(list(files), found, left_out)


def check_there(paths: Sequence[str]) -> None:
    """Raises FileNotFoundError for a path on this machine that is no pattern and does not exist. Reads nothing else."""
    for name in paths:
        path = storage.expanded(name)
        if not (isinstance(path, storage.StorePath) or glob.has_magic(name) or path.exists()):
            raise FileNotFoundError(f"The data path {name!r} does not exist.")


def _visible_below(folder: storage.AnyPath, left_out: LeftOut) -> Sequence[storage.AnyPath]:
    """All files below a folder, sorted, except hidden files and files in hidden folders."""
    if isinstance(folder, storage.StorePath):
        files = []
        for file in folder.files():
            if "/." in str(file).removeprefix(str(folder)):
                left_out.add("hidden", file)
            else:
                files.append(file)
        return files
    found: list[pathlib.Path] = []
    closed = lambda error: left_out.add("folders that cannot be read", error.filename)
    for root, folders, names in os.walk(folder, onerror=closed):
        for name in [*folders, *names]:
            path = pathlib.Path(root, name)
            kind = "hidden" if name.startswith(".") else _why_not(path)
            if kind is not None:
                left_out.add(kind, path)
        found += (path for name in names if not name.startswith(".") and (path := pathlib.Path(root, name)).is_file())
        folders[:] = [name for name in folders if not name.startswith(".")]
    return sorted(found)


def _why_not(path: pathlib.Path, *, folders: bool = True) -> str | None:
    """The kind of a path that is not read; None for a file, and for a folder if folders are searched."""
    if path.is_file():
        return None
    if path.is_dir():
        return "folders" if not folders else "links to folders" if path.is_symlink() else None
    return "links to nothing" if path.is_symlink() else "neither a file nor a folder"


def _matches(pattern: storage.AnyPath, left_out: LeftOut) -> Sequence[storage.AnyPath]:
    """The files that match a pattern, sorted."""
    if isinstance(pattern, storage.StorePath):
        return pattern.matches()
    found = []
    deep = "**" in str(pattern)  # which matches every folder on the way
    for match in glob.glob(str(pattern), recursive=True):
        path = pathlib.Path(match)
        if path.is_file():
            found.append(path)
        elif not (deep and path.is_dir()):
            left_out.add(_why_not(path, folders=False) or "folders", path)
    return sorted(found)


def _suffix(file: storage.AnyPath) -> str:
    """The suffix in lower case, ignoring a compression suffix."""
    suffix = file.suffix.lower()
    return pathlib.PurePath(file.name.removesuffix(file.suffix)).suffix.lower() if suffix in COMPRESSIONS else suffix


def usable_cores() -> int:
    """The number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS
