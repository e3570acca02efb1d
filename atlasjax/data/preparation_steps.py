"""Steps of a preparation that are the same on one machine and on many."""

import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import pathlib
import platform
import shutil
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from atlasjax import storage
from atlasjax.data.config import DataConfig, Split
from atlasjax.data.documents import Selection
from atlasjax.data.inputs import Inputs, Part, open_inputs
from atlasjax.data.manifest import Manifest, read_manifest, write_manifest
from atlasjax.data.pieces import encode_pieces
from atlasjax.data.token_files import TokenFile, TokenWriter
from atlasjax.data.tokenizers import TRAINING_CHARACTERS, Tokenizer, load_tokenizer, make_tokenizer
from atlasjax.data.windows import ending, token_dtype, with_sizes
from atlasjax.storage import lease, locks

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


@dataclasses.dataclass(frozen=True)
class Preparation:
    """A preparation that has begun.

    Attributes:
      config: what is prepared.
      folder: where to.
      inputs: its documents.
      tokenizer: saved in the folder.
      request: `request_of` the config, and `shard_tokens`, the approximate number of tokens per final file.
      report: is told the progress.
    """

    config: DataConfig
    folder: storage.AnyPath
    inputs: Inputs
    tokenizer: Tokenizer
    request: Mapping[str, object]
    report: Callable[[Report], None]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the ids in the files."""
        return token_dtype(self.tokenizer.vocab_size)

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        """Name of each part's token file → the number of its input, and its own number in that."""
        return {
            f"{i}-{number:06d}": (i, number) for i, each in enumerate(self.inputs.parts) for number in range(len(each))
        }

    def plans(self, written: Mapping[str, TokenFile]) -> dict[Split, Gathered]:
        """How the final files of each split are made from the token files of all parts. Raises ValueError if a split is empty."""
        files = [
            tuple(written[name] for name, (i, _) in self.parts.items() if i == n) for n in range(len(self.inputs.parts))
        ]
        return {split: _plan(self, split, chosen, files[chosen.input]) for split, chosen in self.inputs.splits.items()}

    def finish(self, written: Mapping[str, TokenFile], plans: Mapping[Split, "Gathered"]) -> Manifest:
        """Writes the manifest of the final files, and removes what was only needed to resume."""
        names = final_files(plans)
        splits = {split: tuple(written[name] for name, (of, _) in names.items() if of == split) for split in plans}
        result = Manifest(
            self.tokenizer.fingerprint, self.tokenizer.vocab_size, self.dtype.name, self.config.packing,
            separator_of(self.config), splits, dict(self.request), _versions(), self.inputs.digest,
        )  # fmt: skip
        write_manifest(self.folder, result)
        clean(self.folder)
        return result


def begin(
    config: DataConfig,
    folder: storage.AnyPath,
    inputs: Inputs,
    request: Mapping[str, object],
    on_report: Callable[[Report], None] | None,
) -> Preparation:
    """Begins in a folder, which is held, or goes on with what is in it.

    Raises:
      ValueError: that is another preparation, or the source has changed since it began.
    """
    begun = folder / REQUEST
    if begun.exists():
        saved = storage.read_json(begun)
        # A preparation that is uploaded when it is finished saves the request alone.
        check_same(folder, saved.get("request", saved), request)
        if not inputs.has_identity(saved.get("inputs", {})):
            raise _changed(folder)
    storage.write_whole(begun, json.dumps({"request": request, "inputs": inputs.identity}).encode())
    tokenizer = _ready_tokenizer(config, inputs, folder)
    (folder / "parts").mkdir(exist_ok=True)
    return Preparation(config, folder, inputs, tokenizer, request, on_report or (lambda report: None))


def final_files(plans: Mapping[Split, Gathered]) -> dict[str, tuple[Split, int]]:
    """Name of each final file → its split, and its number in that."""
    return {f"{split}-{i:05d}": (split, i) for split, plan in plans.items() for i in range(plan.num_files)}


def descriptions(folder: storage.AnyPath, names: Iterable[str]) -> dict[str, TokenFile]:
    """The finished files among these, by name."""
    paths = {name: folder / f"{name}.json" for name in names}
    return {name: TokenFile(**storage.read_json(path)) for name, path in paths.items() if path.exists()}


@contextlib.contextmanager
def held(folder: storage.AnyPath) -> Iterator[None]:
    """Holds a folder against a second preparation. Stores other than gs:// have no lease."""
    if isinstance(folder, storage.StorePath):
        with lease.hold(folder, locks.owner()) if folder.scheme == "gs" else contextlib.nullcontext():
            yield
        return
    try:
        lock = locks.take(folder / "lock")
    except locks.HeldError as error:
        raise ValueError(f"Another process is preparing data in {str(folder)!r} ({error.holder}).") from None
    with lock:
        yield


def clean(folder: storage.AnyPath) -> None:
    """Removes what is only needed to resume."""
    parts = folder / "parts"
    if isinstance(parts, pathlib.Path):
        shutil.rmtree(parts, ignore_errors=True)
    else:
        parts.rmtree()
    for split in typing.get_args(Split):
        for path in folder.glob(f"{split}-*.json"):
            path.unlink()
    with contextlib.suppress(FileNotFoundError):
        (folder / REQUEST).unlink()


def other_files(folder: storage.AnyPath) -> ValueError:
    """The error for a folder in which no preparation has begun."""
    return ValueError(f"The folder {str(folder)!r} contains other files. Use an empty or new folder.")


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


def check_same(folder: storage.AnyPath, saved: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    """Raises ValueError if the saved request of a folder is not the one that is wanted."""
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
                raise _changed(folder)
    return found


def _changed(folder: storage.AnyPath) -> ValueError:
    return ValueError(
        f"The source has changed since preparation in {str(folder)!r} began. Delete that folder, or use another one."
    )


def separator_of(config: DataConfig) -> str:
    return config.separator if config.packing == "contiguous" else ""


def _versions() -> dict[str, str]:
    names = ("atlasjax", "tokenizers", "sentencepiece", "numpy")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def _ready_tokenizer(config: DataConfig, inputs: Inputs, folder: storage.AnyPath) -> Tokenizer:
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


def _plan(job: Preparation, split: Split, selection: Selection, files: tuple[TokenFile, ...]) -> Gathered:
    documents, tokens = sum(file.documents for file in files), sum(file.tokens for file in files)
    count = selection.count(documents)
    if not count or not tokens:
        raise _empty(job.config, split, selection, documents, tokens)
    shard_tokens = typing.cast(int, job.request["shard_tokens"])
    num_files = min(count, -(-(tokens * count // documents) // shard_tokens) or 1)
    seed = job.config.seed if job.config.shuffle and split == "train" else None
    return Gathered(files, selection, count, num_files, seed)


def _empty(config: DataConfig, split: Split, selection: Selection, documents: int, tokens: int) -> ValueError:
    others = "all but " if selection.complement else ""
    why = (
        f"{others}every {selection.period}th of {documents} documents" if selection.period else f"{documents} documents"
    )
    if documents and not tokens:
        return ValueError(f"The {split} split is empty: it is {why}, and none of them has any text.")
    return ValueError(
        f"The {split} split is empty: it is {why}, with {tokens} tokens in total. Use more text, another "
        f"--data.validation-fraction (now {config.validation_fraction}) or separate validation data "
        "(--data.validation-paths)."
    )
