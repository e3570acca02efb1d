"""Random access to documents: the interface of every source, and views of a subset of the documents."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np

N = TypeVar("N", int, np.ndarray)


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


@dataclasses.dataclass(frozen=True)
class Selection:
    """The documents of a split: all documents of an input, every n-th, or all except every n-th.

    Attributes:
      input: index of the input.
      period: n, or None for all documents.
      complement: whether to take all except every n-th.
    """

    input: int
    period: int | None = None
    complement: bool = False

    def count(self, num_documents: N) -> N:
        """Number of documents taken from the first `num_documents`, an integer or integers."""
        if self.period is None:
            return num_documents
        held_out = num_documents // self.period
        return num_documents - held_out if self.complement else held_out

    def document(self, index: int) -> int:
        """The index in the input of document `index` of the split."""
        if self.period is None:
            return index
        if self.complement:
            return index + index // (self.period - 1)
        return index * self.period + self.period - 1


class EveryNth:
    """Documents n-1, 2n-1, 3n-1, … of another collection, or with `complement` all others, in order."""

    def __init__(self, documents: Documents, n: int, *, complement: bool = False):
        self._documents, self._chosen = documents, Selection(0, n, complement)
        self.blocks_in_memory = documents.blocks_in_memory
        self._length = self._chosen.count(len(documents))
        offsets = documents.block_offsets
        self.block_offsets = None if offsets is None else self._chosen.count(offsets)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> str:
        if not 0 <= index < self._length:
            raise IndexError(f"Document {index} of {self._length}.")
        return self._documents[self._chosen.document(index)]


def in_order(documents: Documents) -> Iterator[str]:
    """All documents, one after the other."""
    return map(documents.__getitem__, range(len(documents)))
