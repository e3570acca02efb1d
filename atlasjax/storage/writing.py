"""Files and folders that appear whole or not at all, and what is left of writers that were killed.

What is being written lies beside its place, under a name that nobody can foresee, and its writer holds a lock on it. The lock ends
with its process, however that ends, so whoever writes there next can tell what is left over from what a living process writes; no
clock is asked. On a file system without locks nothing is removed.
"""

import contextlib
import fcntl
import functools
import os
import pathlib
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO

from atlasjax.storage.paths import AnyPath, StorePath

_PARTIAL = re.compile(r"\..+\.[0-9a-f]{16}\.partial", re.DOTALL)
_WRITER = ".writer"  # in a folder: what its writer has locked
_REST = 20  # a writer looks for leftovers at most one twentieth of the time, however many files a folder has
_next_sweeps: dict[pathlib.Path, float] = {}


def write_whole(path: AnyPath, content: bytes, *, mode: int = 0o666) -> None:
    """Writes a file atomically: it appears complete or not at all.

    Args:
      path: the file, replaced if it is there. A link is replaced, not followed.
      content: what is in it.
      mode: permissions on a disk, before the process's umask.

    Raises:
      FileNotFoundError: its folder is not there.
      OSError: the file cannot be written.
    """
    if isinstance(path, StorePath):
        path.write_bytes(content)
        return
    with replacing(path, mode=mode) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: pathlib.Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` at the end of the context; after an error it is removed. As `write_whole`."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{str(path)!r} cannot be written: there is no folder {str(path.parent)!r}.")
    _sweep_now_and_then(path.parent)
    descriptor = None
    while descriptor is None:
        partial = _beside(path)
        descriptor = _locked(partial, mode)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            yield file
        partial.replace(path)
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk names no file
    finally:
        partial.unlink(missing_ok=True)
        os.close(descriptor)


@contextlib.contextmanager
def new_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder that is renamed to `path`, which is not there yet, at the end of the context; after an error it is removed.

    Raises:
      OSError: it cannot be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _folder_beside(path, 0o777) as partial:
        yield partial
        partial.rename(path)
        (path / _WRITER).unlink()  # not before: without it the folder looks left over


@contextlib.contextmanager
def temporary_folder(name: str) -> Iterator[pathlib.Path]:
    """A folder for temporary files of this machine, removed at the end of the context; a killed process leaves it to the next one.

    Args:
      name: what it is for.
    """
    with _folder_beside(pathlib.Path(tempfile.gettempdir()) / f"atlasjax-{name}", 0o700) as folder:
        (folder / "files").mkdir()
        yield folder / "files"


def sweep(folder: pathlib.Path, *, folders: bool = False) -> int:
    """Removes what killed writers left in a folder, as far as that may be read. Returns the bytes of files that are being written.

    Args:
      folder: where they wrote.
      folders: whether to remove folders too.
    """
    num_bytes = 0
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        for entry in [entry for entry in found if _PARTIAL.fullmatch(entry.name)]:
            path = pathlib.Path(entry.path)
            with contextlib.suppress(OSError):
                if entry.is_file(follow_symlinks=False):
                    if not _removed(path, path.unlink):
                        num_bytes += entry.stat(follow_symlinks=False).st_size
                elif folders and entry.is_dir(follow_symlinks=False):
                    _removed(path / _WRITER, functools.partial(shutil.rmtree, path, ignore_errors=True))
    return num_bytes


def _sweep_now_and_then(folder: pathlib.Path) -> None:
    begun = time.monotonic()
    if begun >= _next_sweeps.get(folder, 0.0):
        sweep(folder)
        now = time.monotonic()
        _next_sweeps[folder] = now + _REST * (now - begun)


def _removed(path: pathlib.Path, remove: Callable[[], None]) -> bool:
    """Removes what nobody has locked, and says so: a file that is left over, or not there. Without locks nothing is left over.

    The lock is held until it is removed. A writer that has just made the file could lock it in between, see that it is there
    (`_locked`), and then lose it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a FIFO would wait for a writer
    except FileNotFoundError:
        remove()
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # NFS wants a file open for writing for more
        remove()
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _beside(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")


def _locked(path: pathlib.Path, mode: int) -> int | None:
    """The descriptor of a new file that this process has locked. None: another one took it for left over before that."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except FileNotFoundError:  # with its folder
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # no locks here, so nobody removes it
        return descriptor
    if os.fstat(descriptor).st_nlink:
        return descriptor
    os.close(descriptor)
    return None


@contextlib.contextmanager
def _folder_beside(path: pathlib.Path, mode: int) -> Iterator[pathlib.Path]:
    sweep(path.parent, folders=True)
    descriptor = None
    while descriptor is None:
        partial = _beside(path)
        partial.mkdir(mode)
        descriptor = _locked(partial / _WRITER, 0o600)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(descriptor)
