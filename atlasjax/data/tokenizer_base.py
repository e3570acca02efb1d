"""The interface of tokenizers, the parts that all kinds share, and the tokenizer of bytes."""

import functools
import hashlib
import itertools
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from atlasjax import check, storage

KIND_FILE = "tokenizer.json"
_GUARD = "\ufdd0"  # a noncharacter, which no text is meant to have


class Control(NamedTuple):
    """A control token.

    Attributes:
      id: its id.
      lstrip, rstrip: whether it takes white space before or after it.
    """

    id: int
    lstrip: bool = False
    rstrip: bool = False


class Tokenizer(Protocol):
    """Text to token ids and back.

    A text has no control tokens, whatever is written in it: "</s>" typed by somebody is four characters. Control tokens come only
    from ids, and from `encode_controlled`.

    Attributes:
      vocab_size: ids are in [0, vocab_size).
      control_tokens: the control tokens by name.
      bytes_per_token: int32 [vocab_size], the number of UTF-8 bytes of text that each id represents, 0 for control tokens.
      is_exact: whether these sum to the bytes of every text. If not, what a token represents depends on the text around it (a
        normalizer, a prefix), and `encode_sized` counts it.
      fingerprint: hexadecimal SHA-256 of kind and definition. Tokenizers with equal fingerprints encode alike.
      former_fingerprint: the one that data prepared by older versions has.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def control_tokens(self) -> Mapping[str, Control]: ...

    @property
    def bytes_per_token(self) -> np.ndarray: ...

    @property
    def is_exact(self) -> bool: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def former_fingerprint(self) -> str: ...

    def encode(self, text: str, /) -> np.ndarray:
        """Return the token ids of `text`, int32 [num_tokens]. Raises ValueError if it is no str, or not valid Unicode."""
        ...

    def encode_sized(self, text: str, /) -> np.ndarray:
        """Return the token ids of `text`, and below them how many of its UTF-8 bytes each represents, int32 [2, num_tokens].

        The bytes sum to those of the text, unless it has no token (spaces, where a tokenizer drops them). Where a tokenizer changes
        the text first, the bytes of the given text count: a token ends where the text it was made from ends, and begins
        where the one before it ends. Raises as `encode`.
        """
        ...

    def guarded(self, content: str, /) -> str:
        """Return `content` for a text with control tokens, marked where it spells the name of one, or could do so with what comes
        before or after it. Raises ValueError if it has the character of the mark, U+FDD0."""
        ...

    def encode_controlled(self, text: str, /) -> np.ndarray:
        """Return the token ids of a text with control tokens, such as a chat template writes, int32 [num_tokens].

        Each name of a control token is its id, unless it is inside `guarded` content; all else is text, encoded in parts. Raises as
        `encode`.
        """
        ...

    def last_cut(self, text: str, /) -> int:
        """Return the last position p > 0 at which `text` may be cut, or 0 if none is known. Encoding text[:p] and all that follows
        separately, including text after `text`, gives the tokens of the whole (up to ties in a unigram model)."""
        ...

    def decode(self, ids: Iterable[int], /) -> str:
        """Return the text of `ids`. Control tokens have none, and incomplete UTF-8 becomes U+FFFD. Raises ValueError if an id is
        not an integer, or outside the vocabulary."""
        ...

    def save(self, directory: str | os.PathLike[str] | storage.StorePath, /) -> None:
        """Write everything that `load_tokenizer` needs into `directory`, which is created if it does not exist."""
        ...


def checked_text(text: object) -> str:
    """`text`, if it is one. Raises ValueError."""
    if not isinstance(text, str):
        raise ValueError(f"text is {text!r:.200}, a {type(text).__name__}; it must be a str.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"text is not valid Unicode at character {error.start} ({error.reason}).") from None
    return text


def checked_ids(ids: Iterable[int], vocab_size: int) -> list[int]:
    """Token ids as a list. Raises ValueError if one is not an integer, or outside the vocabulary."""
    ids = ids if isinstance(ids, np.ndarray) else list(ids)
    check.plain_array("decode", "ids", ids)
    array = np.asarray(ids).reshape(-1)
    if not array.size:
        return []
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"Token ids are {array.dtype}, such as {array[0]!r:.80}; they must be integers.")
    wrong = (array < 0) | (array >= vocab_size)
    if wrong.any():
        raise ValueError(f"Token id {array[wrong][0]} is outside the tokenizer's vocabulary of {vocab_size}.")
    return array.tolist()


def sizes_by_ends(ends: np.ndarray, num_bytes: int) -> np.ndarray:
    """The bytes of each token, int32 [n], from where each ends in a text of `num_bytes`, integers [n].

    They are not negative and sum to `num_bytes`: what lies before a token, after the end of the one before it, is its own, and the
    last one has all that is left.
    """
    ends = np.maximum.accumulate(np.clip(ends, 0, num_bytes))
    ends[-1:] = num_bytes
    return np.diff(ends, prepend=0).astype(np.int32)


def write_tokenizer(
    directory: str | os.PathLike[str] | storage.StorePath, kind: str, name: str = "", content: bytes = b""
) -> None:
    """Write the model, then the file with its kind and checksum. Each write is atomic."""
    folder = storage.path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    described = {"kind": kind, "crc32": zlib.crc32(content)} if name else {"kind": kind}
    if name:
        storage.write_whole(folder / name, content)
    storage.write_whole(folder / KIND_FILE, json.dumps(described).encode())


def fingerprint(kind: str, content: bytes = b"") -> str:
    """Hexadecimal SHA-256 of a kind of tokenizer and its definition."""
    return hashlib.sha256(kind.encode() + b"\n" + content).hexdigest()


class WithControl:
    """The part of a tokenizer that is about control tokens.

    Attributes:
      control_tokens: by name.
    """

    control_tokens: Mapping[str, Control] = {}

    def encode(self, text: str, /) -> np.ndarray:
        raise NotImplementedError

    def guarded(self, content: str, /) -> str:
        if _GUARD in content:
            raise ValueError("a text has U+FDD0, which is no character; no text of a conversation should have it.")
        names = self.control_tokens.keys()
        lengths = sorted({len(name) for name in names})
        # A template may strip white space, and write the rest of a name beside what is left.
        start, end = len(content) - len(content.lstrip()), len(content.rstrip())
        beginnings = {name[:n] for name in names for n in range(1, len(name))}
        rests = {name[n:] for name in names for n in range(1, len(name))}
        partial = range(1, min(end - start, lengths[-1] if lengths else 0) + 1)
        first = {name[0] for name in names}
        places = (at for at in range(start, end) if content[at] in first)
        guards = {at for at in places if any(content[at : at + n] in names for n in lengths)}
        guards |= {end - n for n in partial if content[end - n : end] in beginnings}
        if any(content[start : start + n] in rests for n in partial) or (
            partial and content[start:end] in "\n".join(names)
        ):
            guards.add(start)
        cuts = [0, *sorted(guards), len(content)]
        return _GUARD.join(content[a:b] for a, b in itertools.pairwise(cuts))

    def encode_controlled(self, text: str, /) -> np.ndarray:
        parts = self._control_pattern.split(text) if self.control_tokens else [text]
        for i, name in enumerate(parts[1::2]):
            _, before, after = self.control_tokens[name]
            parts[2 * i] = parts[2 * i].rstrip() if before else parts[2 * i]
            parts[2 * i + 2] = parts[2 * i + 2].lstrip() if after else parts[2 * i + 2]
        ids = [np.zeros(0, np.int32)]
        for i, part in enumerate(parts):
            if i % 2:
                ids.append(np.array([self.control_tokens[part].id], np.int32))
            elif text := part.replace(_GUARD, ""):
                ids.append(self.encode(text))
        return np.concatenate(ids)

    @functools.cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        names = sorted(self.control_tokens, key=len, reverse=True)  # of two that begin alike, the longer one
        return re.compile(f"(?<!{_GUARD})({'|'.join(map(re.escape, names))})")


class ByteTokenizer(WithControl):
    """One token per UTF-8 byte."""

    vocab_size = 256
    is_exact = True
    fingerprint = former_fingerprint = fingerprint("byte")

    def __init__(self) -> None:
        self.bytes_per_token = np.ones(256, np.int32)

    def encode(self, text: str, /) -> np.ndarray:
        return np.frombuffer(checked_text(text).encode("utf-8"), np.uint8).astype(np.int32)

    def encode_sized(self, text: str, /) -> np.ndarray:
        ids = self.encode(text)
        return np.stack([ids, np.ones_like(ids)])

    def last_cut(self, text: str, /) -> int:
        return len(text)

    def decode(self, ids: Iterable[int], /) -> str:
        return bytes(checked_ids(ids, 256)).decode("utf-8", errors="replace")

    def save(self, directory: str | os.PathLike[str] | storage.StorePath, /) -> None:
        write_tokenizer(directory, "byte")
