"""Looking up what stands earlier in the text: a phone book, and the fields of a page."""

import re

import numpy as np

from atlasjax.evaluate.long_context import words
from atlasjax.evaluate.long_context.scoring import any_answer
from atlasjax.evaluate.long_context.setting import Prompt, Setting
from atlasjax.evaluate.long_context.task import fitted, prompts

_FIELDS = """
Author Publisher Editor Director Producer Composer Architect Owner Founder Chairman Manager Sponsor Address Street
Region Capital Currency Language Colour Material Model Version Code Catalogue Shelf Album Studio Label Venue Team
Coach Club Award Genre Series Episode Format Weight Width Height Price Stock Supplier Warranty Battery Engine Airport
Station Harbour School Major Mascot Motto Budget Revenue Rating Runtime Deadline Contact
""".split()  # noqa: SIM905
_NUM_FIELDS = 12


@prompts(32, any_answer, stop=("\n",), about="the number of a name in a phone book (arXiv 2402.01032)")
def phonebook(setting: Setting) -> Prompt:
    """A phone book as long as the length allows, two of its entries again as examples, and a name (Jelassi et al. 2024, §4)."""
    rng = setting.rng("phonebook")
    most = min(words.NUM_NAMES, setting.length)
    names = rng.permutation(words.NUM_NAMES)
    numbers = np.random.default_rng(rng.integers(2**63)).integers(10**9, 10**10, size=most)
    asked, *shown = (float(place) for place in rng.random(3))
    asked = asked if setting.depth is None else setting.depth
    entry = lambda i: (words.name(int(names[i])), re.sub(r"(...)(...)(....)", r"\1-\2-\3", str(numbers[i])))
    # The entry that is asked for, and the examples, are the same ones at all lengths and depths.
    target, *examples = (entry(i) for i in range(3))

    def text(n: int) -> str:
        entries = [entry(i) for i in range(3, n)]
        for place, one in sorted([*zip(shown, examples), (asked, target)], key=lambda placed: -placed[0]):
            entries.insert(round(place * (n - 3)), one)
        book = "\n".join(f"{name}: {number}" for name, number in entries)
        solved = "\n".join(f"{name}: {number}" for name, number in examples)
        return f"Phone book\n{book}\n\nThe numbers of some people in the phone book\n{solved}\n{target[0]}:"

    return Prompt(*fitted(setting, "phonebook", 32, text, least=4, most=most), (target[1],))


@prompts(48, any_answer, stop=("\n",), about="a field of a page, in the form of a cloze (as SWDE in arXiv 2402.18668)")
def in_context_recall(setting: Setting) -> Prompt:
    """Twelve fields of a page between the sentences of a text; the prompt ends with the name of one. Stops at a line end.

    The form, the 48 tokens and the score are those of the recall tasks of Based (Arora et al. 2024); the pages are written here.
    """
    rng = setting.rng("in_context_recall")
    fields = [_FIELDS[i] for i in rng.choice(len(_FIELDS), _NUM_FIELDS, replace=False)]
    values = [words.name(int(i)) for i in rng.choice(words.NUM_NAMES, _NUM_FIELDS, replace=False)]
    depths = rng.random(_NUM_FIELDS)
    if setting.depth is not None:
        depths[0] = setting.depth
    needles = [(float(d), f"\n{field}: {value}\n") for d, field, value in zip(depths, fields, values)]
    haystack, start = setting.haystack, setting.haystack.start(rng)

    def text(n: int) -> str:
        page = haystack.around(needles, start, n).replace(" \n", "\n").replace("\n ", "\n")
        return f"{page.strip()}\n\n{fields[0]}:"

    return Prompt(*fitted(setting, "in_context_recall", 48, text), (values[0],))
