"""Tokenizers with one interface: bytes, byte-level BPE (trained here or loaded), and SentencePiece models."""

import os
import zlib
from collections.abc import Iterable, Iterator

from atlasjax import storage
from atlasjax.data.byte_pairs import BpeTokenizer, bpe_of, check_trainable
from atlasjax.data.config import DataConfig
from atlasjax.data.documents import in_order
from atlasjax.data.manifest import read_manifest
from atlasjax.data.sentence_pieces import SentencePieceTokenizer
from atlasjax.data.sources import load_documents
from atlasjax.data.tokenizer_base import KIND_FILE, ByteTokenizer, Tokenizer
from atlasjax.names import lookup

__all__ = [
    "NAMING",
    "TRAINING_CHARACTERS",
    "BpeTokenizer",
    "ByteTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "load_tokenizer",
    "make_tokenizer",
    "vocabulary",
]

NAMING = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Files that may lie beside a tokenizer of public weights, and say what its tokens are for."""
TRAINING_CHARACTERS = 64 * 2**20  # BPE statistics change little with more text


def make_tokenizer(config: DataConfig, texts: Iterable[str] | None = None) -> Tokenizer:
    """Make the tokenizer that `config.tokenizer` describes. It is trained on the training split if necessary.

    Args:
      config: which tokenizer, and the data.
      texts: documents of the training split, read as far as needed. None opens the documents of `config`.

    Raises:
      ValueError: the kind is unknown or the file is unusable. If a BPE is trained, as `load_documents`. With source `prepared`: the
        tokenizer is not the one that the data was prepared with.
      FileNotFoundError: the tokenizer file does not exist.
    """
    if config.source != "prepared":
        return _new_tokenizer(config, texts)
    folder = storage.fetched(config.paths[0])
    read_manifest(folder)  # first, because its message says what is missing
    tokenizer = load_tokenizer(folder / "tokenizer")
    if config.tokenizer != DataConfig.tokenizer and _new_tokenizer(config, ()).fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"tokenizer is {config.tokenizer!r}, but {config.paths[0]!r} was prepared with another one. Omit it to use that one."
        )
    return tokenizer


def vocabulary(config: DataConfig) -> int:
    """The vocabulary size of `make_tokenizer(config)`; for a BPE that is yet to be trained, its maximum size.

    Raises:
      ValueError, FileNotFoundError: as `make_tokenizer`.
    """
    size = _size_to_train(config)
    if config.source == "prepared" or size is None:
        return make_tokenizer(config).vocab_size
    check_trainable(size)
    return size


def _size_to_train(config: DataConfig) -> int | None:
    """The size of "bpe:<vocabulary size>", None for other tokenizers."""
    kind, _, argument = config.tokenizer.partition(":")
    return int(argument) if kind == "bpe" and argument.isdecimal() else None


def _new_tokenizer(config: DataConfig, texts: Iterable[str] | None) -> Tokenizer:
    kind, colon, argument = config.tokenizer.partition(":")
    lookup("tokenizer", kind, {"byte": 0, "bpe": 0, "sentencepiece": 0})
    if kind == "byte":
        if colon:
            raise ValueError(f"tokenizer is {config.tokenizer!r}; 'byte' takes no argument.")
        return ByteTokenizer()
    if not argument:
        what = "bpe:<vocabulary size> or bpe:<path>" if kind == "bpe" else "sentencepiece:<path>"
        raise ValueError(f"tokenizer is {config.tokenizer!r}; it must be {what}.")
    if (size := _size_to_train(config)) is not None:
        if texts is None:
            texts = in_order(load_documents(config, "train"))
        return BpeTokenizer.train(_sample(texts), size)
    path = storage.fetched(argument)
    if not path.is_file():
        raise FileNotFoundError(f"The tokenizer file {argument!r} does not exist.")
    if kind == "sentencepiece":
        return SentencePieceTokenizer(path.read_bytes(), argument)
    return bpe_of(path.read_bytes(), argument)


def load_tokenizer(directory: str | os.PathLike[str] | storage.StorePath) -> Tokenizer:
    """Load what `Tokenizer.save` wrote.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged.
    """
    folder = storage.path(directory)
    try:
        described = storage.read_json(folder / KIND_FILE)
        kind = described["kind"]
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"There is no tokenizer in {str(folder)!r}: {KIND_FILE} is missing.") from None
    except (ValueError, KeyError, TypeError, IsADirectoryError):
        raise ValueError(f"The tokenizer file {str(folder / KIND_FILE)!r} is damaged.") from None
    if kind == "byte":
        return ByteTokenizer()
    if kind not in ("bpe", "sentencepiece"):
        raise ValueError(f"The tokenizer in {str(folder)!r} has the unknown kind {kind!r}.")
    file = folder / (BpeTokenizer.FILE if kind == "bpe" else SentencePieceTokenizer.FILE)
    if file.is_dir():
        raise ValueError(f"The tokenizer file {str(file)!r} is damaged: it is a folder.")
    content = file.read_bytes()
    if described.get("crc32", zlib.crc32(content)) != zlib.crc32(content):  # older folders have no checksum
        raise ValueError(f"The tokenizer file {str(file)!r} is damaged: its checksum does not match.")
    return bpe_of(content, str(folder)) if kind == "bpe" else SentencePieceTokenizer(content, str(folder))


def _sample(texts: Iterable[str]) -> Iterator[str]:
    """Documents in order, until there is enough text to learn merges from."""
    remaining = TRAINING_CHARACTERS
    for text in texts:
        text = text[:remaining]
        yield text
        remaining -= len(text)
        if not remaining:
            return
