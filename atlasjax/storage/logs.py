"""Logs of lines: a file that only grows, or in a store a folder of numbered parts, since a bucket has no append."""

import contextlib
import os
import pathlib
import time
from collections.abc import Iterator
from typing import BinaryIO, Protocol

from atlasjax.storage.paths import AnyPath, StoreError, StorePath

_SECONDS = 60.0  # between two parts, unless one is asked for


class Log(Protocol):
    """A log that is being written.

    Attributes:
      empty: whether there was nothing in it when it was opened.
    """

    empty: bool

    def append(self, line: bytes) -> None:
        """Adds a line, without its end. On a disk it is in the file when this returns; in a store at the next `commit`."""
        ...

    def commit(self) -> None:
        """Makes what was appended visible to others. Raises OSError if it cannot be written."""
        ...

    def close(self) -> None:
        """Commits and ends."""
        ...


@contextlib.contextmanager
def naming(path: pathlib.Path) -> Iterator[None]:
    """Adds the path to errors of writing to an open file, as on a full disk: they name no file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


class FileLog:
    """A file that only grows. After a line that a killed process left incomplete a new one begins."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._file: BinaryIO = path.open("a+b")
        size = self._file.seek(0, os.SEEK_END)
        self.empty = not size
        if size:
            self._file.seek(size - 1)
            if self._file.read(1) != b"\n":
                self._write(b"\n")

    def append(self, line: bytes) -> None:
        self._write(line + b"\n")

    def commit(self) -> None: ...

    def close(self) -> None:
        with naming(self._path):  # what could not be written is tried again
            self._file.close()

    def _write(self, content: bytes) -> None:
        with naming(self._path):
            self._file.write(content)
            self._file.flush()


class PartsLog:
    """A folder of parts, 00000000, 00000001, …, each written once and whole. There is one writer at a time.

    Lines become a part at `commit`, or when a line is appended a minute after the part before. If that fails, they are part of the
    next one.
    """

    def __init__(self, folder: StorePath):
        self._folder = folder
        parts = [int(file.name) for file in folder.files() if file.name.isdecimal()]
        self.empty = not parts
        self._next = max(parts, default=-1) + 1
        self._lines: list[bytes] = []
        self._last = time.monotonic()

    def append(self, line: bytes) -> None:
        self._lines.append(line + b"\n")
        if time.monotonic() - self._last >= _SECONDS:
            try:
                self.commit()
            except StoreError:  # the lines are kept; the next try is a minute later
                self._last = time.monotonic()

    def commit(self) -> None:
        if self._lines:
            (self._folder / f"{self._next:08d}").write_bytes(b"".join(self._lines))
            self._next += 1
            self._lines = []
        self._last = time.monotonic()

    def close(self) -> None:
        self.commit()


def open_log(path: AnyPath) -> Log:
    """Opens a log to append to it. Raises OSError if it cannot be opened."""
    return PartsLog(path) if isinstance(path, StorePath) else FileLog(path)


def read_log(path: AnyPath) -> bytes:
    """The lines of a log so far, also of one that was copied from a store to a disk; empty if there is none."""
    if path.is_file():
        return path.read_bytes()
    parts = path.files() if isinstance(path, StorePath) else sorted(path.glob("*"))
    return b"".join(part.read_bytes() for part in parts if part.name.isdecimal())
