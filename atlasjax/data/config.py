"""`DataConfig`: what to read, how to cut it into sequences, and in what order."""

import dataclasses
import os
import typing
from collections.abc import Sequence
from typing import Literal

from atlasjax import check, storage
from atlasjax.data.text import Errors, is_encoding
from atlasjax.names import name_of, options_text, resolve, takes

Source = Literal["embedded", "text", "jsonl", "parquet", "tfds", "prepared"]
Packing = Literal["contiguous", "documents"]
HeldOut = Literal["auto", "tail", "blocks", "documents"]
Split = Literal["train", "validation"]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Training and validation data.

    Sources: `embedded` is the Python language reference that ships with CPython (`pydoc_data.topics`); `text` reads files, one
    document each; `jsonl` reads one string field of each line of JSON; `parquet` reads one string column; `tfds` reads any
    TensorFlow Datasets data source that is already on disk (TensorFlow is not needed); `prepared` reads the output of
    `atlasjax prepare`, where the tokenizer, the training/validation split and the packing are already fixed. Your own source is
    named "package.module:Class"; see `source_options`.

    Packings: `contiguous` tokenizes the whole split in memory (in every process) and cuts one long stream into windows;
    `documents` reads and tokenizes documents on the fly, divides them among the processes, and packs them into rows with segment
    ids. For a corpus larger than memory use `documents` or the source `prepared`. Neither holds the corpus in memory.

    Raises ValueError if a field has an invalid value or two fields clash.
    """

    source: str = "embedded"
    """Where the text comes from: "embedded", "text", "jsonl", "parquet", "tfds", "prepared", or "package.module:Class" for your
    own class or function that returns documents: a sequence of strings with `len` and indexing. The class or function itself is
    also accepted, and stored by name."""
    source_options: str = "{}"
    """Keyword arguments for your own source, as a JSON object. A dictionary is also accepted, and stored as text. A source with a
    `split` parameter is called with "train" or "validation", and nothing is held out of what it returns."""
    paths: tuple[str, ...] = ()
    """Files, folders (searched recursively) or glob patterns for the sources `text`, `jsonl` and `parquet`. Text and JSON lines may
    be compressed (.gz, .zst). For the source `prepared`: its folders."""
    weights: tuple[float, ...] = ()
    """With several folders of the source `prepared`: the relative share of training tokens from each. Without weights, they are
    read as one set."""
    suffixes: tuple[str, ...] = (".txt", ".md")
    """Suffixes of the files that the source `text` reads from a folder. Files named individually are always read."""
    column: str = "text"
    """String column (source `parquet`), or string field of each line (source `jsonl`)."""
    encoding: str = "utf-8"
    """Encoding of the sources `text` and `jsonl`, as a Python codec name such as "latin-1"."""
    errors: Errors = "strict"
    """How to handle bytes that are invalid in the encoding: `strict` raises an error, `replace` substitutes U+FFFD, `skip` drops
    them."""
    tfds_name: str = ""
    """Dataset of the source `tfds`: "name", "name/config" or "name:version"."""
    tfds_data_dir: str | None = None
    """Folder of the TensorFlow Datasets. None means TFDS_DATA_DIR or ~/tensorflow_datasets."""
    tfds_split: str = "train"
    """Split to train on; TFDS slicing such as "train[:90%]" works."""
    tfds_feature: str = "text"
    """Feature of a TFDS example that holds the text."""

    validation_paths: tuple[str, ...] = ()
    """Separate validation files for the sources `text`, `jsonl` and `parquet`. If given, nothing is held out of `paths`."""
    tfds_validation_split: str = ""
    """Separate validation split for the source `tfds`. If given, nothing is held out of `tfds_split`."""
    held_out: HeldOut = "auto"
    """How to hold out validation text: the `tail` of every file, evenly spaced `blocks` of 4 KiB of the joined text, or every n-th
    document (`documents`). `auto` uses blocks for the embedded text; for other sources it uses documents if there are enough, and
    otherwise the tail."""
    validation_fraction: float = 0.05
    """Fraction of the text (or of the documents) that is held out, in [0, 0.5]. 0 means no validation split. Blocks and documents
    are every n-th one, where n is 1 / fraction, rounded: 0.4 holds out every second one."""

    tokenizer: str = "byte"
    """"byte", "bpe:<vocabulary size>" (trained on the training split), "bpe:<path of a tokenizers JSON file>" or
    "sentencepiece:<path of a model>". The source `prepared` has its own tokenizer: leave the default, or name the same one."""
    separator: str = "\n\n"
    """Text between two documents of a contiguous stream."""
    packing: Packing = "contiguous"
    """One long stream cut into windows, or documents packed into rows with segment ids."""
    max_segments: int = 16
    """Maximum number of segments in a row for packing `documents`; padding at the end counts as one."""
    sequence_length: int = 512
    """Tokens per sequence."""
    batch_size: int = 8
    """Sequences per batch, over all processes."""
    shuffle: bool = True
    """Whether to shuffle the training split, differently in every epoch. Validation is never shuffled."""
    seed: int = 0
    """Seed of the shuffling, in [0, 2^32)."""
    num_threads: int = 0
    """Threads that read and tokenize ahead, at most 256. 0 reads in the caller's thread, which is best for text held in memory."""

    def __post_init__(self) -> None:
        for name in (
            "column",
            "tfds_name",
            "tfds_split",
            "tfds_feature",
            "tfds_validation_split",
            "tokenizer",
            "separator",
        ):
            check.require(isinstance(getattr(self, name), str), name, getattr(self, name), "a string")
        for name in ("paths", "suffixes", "validation_paths"):
            value = getattr(self, name)
            several = isinstance(value, Sequence) and not isinstance(value, str)
            fits = several and all(isinstance(item, str | os.PathLike | storage.StorePath) for item in value)
            check.require(fits, name, value, "a tuple of strings")
            object.__setattr__(self, name, tuple(str(item) for item in value))  # JSON has lists
        object.__setattr__(self, "weights", tuple(self.weights))
        object.__setattr__(self, "source", name_of("source", self.source))
        object.__setattr__(self, "source_options", options_text("DataConfig", "source_options", self.source_options))
        resolve("data source", self.source, {name: name for name in typing.get_args(Source)})
        check.literal("packing", self.packing, Packing)
        check.literal("held_out", self.held_out, HeldOut)
        check.literal("errors", self.errors, Errors)
        is_known = isinstance(self.encoding, str) and is_encoding(self.encoding)
        check.require(is_known, "encoding", self.encoding, "a text encoding, such as 'utf-8', 'latin-1' or 'utf-16'")
        for name, least in (("sequence_length", 1), ("batch_size", 1), ("max_segments", 2), ("num_threads", 0)):
            value = getattr(self, name)
            check.require(check.is_integer(value, least), name, value, f"an integer of at least {least}")
        # Positions, and twice the length, are counted in int32.
        for name, most in (("sequence_length", 2**30), ("num_threads", 256)):
            value = getattr(self, name)
            check.require(value <= most, name, value, f"an integer of at most {most:,}")
        fraction = self.validation_fraction
        check.require(0 <= fraction <= 0.5, "validation_fraction", fraction, "in [0, 0.5]")
        check.require(0 <= self.seed < 2**32, "seed", self.seed, "in [0, 2^32)")
        self._check_source()

    def _check_source(self) -> None:
        reads_files = self.source in ("text", "jsonl", "parquet", "prepared")
        if reads_files and not self.paths:
            raise ValueError(f"source {self.source!r} needs paths; none are given.")
        if not reads_files and (self.paths or self.validation_paths):
            given = (self.paths + self.validation_paths)[0]
            raise ValueError(
                f"source {self.source!r} reads no paths, but {given!r} is given; use source 'text', 'jsonl' or "
                "'parquet'."
            )
        if (self.encoding, self.errors) != ("utf-8", "strict") and self.source not in ("text", "jsonl"):
            raise ValueError(
                f"encoding is {self.encoding!r} and errors is {self.errors!r}, but source {self.source!r} has no bytes to decode; "
                "these options are for 'text' and 'jsonl'."
            )
        if self.source == "prepared" and (self.validation_paths or self.held_out != "auto"):
            raise ValueError(
                "source 'prepared' was split into training and validation when it was prepared; validation_paths and held_out "
                "are options of `atlasjax prepare`."
            )
        if self.weights:
            fits = self.source == "prepared" and len(self.weights) == len(self.paths)
            fits = fits and all(check.is_finite(weight) and weight > 0 for weight in self.weights)
            check.require(
                fits,
                "weights",
                self.weights,
                f"a positive number for each of the {len(self.paths)} paths of source 'prepared'",
            )
        if self.source == "tfds" and not self.tfds_name:
            raise ValueError("source 'tfds' needs tfds_name, the name of a prepared dataset.")
        if self.source_options != "{}" and not self.has_own_source:
            raise ValueError(
                f"source_options is {self.source_options}, but source {self.source!r} takes none; they are for "
                "your own source, named 'package.module:Class'."
            )
        if self.held_out in ("tail", "blocks") and not self.is_in_memory:
            raise ValueError(
                f"held_out {self.held_out!r} cuts text in memory; source {self.source!r} holds out 'documents'."
            )
        if self.held_out == "blocks" and self.packing == "documents":
            raise ValueError(
                "held_out 'blocks' cuts across documents; with packing 'documents' use 'documents' or 'tail'."
            )

    @property
    def has_own_source(self) -> bool:
        """Whether the source is a user's own, named by module and object."""
        return ":" in self.source

    @property
    def is_in_memory(self) -> bool:
        """Whether the source's text is read into memory, where it can be cut anywhere."""
        return self.source in ("embedded", "text")

    @property
    def separate_validation(self) -> bool:
        """Whether validation text has its own files or TFDS split, or comes from a user's source with a parameter `split`."""
        if self.has_own_source:
            return takes(resolve("data source", self.source, {}), "split")
        return bool(self.tfds_validation_split) if self.source == "tfds" else bool(self.validation_paths)

    @property
    def has_validation(self) -> bool:
        """Whether there is a validation split."""
        return self.separate_validation or self.validation_fraction > 0

    @property
    def held_out_period(self) -> int:
        """n such that every n-th block or document is held out; 1 / `validation_fraction`, rounded."""
        return max(2, round(1 / self.validation_fraction))
