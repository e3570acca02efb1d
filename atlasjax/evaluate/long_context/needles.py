"""Needles in a haystack: the retrieval tasks of RULER (arXiv 2404.06654, Appendix B), with its prompts.

    prompt = niah_1(Setting(seed=0, length=4096, tokenizer=tokenizer, haystack=Haystack(text), depth=0.5))

Where RULER takes essays from the web, the haystack is the text of the setting, from a random sentence on. Depths that a setting
does not give are drawn from RULER's 40.
"""

from collections.abc import Callable, Sequence

import numpy as np

from atlasjax.evaluate.long_context import words
from atlasjax.evaluate.long_context.haystack import NOISE, among
from atlasjax.evaluate.long_context.scoring import all_answers
from atlasjax.evaluate.long_context.setting import Prompt, Setting
from atlasjax.evaluate.long_context.task import fitted, prompts

Draw = Callable[[np.random.Generator], str]

_DEPTHS = np.round(np.linspace(0, 100, 40)) / 100
_GENERATED = 128
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the {kind} "
    "afterwards.\n{context}\nWhat is the special magic {kind} for {query} mentioned in the provided text? The special magic {kind} "
    "for {query} mentioned in the provided text is"
)
_SEVERAL = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. I will quiz you about the {kind}s "
    "afterwards.\n{context}\nWhat are all the special magic {kind}s for {query} mentioned in the provided text? The special magic "
    "{kind}s for {query} mentioned in the provided text are"
)


@prompts(_GENERATED, all_answers, about="pass key: a number in a repeated sentence (RULER)")
def niah_1(setting: Setting) -> Prompt:
    """S-NIAH-1: a word's number among repetitions of one sentence."""
    needles = _Needles(setting, "niah_1")
    return needles.prompt(lambda n: "\n".join(among([NOISE] * n, needles.placed)))


@prompts(_GENERATED, all_answers, about="a number in a text (RULER)")
def niah_2(setting: Setting) -> Prompt:
    """S-NIAH-2: a word's number in a text."""
    return _Needles(setting, "niah_2").in_text()


@prompts(_GENERATED, all_answers, about="a UUID in a text (RULER)")
def niah_3(setting: Setting) -> Prompt:
    """S-NIAH-3: a word's UUID in a text."""
    return _Needles(setting, "niah_3", value=words.uuid4).in_text()


@prompts(_GENERATED, all_answers, about="one of four needles in a text (RULER)")
def niah_multi_key_1(setting: Setting) -> Prompt:
    """MK-NIAH-1: the number of one of four words, in a text. The depth is that of the needle asked for."""
    return _Needles(setting, "niah_multi_key_1", keys=4).in_text()


@prompts(_GENERATED, all_answers, about="a haystack of needles (RULER)")
def niah_multi_key_2(setting: Setting) -> Prompt:
    """MK-NIAH-2: the number of one word among the numbers of as many other words as the length allows."""
    return _Needles(setting, "niah_multi_key_2").in_needles()


@prompts(_GENERATED, all_answers, about="a haystack of needles, UUIDs for UUIDs (RULER)")
def niah_multi_key_3(setting: Setting) -> Prompt:
    """MK-NIAH-3: the UUID of a UUID among as many other pairs as the length allows."""
    return _Needles(setting, "niah_multi_key_3", key=words.uuid4, value=words.uuid4).in_needles()


@prompts(_GENERATED, all_answers, has_depth=False, about="four numbers of one word, in a text (RULER)")
def niah_multi_value(setting: Setting) -> Prompt:
    """MV-NIAH: all four numbers of one word, at random depths of a text."""
    return _Needles(setting, "niah_multi_value", values=4).in_text()


@prompts(_GENERATED, all_answers, has_depth=False, about="the numbers of four words, in a text (RULER)")
def niah_multi_query(setting: Setting) -> Prompt:
    """MQ-NIAH: the numbers of four words, at random depths of a text."""
    return _Needles(setting, "niah_multi_query", keys=4, queries=4).in_text()


class _Needles:
    """The random parts of a task of needles.

    Args:
      setting: of the prompt.
      task: name of the task.
      keys: number of keys. The first `queries` of them are asked for.
      values: number of values of each key.
      queries: number of keys that are asked for.
      key, value: draw one.
    """

    def __init__(
        self, setting: Setting, task: str, *, keys: int = 1, values: int = 1, queries: int = 1, key: Draw = words.word,
        value: Draw = words.number,
    ):  # fmt: skip
        rng = setting.rng(task)
        self._setting, self._task, self._key, self._value = setting, task, key, value
        self._kind = "uuid" if value is words.uuid4 else "number"
        self._keys = words.different(rng, key, keys)
        found = words.different(rng, value, keys * values)
        self._values = [found[i * values : (i + 1) * values] for i in range(keys)]
        self._queries = queries
        depths = rng.permutation(_DEPTHS)[: keys * values]
        if setting.depth is not None and queries * values == 1:
            depths[0] = setting.depth
        lines = [self._line(key, value) for key, own in zip(self._keys, self._values) for value in own]
        self.placed = list(zip(map(float, depths), lines))
        self._rng_of_rest = int(rng.integers(2**63))

    def in_text(self) -> Prompt:
        """Between the sentences of the setting's text."""
        haystack = self._setting.haystack
        start = haystack.start(np.random.default_rng(self._rng_of_rest))
        return self.prompt(lambda n: haystack.around(self.placed, start, n))

    def in_needles(self) -> Prompt:
        """Between other needles, one a line, none of which has a key that is asked for."""
        rng = np.random.default_rng(self._rng_of_rest)
        lines: list[str] = []

        def text(n: int) -> str:
            while len(lines) < n:
                if (key := self._key(rng)) not in self._keys:
                    lines.append(self._line(key, self._value(rng)))
            return "\n".join(among(lines[:n], self.placed))

        return self.prompt(text)

    def prompt(self, context: Callable[[int], str]) -> Prompt:
        """The longest prompt that fits; `context` gives the text of n units."""
        answers = tuple(value for own in self._values[: self._queries] for value in own)
        template = _ONE if len(answers) == 1 else _SEVERAL
        query = _listed(self._keys[: self._queries])

        def text(n: int) -> str:
            return template.format(kind=self._kind, query=query, context=context(n))

        return Prompt(*fitted(self._setting, self._task, _GENERATED, text), answers)

    def _line(self, key: str, value: str) -> str:
        return _NEEDLE.format(kind=f"{self._kind}s", key=key, value=value)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"
