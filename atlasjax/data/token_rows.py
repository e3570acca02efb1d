"""Packs tokenized documents into rows with segment ids: every process knows the rows of all, and reads the tokens of its own.

Which documents share a row follows from their lengths, which are read without their tokens. So the order of rows is one, whatever
the number of processes, and a position in it is the same for all of them.
"""

from typing import Any

import grain
import numpy as np

from atlasjax.data.mixture import Order
from atlasjax.data.token_files import TokenFiles
from atlasjax.data.windows import Batch

_LEAST_ROWS = 8  # filled at the same time; more rows waste less padding
_Piece = tuple[int, int, int]  # start and stop in the stream of tokens, and the end of the document


class TokenRows(grain.IterDataset):
    """Batches of packed rows, of one process.

    Documents are taken in order and cut into pieces of at most `sequence_length`. A piece goes into the first of a group of rows
    that has room for it; if none has, the group is finished, and the piece begins the next. A group has as many rows as a batch,
    or the least multiple of it that is at least 8. With a seed the rows of a group are shuffled.

    A batch is that of `packing.packed_rows`: {"inputs", "targets", "segment_ids": int32 [B, T], "weights": float32 [B, T]}.

    Args:
      tokens: the documents.
      order: in which they are taken.
      sequence_length: T.
      max_segments: bound on the segments in a row, of which the padding counts as one.
      batch_size: rows in a batch of all processes.
      rows: which of them are given.
      seed: of the shuffling of rows. None keeps their order.
    """

    def __init__(
        self,
        tokens: TokenFiles,
        order: Order,
        *,
        sequence_length: int,
        max_segments: int,
        batch_size: int,
        rows: slice,
        seed: int | None,
    ):
        super().__init__()
        self._tokens, self._order, self._length, self._batch_size = tokens, order, sequence_length, batch_size
        self._most, self._mine, self._seed = max_segments - 1, rows, seed

    def __iter__(self) -> "_TokenRowsIterator":
        return _TokenRowsIterator(self)

    def group(self, place: int, offset: int) -> tuple[list[list[_Piece]], int, int]:
        """The group of rows that begins with a document at a place of the order, `offset` tokens after its start.

        Returns:
          The pieces of each row, [] for padding after the last document; and the place and offset at which the next group begins.
        """
        size = self._batch_size * -(-_LEAST_ROWS // self._batch_size)
        first = (place, offset)
        rows: list[list[_Piece]] = [[] for _ in range(size)]
        room = np.full(size, self._length)
        while (document := self._order[place]) is not None:
            start, end = self._tokens.document(document)
            start += offset
            while start < end:
                length = min(self._length, end - start)
                row = int((room >= length).argmax())
                if room[row] < length:
                    return self._shuffled(rows, first), place, offset
                rows[row].append((start, start + length, end))
                room[row] = room[row] - length if len(rows[row]) < self._most else 0
                start, offset = start + length, offset + length
            place, offset = place + 1, 0
        rows = [row for row in rows if row]
        rows = self._shuffled(rows, first)
        return rows + [[]] * (-len(rows) % self._batch_size), place, offset

    def _shuffled(self, rows: list[list[_Piece]], first: tuple[int, int]) -> list[list[_Piece]]:
        if self._seed is None:
            return rows
        return [rows[i] for i in np.random.default_rng((self._seed, *first)).permutation(len(rows))]

    def rows(self, group: list[list[_Piece]], index: int) -> Batch:
        """This process's rows of a batch of a group."""
        mine = group[index * self._batch_size : (index + 1) * self._batch_size][self._mine]
        shape = (len(mine), self._length)
        batch = {name: np.zeros(shape, np.int32) for name in ("inputs", "targets", "segment_ids")}
        weights = np.zeros(shape, np.float32)
        for i, row in enumerate(mine):
            at = 0
            for segment, (start, stop, end) in enumerate(row, 1):
                tokens = self._tokens[start : min(stop + 1, end)]  # one more, if the document goes on: the last target
                length, targets = stop - start, len(tokens) - 1
                batch["inputs"][i, at : at + length] = tokens[:length]
                batch["targets"][i, at : at + targets] = tokens[1:]
                batch["segment_ids"][i, at : at + length] = segment
                weights[i, at : at + targets] = 1
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
        if self._batch * self._dataset._batch_size == len(rows):
            self.set_state({"place": place, "offset": offset, "batch": 0})
        return batch

    def get_state(self) -> dict[str, Any]:
        return {"place": self._place, "offset": self._offset, "batch": self._batch}

    def set_state(self, state: dict[str, Any]) -> None:
        self._place, self._offset, self._batch = state["place"], state["offset"], state["batch"]
        self._found = None
