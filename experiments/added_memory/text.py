"""The texts: pages of real text, of which half have facts in them, and long tests with and without facts.

A fact is "@", a name (A to P) and its value (a to p). In a page, and in a test, a name has one value. The first mention states it;
at the value of every later one a model can know it. All text is ASCII: a token is a byte, and a page is one training sequence.
"""

import hashlib
import pathlib
import sysconfig
from collections.abc import Sequence

import numpy as np

from atlasjax import check
from experiments.rows import text_identity, text_name

MARK = ord("@")
NAMES = np.frombuffer(b"ABCDEFGHIJKLMNOP", np.uint8)
VALUES = np.frombuffer(b"abcdefghijklmnop", np.uint8)
SIZE = 3  # bytes of a mention
OWN_NAME = "library"
_ADDED_PERIOD = 5
_PERIOD = 10  # every tenth file is for tests


def library_files() -> list[pathlib.Path]:
    """The modules of Python's standard library that are one file each, in order of their names (licence: PSF-2.0).

    Raises:
      ValueError: this Python has no sources.
    """
    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    if len(files) < _PERIOD:
        raise ValueError("added_memory: this Python has no sources of its standard library; give --text.")
    return files


def split(paths: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The text of training and that of tests, as ASCII bytes; what is not ASCII is a question mark, and "@" too.

    Args:
      paths: UTF-8 files, of which the last tenth of each is for tests. No files: the standard
        library, of which every tenth file is.
    """
    if paths:
        texts = [pathlib.Path(path).read_text(encoding="utf-8-sig") for path in paths]
        ends = [len(text) - len(text) // _PERIOD for text in texts]
        parts = [[t[:n] for t, n in zip(texts, ends, strict=True)], [t[n:] for t, n in zip(texts, ends, strict=True)]]
    else:
        each = [file.read_text(encoding="utf-8", errors="replace") for file in library_files()]
        tests = [i % _PERIOD == _PERIOD - 1 for i in range(len(each))]
        parts = [[t for t, test in zip(each, tests, strict=True) if test == wanted] for wanted in (False, True)]
    train, test = (_ascii("\n\n".join(part)) for part in parts)
    return train, test


def identity(paths: Sequence[str]) -> tuple[str, str]:
    """The name of the rows of a text, and name and hash for the recipe: rows of other texts must not count as rows of this."""
    if paths:
        return text_name(paths), text_identity(paths)
    files = library_files()
    digest = hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()
    return OWN_NAME, f"{OWN_NAME}, sha256 {digest[:16]}"


def _ascii(text: str) -> np.ndarray:
    return np.frombuffer(text.replace("\r\n", "\n").replace("@", "?").encode("ascii", "replace"), np.uint8)


def pages(text: np.ndarray, count: int, length: int, facts: int, seed: int, *, added: bool = False) -> list[np.ndarray]:
    """Pages of training, uint8 [length] each: different pieces of the text while there are some, every second one with facts in it.

    Args:
      text: uint8 [n].
      count: number of pages.
      length: bytes of a page.
      facts: names in a page that has facts. It has 2 · facts mentions or more, up to as many as fit, so that recall is learned from
        short distances first.
      seed: of the order, and of the facts and their places.
      added: whether they are of every fifth piece of the text, instead of all others.

    Raises:
      ValueError: a number is out of range, the text is shorter than a page, or the facts do not fit in a page.
    """
    check.integer("added_memory", "count", count)
    _check_facts(len(text), 2 * length, length, facts)  # a piece for each of the two trainings
    rng = np.random.default_rng([seed, 0])
    pieces = np.arange(0, len(text) - length + 1, length)
    mine = pieces[(np.arange(len(pieces)) % _ADDED_PERIOD == 0) == added]
    starts = [rng.permutation(mine) for _ in range(-(-count // len(mine)))]
    found = []
    for number, start in enumerate(np.concatenate(starts)[:count]):
        piece = text[start : start + length]
        if number % 2:
            names, values = rng.permutation(NAMES)[:facts], rng.choice(VALUES, facts)
            said = rng.integers(facts, size=rng.integers(2 * facts, length // SIZE + 1))
            mentions = np.stack([np.full(len(said), MARK), names[said], values[said]], 1).astype(np.uint8)
            left = length - mentions.size
            places = np.sort(rng.integers(left + 1, size=len(said)))
            piece = _joined(piece[:left], places, mentions)
        found.append(piece)
    return found


def needles(text: np.ndarray, count: int, length: int, facts: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tests of recall: facts at distances that are even on a logarithmic scale, and at the end one question about each of them.

    Args:
      text, length, facts, seed: as for `pages`.
      count: number of tests.

    Returns:
      Tokens uint8 [count, length], and int64 [count, facts, 2]: the place of each asked value, and how many bytes before it the
      value was stated.
    """
    _check_facts(len(text), length, length, facts)
    rng = np.random.default_rng([seed, 1])
    left = length - 2 * SIZE * facts
    tokens, asked = [], []
    for _ in range(count):
        start = int(rng.integers(len(text) - left + 1))
        names, values = rng.permutation(NAMES)[:facts], rng.choice(VALUES, facts)
        mentions = np.stack([np.full(facts, MARK), names, values], 1).astype(np.uint8)
        # Bytes of text between a fact and the questions: the first fact is furthest.
        gaps = np.sort(np.exp(rng.uniform(0, np.log(left + 1), facts)).astype(int) - 1)[::-1]
        order = rng.permutation(facts)
        piece = _joined(text[start : start + left], left - gaps, mentions)
        tokens.append(np.concatenate((piece, mentions[order].ravel())))
        stated = left - gaps + SIZE * np.arange(1, facts + 1) - 1
        place = len(piece) + SIZE * np.arange(1, facts + 1) - 1
        asked.append(np.stack([place, place - stated[order]], 1))
    return np.stack(tokens), np.stack(asked)


def windows(text: np.ndarray, count: int, length: int) -> np.ndarray:
    """Tests of text, evenly spaced: uint8 [count, length + 1]. The same for all seeds. Fewer if they would overlap."""
    count = min(count, (len(text) - 1) // length)
    if count < 1:
        raise ValueError(f"added_memory: the text of the tests has {len(text):,} bytes, should be over {length:,}.")
    starts = np.linspace(0, len(text) - length - 1, count).astype(int)
    return np.stack([text[start : start + length + 1] for start in starts])


def _joined(text: np.ndarray, places: np.ndarray, mentions: np.ndarray) -> np.ndarray:
    """The text with each mention [n, 3] before the byte at its place [n] (increasing)."""
    pieces = np.split(text, places)
    return np.concatenate([pieces[0], *(part for pair in zip(mentions, pieces[1:], strict=True) for part in pair)])


def _check_facts(available: int, needed: int, length: int, facts: int) -> None:
    check.require(1 <= facts <= len(NAMES), "facts", facts, f"1 to {len(NAMES)}")
    least = 2 * SIZE * facts + 1
    check.require(length >= least, "length", length, f"at least {least} for {facts} facts")
    if available < needed:
        raise ValueError(f"added_memory: the text has {available:,} bytes, should have at least {needed:,}.")
