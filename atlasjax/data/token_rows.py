"""Packs tokenized documents into rows with segment ids.

Which documents share a row depends only on their order and their lengths. So the order of rows, and a position in it, are the same
for any number of processes that share out the rows.
"""

import dataclasses
from typing import Any, Protocol

import grain
import numpy as np

from atlasjax.data.mixture import Order
from atlasjax.data.token_files import TokenFiles
from atlasjax.data.windows import Batch

LEAST_ROWS = 8  # filled at the same time; more rows need less padding
_Piece = tuple[Any, int, int, int]  # a document, start and stop in it, and its length


class TokenDocuments(Protocol):
    """Documents of tokens in reading order."""

    def document(self, place: int, /) -> tuple[Any, int] | None:
        """The document at a place in the order, with its number of tokens, or None after the last. Places are asked for in order,
        or from the one where a group of rows begins."""
        ...

    def tokens(self, document: Any, start: int, stop: int, /) -> np.ndarray:
        """Tokens [stop - start] of a document; or [2, stop - start], with the bytes of each below."""
        ...


class PreparedDocuments:
    """The documents of token files. Their tokens are not read until they are asked for."""

    def __init__(self, files: TokenFiles, order: Order):
        self._files, self._order = files, order

    def document(self, place: int, /) -> tuple[int, int] | None:
        index = self._order[place]
        if index is None:
            return None
        start, end = self._files.document(index)
        return start, end - start

    def tokens(self, document: int, start: int, stop: int, /) -> np.ndarray:
        return self._files[document + start : document + stop]


@dataclasses.dataclass(frozen=True)
class RowConfig:
    """The form of packed rows, and the rows of a process.

    Attributes:
      sequence_length: T.
      max_segments: maximum number of segments in a row; padding counts as one.
      batch_size: rows per batch, over all processes.
      rows: which of these rows to return.
      seed: seed of the shuffling. None keeps the order.
      sized: whether batches have the bytes of each target; the tokens of documents come with their bytes then.
    """

    sequence_length: int
    max_segments: int
    batch_size: int
    rows: slice
    seed: int | None = None
    sized: bool = False


class TokenRows(grain.IterDataset):
    """Batches of packed rows for one process.

    Documents are taken in order and cut into pieces of at most `sequence_length`. A piece goes into the first row of a
    group that has room for it; if none has, the group is finished and the piece starts the next group. The number of rows in a
    group is the smallest multiple of the batch size that is at least `least_rows`. With a seed, the rows of a group are shuffled.

    A row holds at most `max_segments` - 1 documents (or pieces of documents), with segment ids 1, 2, … Padding at its end has
    segment id 0, token ids 0 and weights 0. A batch is {"inputs", "targets", "segment_ids": int32 [B, T], "weights": float32
    [B, T]}, and with `sized` also {"bytes": int32 [B, T]}, of the targets. Every token is an input once, and every token but
    the first of its document a target of weight 1 once.

    Args:
      documents: the documents in the order in which they are taken.
      config: the form of the rows.
      least_rows: rows that are filled at the same time, at least.
    """

    def __init__(self, documents: TokenDocuments, config: RowConfig, least_rows: int = LEAST_ROWS):
        super().__init__()
        self._documents, self.config = documents, config
        self._group_size = config.batch_size * -(-least_rows // config.batch_size)

    def __iter__(self) -> "_TokenRowsIterator":
        return _TokenRowsIterator(self)

    def group(self, place: int, offset: int) -> tuple[list[list[_Piece]], int, int]:
        """The group of rows that starts with the document at `place` in the order, `offset` tokens after its start.

        Returns:
          The pieces of each row, [] for padding after the last document; and the place and offset of the next group.
        """
        size, longest = self._group_size, self.config.sequence_length
        first = (place, offset)
        rows: list[list[_Piece]] = [[] for _ in range(size)]
        room = np.full(size, longest)
        while (found := self._documents.document(place)) is not None:
            document, end = found
            while offset < end:
                length = min(longest, end - offset)
                row = int((room >= length).argmax())
                if room[row] < length:
                    return self._shuffled(rows, first), place, offset
                rows[row].append((document, offset, offset + length, end))
                # A row with as many segments as it may have is full, whatever room it has left.
                room[row] = room[row] - length if len(rows[row]) < self.config.max_segments - 1 else 0
                offset += length
            place, offset = place + 1, 0
        rows = [row for row in rows if row]
        rows = self._shuffled(rows, first)
        return rows + [[]] * (-len(rows) % self.config.batch_size), place, offset

    def _shuffled(self, rows: list[list[_Piece]], first: tuple[int, int]) -> list[list[_Piece]]:
        if self.config.seed is None:
            return rows
        return [rows[i] for i in np.random.default_rng((self.config.seed, *first)).permutation(len(rows))]

    def rows(self, group: list[list[_Piece]], index: int) -> Batch:
        """This process's rows of batch `index` of a group."""
        config = self.config
        mine = group[index * config.batch_size : (index + 1) * config.batch_size][config.rows]
        shape = (len(mine), config.sequence_length)
        names = ("inputs", "targets", "segment_ids", *(("bytes",) if config.sized else ()))
        batch = {name: np.zeros(shape, np.int32) for name in names}
        weights = np.zeros(shape, np.float32)
        for i, row in enumerate(mine):
            at = 0
            for segment, (document, start, stop, end) in enumerate(row, 1):
                # One more if the document continues: the last target.
                tokens, *sizes = np.atleast_2d(self._documents.tokens(document, start, min(stop + 1, end)))
                length, targets = stop - start, len(tokens) - 1
                batch["inputs"][i, at : at + length] = tokens[:length]
                batch["targets"][i, at : at + targets] = tokens[1:]
                batch["segment_ids"][i, at : at + length] = segment
                weights[i, at : at + targets] = 1
                if config.sized:
                    batch["bytes"][i, at : at + targets] = sizes[0][1:]
                at += length
        return {**batch, "weights": weights}


class _TokenRowsIterator(grain.DatasetIterator):
    def __init__(self, dataset: TokenRows):
        super().__init__()
        self._dataset = dataset
        self._place = self._offset = self._batch = 0
        self._found: tuple[list[list[_Piece]], int, int] | None = None

    def __next__(self) -> Batch:
        rows, place, offset = self._found or self._dataset.group(self._place, self._offset)
        if not rows:
            raise StopIteration
        batch = self._dataset.rows(rows, self._batch)
        self._found, self._batch = (rows, place, offset), self._batch + 1
        if self._batch * self._dataset.config.batch_size == len(rows):
            self.set_state({"place": place, "offset": offset, "batch": 0})
        return batch

    def get_state(self) -> dict[str, int]:
        return {"place": self._place, "offset": self._offset, "batch": self._batch}

    def set_state(self, state: dict[str, int]) -> None:
        self._place, self._offset, self._batch = state["place"], state["offset"], state["batch"]
        self._found = None
