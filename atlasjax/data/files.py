"""Finds the files that a configuration names, on disk or in a store."""

import functools
import glob
import logging
import os
import pathlib
from collections.abc import Sequence

from atlasjax import storage

COMPRESSIONS = (".gz", ".zst")
_log = logging.getLogger(__name__)


@functools.cache
def say_once(line: str) -> None:
    """Log a warning, once in a process. Without a handler of your own, it is printed to stderr."""
    _log.warning("atlasjax: %s", line)


def expand(paths: Sequence[str], suffixes: Sequence[str]) -> tuple[list[storage.AnyPath], set[storage.AnyPath]]:
    """List the files behind `paths`.

    Args:
      paths: files, folders (searched recursively, skipping hidden files and folders) or glob patterns. May be URLs.
      suffixes: suffixes of the files to take from folders, e.g. (".txt", ".md"), case-insensitive. Compressed files (.txt.gz,
        .txt.zst) are included.

    Returns:
      The files without duplicates, in the order of `paths` and sorted within each folder or pattern; and the set of files that
      were found in a folder or by a pattern, not named.

    Raises:
      FileNotFoundError: a path does not exist, a pattern matches nothing, or a folder has no such file.
      ValueError: a path is a device or a pipe, or a URL of an unknown kind.
    """
    files: dict[storage.AnyPath, None] = {}
    found: set[storage.AnyPath] = set()
    inside: Sequence[storage.AnyPath]
    wanted = tuple(suffix.lower() for suffix in suffixes)
    for name in paths:
        path = storage.path(name).expanduser()
        if path.is_dir():
            inside = [file for file in _visible_below(path) if _suffix(file) in wanted]
            if not inside:
                kinds = ", ".join(f"*{suffix}" for suffix in suffixes)
                raise FileNotFoundError(
                    f"The data folder {str(path)!r} contains no {kinds} file, not even in subfolders."
                )
        elif path.exists():
            if not path.is_file():  # a device such as /dev/zero may be endless; a pipe can be read only once
                raise ValueError(f"The data path {name!r} is neither a file nor a folder.")
            files[path] = None
            continue
        elif glob.has_magic(name):
            inside = _matches(path)
            if not inside:
                raise FileNotFoundError(f"No file matches the data pattern {name!r}.")
        else:
            raise FileNotFoundError(f"The data path {name!r} does not exist.")
        found.update(file for file in inside if file not in files)
        files.update(dict.fromkeys(inside))
    return list(files), found


def _visible_below(folder: storage.AnyPath) -> Sequence[storage.AnyPath]:
    """All files below a folder, sorted, except hidden files and files in hidden folders."""
    if isinstance(folder, storage.StorePath):
        return [file for file in folder.files() if "/." not in str(file).removeprefix(str(folder))]
    return sorted(
        file
        for file in folder.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )


def _matches(pattern: storage.AnyPath) -> Sequence[storage.AnyPath]:
    """The files that match a pattern, sorted."""
    if isinstance(pattern, storage.StorePath):
        return pattern.matches()
    return sorted(file for match in glob.glob(str(pattern), recursive=True) if (file := pathlib.Path(match)).is_file())


def _suffix(file: storage.AnyPath) -> str:
    """The suffix in lower case, ignoring a compression suffix."""
    suffix = file.suffix.lower()
    return pathlib.PurePath(file.name.removesuffix(file.suffix)).suffix.lower() if suffix in COMPRESSIONS else suffix


def machine_memory() -> int:
    """Memory in bytes of the machine, or of the container that this process runs in."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in map(pathlib.Path, ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        text = path.read_text().strip() if path.exists() else ""
        if text.isdecimal():
            limits.append(int(text))
    return min(limits)


def usable_cores() -> int:
    """The number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS
