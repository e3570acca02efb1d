"""Memories under names: what conversations have read, in a folder, until nobody has used them for some time."""

import contextlib
import dataclasses
import os
import pathlib
import re
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

from atlasjax import storage
from atlasjax.generate import Context, ContextFiles
from atlasjax.serve.limits import MemoryLimits as MemoryLimits
from atlasjax.storage import locks

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_END = ".memory"
_LOCK = "lock"
_STEP = 1e-3  # seconds by which a memory is newer than the others, where the clock says that it is older
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_began = time.time() - time.monotonic()


def steady_time() -> float:
    """Seconds since 1970, as they were when this process began and have passed since: nobody can set this clock."""
    return _began + time.monotonic()


class InUseError(RuntimeError):
    """Another request uses the memory of this name."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A memory in the folder: its name, its size in bytes, and when it was last used, in seconds since 1970."""

    name: str
    num_bytes: int
    used: float


class Lease:
    """Keeps other processes out of a folder of memories. It ends with its last reference, or with the process.

    Only this user may read the folder from then on, and what is in it.

    Args:
      folder: it is there.

    Raises:
      ValueError: another process serves it; or others may read it, and it has other files than memories.
      OSError: it cannot be read or written.
    """

    def __init__(self, folder: pathlib.Path):
        _make_private(folder)
        try:
            file = locks.take(folder / _LOCK)
        except locks.HeldError as error:
            raise ValueError(
                f"memories is {str(folder)!r}; another server uses it ({error.holder}). Give another folder with --memories, or "
                "end that server."
            ) from None
        weakref.finalize(self, file.close)

    @classmethod
    def of(cls, folder: pathlib.Path) -> "Lease":
        """The lease of a folder, one for all who use it in this process. Raises as the constructor."""
        about = folder.stat()
        with _guard:
            key = about.st_dev, about.st_ino
            found = _leases.get(key)
            if found is None:
                found = _leases[key] = cls(folder)
            return found


_leases: "weakref.WeakValueDictionary[tuple[int, int], Lease]" = weakref.WeakValueDictionary()
_guard = threading.Lock()


def _make_private(folder: pathlib.Path) -> None:
    if stat.S_IMODE(folder.stat().st_mode) & _OTHERS:
        with os.scandir(folder) as found:
            other = next(
                (one.name for one in found if one.name != _LOCK and not one.name.endswith((_END, ".partial"))), None
            )
        advice = (
            "Give a folder of its own with --memories, or take the permissions of others from this one (chmod 700)."
        )
        if other is not None:
            raise ValueError(f"memories is {str(folder)!r}, which others may use and which has {other!r} too. {advice}")
        try:
            folder.chmod(0o700)
        except PermissionError:
            raise ValueError(f"memories is {str(folder)!r}, which others may use. {advice}") from None
        _say(f"others could use {str(folder)!r}; from now on only this user can.")
    with os.scandir(folder) as found:
        for one in found:
            if one.is_file(follow_symlinks=False) and one.stat(follow_symlinks=False).st_mode & _OTHERS:
                with contextlib.suppress(OSError):
                    os.chmod(one.path, 0o600)


def _say(line: str) -> None:
    print(f"atlasjax: {line}", file=sys.stderr, flush=True)


class Memories:
    """A folder of memories. The files are all that there is of them, so they outlive the process.

    Several threads may use it, but no other process. Only files are memories, not links: what else has the name of one is left
    alone, and named once. A memory that was used is newer than all others, also where the clock was set back.

    Args:
      files: reads and writes contexts of the model.
      folder: it is created if it does not exist, for this user only.
      limits: what is kept. Files that are being written count.
      clock: seconds since 1970.

    Raises:
      ValueError, OSError: as `Lease`.
    """

    def __init__(
        self, files: ContextFiles, folder: str | os.PathLike[str], limits: MemoryLimits = MemoryLimits(),
        clock: Callable[[], float] = steady_time,
    ):  # fmt: skip
        self._files, self._folder, self._limits, self._clock = files, pathlib.Path(folder), limits, clock
        if not self._folder.is_dir():
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700)
        self._lease = Lease.of(self._folder)
        self._used: set[str] = set()
        self._named: set[str] = set()
        self._lock = threading.RLock()
        self.sweep()

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Keeps other requests from a name.

        Raises:
          ValueError: it is not a name, or what has it is not a file.
          InUseError: another request uses it.
        """
        self._is_there(name)
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
        """The context that was saved under a name, or None. This counts as a use.

        Raises:
          ValueError: it is not a name, or the file is damaged or of another model; the message says which.
        """
        file = self._file(name)
        with self._lock:
            entries = self.sweep()
            if not self._is_there(name):
                return None
            self._touch(name, entries)
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
            self._touch(name, self._entries())
            self.sweep(name)

    def delete(self, name: str) -> bool:
        """Removes a memory. Returns whether there was one.

        Raises:
          ValueError: it is not a name.
          InUseError: a request uses it.
        """
        with self.use(name), self._lock:
            found = self._is_there(name)
            self._file(name).unlink(missing_ok=True)
            return found

    def entries(self) -> list[Entry]:
        """All memories, the last used first."""
        return self.sweep()

    def sweep(self, saved: str | None = None) -> list[Entry]:
        """Removes what is too old or too much, but nothing that is in use, nor `saved`, and what killed writers left.

        Returns what stays, the last used first.
        """
        with self._lock:
            oldest = self._clock() - self._limits.hours * 3600
            num_bytes = storage.sweep(self._folder)
            kept: list[Entry] = []
            for entry in self._entries():
                over = len(kept) >= self._limits.count or num_bytes + entry.num_bytes > self._limits.gigabytes * 1e9
                if (over or entry.used < oldest) and entry.name not in self._used | {saved}:
                    self._file(entry.name).unlink(missing_ok=True)
                else:
                    kept.append(entry)
                    num_bytes += entry.num_bytes
            return kept

    def _entries(self) -> list[Entry]:
        found = []
        with os.scandir(self._folder) as files:
            for file in files:
                name = file.name.removesuffix(_END)
                if name == file.name or not _NAME.fullmatch(name):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    about = file.stat(follow_symlinks=False)
                    if stat.S_ISREG(about.st_mode):
                        found.append(Entry(name, about.st_size, about.st_mtime))
                    elif name not in self._named:
                        self._named.add(name)
                        _say(f"{file.path!r} is not a file; it is left alone.")
        return sorted(found, key=lambda entry: -entry.used)

    def _touch(self, name: str, entries: Sequence[Entry]) -> None:
        """Makes a memory the last used one."""
        others = max((entry.used for entry in entries if entry.name != name), default=0.0)
        used = max(self._clock(), others + _STEP)
        os.utime(self._file(name), (used, used))

    def _is_there(self, name: str) -> bool:
        """Whether there is a memory of this name. Raises ValueError if it is not a name, or something else has it."""
        try:
            about = self._file(name).lstat()
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"memory {name!r} is not a file in the server's folder.")
        return True

    def _file(self, name: str) -> pathlib.Path:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"memory is {name!r:.200}; it must be 1 to 100 letters, digits, '.', '_' and '-', the first a letter or digit."
            )
        return self._folder / f"{name}{_END}"
