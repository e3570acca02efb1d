"""Random access to documents: the interface of every source, and views of a subset of the documents."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np


class Documents(Protocol):
    """A numbered collection of texts, read one at a time.

    Attributes:
      block_offsets: None if documents can be read in any order at the same cost. Otherwise int64 [num_blocks + 1], increasing from
        0 to len(self): documents block_offsets[i] to block_offsets[i + 1] are stored and read together.
      blocks_in_memory: number of blocks that the source keeps in memory. Shuffling uses at most this many blocks at a time.
    """

    @property
    def block_offsets(self) -> np.ndarray | None: ...

    @property
    def blocks_in_memory(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> str: ...


class TextDocuments:
    """Documents held in memory."""

    block_offsets: np.ndarray | None = None
    blocks_in_memory: int = 1

    def __init__(self, texts: Sequence[str]):
        self.texts = tuple(texts)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int, /) -> str:
        return self.texts[index]


class EveryNth:
    """Documents n-1, 2n-1, 3n-1, … of another collection, or with `complement` all others, in order."""

    def __init__(self, documents: Documents, n: int, *, complement: bool = False):
        self._documents, self._n, self._complement = documents, n, complement
        self.blocks_in_memory = documents.blocks_in_memory
        self._length = int(self._count_before(len(documents)))
        offsets = documents.block_offsets
        self.block_offsets = None if offsets is None else self._count_before(offsets)

    def _count_before(self, index):
        return index - index // self._n if self._complement else index // self._n

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> str:
        if not 0 <= index < self._length:
            raise IndexError(f"Document {index} of {self._length}.")
        original = index + index // (self._n - 1) if self._complement else index * self._n + self._n - 1
        return self._documents[original]


def in_order(documents: Documents) -> Iterator[str]:
    """All documents, one after the other."""
    return map(documents.__getitem__, range(len(documents)))
