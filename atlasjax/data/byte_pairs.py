"""Byte-level byte-pair encoding, trained here or loaded (`tokenizers`)."""

import itertools
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from atlasjax import json_text, storage
from atlasjax.data.pieces import last_word_cut, words_are_apart
from atlasjax.data.tokenizer_base import (
    Control,
    WithControl,
    checked_ids,
    checked_text,
    fingerprint,
    sizes_by_ends,
    write_tokenizer,
)

_MAX_IDS = 16  # times the number of tokens bounds the ids: vocabulary tables have a row per id
_MOST_TOKENS = 2**20  # memory for all of them is allocated before the first merge
_BYTES = 256
# Bytes that UTF-8 never has, as byte-level characters.
_IN_NO_TEXT = {chr(byte) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))}


class BpeTokenizer(WithControl):
    """Byte-level byte-pair encoding (`tokenizers`). Any text can be encoded, and decoding restores it as far as the normalizer of
    the file, and added tokens that take the white space beside them, leave it as it is.

    Special tokens of the file are control tokens, unless plain text gives them too.

    Args:
      definition: the JSON text of a `tokenizers.Tokenizer` with a BPE model and a ByteLevel decoder.
      name: its origin, for error messages.
    """

    FILE = "bpe.json"

    def __init__(self, definition: str, name: str = "given"):
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"The tokenizer {name!r} is not a tokenizers JSON file: {error}") from None
        parsed = json_text.parse(definition, f"The tokenizer {name!r}")
        self._tokenizer.no_truncation()  # a file may truncate every text to 512 tokens
        self._tokenizer.no_padding()
        self._has_cuts = words_are_apart(parsed)
        decoder = parsed.get("decoder") or {}
        stages = [decoder, *decoder.get("decoders", [])]
        if parsed["model"]["type"] != "BPE" or not any(stage.get("type") == "ByteLevel" for stage in stages):
            raise ValueError(
                f"The tokenizer {name!r} is not a byte-level BPE, so its tokens cannot be counted in bytes."
            )
        self._tokenizer.model.dropout = None  # a file may leave out merges at random
        vocabulary = self._tokenizer.get_vocab()
        ids = vocabulary.values()
        if not ids or max(ids) >= _MAX_IDS * len(ids):
            raise ValueError(
                f"The tokenizer {name!r} has {len(ids)} tokens and ids up to {max(ids, default=0)}; ids must be below {_MAX_IDS} "
                "times the number of tokens."
            )
        # After the check, because it writes every id out.
        written = self._tokenizer.to_str()
        self.fingerprint = fingerprint("bpe", _meaning(json.loads(written)))
        self.former_fingerprint = fingerprint("bpe", written.encode())
        self.vocab_size: int = 1 + max(ids)  # some ids may be unused
        self._tokenizer.encode_special_tokens = True  # they are text where a text has their names
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: Control(i, token.lstrip, token.rstrip) for i, token in added.items() if token.special}
        self.control_tokens = {text: token for text, token in special.items() if token.id not in self.encode(text)}
        self._no_text = frozenset(token.id for token in self.control_tokens.values())
        self.bytes_per_token = np.zeros(self.vocab_size, np.int32)
        for token, i in vocabulary.items():
            self.bytes_per_token[i] = len(token)  # the byte-level alphabet has one character per byte
        plain = {i: token for i, token in added.items() if i not in self._no_text}
        for i in added:
            self.bytes_per_token[i] = len(plain[i].content.encode()) if i in plain else 0
        learned = parsed["model"]["vocab"]
        self._words = {i: token.content for i, token in added.items() if _reads_as_bytes(token.content)}
        for i, word in self._words.items():
            if word in learned:
                raise ValueError(
                    f"The tokenizer {name!r} has the added token {word!r:.80} with the id {i} of other bytes, which cannot be "
                    "told apart; delete it from added_tokens."
                )
        strips = any(token.lstrip or token.rstrip for token in plain.values())
        self.is_exact = not strips and _keeps_bytes(parsed, learned)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BpeTokenizer":
        """Learn merges from `texts`. The vocabulary is smaller than `vocab_size` if the texts have too few pairs to merge.

        Raises:
          ValueError: vocab_size is below 256 (every byte needs a token) or above 2^20.
        """
        check_trainable(vocab_size)
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
        found = self._tokenizer.encode_batch_fast([checked_text(text)], add_special_tokens=False)
        return np.asarray(found[0].ids, np.int32)

    def encode_sized(self, text: str, /) -> np.ndarray:
        if self.is_exact:
            ids = self.encode(text)
            return np.stack([ids, self.bytes_per_token[ids]])
        found = self._tokenizer.encode_batch([checked_text(text)], add_special_tokens=False)[0]
        characters = np.frombuffer(text.encode("utf-32-le"), "<u4")
        bytes_of = 1 + sum((characters >= least).astype(np.int64) for least in (0x80, 0x800, 0x10000))
        byte_at = np.concatenate([[0], np.cumsum(bytes_of)])
        ends = np.asarray([end for _, end in found.offsets], np.int64)
        return np.stack([np.asarray(found.ids, np.int32), sizes_by_ends(byte_at[ends], int(byte_at[-1]))])

    def last_cut(self, text: str, /) -> int:
        return last_word_cut(text) if self._has_cuts else 0

    def decode(self, ids: Iterable[int], /) -> str:
        texts = [i for i in checked_ids(ids, self.vocab_size) if i not in self._no_text]
        runs = itertools.groupby(texts, self._words.get)
        return "".join(
            word * sum(1 for _ in run) if word else self._tokenizer.decode(list(run), skip_special_tokens=False)
            for word, run in runs
        )

    def save(self, directory: str | os.PathLike[str] | storage.StorePath, /) -> None:
        write_tokenizer(directory, "bpe", self.FILE, self._tokenizer.to_str().encode())


def check_trainable(vocab_size: int) -> None:
    """Raise ValueError unless a BPE of this size can be trained."""
    if vocab_size < _BYTES:
        raise ValueError(f"A byte-level BPE vocabulary needs at least {_BYTES} tokens, not {vocab_size}.")
    if vocab_size > _MOST_TOKENS:
        raise ValueError(f"A trained BPE vocabulary can have at most {_MOST_TOKENS:,} tokens, not {vocab_size:,}.")


def bpe_of(content: bytes, name: str) -> BpeTokenizer:
    """The tokenizer in a file. Raises ValueError if it is none."""
    try:
        return BpeTokenizer(content.decode("utf-8"), name)
    except UnicodeDecodeError:
        raise ValueError(f"The tokenizer {name!r} is not a tokenizers JSON file: it is not UTF-8.") from None


def _meaning(written: dict[str, Any]) -> bytes:
    """The mapping that a `tokenizers` JSON file defines, whichever version wrote it: without fields that are off or not used."""

    def some(value: Any) -> Any:
        if isinstance(value, dict):
            found = {name: some(one) for name, one in value.items()}
            return {name: one for name, one in found.items() if one or (isinstance(one, int) and one is not False)}
        return [some(one) for one in value] if isinstance(value, list) else value

    model = written["model"]
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    used = {name: written.get(name) for name in ("normalizer", "pre_tokenizer", "decoder", "added_tokens")}
    return json.dumps(some({**used, "model": {**model, "merges": merges}}), sort_keys=True).encode()


def _keeps_bytes(definition: Mapping[str, Any], vocabulary: Mapping[str, int]) -> bool:
    """Whether the characters of the tokens of a text, one per byte, are all of its bytes.

    Args:
      definition: a parsed `tokenizers` JSON file.
      vocabulary: the tokens of its model, without added ones.

    Returns:
      True if nothing normalizes the text, adds to it or removes from it, and every byte has a token.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    model, first = definition["model"], definition.get("pre_tokenizer") or {"type": ""}
    stages = first["pretokenizers"] if first["type"] == "Sequence" else [first]
    if definition.get("normalizer") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    if any(stage.get("add_prefix_space") or stage.get("behavior") == "Removed" for stage in stages):
        return False
    known = {"ByteLevel", "Split", "Digits", "Punctuation"}
    kinds = {stage["type"] for stage in stages}
    return "ByteLevel" in kinds and kinds <= known and set(ByteLevel.alphabet()) - _IN_NO_TEXT <= vocabulary.keys()


def _reads_as_bytes(word: str) -> bool:
    """Whether the decoder takes the text of an added token for byte-level characters, and so makes other text of it."""
    from tokenizers.pre_tokenizers import ByteLevel

    return not word.isascii() and set(word) <= set(ByteLevel.alphabet())
