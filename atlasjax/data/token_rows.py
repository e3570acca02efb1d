"""Packs tokenized documents into rows with segment ids. Every process plans all rows, and reads only the tokens of its own.

Which documents share a row depends only on their lengths, which are read without the tokens. So the order of rows, and a position
in it, are the same for any number of processes.
"""

from typing import Any

import grain
import numpy as np

from atlasjax.data.mixture import Order
from atlasjax.data.token_files import TokenFiles
from atlasjax.data.windows import Batch

_LEAST_ROWS = 8  # rows filled at the same time; more rows need less padding
_Piece = tuple[int, int, int]  # start and stop in the token stream, and the end of the document


class TokenRows(grain.IterDataset):
    """Batches of packed rows for one process.

    Documents are taken in order and cut into pieces of at most `sequence_length`. A piece goes into the first row of a
    group that has room for it; if none has, the group is finished and the piece starts the next group. The number of rows in a
    group is the smallest multiple of the batch size that is at least 8. With a seed, the rows of a group are shuffled.

    A batch is the same as in `packing.packed_rows`: {"inputs", "targets", "segment_ids": int32 [B, T], "weights": float32 [B, T]}.

    Args:
      tokens: the documents.
      order: order in which they are taken.
      sequence_length: T.
      max_segments: maximum number of segments in a row; padding counts as one.
      batch_size: rows per batch, over all processes.
      rows: which of these rows to return.
      seed: seed for shuffling rows. None keeps their order.
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
        """The group of rows that starts with the document at `place` in the order, `offset` tokens after its start.

        Returns:
          The pieces of each row, [] for padding after the last document; and the place and offset of the next group.
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
        """This process's rows of batch `index` of a group."""
        mine = group[index * self._batch_size : (index + 1) * self._batch_size][self._mine]
        shape = (len(mine), self._length)
        batch = {name: np.zeros(shape, np.int32) for name in ("inputs", "targets", "segment_ids")}
        weights = np.zeros(shape, np.float32)
        for i, row in enumerate(mine):
            at = 0
            for segment, (start, stop, end) in enumerate(row, 1):
                tokens = self._tokens[start : min(stop + 1, end)]  # one more if the document continues: the last target
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
