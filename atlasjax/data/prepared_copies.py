"""Prepared data sets in a bucket: a copy on the disk of every host, and the upload of a finished preparation.

A bucket answers in tens of milliseconds, and training reads each document or window by itself, in random order. So each host copies
a set once and reads its own disk. A file is in its place only after its checksum was compared, and a copy that was interrupted
goes on with the files that are missing.
"""

import concurrent.futures
import contextlib
import fcntl
import hashlib
import os
import pathlib
import shutil
import threading
import zlib
from typing import IO

import numpy as np

from atlasjax import cache, storage
from atlasjax.data.manifest import FILE, Manifest, read_manifest, write_manifest
from atlasjax.data.token_files import END, Part

_THREADS = 8
_BLOCK = 2**24  # bytes read at once
_SPARE = 2**30  # bytes of the disk that are left free

_in_use: dict[pathlib.Path, IO[bytes]] = {}  # shared locks of this process, kept to its end
_guard = threading.Lock()


def copies() -> pathlib.Path:
    """The folder of the copies of this machine. $ATLASJAX_CACHE chooses another disk."""
    return cache.folder() / "prepared"


def local_copy(folder: storage.StorePath) -> pathlib.Path:
    """A copy of a prepared data set on the disk of this machine, made or completed first. Processes of a host share it.

    Copies that no process uses are deleted, the oldest first, if the disk would be too small.

    Raises:
      FileNotFoundError: there is no finished preparation in the folder.
      ValueError: what is there is damaged, or the disk is too small.
      OSError: the store does not answer, or the disk cannot be written.
    """
    manifest = read_manifest(folder)
    content = (folder / FILE).read_bytes()
    name = hashlib.sha256(str(folder).encode() + content).hexdigest()[:24]
    copy = copies() / name
    with _guard:
        if copy in _in_use:
            return copy
        lock = _locked(copy)
        try:
            _complete(folder, copy, manifest)
            write_manifest(copy, manifest)
        except BaseException:
            lock.close()
            raise
        fcntl.flock(lock, fcntl.LOCK_SH)
        _in_use[copy] = lock
    os.utime(copy)  # when it was last used
    return copy


def _locked(copy: pathlib.Path) -> IO[bytes]:
    """The lock of a copy, held alone: another process of this host may be copying, or deleting it to make room."""
    while True:
        copy.mkdir(parents=True, exist_ok=True)
        lock = open(copy / "lock", "ab")  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(copy / "lock")):
                return lock
        lock.close()


def _complete(folder: storage.StorePath, copy: pathlib.Path, manifest: Manifest) -> None:
    missing = []
    for file in (file for files in manifest.splits.values() for file in files):
        for kind, part in file.parts(manifest.token_dtype).items():
            path = copy / part.name
            if not path.exists() or path.stat().st_size != part.size:
                missing.append((part, file.tokens if kind == "ends" else None))
    for left in copy.glob(".*.partial"):
        left.unlink()  # of a process that was killed; the lock is ours
    _make_room(copy, sum(part.size for part, _ in missing))
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        fetched = [threads.submit(_fetch, folder, copy, part, last_end) for part, last_end in missing]
        try:
            for one in concurrent.futures.as_completed(fetched):
                one.result()
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


def _fetch(folder: storage.StorePath, copy: pathlib.Path, part: Part, last_end: int | None) -> None:
    """Copies a file. last_end: of ends without a checksum, the last one."""
    source, target = folder / part.name, copy / part.name
    found = checksum = 0
    block = last = b""
    with storage.replacing(target) as written:
        with storage.explaining(source), source.open() as stream:
            while block := stream.read(_BLOCK):
                written.write(block)
                found, checksum, last = found + len(block), zlib.crc32(block, checksum), block
        if found != part.size:
            raise ValueError(
                f"The prepared file {str(source)!r} is damaged: it has {found:,} bytes and should have {part.size:,}."
            )
        if checksum != part.crc32 if part.crc32 is not None else _ends_at(last[-END.itemsize :]) != last_end:
            raise ValueError(f"The prepared file {str(source)!r} is damaged: its checksum is not that of the manifest.")


def _ends_at(last: bytes) -> int:
    return int(np.frombuffer(last, END)[0]) if last else 0


def _make_room(copy: pathlib.Path, needed: int) -> None:
    free = lambda: shutil.disk_usage(copy).free
    others = sorted(
        (other for other in copies().iterdir() if other != copy and other.is_dir()),
        key=lambda other: other.stat().st_mtime,
    )
    for other in others:
        if free() >= needed + _SPARE:
            return
        with open(other / "lock", "ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(other, ignore_errors=True)
    if needed and free() < needed + _SPARE:
        raise ValueError(
            f"The data set needs {needed / 2**30:.1f} GiB in {str(copies())!r}, where {free() / 2**30:.1f} GiB are free, of which "
            f"{_SPARE / 2**30:.0f} GiB stay free. Set ATLASJAX_CACHE to a folder on a larger disk."
        )


def upload(local: pathlib.Path, folder: storage.StorePath, manifest: Manifest) -> None:
    """Copies a finished preparation to a bucket, its manifest last. Files that are there with the right size are left out.

    Raises:
      OSError: the store does not answer.
    """
    there = {str(file).removeprefix(f"{folder}/"): file.stat().st_size for file in folder.files()}
    files = [path for path in (local / "tokenizer").rglob("*") if path.is_file()]
    for file in (file for each in manifest.splits.values() for file in each):
        files += [local / part.name for part in file.parts(manifest.token_dtype).values()]
    names = {path.relative_to(local).as_posix(): path for path in files}
    waiting = [name for name, path in names.items() if there.get(name) != path.stat().st_size]

    def put(name: str) -> None:
        storage.write_whole(folder / name, names[name].read_bytes())

    with concurrent.futures.ThreadPoolExecutor(2) as threads:  # a file is in memory while it is uploaded
        list(threads.map(put, waiting))
    write_manifest(folder, manifest)
