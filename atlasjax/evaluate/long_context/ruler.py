"""Tracing and counting, as in RULER (arXiv 2404.06654, Appendix B), with its prompts: variables, common and frequent words."""

import itertools
import math
import string

import numpy as np

from atlasjax.evaluate.long_context import words
from atlasjax.evaluate.long_context.haystack import NOISE
from atlasjax.evaluate.long_context.scoring import all_answers
from atlasjax.evaluate.long_context.setting import Prompt, Setting
from atlasjax.evaluate.long_context.task import fitted, prompts

_HOPS = 4
_TRACKING = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above. "
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the value {value}, "
    "they are: "
)
_COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear most "
    "often.\n{context}\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words that appear most "
    "often in the list are:"
)
_NUM_COMMON = 10
_FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text? "
    "Answer: According to the coded text above, the three most frequently appeared words are:"
)
_LETTERS = 6
_LEAST_FREQUENT = 53  # from here on the fourth word always occurs more often than the fifth
_ZETA_2 = math.pi**2 / 6


@prompts(30, all_answers, has_depth=False, about="variables that have one value through a chain of assignments (RULER)")
def variable_tracking(setting: Setting) -> Prompt:
    """VT: a chain of five variables among repetitions of one sentence, after one solved example."""
    rng = setting.rng("variable_tracking")
    sentences = [f"{sentence}." for sentence in NOISE.rstrip(".").split(". ")]
    value, names, chain = _chain(rng, 3)
    example = " ".join(f"{assignment} {sentence}" for assignment, sentence in zip(chain, sentences))
    solved = _TRACKING.format(context=example, value=value, count=len(names)) + " ".join(names)
    value, names, chain = _chain(rng, 5)
    places = rng.random(len(chain))  # the chain's order is that of the text
    places.sort()

    def text(n: int) -> str:
        lines = [NOISE] * n
        for place, assignment in reversed(list(zip(places, chain))):
            lines.insert(int(place * (n + 1)), assignment)
        return f"{solved}\n\n" + _TRACKING.format(context="\n".join(lines), value=value, count=len(names))

    return Prompt(*fitted(setting, "variable_tracking", 30, text), tuple(names))


def _chain(rng: np.random.Generator, num_letters: int) -> tuple[str, list[str], list[str]]:
    """A value, the variables that have it, and their assignments."""
    names = words.different(rng, lambda rng: words.letters(rng, num_letters, string.ascii_uppercase), _HOPS + 1)
    value = str(rng.integers(10000, 100000))
    assignments = [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a}" for a, b in itertools.pairwise(names))]
    return value, names, assignments


@prompts(120, all_answers, has_depth=False, about="the ten most common words of a list (RULER)")
def common_words(setting: Setting) -> Prompt:
    """CWE: ten words occur 30 times, the others three times (below 4,096 tokens 6 times and once), after one solved example.

    The words are made of syllables. RULER takes words from a list, which ends before long lengths do.
    """
    rng = setting.rng("common_words")
    short = setting.length < 4096
    order = rng.permutation(words.NUM_SYLLABLE_WORDS)[: setting.length + 100]
    vocabulary = [words.syllables(int(i)) for i in order]
    seed = int(rng.integers(2**63))
    example, shown = _list(vocabulary[:20] if short else vocabulary[:40], *((3, 1) if short else (10, 3)), seed)
    solved = _COMMON.format(context=example) + " " + " ".join(f"{i}. {word}" for i, word in enumerate(shown, 1))
    rest = vocabulary[20 if short else 40 :]

    def text(n: int) -> str:
        numbered, _ = _list(rest[:n], *((6, 1) if short else (30, 3)), seed)
        return f"{solved}\n{_COMMON.format(context=numbered)}"

    return Prompt(
        *fitted(setting, "common_words", 120, text, least=_NUM_COMMON + 1, most=len(rest)), tuple(rest[:_NUM_COMMON])
    )


def _list(vocabulary: list[str], common: int, others: int, seed: int) -> tuple[str, list[str]]:
    found = vocabulary[:_NUM_COMMON] * common + vocabulary[_NUM_COMMON:] * others
    order = np.random.default_rng(seed).permutation(len(found))
    return " ".join(f"{i}. {found[j]}" for i, j in enumerate(order, 1)), vocabulary[:_NUM_COMMON]


@prompts(50, all_answers, has_depth=False, about="the three most frequent words of a coded text (RULER)")
def frequent_words(setting: Setting) -> Prompt:
    """FWE: coded words whose frequencies fall with the square of their rank; the first rank is dots, which do not count."""
    rng = setting.rng("frequent_words")
    count = max(5, setting.length // 50)
    vocabulary = [
        "...",
        *words.different(rng, lambda rng: words.letters(rng, _LETTERS, string.ascii_lowercase), count - 1),
    ]
    shares = np.arange(1, count + 1) ** -2.0 / _ZETA_2
    seed = int(rng.integers(2**63))

    def text(n: int) -> str:
        coded = np.repeat(np.arange(count), (n * shares).astype(int))
        coded = np.random.default_rng(seed).permutation(coded)
        return _FREQUENT.format(context=" ".join(vocabulary[i] for i in coded))

    return Prompt(*fitted(setting, "frequent_words", 50, text, least=_LEAST_FREQUENT), tuple(vocabulary[1:4]))
