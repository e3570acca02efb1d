"""The lock of a folder on a disk: a file that one process at a time has locked. It is released when that ends, however it ends.

In a bucket, which has no locks, a lease takes its place (`storage.lease`).
"""

import fcntl
import os
import pathlib
import socket
from typing import IO


class HeldError(ValueError):
    """Another process holds the lock. `holder` says which, as far as it is known."""

    def __init__(self, holder: str):
        super().__init__(holder)
        self.holder = holder


def owner() -> str:
    """This process, for the message to another one."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def take(path: pathlib.Path) -> IO[str]:
    """Takes the lock of a file, which is created if it is not there, and never through a link. Closing it releases the lock.

    Raises:
      HeldError: another process holds it.
      OSError: the file cannot be created, or the file system has no locks.
    """
    # O_NONBLOCK: a FIFO or a device of this name must not make it wait.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    file = open(descriptor, "r+", errors="replace")  # noqa: SIM115
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HeldError(" ".join(file.read(200).split()) or "an unknown process") from None
        if file.read(200) != f"{owner()}\n":  # a process that takes its lock again changes no file
            file.seek(0)
            file.truncate()
            file.write(f"{owner()}\n")
            file.flush()
    except BaseException:
        file.close()
        raise
    return file
