"""Packs documents that are read and tokenized on the fly, in an order that does not depend on the number of processes.

Packing needs the length of every document in tokens, so whoever packs must tokenize. To share that work out, the documents in
reading order are dealt to a fixed number of readers, each of which packs its own rows of every batch. A process runs the readers
of its rows. The position of a reader is where its current group of rows begins, whoever runs it.
"""

import concurrent.futures
import dataclasses
import functools
from typing import Protocol

import grain
import numpy as np

from atlasjax.data.documents import Documents
from atlasjax.data.mixture import Order
from atlasjax.data.pieces import encode_text
from atlasjax.data.token_rows import RowConfig, TokenRows
from atlasjax.data.tokenizers import Tokenizer
from atlasjax.data.windows import Batch, token_dtype

_MOST_READERS = 32
_LEAST_DOCUMENTS = 16  # of a reader in an epoch
_LEAST_BLOCKS = 4
_LEAST_ROWS = 32  # that a reader fills at the same time: rows of 4,096 tokens, with documents of 800, are 98% full
_AHEAD = 16  # documents of a process that each thread reads ahead
_NOTHING = np.zeros(0, np.uint8)


def num_readers(documents: Documents, batch_size: int) -> int:
    """The number of readers: a divisor of the batch size, at most 32, such that each has several documents or blocks in an epoch
    and all their blocks fit in memory."""
    most = min(_MOST_READERS, len(documents) // _LEAST_DOCUMENTS)
    if documents.block_offsets is not None:
        most = min(most, documents.blocks_in_memory, (len(documents.block_offsets) - 1) // _LEAST_BLOCKS)
    return max((n for n in range(1, most + 1) if batch_size % n == 0), default=1)


class ReadingOrder(Protocol):
    """The document index at each place: -1 if there is no document at this place, None after the last one."""

    def __getitem__(self, place: int, /) -> int | None: ...


class Dealt:
    """Every `count`-th place of an order, from `number` on."""

    def __init__(self, order: Order, number: int, count: int):
        self._order, self._number, self._count = order, number, count

    def __getitem__(self, place: int, /) -> int | None:
        return self._order[self._number + place * self._count]


class DealtBlocks:
    """A reading order of documents that are stored in blocks, so that only `window` blocks are in use at a time.

    Every epoch takes the blocks in a new random order, in groups of `window` consecutive blocks, in which the documents are
    shuffled. A reader takes every `count`-th group, from `number` on. A group has as many places as the largest possible one.

    Args:
      block_offsets: int64 [num_blocks + 1], the start of each block, followed by the number of documents.
      window: number of blocks in a group.
      seed: in [0, 2^32). None keeps the order.
      repeat: whether to continue after one epoch.
      number: the reader, in [0, count).
      count: number of readers.
    """

    def __init__(
        self, block_offsets: np.ndarray, window: int, seed: int | None, *, repeat: bool, number: int, count: int
    ):
        self._offsets, self._window, self._seed, self._repeat = block_offsets, window, seed, repeat
        self._number, self._count = number, count
        blocks = len(block_offsets) - 1
        self._groups = -(-blocks // window)
        self._places = int(np.diff(block_offsets).max()) * window
        self._group = functools.lru_cache(maxsize=2)(self._make_group)
        self._order = functools.lru_cache(maxsize=2)(self._make_order)

    def _make_order(self, epoch: int) -> np.ndarray:
        blocks = len(self._offsets) - 1
        return (
            np.arange(blocks) if self._seed is None else np.random.default_rng((self._seed, epoch)).permutation(blocks)
        )

    def _make_group(self, group: int) -> np.ndarray:
        """The documents of a group."""
        epoch, group = divmod(group, self._groups)
        blocks = self._order(epoch)[group * self._window : (group + 1) * self._window]
        documents = np.concatenate([np.arange(*self._offsets[block : block + 2]) for block in blocks])
        if self._seed is not None:
            np.random.default_rng((self._seed, epoch, group)).shuffle(documents)
        return documents

    def __getitem__(self, place: int, /) -> int | None:
        turn, place = divmod(place, self._places)
        group = self._number + turn * self._count
        if not self._repeat and group >= self._groups:
            return None
        documents = self._group(group)
        return int(documents[place]) if place < len(documents) else -1


class TextTokens:
    """Documents of a reader, read and tokenized when they are asked for, or ahead of that in threads.

    Args:
      documents: the documents.
      order: their order.
      tokenizer: the tokenizer.
      threads: what reads ahead, if anything does.
      ahead: number of documents that are read ahead.
      sized: whether their tokens are [2, n], with the bytes of each below.
    """

    def __init__(
        self,
        documents: Documents,
        order: ReadingOrder,
        tokenizer: Tokenizer,
        threads: concurrent.futures.Executor | None = None,
        ahead: int = 0,
        *,
        sized: bool = False,
    ):
        self._documents, self._order, self._tokenizer = documents, order, tokenizer
        self._threads, self._ahead = threads, ahead
        self._sized = sized
        self._dtype = np.dtype(np.int32) if sized else token_dtype(tokenizer.vocab_size)
        self._coming: dict[int, concurrent.futures.Future[np.ndarray | None]] = {}
        self._empty = 0  # empty documents one after another
        self._last: tuple[int, np.ndarray | None] = (-1, None)  # a group may begin within a document

    def document(self, place: int, /) -> tuple[np.ndarray, int] | None:
        if place != self._last[0]:
            self._last = place, self._next(place)
        tokens = self._last[1]
        return None if tokens is None else (tokens, tokens.shape[-1])

    def tokens(self, document: np.ndarray, start: int, stop: int, /) -> np.ndarray:
        return document[..., start:stop]

    def _next(self, place: int) -> np.ndarray | None:
        if self._threads is None:
            return self._encode(place)
        for coming in [coming for coming in self._coming if not place <= coming <= place + self._ahead]:
            self._coming.pop(coming).cancel()  # after a jump to another position
        for coming in range(place, place + self._ahead + 1):
            if coming not in self._coming:
                self._coming[coming] = self._threads.submit(self._encode, coming)
        return self._coming.pop(place).result()

    def _encode(self, place: int) -> np.ndarray | None:
        index = self._order[place]
        if index is None:
            return None
        if index < 0:
            return _NOTHING
        tokens = encode_text(self._tokenizer, self._documents[index], self._dtype, sized=self._sized)
        # After two epochs without a token it would search for ever.
        self._empty = 0 if tokens.size else self._empty + 1
        if self._empty > 2 * len(self._documents):
            raise ValueError(
                "All documents that a reader is dealt are empty. Shuffle them, or leave the empty ones out."
            )
        return tokens


class Readers(grain.IterDataset):
    """Batches with the rows of several readers, one after another. The position has one entry for each."""

    def __init__(self, readers: dict[int, TokenRows]):
        super().__init__()
        self.readers = readers

    def __iter__(self) -> "_ReadersIterator":
        return _ReadersIterator(self.readers)


_Position = dict[str, dict[str, dict[str, int]]]  # "readers" → number → position of a reader


class _ReadersIterator(grain.DatasetIterator):
    def __init__(self, readers: dict[int, TokenRows]):
        super().__init__()
        self._readers = {str(number): iter(rows) for number, rows in readers.items()}

    def __next__(self) -> Batch:
        parts = [next(reader) for reader in self._readers.values()]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def get_state(self) -> _Position:
        return {"readers": {number: reader.get_state() for number, reader in self._readers.items()}}

    def set_state(self, state: _Position) -> None:
        for number, reader in self._readers.items():
            reader.set_state(state["readers"][number])


def packed_documents(
    documents: Documents, tokenizer: Tokenizer, config: RowConfig, *, repeat: bool, num_threads: int
) -> grain.IterDataset:
    """Some rows of batches of packed documents, as in `TokenRows`.

    With `repeat`, documents are dealt to `num_readers` readers. One pass has one reader, so that the number of batches is the same
    in every process.

    Args:
      documents: what to pack. Empty documents are dropped.
      config: the form of the rows.
      repeat: whether to repeat forever, shuffled differently in every epoch.
      num_threads: number of threads that read and tokenize ahead.
    """
    count = num_readers(documents, config.batch_size) if repeat else 1
    size = config.batch_size // count
    first, last, _ = config.rows.indices(config.batch_size)
    mine = [number for number in range(count) if number * size < last and (number + 1) * size > first]
    # One pool for all readers of the process: they wait for one another at every batch.
    threads = concurrent.futures.ThreadPoolExecutor(num_threads) if num_threads else None
    found = {}
    for number in mine:
        order: ReadingOrder
        if documents.block_offsets is None:
            order = Dealt(Order((len(documents),), None, config.seed, repeat=repeat), number, count)
        else:
            window = max(1, documents.blocks_in_memory // count)
            order = DealtBlocks(documents.block_offsets, window, config.seed, repeat=repeat, number=number, count=count)
        ahead = max(1, _AHEAD * num_threads // len(mine))
        tokens = TextTokens(documents, order, tokenizer, threads, ahead, sized=config.sized)
        rows = slice(max(0, first - number * size), min(size, last - number * size))
        found[number] = TokenRows(tokens, dataclasses.replace(config, batch_size=size, rows=rows), _LEAST_ROWS)
    return Readers(found)
