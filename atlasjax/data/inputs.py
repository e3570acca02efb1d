"""Splits a source into parts that can be read independently, with documents read in pieces. Nothing is in memory as a whole.

Used by `prepare`. The documents and the training/validation split are the same as of `load_documents`.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from atlasjax import storage
from atlasjax.data.config import DataConfig, Split
from atlasjax.data.documents import Documents, Selection
from atlasjax.data.files import expand
from atlasjax.data.sources import held_out, load_documents, open_documents
from atlasjax.data.text import json_documents, text_files, text_pieces

Pieces = Iterator[str]
_PART_BYTES = 64 * 2**20  # text files are grouped into parts of this size
_PART_DOCUMENTS = 4096  # documents per part of a random-access source


@dataclasses.dataclass(frozen=True)
class Part:
    """The unit of work of a worker.

    Attributes:
      name: its name in messages.
      size: its number of bytes, or of documents if it is not read from files of text.
      documents: returns its documents in order, each as pieces of text to be joined.
      files: the files of text that it is read from.
    """

    name: str
    size: int
    documents: Callable[[], Iterator[Pieces]]
    files: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The documents of a config.

    Attributes:
      parts: the parts of each input.
      splits: the documents of each split.
      identity: what must not change before an interrupted preparation resumes: the parts, the splits, and the name and size of
        each file.
    """

    parts: tuple[tuple[Part, ...], ...]
    splits: dict[Split, Selection]
    identity: Mapping[str, object]

    @property
    def digest(self) -> str:
        """SHA-256 of the identity, which a finished preparation keeps."""
        return _digest(self.identity)

    def has_digest(self, digest: str) -> bool:
        """Whether a finished preparation was made from these inputs. Older versions kept a digest without the files."""
        without_files = {name: value for name, value in self.identity.items() if name != "files"}
        return digest in (self.digest, _digest(without_files))

    def has_identity(self, saved: Mapping[str, object]) -> bool:
        """Whether an interrupted preparation, whose identity was read from JSON, can go on. Older versions kept no files."""
        own = json.loads(json.dumps(self.identity))
        return all(own.get(name) == value for name, value in saved.items())

    def texts(self, split: Split) -> Iterator[Pieces]:
        """The documents of a split, in the order of the source."""
        selection = self.splits[split]
        numbered = enumerate(document for part in self.parts[selection.input] for document in part.documents())
        wanted = 0
        for number, document in numbered:
            if number == selection.document(wanted):
                wanted += 1
                yield document


def _digest(identity: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def open_inputs(config: DataConfig) -> Inputs:
    """Find the documents of a config. Files are listed, not read.

    Raises:
      FileNotFoundError, ValueError: as `load_documents`.
    """
    if config.separate_validation:
        train, validation = _input(config, separate=False), _input(config, separate=True)
        return _inputs(config, (train, validation), {"train": Selection(0), "validation": Selection(1)})
    if not config.has_validation:
        return _inputs(config, (_input(config, separate=False),), {"train": Selection(0)})
    # Only the source `text` needs the number of its documents, which are files.
    files = _text_files(config, config.paths) if config.source == "text" else []
    how = held_out(config, len(files))
    if how == "tail" and config.source == "text":
        both = tuple(_file_parts(config, files, split) for split in ("train", "validation"))
        return _inputs(config, both, {"train": Selection(0), "validation": Selection(1)})
    if how in ("tail", "blocks"):
        both = tuple(_document_parts(load_documents(config, split)) for split in ("train", "validation"))
        return _inputs(config, both, {"train": Selection(0), "validation": Selection(1)})
    period = config.held_out_period
    splits: dict[Split, Selection] = {
        "train": Selection(0, period, complement=True),
        "validation": Selection(0, period),
    }
    return _inputs(config, (_input(config, separate=False),), splits)


def _inputs(config: DataConfig, parts: tuple[tuple[Part, ...], ...], splits: dict[Split, Selection]) -> Inputs:
    suffixes = {"text": config.suffixes, "jsonl": (".jsonl",), "parquet": (".parquet",)}.get(config.source)
    files = [] if suffixes is None else expand((*config.paths, *config.validation_paths), suffixes).files
    identity = {
        "files": [(str(file), file.stat().st_size) for file in files],
        "parts": [[(part.name, part.size) for part in each] for each in parts],
        "splits": {name: dataclasses.asdict(selection) for name, selection in splits.items()},
    }
    return Inputs(parts, splits, identity)


def _input(config: DataConfig, *, separate: bool) -> tuple[Part, ...]:
    paths = config.validation_paths if separate else config.paths
    if config.source == "text":
        return _file_parts(config, _text_files(config, paths))
    if config.source == "jsonl":
        return tuple(
            Part(str(file), file.stat().st_size, lambda file=file: _lines(config, file), (str(file),))  # type: ignore[misc]
            for file in text_files(paths, (".jsonl",), config.encoding, config.errors)
        )
    return _document_parts(open_documents(config, separate=separate))


def _text_files(config: DataConfig, paths: Sequence[str]) -> list[storage.AnyPath]:
    return text_files(paths, config.suffixes, config.encoding, config.errors)


def _lines(config: DataConfig, file: storage.AnyPath) -> Iterator[Pieces]:
    return (iter((text,)) for text in json_documents(file, config.column, config.encoding, config.errors))


def _file_parts(config: DataConfig, files: list[storage.AnyPath], tail_of: Split | None = None) -> tuple[Part, ...]:
    """Group files into parts, small files together. If tails are held out, `tail_of` is the split to read from each file."""
    groups: list[list[storage.AnyPath]] = []
    room = 0
    for file in files:
        size = file.stat().st_size
        if size > room or not groups:
            groups.append([])
            room = _PART_BYTES
        groups[-1].append(file)
        room -= size
    read = lambda group: (_file(config, file, tail_of) for file in group)
    return tuple(
        Part(
            str(group[0]),
            sum(file.stat().st_size for file in group),
            lambda group=group: _full(read(group)),  # type: ignore[misc]
            tuple(map(str, group)),
        )
        for group in groups
    )


def _full(documents: Iterator[Pieces]) -> Iterator[Pieces]:
    """The documents that are not empty."""
    for document in documents:
        for first in document:
            yield itertools.chain((first,), document)
            break


def _file(config: DataConfig, file: storage.AnyPath, tail_of: Split | None) -> Pieces:
    pieces = lambda: text_pieces(file, config.encoding, config.errors)
    if tail_of is None:
        return pieces()
    # Read twice, because the cut depends on the number of characters, and the text need not fit in memory.
    cut = round(sum(map(len, pieces())) * (1 - config.validation_fraction))
    return _between(pieces(), 0, cut) if tail_of == "train" else _between(pieces(), cut, None)


def _between(pieces: Pieces, start: int, stop: int | None) -> Pieces:
    """Characters `start` to `stop` of a text."""
    at = 0
    for piece in pieces:
        wanted = piece[max(0, start - at) : None if stop is None else max(0, stop - at)]
        at += len(piece)
        if wanted:
            yield wanted


def _document_parts(documents: Documents) -> tuple[Part, ...]:
    """Ranges of random-access documents. Documents that are stored together stay in one part."""
    offsets = documents.block_offsets
    if offsets is None:
        cuts = [*range(0, len(documents), _PART_DOCUMENTS), len(documents)]
    else:
        cuts = [0]
        for offset in map(int, np.unique(offsets)):
            if offset - cuts[-1] >= _PART_DOCUMENTS or offset == len(documents):
                cuts.append(offset)
    one = lambda i: iter((documents[i],))
    return tuple(
        Part(f"documents {a} to {b - 1}", b - a, lambda a=a, b=b: map(one, range(a, b)))  # type: ignore[misc]
        for a, b in itertools.pairwise(cuts)
    )
