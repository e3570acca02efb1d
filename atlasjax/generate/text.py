"""The text of tokens as they are generated: characters whole, and nothing of a stop string."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

_BEFORE = 8  # tokens before the first one, for tokenizers whose text of a token depends on those before it
_UNKNOWN = "\ufffd"  # what the bytes of an incomplete character decode to
_MOST_UNKNOWN = 3  # a character of UTF-8 has at most four bytes, so at most three of them are waiting


class Decodes(Protocol):
    """The method of a tokenizer that is needed here."""

    def decode(self, ids: Iterable[int], /) -> str:
        """Return the text of `ids`, in which incomplete UTF-8 is U+FFFD."""
        ...


class TextStream:
    """The text of one stream of tokens, given as soon as it is certain.

    A character whose bytes are in several tokens is given when it is complete, even if its first bytes came before the stream. With
    stop strings, the text ends before the one that is complete first (of several, the longest), and what may be the beginning of
    one waits. However the tokens are fed, all pieces together are the same text.

    Args:
      tokenizer: has `decode`.
      before: the tokens before the first one. Some tokenizers write the first token of a text without its space.
      stop: strings that end the text.
      end_tokens: tokens that end the text. They are not part of it.

    Attributes:
      stopped: whether a stop string or an end token was found. No more text follows.

    Raises:
      ValueError: a stop string is empty, or no str.
    """

    def __init__(
        self, tokenizer: Decodes, before: Iterable[int] = (), stop: Sequence[str] = (), end_tokens: Iterable[int] = ()
    ):
        if isinstance(stop, str) or not all(isinstance(one, str) for one in stop):
            raise ValueError(f"stop is {stop!r:.200}; it must be a sequence of strings.")
        if "" in stop:
            raise ValueError("stop is ''; a stop string should have at least one character.")
        self.stopped = False
        self._tokenizer, self._stop, self._end_tokens = tokenizer, tuple(stop), frozenset(map(int, end_tokens))
        self._before = [int(i) for i in before][-_BEFORE:]
        self._tokens: list[int] = []  # since the last place at which all text was complete
        self._shown = 0  # characters of their text that were taken
        self._waiting = ""  # may begin a stop string

    def feed(self, tokens: Iterable[int] | np.ndarray) -> str:
        """The text that is certain with these tokens and was not before; may be empty."""
        if self.stopped:
            return ""
        new_tokens = [int(i) for i in tokens]
        end = next((at for at, token in enumerate(new_tokens) if token in self._end_tokens), None)
        if end is not None:
            found = self.feed(new_tokens[:end])
            found += self.finish()
            self.stopped = True
            return found
        self._tokens += new_tokens
        text = self._text()
        end = max(len(text.rstrip(_UNKNOWN)), len(text) - _MOST_UNKNOWN)
        new, self._shown = text[self._shown : end], max(self._shown, end)
        if text and end == len(text):
            self._before, self._tokens, self._shown = (self._before + self._tokens)[-_BEFORE:], [], 0
        return self._until_stop(new)

    def finish(self) -> str:
        """The text that was waiting, after the last token."""
        if self.stopped:
            return ""
        rest = self._text()[self._shown :]
        self._tokens, self._shown = [], 0
        found = self._until_stop(rest)
        found, self._waiting = found + self._waiting, ""
        return found

    def _text(self) -> str:
        """The text of the tokens, without the text of the tokens before them."""
        before = self._tokenizer.decode(self._before) if self._before else ""
        text = self._tokenizer.decode(self._before + self._tokens)
        # A character that was incomplete before them belongs to it.
        shared = next((i for i, (a, b) in enumerate(zip(before, text)) if a != b), min(len(before), len(text)))
        return text[shared:]

    def _until_stop(self, new: str) -> str:
        text = self._waiting + new
        found = [(start + len(one), start) for one in self._stop if (start := text.find(one)) >= 0]
        if found:
            self.stopped, self._waiting = True, ""
            return text[: min(found)[1]]
        held = max((_overlap(text, one) for one in self._stop), default=0)
        self._waiting = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, shorter than it."""
    return next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:n]))
