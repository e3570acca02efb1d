"""Encodes a text of any length in pieces, with the tokens that one call would give.

A text may be cut between two characters if no token of the whole text spans them, and if neither part's tokens depend on the other.
A tokenizer knows such places (`Tokenizer.last_cut`); those of byte-pair encodings follow from their pre-tokenizers.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

PIECE = 2**18  # characters; a tokenizer needs about a hundred bytes of memory for each token

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The expressions of GPT-2; cl100k as Llama 3 has it, and Qwen's; o200k. None of them has a match that goes on from a character
# other than white space to a space, or from a letter to a line end; none looks back; and they look ahead in white space only.
_EXPRESSIONS = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",
    rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_CANDIDATE = re.compile(r"(?<=\S) |(?<=\w)\n")


class Cuttable(Protocol):
    """The part of a tokenizer that this module needs."""

    def encode(self, text: str, /) -> np.ndarray: ...

    def last_cut(self, text: str, /) -> int: ...


def encode_pieces(tokenizer: Cuttable, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Encode a text that is given in parts.

    Args:
      tokenizer: what encodes.
      texts: the text, cut anywhere.

    Yields:
      Token ids, int32. Joined, they are the tokens of the whole text. A piece has about `PIECE` characters, or more if there is no
      place to cut.
    """
    held: list[str] = []  # since the last cut; only the newest part is searched for the next
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
            yield tokenizer.encode("".join([*held[:-1], part[:cut]]))
            held = [part[cut:]] if cut < len(part) else []
            size = len(part) - cut
    if size:
        yield tokenizer.encode("".join(held))


def encode_text(tokenizer: Cuttable, text: str, dtype: np.dtype) -> np.ndarray:
    """The tokens of a whole text, [num_tokens] of the given dtype."""
    pieces = [piece.astype(dtype) for piece in encode_pieces(tokenizer, (text,))]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype)


def last_word_cut(text: str) -> int:
    """The last place between a character that is not white space and a space, or a letter and a line end; 0 if there is none."""
    end, width = len(text), 2**10
    while end > 1:
        start = max(1, end - width)
        for found in reversed(list(_CANDIDATE.finditer(text, start, end))):
            place = found.start()
            # Letters of Unicode 3.2 are letters to every tokenizer; a later one may be a symbol to an older library.
            if text[place] == " " or unicodedata.ucd_3_2_0.category(text[place - 1])[0] == "L":
                return place
        end, width = start, 2 * width
    return 0


def words_are_apart(definition: Mapping[str, Any]) -> bool:
    """Whether a text may be cut at `last_word_cut` before it is given to a byte-level BPE.

    Args:
      definition: a parsed JSON file of `tokenizers`.

    Returns:
      True if the normalizer composes characters at most, no added token has or takes white space, and the pre-tokenizer is one
      that is known to have a boundary there.
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
        if stage["type"] not in ("Digits", "Punctuation"):  # these go by single characters
            return False
    return False
