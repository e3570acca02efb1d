"""Flat files of tokenized documents with random access.

A token file NAME consists of NAME.tokens, the concatenated ids of its documents as little-endian unsigned integers, and NAME.ends,
the end of each document in tokens, as little-endian int64. Nothing is compressed, so a sequence at any position is one read.
"""

import bisect
import dataclasses
import functools
import itertools
import os
import pathlib
import weakref
import zlib
from collections.abc import Sequence

import numpy as np

END = np.dtype("<i8")
_OPEN_FILES = 256  # per process
_BUFFER = 2**20  # bytes


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """A finished token file.

    Attributes:
      name: its name without suffix, relative to the folder.
      documents: number of documents.
      tokens: number of tokens.
      num_bytes: number of bytes of UTF-8 text that the tokens represent.
      crc32: checksum of the ids.
    """

    name: str
    documents: int
    tokens: int
    num_bytes: int
    crc32: int


class TokenWriter:
    """Context manager that writes one token file. Afterwards `finished` describes it.

    Args:
      folder: output folder.
      name: name of the file without suffix.
      dtype: unsigned integer dtype that holds every id.
      bytes_per_token: int32 [vocab_size], to count bytes.

    Raises:
      OSError: the file cannot be written.
    """

    def __init__(self, folder: pathlib.Path, name: str, dtype: np.dtype, bytes_per_token: np.ndarray):
        self._name, self._dtype, self._bytes_per_token = name, dtype.newbyteorder("<"), bytes_per_token
        self._tokens_file = open(folder / f"{name}.tokens", "wb", buffering=_BUFFER)  # noqa: SIM115
        self._ends_file = open(folder / f"{name}.ends", "wb", buffering=_BUFFER)  # noqa: SIM115
        self._documents = self._tokens = self._num_bytes = self._crc32 = 0

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._tokens_file, self._ends_file):
            file.flush()
            os.fsync(file.fileno())  # the description, written next, must not survive a crash alone
            file.close()

    def write(self, ids: np.ndarray) -> None:
        """Append tokens [n] to the current document."""
        content = ids.astype(self._dtype).tobytes()
        self._tokens_file.write(content)
        self._crc32 = zlib.crc32(content, self._crc32)
        self._tokens += len(ids)
        self._num_bytes += int(self._bytes_per_token[ids].sum(dtype=np.int64))

    def end_document(self) -> None:
        """End the current document."""
        self._ends_file.write(np.asarray(self._tokens, END).tobytes())
        self._documents += 1

    @property
    def finished(self) -> TokenFile:
        """The description of what was written."""
        return TokenFile(self._name, self._documents, self._tokens, self._num_bytes, self._crc32)


@functools.lru_cache(maxsize=_OPEN_FILES)
def _opened(path: str, size: int, modified: int) -> "_Opened":
    del size, modified  # cache keys: a replaced file is opened again
    return _Opened(path)


class _Opened:
    """An open file, closed when no longer used; at the exit of the interpreter, where threads may still read, by the system."""

    def __init__(self, path: str):
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor).atexit = False


class _File:
    """A file of a fixed size with random access."""

    def __init__(self, path: pathlib.Path, size: int):
        try:
            found = path.stat()
        except FileNotFoundError:
            raise FileNotFoundError(f"The prepared file {str(path)!r} is missing.") from None
        if found.st_size != size:
            raise ValueError(
                f"The prepared file {str(path)!r} is damaged: it has {found.st_size:,} bytes and should have {size:,}."
            )
        self._key = (str(path), size, found.st_mtime_ns)

    def read(self, offset: int, size: int) -> bytes:
        file = _opened(*self._key)
        content = os.pread(file.descriptor, size, offset)
        while len(content) < size:  # one read returns at most 2 GiB
            more = os.pread(file.descriptor, size - len(content), offset + len(content))
            if not more:
                raise ValueError(f"The prepared file {self._key[0]!r} is damaged: it was truncated while being read.")
            content += more
        return content


class TokenFiles:
    """The documents of several token files as one sequence, and their tokens as one stream. Only file sizes are in memory.

    Files are read with `pread`. Unlike with `mmap`, resident memory does not grow with what was read, and a truncated file raises
    an error instead of a signal.

    Args:
      files: folder and description of each file.
      dtype: dtype of the ids.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file has the wrong size.
    """

    def __init__(self, files: Sequence[tuple[pathlib.Path, TokenFile]], dtype: np.dtype):
        self._dtype = dtype.newbyteorder("<")
        self._files = [
            (
                _File(folder / f"{file.name}.tokens", file.tokens * dtype.itemsize),
                _File(folder / f"{file.name}.ends", file.documents * END.itemsize),
            )
            for folder, file in files
        ]
        self._tokens = [0, *itertools.accumulate(file.tokens for _, file in files)]
        self._documents = [0, *itertools.accumulate(file.documents for _, file in files)]

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return self._documents[-1]

    def __len__(self) -> int:
        """Number of tokens."""
        return self._tokens[-1]

    def document(self, index: int) -> tuple[int, int]:
        """The start and end of document `index` in the token stream."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"Document {index} of {self.num_documents}.")
        which = bisect.bisect_right(self._documents, index) - 1
        place, first = index - self._documents[which], self._tokens[which]
        ends = self._files[which][1]
        if not place:
            return first, first + int(np.frombuffer(ends.read(0, 8), END)[0])
        start, stop = np.frombuffer(ends.read(8 * place - 8, 16), END).tolist()
        return first + start, first + stop

    def __getitem__(self, places: slice) -> np.ndarray:
        """A slice of the token stream, [n]."""
        start, stop, _ = places.indices(len(self))
        found = []
        while start < stop:
            which = bisect.bisect_right(self._tokens, start) - 1
            end, first, size = min(stop, self._tokens[which + 1]), self._tokens[which], self._dtype.itemsize
            content = self._files[which][0].read((start - first) * size, (end - start) * size)
            found.append(np.frombuffer(content, self._dtype))
            start = end
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.zeros(0, self._dtype)
