"""Finds the files that a configuration names, and writes files atomically."""

import glob
import os
import pathlib
import secrets
from collections.abc import Sequence

COMPRESSIONS = (".gz", ".zst")


def expand(paths: Sequence[str], suffixes: Sequence[str]) -> tuple[list[pathlib.Path], set[pathlib.Path]]:
    """List the files behind `paths`.

    Args:
      paths: files, folders (searched recursively, without hidden files and folders), or glob patterns.
      suffixes: which files of a folder to take, e.g. (".txt", ".md"), in upper or lower case. Compressed ones are taken too
        (.txt.gz, .txt.zst).

    Returns:
      The files, each once, in the order of `paths` and sorted within each folder or pattern; and the set of those that were found
      in a folder or by a pattern instead of being named.

    Raises:
      FileNotFoundError: a path does not exist, a pattern matches nothing, or a folder has no such file.
      ValueError: a path is a device or a pipe.
    """
    files: dict[pathlib.Path, None] = {}
    found: set[pathlib.Path] = set()
    wanted = tuple(suffix.lower() for suffix in suffixes)
    for name in paths:
        path = pathlib.Path(name).expanduser()
        if path.is_dir():
            inside = sorted(
                file
                for file in path.rglob("*")
                if file.is_file()
                and _suffix(file) in wanted
                and not any(part.startswith(".") for part in file.relative_to(path).parts)
            )
            if not inside:
                kinds = ", ".join(f"*{suffix}" for suffix in suffixes)
                raise FileNotFoundError(
                    f"The data folder {str(path)!r} has no file of the kind {kinds} in it or below it."
                )
        elif path.exists():
            if not path.is_file():  # a device such as /dev/zero may have no end, and a pipe can be read once
                raise ValueError(f"The data path {name!r} is neither a file nor a folder.")
            files[path] = None
            continue
        elif glob.has_magic(name):
            inside = sorted(
                file for match in glob.glob(str(path), recursive=True) if (file := pathlib.Path(match)).is_file()
            )
            if not inside:
                raise FileNotFoundError(f"No file matches the data pattern {name!r}.")
        else:
            raise FileNotFoundError(f"The data path {name!r} does not exist.")
        found.update(file for file in inside if file not in files)
        files.update(dict.fromkeys(inside))
    return list(files), found


def _suffix(file: pathlib.Path) -> str:
    """The suffix in lower case, without that of a compression."""
    suffix = file.suffix.lower()
    return pathlib.Path(file.stem).suffix.lower() if suffix in COMPRESSIONS else suffix


def machine_memory() -> int:
    """Bytes of memory of the machine, or of the container that this process runs in."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in map(pathlib.Path, ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        text = path.read_text().strip() if path.exists() else ""
        if text.isdecimal():
            limits.append(int(text))
    return min(limits)


def write_whole(path: pathlib.Path, content: bytes) -> None:
    """Write a file atomically: it appears complete or not at all.

    The temporary file beside it has an unpredictable name and must not exist before, so nothing is written through a link.

    Raises:
      OSError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
