"""Texts in which a task hides its needles."""

import bisect
import functools
from collections.abc import Sequence

import numpy as np

# RULER's (arXiv 2404.06654), repeated in the pass-key task and in variable tracking.
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_ENDS = (".", "!", "?", '."', ".”", "?”", "!”")


class Haystack:
    """A text as words that may be repeated without end.

    Args:
      text: the text. White space is not kept.

    Raises:
      ValueError: the text has no word.
    """

    def __init__(self, text: str):
        self._words = text.split()
        if not self._words:
            raise ValueError("the text of a haystack is empty; it should have at least one word.")

    def __len__(self) -> int:
        return len(self._words)

    @functools.cached_property
    def _sentence_ends(self) -> list[int]:
        """Numbers of words after which a sentence ends; the end of the text is one."""
        ends = [i for i, word in enumerate(self._words, 1) if word.endswith(_ENDS)]
        return ends if ends and ends[-1] == len(self) else [*ends, len(self)]

    def start(self, rng: np.random.Generator) -> int:
        """The first word of a sentence, at random."""
        return self._sentence_ends[rng.integers(len(self._sentence_ends))] % len(self)

    def words(self, start: int, end: int) -> list[str]:
        """The words from `start` to `end`; after the last word of the text comes its first one."""
        first, count = start % len(self), end - start
        found = self._words[first : first + count]
        while len(found) < count:
            found += self._words[: count - len(found)]
        return found

    def sentence_end(self, position: float, most: int) -> int:
        """The number of words, nearest to `position` and at most `most`, after which a sentence ends."""
        rounds, inside = divmod(position, len(self))
        before = int(rounds) * len(self)
        after = bisect.bisect_left(self._sentence_ends, inside)
        near = [before + end for end in [0, *self._sentence_ends][after : after + 2]]
        return min((end for end in near if end <= most), key=lambda end: abs(end - position), default=most)

    def around(self, needles: Sequence[tuple[float, str]], start: int, num_words: int) -> str:
        """Words of the text with needles between its sentences.

        Args:
          needles: (depth, sentence). Depth 0 is before all words, 1 after them; others are at the nearest end of a sentence.
          start: the first word.
          num_words: number of words.

        Returns:
          The text. Needles of equal depth keep their order.
        """
        pieces, done = [], 0
        for depth, sentence in sorted(needles, key=lambda needle: needle[0]):
            end = round(depth * num_words)
            if 0 < depth < 1:
                end = max(done, self.sentence_end(start + depth * num_words, start + num_words) - start)
            pieces += [*self.words(start + done, start + end), sentence]
            done = end
        return " ".join([*pieces, *self.words(start + done, start + num_words)])


def among(lines: Sequence[str], needles: Sequence[tuple[float, str]]) -> list[str]:
    """Lines with needles between them: (depth, line), where depth 0 is before all lines and 1 after them."""
    result = list(lines)
    for depth, needle in sorted(needles, key=lambda needle: -needle[0]):
        result.insert(round(depth * len(lines)), needle)
    return result
