"""Document packing: shuffles and tokenizes documents, cuts long ones, and packs them into rows with segment ids."""

import dataclasses
import functools
from collections.abc import Sequence

import grain
import numpy as np

from atlasjax.data.documents import Documents
from atlasjax.data.pieces import encode_text
from atlasjax.data.tokenizers import Tokenizer
from atlasjax.data.windows import Batch, token_dtype

_LEAST_BINS = 8  # rows filled at the same time; more rows need less padding, but cost memory and time on resume


class BlockShuffle(grain.MapDataset):
    """Shuffles documents that are stored in blocks, so that only a few blocks are in use at a time.

    Every epoch takes the blocks in a new random order, and shuffles the documents within each group of `window` consecutive blocks.

    Args:
      parent: the documents.
      block_offsets: int64 [num_blocks + 1], the start of each block, followed by the number of documents.
      window: number of blocks in use at a time.
      seed: in [0, 2^32).
    """

    def __init__(self, parent: grain.MapDataset, block_offsets: np.ndarray, window: int, seed: int):
        super().__init__(parent)
        self._offsets, self._window, self._seed = block_offsets, window, seed
        self._order = functools.lru_cache(maxsize=2)(self._epoch_order)

    def _epoch_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of the blocks in an epoch, and the offsets of the blocks in that order."""
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._offsets) - 1)
        return order, np.concatenate([[0], np.cumsum(np.diff(self._offsets)[order])])

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        epoch, position = divmod(index, len(self))
        order, offsets = self._order(epoch)
        first = (int(np.searchsorted(offsets, position, side="right")) - 1) // self._window * self._window
        start, stop = int(offsets[first]), int(offsets[min(first + self._window, len(order))])
        seed = int(np.random.SeedSequence((self._seed, epoch, first)).generate_state(1)[0])
        shuffle = grain.experimental.index_shuffle
        position = start + shuffle(position - start, max_index=stop - start - 1, seed=seed, rounds=4)
        place = int(np.searchsorted(offsets, position, side="right")) - 1
        return self._parent[int(self._offsets[order[place]] + position - offsets[place])]


class _Cuts(Sequence[Batch]):
    """The pieces of a document, each made on access."""

    def __init__(self, tokens: np.ndarray, length: int):
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        return -(-len(self._tokens) // self._length)

    def __getitem__(self, index):
        start = index * self._length
        tokens = self._tokens[start : start + self._length + 1]
        columns = np.zeros((min(self._length, len(tokens)), 3), np.int32)
        columns[:, 0] = tokens[: len(columns)]
        columns[: len(tokens) - 1, 1] = tokens[1:]
        columns[: len(tokens) - 1, 2] = 1
        return {"tokens": columns}


@dataclasses.dataclass(frozen=True)
class CutDocument(grain.experimental.FlatMapTransform):
    """Cut the tokens of a document, integers [n], into pieces of at most `sequence_length`.

    A piece is {"tokens": int32 [length, 3]} with the columns input, target and weight. Over the pieces of a document, every token
    is an input once, and every token except the first is a target of weight 1 once. Only the last token has no target.
    """

    sequence_length: int

    def flat_map(self, element: np.ndarray) -> Sequence[Batch]:
        return _Cuts(element, self.sequence_length)


def _as_sequence(packed: Batch) -> Batch:
    tokens = packed["tokens"]
    return {
        "inputs": np.ascontiguousarray(tokens[:, 0]),
        "targets": np.ascontiguousarray(tokens[:, 1]),
        "weights": tokens[:, 2].astype(np.float32),
        "segment_ids": packed["tokens_segment_ids"],
    }


def packed_rows(
    documents: Documents,
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    max_segments: int,
    batch_size: int,
    shuffle_seed: int | None,
    repeat: bool,
    num_threads: int,
) -> grain.IterDataset:
    """Pack documents into rows by first fit.

    A row holds at most `max_segments` - 1 documents (or pieces of documents), with segment ids 1, 2, … Padding at its end has
    segment id 0, token ids 0 and weights 0. An element is {"inputs", "targets", "segment_ids": int32 [T], "weights":
    float32 [T]}, T = sequence_length.

    Args:
      documents: what to pack. Empty documents are dropped.
      batch_size: number of rows taken at a time. This many rows, but at least 8, are filled at the same time.
      shuffle_seed: seed of the shuffling. None keeps the order.
      repeat: whether to repeat forever, shuffled differently in every epoch.
      num_threads: number of threads that read and tokenize ahead.
    """
    dataset = grain.MapDataset.source(documents)
    if shuffle_seed is not None:
        offsets = documents.block_offsets
        if offsets is None:
            dataset = dataset.shuffle(seed=shuffle_seed)
        else:
            dataset = BlockShuffle(dataset, offsets, documents.blocks_in_memory, shuffle_seed)
    if repeat:
        dataset = dataset.repeat()
    read = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=16 * num_threads)
    dtype = token_dtype(tokenizer.vocab_size)
    tokens = dataset.map(lambda text: encode_text(tokenizer, text, dtype)).to_iter_dataset(read)
    pieces = grain.experimental.FlatMapIterDataset(tokens, CutDocument(sequence_length))
    return grain.experimental.FirstFitPackIterDataset(
        pieces,
        length_struct={"tokens": sequence_length},
        num_packing_bins=max(batch_size, _LEAST_BINS),
        max_sequences_per_bin=max_segments - 1,
        seed=shuffle_seed or 0,
        shuffle_bins=shuffle_seed is not None,
    ).map(_as_sequence)
