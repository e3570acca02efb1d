"""SentencePiece models."""

import os
from collections.abc import Iterable

import numpy as np

from atlasjax import storage
from atlasjax.data.pieces import last_word_cut
from atlasjax.data.tokenizer_base import (
    Control,
    WithControl,
    checked_ids,
    checked_text,
    fingerprint,
    sizes_by_ends,
    write_tokenizer,
)


class SentencePieceTokenizer(WithControl):
    """A SentencePiece model. It normalizes the text (most models turn line ends into spaces, and put one before the text).

    `bytes_per_token` is the number of bytes of each piece of normalized text, and 1 for the unknown piece; `encode_sized` counts
    bytes of the text itself. Its control symbols are control tokens; its user-defined symbols are text.

    Args:
      model: the serialized model.
      name: its origin, for error messages.
    """

    FILE = "sentencepiece.model"
    is_exact = False

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
        self.control_tokens = {piece: Control(i) for i, piece in enumerate(pieces) if self._processor.is_control(i)}
        self.fingerprint = self.former_fingerprint = fingerprint("sentencepiece", model)
        self._has_cuts = _has_cuts(model)

    def _num_bytes(self, i: int, piece: str) -> int:
        if self._processor.is_control(i) or self._processor.is_unused(i):
            return 0
        if self._processor.is_byte(i) or self._processor.is_unknown(i):
            return 1
        return len(piece.replace("▁", " ").encode())

    def encode(self, text: str, /) -> np.ndarray:
        return np.asarray(self._processor.encode(checked_text(text)), np.int32)

    def encode_sized(self, text: str, /) -> np.ndarray:
        found = self._processor.encode(checked_text(text), return_type="offset_mapping", return_bytes=True)
        ends = np.asarray([end for _, end in found["offsets"]], np.int64)
        return np.stack([np.asarray(found["ids"], np.int32), sizes_by_ends(ends, len(text.encode()))])

    def last_cut(self, text: str, /) -> int:
        return last_word_cut(text) if self._has_cuts else 0

    def decode(self, ids: Iterable[int], /) -> str:
        return self._processor.decode(checked_ids(ids, self.vocab_size))

    def save(self, directory: str | os.PathLike[str] | storage.StorePath, /) -> None:
        write_tokenizer(directory, "sentencepiece", self.FILE, self._model)


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
