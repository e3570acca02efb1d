"""Memories under names: what conversations have read, in a folder, until nobody has used them for some time."""

import contextlib
import dataclasses
import os
import pathlib
import re
import threading
import time
from collections.abc import Callable, Iterator

from atlasjax import check
from atlasjax.generate import Context, ContextFiles

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_END = ".memory"


class InUseError(RuntimeError):
    """Another request uses the memory of this name."""


@dataclasses.dataclass(frozen=True)
class MemoryLimits:
    """How long memories are kept, and how many.

    Attributes:
      hours: one that was not used for so long is removed.
      count: of more than so many, those that were not used for the longest time are removed.
      gigabytes: likewise of more than so many 10^9 bytes.

    Raises:
      ValueError: a number is out of range.
    """

    hours: float = 24.0 * 7
    count: int = 1000
    gigabytes: float = 10.0

    def __post_init__(self) -> None:
        check.number("memories", "hours", self.hours, above=0)
        check.integer("memories", "count", self.count)
        check.number("memories", "gigabytes", self.gigabytes, above=0)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A memory in the folder: its name, its size in bytes, and when it was last used, in seconds since 1970."""

    name: str
    num_bytes: int
    used: float


class Memories:
    """A folder of memories. The files are all that there is of them, so they outlive the process.

    Several threads may use it, but no other process.

    Args:
      files: reads and writes contexts of the model.
      folder: it is created if it does not exist.
      limits: what is kept.
      clock: seconds since 1970.
    """

    def __init__(
        self, files: ContextFiles, folder: str | os.PathLike[str], limits: MemoryLimits = MemoryLimits(),
        clock: Callable[[], float] = time.time,
    ):  # fmt: skip
        self._files, self._folder, self._limits, self._clock = files, pathlib.Path(folder), limits, clock
        self._folder.mkdir(parents=True, exist_ok=True)
        self._used: set[str] = set()
        self._lock = threading.RLock()
        self.sweep()

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Keeps other requests from a name.

        Raises:
          ValueError: it is not a name.
          InUseError: another request uses it.
        """
        self._file(name)
        with self._lock:
            if name in self._used:
                raise InUseError(f"memory {name!r} is in use by another request; send this one when that has ended.")
            self._used.add(name)
        try:
            yield
        finally:
            with self._lock:
                self._used.discard(name)

    def load(self, name: str) -> Context | None:
        """What was saved under a name, or None. This counts as a use.

        Raises:
          ValueError: it is not a name, or the file is damaged or of another model; the message says which.
        """
        file = self._file(name)
        with self._lock:
            self.sweep()
            if not file.exists():
                return None
            self._touch(file)
        try:
            return self._files.load(file)
        except FileNotFoundError:  # removed in between, which a name in use never is
            return None
        except ValueError as error:  # for clients, who know the name and not the place
            raise ValueError(str(error).replace(repr(str(file)), f"memory {name!r}")) from None

    def save(self, name: str, context: Context) -> None:
        """Saves a context in the place of what had the name. Others are removed if they are too many now.

        Raises:
          ValueError: it is not a name.
          OSError: the file cannot be written; what was there is still there.
        """
        file = self._file(name)
        self._files.save(context, file)
        with self._lock:
            self._touch(file)
            self.sweep(name)

    def delete(self, name: str) -> bool:
        """Removes a memory. Returns whether there was one.

        Raises:
          ValueError: it is not a name.
          InUseError: a request uses it.
        """
        with self.use(name), self._lock:
            found = self._file(name).exists()
            self._file(name).unlink(missing_ok=True)
            return found

    def entries(self) -> list[Entry]:
        """All memories, the last used first."""
        with self._lock:
            self.sweep()
            return self._entries()

    def sweep(self, saved: str | None = None) -> None:
        """Removes what is too old or too much, but nothing that is in use, nor `saved`."""
        with self._lock:
            oldest = self._clock() - self._limits.hours * 3600
            num_bytes = count = 0
            for entry in self._entries():
                over = count >= self._limits.count or num_bytes + entry.num_bytes > self._limits.gigabytes * 1e9
                if (over or entry.used < oldest) and entry.name not in self._used | {saved}:
                    self._file(entry.name).unlink(missing_ok=True)
                else:
                    count, num_bytes = count + 1, num_bytes + entry.num_bytes

    def _entries(self) -> list[Entry]:
        found = []
        for file in self._folder.glob(f"*{_END}"):
            if _NAME.fullmatch(file.name.removesuffix(_END)):
                about = file.stat()
                found.append(Entry(file.name.removesuffix(_END), about.st_size, about.st_mtime))
        return sorted(found, key=lambda entry: -entry.used)

    def _touch(self, file: pathlib.Path) -> None:
        now = self._clock()
        os.utime(file, (now, now))

    def _file(self, name: str) -> pathlib.Path:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"memory is {name!r:.200}; it should be 1 to 100 letters, digits, '.', '_' and '-', the first a letter or digit."
            )
        return self._folder / f"{name}{_END}"
