"""Tokens of documents in flat files that are read at any place.

A token file NAME is NAME.tokens, the ids of its documents one after the other as little-endian unsigned integers, and NAME.ends,
where each document ends, in tokens, as little-endian int64. Nothing is compressed, so that a sequence at any place is one read.
"""

import bisect
import dataclasses
import functools
import itertools
import os
import pathlib
import zlib
from collections.abc import Sequence

import numpy as np

_END = np.dtype("<i8")
_OPEN_FILES = 256  # per process
_BUFFER = 2**20  # bytes


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """A finished token file.

    Attributes:
      name: its name without suffix, relative to the folder.
      documents: number of documents.
      tokens: number of tokens.
      num_bytes: number of bytes of UTF-8 text that the tokens are of.
      crc32: checksum of the ids.
    """

    name: str
    documents: int
    tokens: int
    num_bytes: int
    crc32: int


class TokenWriter:
    """Writes one token file. A context manager; `finished` describes the file afterwards.

    Args:
      folder: where.
      name: name of the file without suffix.
      dtype: unsigned integers that hold every id.
      bytes_per_token: int32 [vocab_size], to count bytes.

    Raises:
      OSError: it cannot be written.
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
            os.fsync(file.fileno())  # a description that is written next must not survive a crash alone
            file.close()

    def write(self, ids: np.ndarray) -> None:
        """Append tokens [n] of the document that is being written."""
        content = ids.astype(self._dtype).tobytes()
        self._tokens_file.write(content)
        self._crc32 = zlib.crc32(content, self._crc32)
        self._tokens += len(ids)
        self._num_bytes += int(self._bytes_per_token[ids].sum(dtype=np.int64))

    def end_document(self) -> None:
        """End the document."""
        self._ends_file.write(np.asarray(self._tokens, _END).tobytes())
        self._documents += 1

    @property
    def finished(self) -> TokenFile:
        """What was written."""
        return TokenFile(self._name, self._documents, self._tokens, self._num_bytes, self._crc32)


@functools.lru_cache(maxsize=_OPEN_FILES)
def _opened(path: str, size: int, modified: int) -> "_Opened":
    del size, modified  # another file of this name is opened anew
    return _Opened(path)


class _Opened:
    """An open file, closed when nobody uses it any more."""

    def __init__(self, path: str):
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        os.close(self.descriptor)


class _File:
    """One file of a fixed size, read at any place."""

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
        while len(content) < size:  # a read gives at most 2 GiB
            more = os.pread(file.descriptor, size - len(content), offset + len(content))
            if not more:
                raise ValueError(f"The prepared file {self._key[0]!r} is damaged: it was cut off while it was read.")
            content += more
        return content


class TokenFiles:
    """The documents of several token files, in a row, and their tokens as one stream. Only the files' sizes are in memory.

    Files are read with `pread`: resident memory does not grow with what was read, and a file that is cut off is an error and not a
    signal, as it would be with `mmap`.

    Args:
      files: for each its folder and its description.
      dtype: of the ids.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file does not have its size.
    """

    def __init__(self, files: Sequence[tuple[pathlib.Path, TokenFile]], dtype: np.dtype):
        self._dtype = dtype.newbyteorder("<")
        self._files = [
            (
                _File(folder / f"{file.name}.tokens", file.tokens * dtype.itemsize),
                _File(folder / f"{file.name}.ends", file.documents * _END.itemsize),
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
        """Where document `index` begins and ends in the stream of tokens."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"Document {index} of {self.num_documents}.")
        which = bisect.bisect_right(self._documents, index) - 1
        place, first = index - self._documents[which], self._tokens[which]
        ends = self._files[which][1]
        if not place:
            return first, first + int(np.frombuffer(ends.read(0, 8), _END)[0])
        start, stop = np.frombuffer(ends.read(8 * place - 8, 16), _END).tolist()
        return first + start, first + stop

    def __getitem__(self, places: slice) -> np.ndarray:
        """Tokens of the stream from a start to a stop, [n]."""
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
