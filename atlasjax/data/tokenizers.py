"""Tokenizers with one interface: bytes, byte-level BPE (trained here or loaded), and SentencePiece models."""

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

from atlasjax import storage
from atlasjax.data.config import DataConfig
from atlasjax.data.manifest import read_manifest
from atlasjax.data.pieces import last_word_cut, words_are_apart
from atlasjax.data.sources import load_documents
from atlasjax.names import lookup

_KIND_FILE = "tokenizer.json"
_MAX_IDS = 16  # times the number of tokens bounds the ids: vocabulary tables have a row per id
_MOST_TOKENS = 2**20  # memory for all of them is allocated before the first merge
TRAINING_CHARACTERS = 64 * 2**20  # BPE statistics change little with more text


class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
      vocab_size: ids are in [0, vocab_size).
      bytes_per_token: int32 [vocab_size], the number of UTF-8 bytes of text that each id represents, 0 for control tokens. Its sum
        over the predicted tokens is the number of bytes in "bits per byte".
      fingerprint: hexadecimal SHA-256 of kind and definition. Tokenizers with equal fingerprints encode alike.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def bytes_per_token(self) -> np.ndarray: ...

    @property
    def fingerprint(self) -> str: ...

    def encode(self, text: str, /) -> np.ndarray:
        """Return the token ids of `text`, int32 [num_tokens]."""
        ...

    def last_cut(self, text: str, /) -> int:
        """Return the last position p > 0 at which `text` may be cut, or 0 if none is known. Encoding text[:p] and all that follows
        separately, including text after `text`, gives the tokens of the whole (up to ties in a unigram model)."""
        ...

    def decode(self, ids: Iterable[int], /) -> str:
        """Return the text of `ids`. Incomplete UTF-8 becomes U+FFFD. Raises ValueError if an id is outside the vocabulary."""
        ...

    def save(self, directory: str | os.PathLike[str] | storage.StorePath, /) -> None:
        """Write everything that `load_tokenizer` needs into `directory`, which is created if it does not exist."""
        ...


def _checked(ids: Iterable[int], vocab_size: int) -> list[int]:
    checked = [int(i) for i in np.asarray(ids if isinstance(ids, np.ndarray) else list(ids)).reshape(-1)]
    for i in checked:
        if not 0 <= i < vocab_size:
            raise ValueError(f"Token id {i} is outside the tokenizer's vocabulary of {vocab_size}.")
    return checked


def _write(
    directory: str | os.PathLike[str] | storage.StorePath, kind: str, name: str = "", content: bytes = b""
) -> None:
    """Write the model, then the file with its kind and checksum. Each write is atomic."""
    folder = storage.path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    described = {"kind": kind, "crc32": zlib.crc32(content)} if name else {"kind": kind}
    if name:
        storage.write_whole(folder / name, content)
    storage.write_whole(folder / _KIND_FILE, json.dumps(described).encode())


def _fingerprint(kind: str, content: bytes = b"") -> str:
    return hashlib.sha256(kind.encode() + b"\n" + content).hexdigest()


class ByteTokenizer:
    """One token per UTF-8 byte."""

    vocab_size = 256
    fingerprint = _fingerprint("byte")

    def __init__(self) -> None:
        self.bytes_per_token = np.ones(256, np.int32)

    def encode(self, text: str, /) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def last_cut(self, text: str, /) -> int:
        return len(text)

    def decode(self, ids: Iterable[int], /) -> str:
        return bytes(_checked(ids, 256)).decode("utf-8", errors="replace")

    def save(self, directory: str | os.PathLike[str] | storage.StorePath, /) -> None:
        _write(directory, "byte")


class BpeTokenizer:
    """Byte-level byte-pair encoding (`tokenizers`). Any text can be encoded, and decoding restores it.

    Args:
      definition: the JSON text of a `tokenizers.Tokenizer` with a BPE model and a ByteLevel decoder.
      name: its origin, for error messages.
    """

    _FILE = "bpe.json"

    def __init__(self, definition: str, name: str = "given"):
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"The tokenizer {name!r} is not a tokenizers JSON file: {error}") from None
        parsed = json.loads(definition)
        self._tokenizer.no_truncation()  # a file may truncate every text to 512 tokens
        self._tokenizer.no_padding()
        self._has_cuts = words_are_apart(parsed)
        decoder = parsed.get("decoder") or {}
        stages = [decoder, *decoder.get("decoders", [])]
        if parsed["model"]["type"] != "BPE" or not any(stage.get("type") == "ByteLevel" for stage in stages):
            raise ValueError(
                f"The tokenizer {name!r} is not a byte-level BPE, so its tokens cannot be counted in bytes."
            )
        ids = self._tokenizer.get_vocab().values()
        if not ids or max(ids) >= _MAX_IDS * len(ids):
            raise ValueError(
                f"The tokenizer {name!r} has {len(ids)} tokens and ids up to {max(ids, default=0)}; ids should be below {_MAX_IDS} "
                "times the number of tokens."
            )
        # After the check, because it writes every id out.
        self.fingerprint = _fingerprint("bpe", self._tokenizer.to_str().encode())
        self.vocab_size: int = 1 + max(ids)  # some ids may be unused
        self.bytes_per_token = np.zeros(self.vocab_size, np.int32)
        for token, i in self._tokenizer.get_vocab().items():
            self.bytes_per_token[i] = len(token)  # the byte-level alphabet has one character per byte
        for i, added in self._tokenizer.get_added_tokens_decoder().items():
            self.bytes_per_token[i] = 0 if added.special else len(added.content.encode())

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BpeTokenizer":
        """Learn merges from `texts`. The vocabulary is smaller than `vocab_size` if the texts have too few pairs to merge.

        Raises:
          ValueError: vocab_size is below 256 (every byte needs a token) or above 2^20.
        """
        _check_trainable(vocab_size)
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        byte_level = pre_tokenizers.ByteLevel
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, initial_alphabet=sorted(byte_level.alphabet()), show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer.to_str(), "trained")

    def encode(self, text: str, /) -> np.ndarray:
        # A batch of one: this method lets other threads run, and does not compute the offsets of tokens in the text.
        return np.asarray(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.int32)

    def last_cut(self, text: str, /) -> int:
        return last_word_cut(text) if self._has_cuts else 0

    def decode(self, ids: Iterable[int], /) -> str:
        return self._tokenizer.decode(_checked(ids, self.vocab_size), skip_special_tokens=True)

    def save(self, directory: str | os.PathLike[str] | storage.StorePath, /) -> None:
        _write(directory, "bpe", self._FILE, self._tokenizer.to_str().encode())


class SentencePieceTokenizer:
    """A SentencePiece model. It normalizes the text (most models turn line ends into spaces).

    `bytes_per_token` is the number of bytes of each piece of normalized text, and 1 for the unknown piece.

    Args:
      model: the serialized model.
      name: its origin, for error messages.
    """

    _FILE = "sentencepiece.model"

    def __init__(self, model: bytes, name: str = "given"):
        import sentencepiece

        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
            self.vocab_size: int = self._processor.vocab_size()
            pieces = [self._processor.id_to_piece(i) for i in range(self.vocab_size)]
        except (RuntimeError, IndexError):
            pieces = []
        if not pieces:
            raise ValueError(f"The tokenizer {name!r} is not a SentencePiece model.")
        self.bytes_per_token = np.array([self._num_bytes(i, piece) for i, piece in enumerate(pieces)], np.int32)
        self.fingerprint = _fingerprint("sentencepiece", model)
        self._has_cuts = _has_cuts(model)

    def _num_bytes(self, i: int, piece: str) -> int:
        if self._processor.is_control(i) or self._processor.is_unused(i):
            return 0
        if self._processor.is_byte(i) or self._processor.is_unknown(i):
            return 1
        return len(piece.replace("▁", " ").encode())

    def encode(self, text: str, /) -> np.ndarray:
        return np.asarray(self._processor.encode(text), np.int32)

    def last_cut(self, text: str, /) -> int:
        return last_word_cut(text) if self._has_cuts else 0

    def decode(self, ids: Iterable[int], /) -> str:
        return self._processor.decode(_checked(ids, self.vocab_size))

    def save(self, directory: str | os.PathLike[str] | storage.StorePath, /) -> None:
        _write(directory, "sentencepiece", self._FILE, self._model)


def _has_cuts(model: bytes) -> bool:
    """Whether no piece spans words: white space is collapsed, and occurs only where a piece or the text starts."""
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError:  # protobuf is not installed
        return False
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
    normalizer, trainer = proto.normalizer_spec, proto.trainer_spec
    collapses = normalizer.add_dummy_prefix and normalizer.remove_extra_whitespaces and normalizer.escape_whitespaces
    begins = trainer.split_by_whitespace and not trainer.treat_whitespace_as_suffix
    return collapses and begins and not any("▁" in entry.piece[1:] or " " in entry.piece for entry in proto.pieces)


def make_tokenizer(config: DataConfig, texts: Iterable[str] | None = None) -> Tokenizer:
    """Make the tokenizer that `config.tokenizer` describes. It is trained on the training split if necessary.

    Args:
      config: which tokenizer, and the data.
      texts: documents of the training split, read as far as needed. None opens those of `config`.

    Raises:
      ValueError: the kind is unknown or the file is unusable. If a BPE is trained, as `load_documents`. With source `prepared`: the
        tokenizer is not the one that the data was prepared with.
      FileNotFoundError: the tokenizer file does not exist.
    """
    if config.source != "prepared":
        return _new_tokenizer(config, texts)
    folder = storage.path(config.paths[0]).expanduser()
    read_manifest(folder)  # first, because its message says what is missing
    tokenizer = load_tokenizer(folder / "tokenizer")
    if config.tokenizer != DataConfig.tokenizer and _new_tokenizer(config, ()).fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"tokenizer is {config.tokenizer!r}, but {config.paths[0]!r} was prepared with another one. Omit it to use that one."
        )
    return tokenizer


def _check_trainable(vocab_size: int) -> None:
    if vocab_size < 256:
        raise ValueError(f"A byte-level BPE vocabulary needs at least 256 tokens, not {vocab_size}.")
    if vocab_size > _MOST_TOKENS:
        raise ValueError(f"A trained BPE vocabulary can have at most {_MOST_TOKENS:,} tokens, not {vocab_size:,}.")


def vocabulary(config: DataConfig) -> int:
    """The vocabulary size of `make_tokenizer(config)`; for a BPE that is yet to be trained, its maximum size.

    Raises:
      ValueError, FileNotFoundError: as `make_tokenizer`.
    """
    size = _size_to_train(config)
    if config.source == "prepared" or size is None:
        return make_tokenizer(config).vocab_size
    _check_trainable(size)
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
        raise ValueError(f"tokenizer is {config.tokenizer!r}; it should be {what}.")
    if (size := _size_to_train(config)) is not None:
        if texts is None:
            documents = load_documents(config, "train")
            texts = map(documents.__getitem__, range(len(documents)))
        return BpeTokenizer.train(_sample(texts), size)
    path = storage.path(argument).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"The tokenizer file {argument!r} does not exist.")
    if kind == "sentencepiece":
        return SentencePieceTokenizer(path.read_bytes(), argument)
    return _bpe(path.read_bytes(), argument)


def _bpe(content: bytes, name: str) -> BpeTokenizer:
    try:
        return BpeTokenizer(content.decode("utf-8"), name)
    except UnicodeDecodeError:
        raise ValueError(f"The tokenizer {name!r} is not a tokenizers JSON file: it is not UTF-8.") from None


def load_tokenizer(directory: str | os.PathLike[str] | storage.StorePath) -> Tokenizer:
    """Load what `Tokenizer.save` wrote.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged.
    """
    folder = storage.path(directory)
    try:
        described = json.loads((folder / _KIND_FILE).read_bytes())
        kind = described["kind"]
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"There is no tokenizer in {str(folder)!r}: {_KIND_FILE} is missing.") from None
    except (ValueError, KeyError, TypeError, RecursionError, IsADirectoryError):
        raise ValueError(f"The tokenizer file {str(folder / _KIND_FILE)!r} is damaged.") from None
    if kind == "byte":
        return ByteTokenizer()
    if kind not in ("bpe", "sentencepiece"):
        raise ValueError(f"The tokenizer in {str(folder)!r} has the unknown kind {kind!r}.")
    file = folder / (BpeTokenizer._FILE if kind == "bpe" else SentencePieceTokenizer._FILE)
    if file.is_dir():
        raise ValueError(f"The tokenizer file {str(file)!r} is damaged: it is a folder.")
    content = file.read_bytes()
    if described.get("crc32", zlib.crc32(content)) != zlib.crc32(content):  # older folders have no checksum
        raise ValueError(f"The tokenizer file {str(file)!r} is damaged: its checksum does not match.")
    return _bpe(content, str(folder)) if kind == "bpe" else SentencePieceTokenizer(content, str(folder))


def _sample(texts: Iterable[str]) -> Iterator[str]:
    """Documents in order, until there is enough text to learn merges from."""
    remaining = TRAINING_CHARACTERS
    for text in texts:
        text = text[:remaining]
        yield text
        remaining -= len(text)
        if not remaining:
            return
