"""Scores of generated texts, as the benchmarks define them. All ignore upper and lower case."""

import re

from atlasjax.evaluate.long_context.setting import Prompt


def all_answers(prompt: Prompt, text: str) -> float:
    """The share of the answers that occur in the text (RULER's `string_match_all`)."""
    text = _printable(text)
    return sum(answer.lower() in text for answer in prompt.answers) / len(prompt.answers)


def any_answer(prompt: Prompt, text: str) -> float:
    """1 if one of the answers occurs in the text (RULER's `string_match_part`; the recall tasks of arXiv 2402.18668), else 0."""
    text = _printable(text)
    return float(any(answer.lower() in text for answer in prompt.answers))


def one_label(prompt: Prompt, text: str) -> float:
    """1 if the first sentence of the text names the answer and no other label, else 0. Labels of the question do not count.

    This is the measure of BABILong (arXiv 2406.10149).
    """
    sentence = text.lower().split(".")[0].split("<context>")[0].split("<example>")[0].split("question")[0]
    named = {label.lower() for label in prompt.labels if label.lower() in sentence}
    named -= {label.lower() for label in prompt.labels if label.lower() in prompt.question.lower()}
    return float(named == {prompt.answers[0].lower()})


def _printable(text: str) -> str:
    return re.sub(r"[\x00-\x1f]", "\n", text.strip()).lower()
