"""Makes batches from a `DataConfig`, with an exact position that can be saved and restored."""

import copy
import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import grain
import numpy as np

from atlasjax import check
from atlasjax.data.config import DataConfig, Split
from atlasjax.data.documents import Documents, in_order
from atlasjax.data.mixture import Mixed, Order, whole_weights
from atlasjax.data.packing import num_readers, packed_documents
from atlasjax.data.prepared import identity as prepared_identity
from atlasjax.data.prepared import open_prepared
from atlasjax.data.sources import load_documents
from atlasjax.data.token_rows import PreparedDocuments, RowConfig, TokenRows
from atlasjax.data.tokenizers import Tokenizer
from atlasjax.data.windows import Batch, SizedTokens, TokenStream, Windows, token_stream

_FOREVER = 2**45  # windows; Grain's endless repetition overflows when batches of size one are sliced


class TextTooShortError(ValueError):
    """A split has fewer tokens than one sequence."""


class Position(TypedDict):
    """A position in the batches, which can be stored as JSON.

    Attributes:
      pipeline: the settings of the pipeline that it belongs to.
      position: the position of the pipeline's Grain iterator.
    """

    pipeline: dict[str, object]
    position: dict[str, Any]


class BatchIterator(Iterator[Batch]):
    """Iterates over batches. Its position is small, exact, and can be stored as JSON."""

    def __init__(self, iterator: grain.DatasetIterator, identity: dict[str, object]):
        self._iterator, self._identity = iterator, identity

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> Position:
        """Return the position after the last batch: a dict of strings, numbers and dicts that can be stored as JSON."""
        return {"pipeline": dict(self._identity), "position": copy.deepcopy(self._iterator.get_state())}

    def set_state(self, state: Position | None) -> None:
        """Move to a position. The next batch is the one that followed when `state` was saved.

        Raises:
          ValueError: the state belongs to a pipeline with other data or another configuration (the message names the difference),
            or is not a valid position.
        """
        if (
            not isinstance(state, dict)
            or set(state) != {"pipeline", "position"}
            or not isinstance(state["pipeline"], dict)
        ):
            raise ValueError("This is not a data position: it must be a dict with the keys 'pipeline' and 'position'.")
        # Older positions do not have them.
        later = ("max_segments", "tokens_crc32")
        saved = {name: value for name, value in self._identity.items() if name in later} | state["pipeline"]
        names = sorted(saved.keys() | self._identity.keys())
        differences = [
            f"{name} was {saved.get(name)!r} and is now {self._identity.get(name)!r}"
            for name in names
            if saved.get(name) != self._identity.get(name)
        ]
        if differences:
            raise ValueError(f"The saved data position belongs to another pipeline: {'; '.join(differences)}.")
        position, own = state["position"], self._iterator.get_state()
        if isinstance(position, dict) and isinstance(position.get("readers"), dict) and "readers" in own:
            # Batches of other processes are left out.
            readers = {name: reader for name, reader in position["readers"].items() if name in own["readers"]}
            position = {**position, "readers": readers}
        _check_position(position, own, "position")
        try:
            self._iterator.set_state(copy.deepcopy(position))
        except IndexError as error:
            raise ValueError(f"The saved data position is out of range: {error}") from None


def merge_positions(positions: Sequence[Position | None]) -> Position | None:
    """The position of a whole job, from the positions of its processes (`BatchIterator.get_state`), for any number of processes.

    Raises:
      ValueError: they are not positions of the processes of one job.
    """
    first = positions[0]
    if all(position == first for position in positions):
        return first
    wrong = ValueError("The saved data positions of the processes do not belong together.")
    readers: dict[str, object] = {}
    for position in positions:
        if first is None or position is None:
            raise wrong
        try:
            same = position["pipeline"] == first["pipeline"]
            own = dict(position["position"]["readers"])
        except (TypeError, KeyError, ValueError):
            raise wrong from None
        if not same or any(readers.get(name, reader) != reader for name, reader in own.items()):
            raise wrong
        readers |= own
    assert first is not None
    return {**first, "position": {"readers": readers}}


def _check_position(saved: object, own: object, name: str) -> None:
    """Raises ValueError unless a saved position has the same keys as the iterator's own, with numbers ≥ 0 where it has numbers."""
    if isinstance(own, dict):
        if not isinstance(saved, dict) or saved.keys() != own.keys():
            raise ValueError(f"The saved data {name} is {str(saved)[:60]!r}; it should have the keys {sorted(own)}.")
        for key in own:
            _check_position(saved[key], own[key], f"{name}.{key}")
    elif check.is_integer(own):
        check.require(check.is_integer(saved, 0) and saved < 2**63, f"The saved data {name}", saved, "in [0, 2^63)")


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Batches of one process. It can be iterated over several times.

    Attributes:
      split: "train" or "validation".
      max_segments: static bound on the number of segments in a row, padding included. None if batches have no segment_ids.
      num_tokens: number of tokens in the split. None if they are not counted in advance (packing "documents").
      batches_per_epoch: number of batches in one pass, rounded up, since with `repeat` a batch may span two epochs. None if
        unknown, and for a mixture of sets that end at different times.
      dataset: the underlying Grain dataset.
      identity: the settings that a saved position must match.
    """

    split: Split
    max_segments: int | None
    num_tokens: int | None
    batches_per_epoch: int | None
    dataset: grain.IterDataset
    identity: dict[str, object]

    def __iter__(self) -> BatchIterator:
        return BatchIterator(iter(self.dataset), self.identity)


def make_pipeline(
    config: DataConfig,
    tokenizer: Tokenizer,
    split: Split,
    process_index: int = 0,
    process_count: int = 1,
    *,
    repeat: bool | None = None,
) -> Pipeline:
    """Build the batches of one process.

    A batch is {"inputs": int32 [B, T], "targets": int32 [B, T], "weights": float32 [B, T]} and, for packing "documents",
    "segment_ids": int32 [B, T], with B = batch_size / process_count and T = sequence_length. Weights are 0 at padding and
    where the target would be in another document. One pass has "bytes": int32 [B, T] too, the bytes of text that each target
    represents, where they depend on the text (`Tokenizer.is_exact`).

    The global batches are the same for any number of processes, and each process has its slice of them. A saved position can be
    used with any number of processes; with packing "documents" of sources other than "prepared", it is that of all processes
    together (`merge_positions`), since each one reads and tokenizes only the documents of its own rows. Without `repeat`, every
    process reads all documents: all processes have the same number of batches, and the last batch is padded with rows of weight 0.

    Args:
      config: the data.
      tokenizer: from `make_tokenizer` or `load_tokenizer`.
      split: "train" or "validation".
      process_index: which slice, in [0, process_count).
      process_count: number of processes. It must divide config.batch_size.
      repeat: whether to repeat forever or stop after one pass. None repeats only for "train".

    Raises:
      ValueError: batch_size is not divisible by process_count, the split is too short (`TextTooShortError`), or as
        `load_documents`.
      FileNotFoundError: as `load_documents`.
    """
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index is {process_index}; it must be in [0, {process_count}), process_count.")
    if config.batch_size % process_count:
        raise ValueError(f"batch_size {config.batch_size} is not divisible by process_count {process_count}.")
    repeat = split == "train" if repeat is None else repeat
    asked = _Asked(config, tokenizer, split, process_index, process_count, repeat)
    if config.source == "prepared":
        return _prepared(asked)
    documents = load_documents(config, split)
    if config.packing == "documents":
        return _documents(asked, documents)
    stream = token_stream(documents, tokenizer, config.separator, sized=asked.is_sized)
    ids = np.ascontiguousarray(np.atleast_2d(stream)[0])
    identity = asked.identity(num_tokens=len(ids), tokens_crc32=zlib.crc32(ids.data))
    return _contiguous(asked, [stream if stream.ndim == 1 else SizedTokens(stream)], None, identity)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """The arguments of `make_pipeline`."""

    config: DataConfig
    tokenizer: Tokenizer
    split: Split
    process_index: int
    process_count: int
    repeat: bool

    @property
    def is_sized(self) -> bool:
        """Whether batches have the bytes of each target: only what is read once is measured in bits per byte."""
        return not self.repeat and not self.tokenizer.is_exact

    @property
    def seed(self) -> int | None:
        """Seed of the shuffling. None keeps the order."""
        return self.config.seed if self.config.shuffle and self.split == "train" else None

    def rows(self, sized: bool) -> RowConfig:
        """Packed rows, those of this process."""
        config = self.config
        local = config.batch_size // self.process_count
        mine = slice(self.process_index * local, (self.process_index + 1) * local)
        return RowConfig(config.sequence_length, config.max_segments, config.batch_size, mine, self.seed, sized)

    def identity(self, **more: object) -> dict[str, object]:
        """The settings that a saved position must match."""
        config = self.config
        fields = ("source", "packing", "sequence_length", "batch_size")
        return {
            **{name: getattr(config, name) for name in fields},
            **({"source_options": config.source_options} if config.has_own_source else {}),
            "split": self.split,
            "repeat": self.repeat,
            "shuffle_seed": self.seed,
            "vocab_size": self.tokenizer.vocab_size,
            **more,
        }


def _prepared(asked: _Asked) -> Pipeline:
    config = asked.config
    joined, sets = open_prepared(config, asked.tokenizer, asked.split)
    own = {"max_segments": config.max_segments} if config.packing == "documents" else {}
    streams = [each.tokens for each in sets]
    # Evaluation reads everything once, regardless of the weights.
    weights = config.weights if config.weights and asked.repeat else None
    identity = asked.identity(**prepared_identity(config, sets), **own)
    if config.packing == "contiguous":
        whole = None if weights is None else whole_weights(weights)
        return _contiguous(asked, streams if weights else [joined], whole, identity)
    counts = [stream.num_documents for stream in streams]
    if weights is not None:  # from weights of tokens to weights of documents, by the mean length in each set
        weights = whole_weights(
            [weight * count / len(stream) for weight, count, stream in zip(weights, counts, streams)]
        )
    dataset: grain.IterDataset = TokenRows(
        PreparedDocuments(joined, Order(counts, weights, asked.seed, repeat=asked.repeat)), asked.rows(joined.is_sized)
    )
    if config.num_threads:
        dataset = grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=2)
    return Pipeline(asked.split, config.max_segments, len(joined), None, dataset, identity)


def _contiguous(
    asked: _Asked, streams: Sequence[TokenStream], weights: Sequence[int] | None, identity: dict[str, object]
) -> Pipeline:
    config = asked.config
    for tokens in streams:
        if len(tokens) <= config.sequence_length:
            raise _too_short(config, asked.split, len(tokens))
    # Evaluation ends with a whole batch; its last windows may have no weight.
    multiple = 1 if asked.repeat else config.batch_size
    windows = [Windows(tokens, config.sequence_length, multiple) for tokens in streams]
    datasets = [grain.MapDataset.source(each) for each in windows]
    if asked.seed is not None:
        datasets = [dataset.shuffle(seed=asked.seed) for dataset in datasets]
    dataset = datasets[0] if weights is None else Mixed(datasets, weights, _FOREVER)
    if asked.repeat and weights is None:
        dataset = dataset.repeat(_FOREVER // len(dataset))
    # The slices of a global batch are adjacent, so a process takes every process_count-th of them.
    dataset = dataset.batch(config.batch_size // asked.process_count)[asked.process_index :: asked.process_count]
    read = grain.ReadOptions(num_threads=config.num_threads, prefetch_buffer_size=2 * config.num_threads)
    per_epoch = -(-len(windows[0]) // config.batch_size) if weights is None else None
    return Pipeline(asked.split, None, sum(map(len, streams)), per_epoch, dataset.to_iter_dataset(read), identity)


def _too_short(config: DataConfig, split: Split, num_tokens: int) -> TextTooShortError:
    is_cut = not config.separate_validation and config.source != "prepared"
    fraction = f", another validation_fraction (now {config.validation_fraction})" if is_cut else ""
    return TextTooShortError(
        f"The {split} {'split' if is_cut else 'text'} is too short for one sequence: it has {num_tokens} tokens, and "
        f"sequence_length {config.sequence_length} needs {config.sequence_length + 1}. Use more text{fraction}, or train with a "
        "shorter sequence_length."
    )


def _documents(asked: _Asked, documents: Documents) -> Pipeline:
    config = asked.config
    identity = asked.identity(num_documents=len(documents), max_segments=config.max_segments)
    if asked.repeat:
        identity["readers"] = num_readers(documents, config.batch_size)
    if not any(in_order(documents)):  # stops at the first non-empty document
        raise ValueError(f"All {len(documents)} documents of the {asked.split} split are empty.")
    rows = asked.rows(asked.is_sized)
    dataset = packed_documents(documents, asked.tokenizer, rows, repeat=asked.repeat, num_threads=config.num_threads)
    return Pipeline(asked.split, config.max_segments, None, None, dataset, identity)
