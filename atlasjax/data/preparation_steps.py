"""Steps of a preparation that are the same on one machine and on many."""

import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import platform
from collections.abc import Iterator

from atlasjax import storage
from atlasjax.data.config import DataConfig, Split
from atlasjax.data.inputs import Inputs, Part, Selection, open_inputs
from atlasjax.data.manifest import Manifest, read_manifest
from atlasjax.data.pieces import encode_pieces
from atlasjax.data.token_files import TokenFile, TokenWriter
from atlasjax.data.tokenizers import TRAINING_CHARACTERS, Tokenizer, load_tokenizer, make_tokenizer
from atlasjax.data.windows import ending, with_sizes

REQUEST = "prepare.json"
# Fields that only matter when prepared data is read.
_OF_TRAINING = ("sequence_length", "batch_size", "max_segments", "num_threads")


@dataclasses.dataclass(frozen=True)
class Report:
    """Progress of a preparation.

    Attributes:
      stage: "tokenizing" or "shuffling".
      done, total: how many of its inputs are finished, and how many there are.
      unit: what these are: "files" of the source, "documents", or on Beam "parts" of the source.
      fraction: finished fraction of this stage, by size, in [0, 1].
      tokens: tokens written in this stage so far, including unfinished files.
      kept: how many of these tokens an earlier run wrote.
    """

    stage: str
    done: int
    total: int
    unit: str
    fraction: float
    tokens: int
    kept: int


@dataclasses.dataclass(frozen=True)
class Gathered:
    """The final files of a split: `num_files` files, filled in order with documents from the token files `files`."""

    files: tuple[TokenFile, ...]
    selection: Selection
    num_documents: int
    num_files: int
    shuffle_seed: int | None

    def places(self, number: int) -> range:
        """The places in the split of the documents of a final file."""
        first, last = (self.num_documents * i // self.num_files for i in (number, number + 1))
        return range(first, last)

    def document(self, place: int) -> int:
        """The document at a place of the split, counted in all files."""
        if self.shuffle_seed is not None:
            from grain.experimental import index_shuffle

            place = index_shuffle(place, max_index=self.num_documents - 1, seed=self.shuffle_seed, rounds=4)
        return self.selection.document(place)


def request_of(config: DataConfig) -> dict[str, object]:
    """The fields that determine the output. Raises ValueError if others are set, or the data is already prepared."""
    if config.source == "prepared":
        raise ValueError("source 'prepared' is already prepared; prepare takes 'text', 'jsonl', 'parquet', …")
    fields = dataclasses.asdict(config)
    for field in dataclasses.fields(DataConfig):
        if field.name in _OF_TRAINING and fields[field.name] != field.default:
            raise ValueError(
                f"{field.name} is {fields[field.name]!r}; it is set when training on prepared data, not when preparing it."
            )
    return json.loads(
        json.dumps({name: value for name, value in fields.items() if name not in (*_OF_TRAINING, "weights")})
    )


def check_same(folder: storage.AnyPath, saved: dict[str, object], wanted: dict[str, object]) -> None:
    names = [name for name in {**saved, **wanted} if saved.get(name) != wanted.get(name)]
    if names:
        differences = "; ".join(f"{name} was {saved.get(name)!r} and is now {wanted.get(name)!r}" for name in names)
        raise ValueError(
            f"{str(folder)!r} contains another preparation: {differences}. Use another folder, or delete this one."
        )


def finished(config: DataConfig, folder: storage.AnyPath, request: dict[str, object]) -> Manifest:
    """The manifest of a finished folder, if it is of this request and of the source as it is now. The source may be gone."""
    found = read_manifest(folder)
    check_same(folder, found.source, request)
    if found.inputs is not None:
        with contextlib.suppress(FileNotFoundError):
            if not open_inputs(config).has_digest(found.inputs):
                raise changed(folder)
    return found


def changed(folder: storage.AnyPath) -> ValueError:
    return ValueError(
        f"The source has changed since preparation in {str(folder)!r} began. Delete that folder, or use another one."
    )


def separator_of(config: DataConfig) -> str:
    return config.separator if config.packing == "contiguous" else ""


def versions() -> dict[str, str]:
    names = ("atlasjax", "tokenizers", "sentencepiece", "numpy")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def ready_tokenizer(config: DataConfig, inputs: Inputs, folder: storage.AnyPath) -> Tokenizer:
    """Load the tokenizer saved by an earlier run, or make and save one."""
    if (folder / "tokenizer" / "tokenizer.json").exists():
        return load_tokenizer(folder / "tokenizer")

    def beginning(pieces: Iterator[str]) -> str:
        """The start of a document, as much as a tokenizer trains on."""
        taken: list[str] = []
        for piece in pieces:
            taken.append(piece)
            if sum(map(len, taken)) >= TRAINING_CHARACTERS:
                break
        return "".join(taken)

    tokenizer = make_tokenizer(config, map(beginning, inputs.texts("train")))
    tokenizer.save(folder / "tokenizer")
    return tokenizer


def encode_part(part: Part, tokenizer: Tokenizer, separator: str, writer: TokenWriter) -> None:
    """Writes the tokens of the documents of a part, each of which ends with the separator."""
    text, control = ending(tokenizer, separator)
    for document in part.documents():
        for tokens in encode_pieces(tokenizer, itertools.chain(document, (text,)), sized=True):
            writer.write(tokens)
        writer.write(with_sizes(tokenizer, control))
        writer.end_document()


def plan_split(
    config: DataConfig, split: Split, selection: Selection, files: tuple[TokenFile, ...], shard_tokens: int
) -> Gathered:
    documents, tokens = sum(file.documents for file in files), sum(file.tokens for file in files)
    count = selection.count(documents)
    if not count or not tokens:
        others = "all but " if selection.complement else ""
        why = (
            f"{others}every {selection.period}th of {documents} documents"
            if selection.period
            else f"{documents} documents"
        )
        if documents and not tokens:
            raise ValueError(f"The {split} split is empty: it is {why}, and none of them has any text.")
        raise ValueError(
            f"The {split} split is empty: it is {why}, with {tokens} tokens in total. Use more text, another "
            f"--data.validation-fraction (now {config.validation_fraction}) or separate validation data "
            "(--data.validation-paths)."
        )
    num_files = min(count, -(-(tokens * count // documents) // shard_tokens) or 1)
    return Gathered(files, selection, count, num_files, config.seed if config.shuffle and split == "train" else None)
