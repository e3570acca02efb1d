"""Encodes text of any length in pieces, into the same tokens as a single call.

A text may be cut between two characters if no token of the whole text spans them and the tokens of each side do not depend on the
other side. A tokenizer finds such positions (`Tokenizer.last_cut`). For byte-pair encodings they follow from the pre-tokenizer.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from atlasjax.data.tokenizer_base import Tokenizer

PIECE = 2**18  # characters; a tokenizer needs about 100 bytes of memory per token

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The expressions of GPT-2, of cl100k and its variants in Llama 3 and Qwen, and of o200k. None of their matches continues from a
# non-whitespace character to a space, or from a letter to a line end. None looks behind, and they look ahead only in white space.
_EXPRESSIONS = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",
    rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_CANDIDATE = re.compile(r"(?<=\S) |(?<=\w)\n")


def encode_pieces(tokenizer: Tokenizer, texts: Iterable[str], *, sized: bool = False) -> Iterator[np.ndarray]:
    """Encode a text given in parts.

    Args:
      tokenizer: the tokenizer.
      texts: the parts of the text, cut anywhere.
      sized: whether to count the bytes of each token.

    Yields:
      Token ids, int32 [num_tokens], or with `sized` the ids and the bytes of each, int32 [2, num_tokens]. Concatenated, they are
      the tokens of the whole text. A piece has about `PIECE` characters, or more if there is no possible cut.
    """
    if not sized:
        yield from map(tokenizer.encode, _cut(tokenizer, texts))
        return
    last, without = None, 0  # the piece before, and the bytes of those since then that had no token
    for piece in _cut(tokenizer, texts):
        tokens = tokenizer.encode_sized(piece)
        if not tokens.size:
            without += len(piece.encode())
            continue
        if last is not None:
            yield last
        tokens[1, 0] += without
        last, without = tokens, 0
    if last is not None:
        last[1, -1] += without
        yield last


def _cut(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[str]:
    """The pieces of a text given in parts."""
    held: list[str] = []  # text since the last cut; only the newest part is searched for a cut
    size = 0
    for text in texts:
        for start in range(0, len(text), PIECE):
            part = text[start : start + PIECE]
            before = held[-1][-1:] if held else ""
            held.append(part)
            size += len(part)
            if size < PIECE:
                continue
            cut = tokenizer.last_cut(before + part) - len(before)
            if cut < 0:
                continue
            yield "".join([*held[:-1], part[:cut]])
            held = [part[cut:]] if cut < len(part) else []
            size = len(part) - cut
    if size:
        yield "".join(held)


def encode_text(tokenizer: Tokenizer, text: str, dtype: np.dtype, *, sized: bool = False) -> np.ndarray:
    """The tokens of a whole text, [num_tokens] of the given dtype; with `sized` and the bytes of each, [2, num_tokens]."""
    pieces = [piece.astype(dtype) for piece in encode_pieces(tokenizer, (text,), sized=sized)]
    return np.concatenate(pieces, axis=-1) if pieces else np.zeros((2, 0) if sized else 0, dtype)


def last_word_cut(text: str) -> int:
    """The last position between a non-whitespace character and a space, or between a letter and a line end; 0 if there is none."""
    end, width = len(text), 2**10
    while end > 1:
        start = max(1, end - width)
        for found in reversed(list(_CANDIDATE.finditer(text, start, end))):
            place = found.start()
            # Letters of Unicode 3.2 are letters in every tokenizer; an older library may treat newer letters as symbols.
            if text[place] == " " or unicodedata.ucd_3_2_0.category(text[place - 1])[0] == "L":
                return place
        end, width = start, 2 * width
    return 0


def words_are_apart(definition: Mapping[str, Any]) -> bool:
    """Whether text for a byte-level BPE may be cut at `last_word_cut`.

    Args:
      definition: a parsed `tokenizers` JSON file.

    Returns:
      True if the normalizer at most composes characters, no added token contains or absorbs white space, and the pre-tokenizer is
      known to have a boundary there.
    """
    normalizer = definition.get("normalizer") or {"type": "NFC"}
    added = definition.get("added_tokens") or []
    if normalizer["type"] != "NFC" or any(
        token.get("lstrip") or token.get("rstrip") or re.search(r"\s", token["content"]) for token in added
    ):
        return False
    first = definition.get("pre_tokenizer") or {"type": ""}
    stages = first["pretokenizers"] if first["type"] == "Sequence" else [first]
    if any(stage.get("add_prefix_space") for stage in stages):
        return False
    for stage in stages:
        if stage["type"] == "ByteLevel" and stage.get("use_regex", True):
            return True
        if stage["type"] == "Split" and stage["pattern"].get("Regex") in _EXPRESSIONS:
            return stage["behavior"] == "Isolated" or bool(stage.get("invert"))
        if stage["type"] not in ("Digits", "Punctuation"):  # these split at single characters
            return False
    return False
