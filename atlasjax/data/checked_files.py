"""Files that are compared with their checksums before anything of them is used."""

import contextlib
import functools
import os
import pathlib
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence

_OPEN_FILES = 256  # per process
_BLOCK = 2**20  # bytes read at once
_THREADS = 4
_Key = tuple[str, int, int]
Content = Callable[[bytes, int, int], str | None]
"""Says what is wrong with a file, from a block, its place, and the number of bytes of the file. None: nothing."""

_sound: set[_Key] = set()  # files that were checked by this process
_locks: dict[_Key, threading.Lock] = {}
_guard = threading.Lock()


class CheckedFile:
    """A file of a fixed size with random access, which is read once as a whole before its first use in this process.

    Args:
      path: the file.
      size: its number of bytes.
      crc32: its checksum. None: it has none.
      content: says what is wrong with its content. None: nothing can be.

    Raises:
      FileNotFoundError: it is missing.
      ValueError: it has the wrong size; while reading: it has another checksum, or its content is wrong.
    """

    def __init__(self, path: pathlib.Path, size: int, crc32: int | None, content: Content | None = None):
        try:
            found = path.stat()
        except FileNotFoundError:
            raise FileNotFoundError(f"The prepared file {str(path)!r} is missing.") from None
        if found.st_size != size:
            raise self._damaged(path, f"it has {found.st_size:,} bytes and should have {size:,}")
        self._key: _Key = (str(path), size, found.st_mtime_ns)
        self._crc32, self._content = crc32, content

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on, after all of the file was checked."""
        if self._key not in _sound:
            self.check()
        return self._read(offset, size)

    def check(self) -> None:
        """Read the file, unless this process did. A second thread waits for the first."""
        with _guard:
            lock = _locks.setdefault(self._key, threading.Lock())
        with lock:
            if self._key in _sound:
                return
            path, size, _ = self._key
            crc32 = 0
            for at in range(0, size, _BLOCK):
                block = self._read(at, min(_BLOCK, size - at))
                crc32 = zlib.crc32(block, crc32)
                wrong = self._content(block, at, size) if self._content is not None else None
                if wrong is not None:
                    raise self._damaged(path, wrong)
            if self._crc32 is not None and crc32 != self._crc32:
                raise self._damaged(path, "its checksum is not that of the manifest")
            _sound.add(self._key)

    def _read(self, offset: int, size: int) -> bytes:
        file = _opened(*self._key)
        content = os.pread(file.descriptor, size, offset)
        while len(content) < size:  # one read returns at most 2 GiB
            more = os.pread(file.descriptor, size - len(content), offset + len(content))
            if not more:
                raise self._damaged(self._key[0], "it was truncated while being read")
            content += more
        return content

    def _damaged(self, path: str | pathlib.Path, why: str) -> ValueError:
        return ValueError(
            f"The prepared file {str(path)!r} is damaged: {why}. Put it back from a copy, or prepare the data again in a new "
            "folder; what was copied from a bucket is copied again if you delete it."
        )


def check_all(files: Sequence[CheckedFile]) -> None:
    """Begin to check files, in threads that do not outlive the process. Who reads a damaged file gets its error."""
    waiting = iter(files)
    taking = threading.Lock()

    def work() -> None:
        while True:
            with taking:
                file = next(waiting, None)
            if file is None:
                return
            with contextlib.suppress(ValueError, OSError):
                file.check()

    for _ in range(min(_THREADS, len(files) - 1)):
        threading.Thread(target=work, daemon=True, name="check").start()


def close_files() -> None:
    """Close all open files of this process that nobody reads. They are opened again when needed."""
    _opened.cache_clear()


@functools.lru_cache(maxsize=_OPEN_FILES)
def _opened(path: str, size: int, modified: int) -> "_Opened":
    del size, modified  # cache keys: a replaced file is opened again
    return _Opened(path)


class _Opened:
    """An open file, closed when no longer used; at the exit of the interpreter, where threads may still read, by the system."""

    def __init__(self, path: str):
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor).atexit = False
