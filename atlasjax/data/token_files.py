"""Flat files of tokenized documents with random access.

A token file NAME consists of NAME.tokens, the concatenated ids of its documents as little-endian unsigned integers, and NAME.ends,
the end of each document in tokens, as little-endian int64. NAME.sizes has the bytes of text that each token represents, as
little-endian uint32, where they depend on the text. Nothing is compressed, so a sequence at any position is one read.

Each file is compared with its checksum before anything of it is used.
"""

import bisect
import dataclasses
import itertools
import os
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np

from atlasjax.data.checked_files import CheckedFile, Content, check_all

END = np.dtype("<i8")
SIZE = np.dtype("<u4")
_BUFFER = 2**20  # bytes


class Part(NamedTuple):
    """One of the files of a token file: its name, its number of bytes, and its CRC-32; None if an older version wrote it."""

    name: str
    size: int
    crc32: int | None


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """A finished token file.

    Attributes:
      name: its name without suffix, relative to the folder.
      documents: number of documents.
      tokens: number of tokens.
      num_bytes: number of bytes of UTF-8 text that the tokens represent.
      crc32: checksum of the ids.
      ends_crc32: checksum of the ends of documents. None: an older version wrote it.
      sizes_crc32: checksum of the bytes of each token. None: there is no such file.
    """

    name: str
    documents: int
    tokens: int
    num_bytes: int
    crc32: int
    ends_crc32: int | None = None
    sizes_crc32: int | None = None

    def parts(self, dtype: np.dtype) -> dict[str, Part]:
        """Its files, "tokens", "ends" and perhaps "sizes", with ids of a dtype."""
        found = {
            "tokens": Part(f"{self.name}.tokens", self.tokens * dtype.itemsize, self.crc32),
            "ends": Part(f"{self.name}.ends", self.documents * END.itemsize, self.ends_crc32),
        }
        if self.sizes_crc32 is not None:
            found["sizes"] = Part(f"{self.name}.sizes", self.tokens * SIZE.itemsize, self.sizes_crc32)
        return found


class TokenWriter:
    """Context manager that writes one token file. Afterwards `finished` describes it.

    Args:
      folder: output folder.
      name: name of the file without suffix.
      dtype: unsigned integer dtype that holds every id.
      sized: whether to keep the bytes of each token.

    Raises:
      OSError: the file cannot be written.
    """

    def __init__(self, folder: pathlib.Path, name: str, dtype: np.dtype, *, sized: bool = False):
        self._name, self._dtype = name, dtype.newbyteorder("<")  # files are read on machines of any byte order
        kinds = ("tokens", "ends", *(("sizes",) if sized else ()))
        self._files = {kind: _created(folder / f"{name}.{kind}") for kind in kinds}
        self._crc32 = dict.fromkeys(kinds, 0)
        self._documents = self._tokens = self._num_bytes = 0

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())  # the description, written next, must not survive a crash alone
            file.close()

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens to the current document: ids, and below them the bytes of each, [2, n]."""
        ids, sizes = tokens
        self._append("tokens", ids.astype(self._dtype).tobytes())
        if "sizes" in self._files:
            self._append("sizes", sizes.astype(SIZE).tobytes())
        self._tokens += len(ids)
        self._num_bytes += int(sizes.sum(dtype=np.int64))

    def end_document(self) -> None:
        """End the current document."""
        self._append("ends", np.asarray(self._tokens, END).tobytes())
        self._documents += 1

    def _append(self, kind: str, content: bytes) -> None:
        self._files[kind].write(content)
        self._crc32[kind] = zlib.crc32(content, self._crc32[kind])

    @property
    def finished(self) -> TokenFile:
        """The description of what was written."""
        return TokenFile(
            self._name, self._documents, self._tokens, self._num_bytes, self._crc32["tokens"], self._crc32["ends"],
            self._crc32.get("sizes"),
        )  # fmt: skip


def _created(path: pathlib.Path) -> BinaryIO:
    """A new file in the place of what is there, which is not written through if it is a link.

    It need not appear whole: its folder is locked, and it counts only when its description is written after it.
    """
    path.unlink(missing_ok=True)
    return open(path, "xb", buffering=_BUFFER)


class TokenFiles:
    """The documents of several token files as one sequence, and their tokens as one stream. Only file sizes are in memory.

    Files are read with `pread`. Unlike with `mmap`, resident memory does not grow with what was read, and a truncated file raises
    an error instead of a signal. The first read of tokens begins to check all files, in threads; a read waits for its own.

    Args:
      files: folder and description of each file.
      dtype: dtype of the ids.
      vocab_size: ids are below it.

    Attributes:
      is_sized: whether slices have the bytes of each token, which all files need.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file has the wrong size; while reading: it is damaged.
    """

    def __init__(self, files: Sequence[tuple[pathlib.Path, TokenFile]], dtype: np.dtype, vocab_size: int):
        self._dtype = dtype.newbyteorder("<")
        self.is_sized = bool(files) and all(file.sizes_crc32 is not None for _, file in files)
        self._files = []
        for folder, file in files:
            wrong: dict[str, Content | None] = {
                "tokens": _Ids(self._dtype, vocab_size),
                "ends": _Ends(file.tokens),
                "sizes": None,
            }
            parts = file.parts(dtype).items()
            self._files.append({kind: CheckedFile(folder / x.name, x.size, x.crc32, wrong[kind]) for kind, x in parts})
        self._tokens = [0, *itertools.accumulate(file.tokens for _, file in files)]
        self._documents = [0, *itertools.accumulate(file.documents for _, file in files)]
        self._checking = False

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
        ends = self._files[which]["ends"]
        if not place:
            return first, first + int(np.frombuffer(ends.read(0, 8), END)[0])
        start, stop = np.frombuffer(ends.read(8 * place - 8, 16), END).tolist()
        return first + start, first + stop

    def __getitem__(self, places: slice) -> np.ndarray:
        """A slice of the token stream, [n]; or if it `is_sized`, with the bytes of each token below, [2, n]."""
        if not self._checking:
            self._checking = True
            # Ends are small, and checked when the first one is asked for.
            check_all([file[kind] for file in self._files for kind in file if kind != "ends"])
        start, stop, _ = places.indices(len(self))
        ids = self._slice("tokens", self._dtype, start, stop)
        return np.stack([ids.astype(np.int64), self._slice("sizes", SIZE, start, stop)]) if self.is_sized else ids

    def _slice(self, kind: str, dtype: np.dtype, start: int, stop: int) -> np.ndarray:
        found = list(self._slices(kind, dtype, start, stop))
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.zeros(0, dtype)

    def _slices(self, kind: str, dtype: np.dtype, start: int, stop: int) -> Iterator[np.ndarray]:
        while start < stop:
            which = bisect.bisect_right(self._tokens, start) - 1
            end, first, size = min(stop, self._tokens[which + 1]), self._tokens[which], dtype.itemsize
            yield np.frombuffer(self._files[which][kind].read((start - first) * size, (end - start) * size), dtype)
            start = end


class _Ids:
    """Finds ids that are not in the vocabulary. They are read in order."""

    def __init__(self, dtype: np.dtype, vocab_size: int):
        self._dtype, self._vocab_size = dtype, vocab_size

    def __call__(self, content: bytes, at: int, whole: int) -> str | None:
        most = int(np.frombuffer(content, self._dtype).max())
        return None if most < self._vocab_size else f"it has the token {most}, and the vocabulary {self._vocab_size}"


class _Ends:
    """Finds ends of documents that go back, or a last one that is not the end of the tokens. They are read in order."""

    def __init__(self, tokens: int):
        self._tokens, self._last = tokens, 0

    def __call__(self, content: bytes, at: int, whole: int) -> str | None:
        ends = np.frombuffer(content, END)
        last, self._last = (self._last if at else 0), int(ends[-1])
        if (np.diff(ends, prepend=last) < 0).any():
            return "a document ends before it begins"
        if at + len(content) == whole and self._last != self._tokens:
            return f"its documents end at token {self._last:,} of {self._tokens:,}"
        return None
