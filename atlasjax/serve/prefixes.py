"""Common beginnings of prompts: states after them, from which later prompts go on."""

import collections

import numpy as np

from atlasjax.generate import Context

_RECENT = 64  # prompts with which a new one is compared


class Prefixes:
    """States after beginnings of prompts, those that were used last.

    A state of constant size says nothing about the tokens before it, so where it is kept has to be decided while a prompt is read:
    at the end of each prompt, for the next turn of a conversation; and where a prompt stops being the same as an earlier one, for
    others with that beginning, such as one system prompt (Pan et al. 2024, "Marconi", arXiv 2411.19379).

    Args:
      num_bytes: most bytes of states.
    """

    def __init__(self, num_bytes: float):
        self._room, self._used = num_bytes, 0
        self._kept: collections.OrderedDict[bytes, Context] = collections.OrderedDict()
        self._recent: collections.deque[np.ndarray] = collections.deque(maxlen=_RECENT)

    def longest(self, tokens: np.ndarray, more_than: int) -> Context | None:
        """The state after the longest beginning that is kept, if it has more than so many tokens. tokens: int32 [time]."""
        lengths = {int(context.num_tokens[0]) for context in self._kept.values()}
        for length in sorted((n for n in lengths if more_than < n <= len(tokens)), reverse=True):
            key = tokens[:length].tobytes()
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        return None

    def shared(self, tokens: np.ndarray) -> int:
        """Number of tokens at the beginning that are those of a recent prompt. This prompt is a recent one from now on."""
        most = 0
        for other in self._recent:
            length = min(len(tokens), len(other))
            differ = np.flatnonzero(tokens[:length] != other[:length])
            most = max(most, int(differ[0]) if len(differ) else length)
        self._recent.append(tokens)
        return most

    def keep(self, tokens: np.ndarray, context: Context) -> None:
        """Keeps the state after these tokens, int32 [time], in the place of those that were not used for the longest time."""
        key = tokens.tobytes()
        if key in self._kept or _size(context) > self._room:
            return
        self._kept[key] = context
        self._used += _size(context)
        while self._used > self._room:
            self._used -= _size(self._kept.popitem(last=False)[1])

    def clear(self) -> None:
        """Forgets everything."""
        self._kept.clear()
        self._recent.clear()
        self._used = 0


def _size(context: Context) -> int:
    return context.num_bytes + context.logits.nbytes
