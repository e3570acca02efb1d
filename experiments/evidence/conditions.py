"""On what a claim depends, as code that predicts comparisons, and the test of it on fresh seeds.

Each condition was written from the rows of seeds 0 to 9 of the capacity experiment, and committed before a row of
`fresh.py` (seeds 10 to 19) was read. The first branch that holds in a comparison's settings predicts it; where none holds, nothing
is predicted.
"""

import dataclasses
from collections.abc import Callable, Iterator

from experiments.evidence.directions import DIRECTIONS
from experiments.evidence.sources import Case, Line

ALIKE = 0.1  # doublings: two memories whose curves are nearer than this are predicted as alike
AHEAD, BEHIND, NEITHER = "ahead", "behind", "alike"


@dataclasses.dataclass(frozen=True)
class Branch:
    """A condition on the settings and what it predicts.

    Attributes:
      says: the condition, as the page has it.
      predicts: `AHEAD` or `BEHIND`, of the thing that the paper claims is better; `NEITHER`: less than `ALIKE` doublings apart.
      holds: the condition.
    """

    says: str
    predicts: str
    holds: Callable[[Case], bool]


def alike(c: Case) -> bool:
    """Whether keys have a common part."""
    return c.keys in ("correlated", "topics")


def once(c: Case) -> bool:
    return c.passes == 1


def free(c: Case) -> bool:
    """Whether the better memory's further state is not counted, or no floats are."""
    return c.better.endswith("free") or c.budget == 0


def deep(c: Case) -> bool:
    return c.better.startswith(("deep", "gated"))


def muon(c: Case) -> bool:
    return "Muon" in c.better


def narrow_and_large(c: Case) -> bool:
    """Keys in 16 dimensions, and floats for wider ones: a matrix cannot use them."""
    return c.keys == "narrow" and c.budget == 1024


def window(c: Case) -> int:
    return int(c.better.partition("c=")[2].partition(",")[0])


def steps(c: Case) -> int:
    """Newton–Schulz steps; the name of a matrix with the usual five has no number."""
    return int(c.better.partition("Muon ")[2][:1] or 5)


CONDITIONS: dict[int, tuple[Branch, ...]] = {
    1: (
        Branch("a matrix, one pass, keys alike", AHEAD, lambda c: not deep(c) and once(c) and alike(c)),
        Branch("a matrix, other keys or 30 passes, buffers free", NEITHER, lambda c: not deep(c) and free(c)),
        Branch("a matrix of 1,024 floats, keys in 16 dimensions", NEITHER, lambda c: not deep(c) and narrow_and_large(c)),
        Branch("a matrix, other keys or 30 passes, equal floats", BEHIND, lambda c: not deep(c)),
        Branch("a deep memory, buffers free", AHEAD, free),
        Branch("a deep memory, 256 floats", BEHIND, lambda c: c.budget == 256),
        Branch("a deep memory, 1,024 floats", NEITHER, lambda c: True),
    ),
    2: (
        Branch("free floats, 30 passes", AHEAD, lambda c: c.budget == 0 and not once(c)),
        Branch("free floats, one pass, powers", AHEAD, lambda c: c.budget == 0 and c.better.startswith("powers")),
        Branch("free floats, one pass, other features", BEHIND, lambda c: c.budget == 0),
        Branch("1,024 floats, keys in 16 dimensions, 30 passes", AHEAD, lambda c: narrow_and_large(c) and not once(c)),
        Branch(
            "1,024 floats, keys in 16 dimensions, one pass, powers",
            AHEAD,
            lambda c: narrow_and_large(c) and c.better.startswith("powers"),
        ),
        Branch("equal floats otherwise", BEHIND, lambda c: True),
    ),
    3: (
        Branch("free floats, 30 passes", AHEAD, lambda c: c.budget == 0 and not once(c)),
        Branch("free floats, one pass, keys alike", AHEAD, lambda c: c.budget == 0 and alike(c)),
        Branch("free floats, one pass, other keys", BEHIND, lambda c: c.budget == 0),
        Branch("1,024 floats, keys in 16 dimensions, 30 passes", AHEAD, lambda c: narrow_and_large(c) and not once(c)),
        Branch(
            "two layers, 1,024 floats, keys alike, one pass",
            NEITHER,
            lambda c: c.better == "deep 2" and c.budget == 1024 and alike(c) and once(c),
        ),
        Branch("equal floats otherwise", BEHIND, lambda c: True),
    ),
    4: (
        Branch("256 floats, Muon, keys alike", NEITHER, lambda c: c.budget == 256 and muon(c) and alike(c)),
        Branch("256 floats otherwise", BEHIND, lambda c: c.budget == 256),
        Branch("1,024 floats, Muon", AHEAD, muon),
        Branch("1,024 floats, 30 passes", AHEAD, lambda c: not once(c)),
        Branch("1,024 floats, one pass without Muon", BEHIND, lambda c: True),
    ),
    5: (
        Branch("buffers free, keys alike, to 4 or 8 pairs", AHEAD, lambda c: free(c) and alike(c) and window(c) in (4, 8)),
        Branch("buffers free otherwise", NEITHER, free),
        Branch("buffers counted, independent keys", BEHIND, lambda c: c.keys == "independent"),
        Branch("256 floats, keys in 16 dimensions", BEHIND, lambda c: c.keys == "narrow" and c.budget == 256),
        Branch("1,024 floats, keys in 16 dimensions", NEITHER, narrow_and_large),
        Branch("1,024 floats, keys alike, to 2 or 4 pairs", AHEAD, lambda c: c.budget == 1024 and window(c) <= 4),
    ),
    6: (
        Branch("a matrix, keys alike", AHEAD, lambda c: not deep(c) and alike(c)),
        Branch("a matrix, other keys", NEITHER, lambda c: not deep(c)),
        Branch("a deep memory, keys alike", NEITHER, alike),
        Branch("a deep memory, other keys", AHEAD, lambda c: True),
    ),
    9: (Branch("every memory and kind of keys", NEITHER, lambda c: True),),
    18: (
        Branch("the second step, keys alike", AHEAD, lambda c: steps(c) == 2 and alike(c)),
        Branch(
            "the third step, a deep memory of 1,024 floats, keys in 16 dimensions",
            AHEAD,
            lambda c: steps(c) == 3 and deep(c) and narrow_and_large(c),
        ),
        Branch("otherwise", NEITHER, lambda c: True),
    ),
    36: (
        Branch("a matrix, momentum free, keys alike", AHEAD, lambda c: not deep(c) and free(c) and alike(c)),
        Branch("a matrix, momentum free, other keys", NEITHER, lambda c: not deep(c) and free(c)),
        Branch("a matrix, momentum counted, keys alike", NEITHER, lambda c: not deep(c) and alike(c)),
        Branch("a matrix of 1,024 floats, keys in 16 dimensions", NEITHER, lambda c: not deep(c) and narrow_and_large(c)),
        Branch("a matrix, momentum counted, other keys", BEHIND, lambda c: not deep(c)),
        Branch("a deep memory, momentum counted", BEHIND, lambda c: not free(c)),
        Branch("a deep memory on keys of 16 numbers that are alike", AHEAD, lambda c: c.budget == 0 and alike(c)),
        Branch("a deep memory, momentum free, otherwise", NEITHER, lambda c: True),
    ),
    37: (
        Branch("30 passes, keys in 16 dimensions", NEITHER, lambda c: not once(c) and c.keys == "narrow"),
        Branch("30 passes, other keys", BEHIND, lambda c: not once(c)),
        Branch("one pass, keys alike", AHEAD, alike),
        Branch("one pass, other keys, as wide as the matrix's", AHEAD, lambda c: free(c) or narrow_and_large(c)),
        Branch("one pass, other keys, equal floats", BEHIND, lambda c: True),
    ),
}  # fmt: skip


def branch_of(number: int, case: Case) -> Branch | None:
    """The branch that predicts a comparison of a direction; None if none does."""
    return next((branch for branch in CONDITIONS[number] if branch.holds(case)), None)


def claimed(number: int) -> Iterator[Line]:
    """The comparisons of the capacity experiment that decide a direction."""
    for line in DIRECTIONS[number - 1].lines():
        if line.case is not None and not line.aside:
            yield line


def rows_wanted() -> set[tuple[str, int, int, str]]:
    """(keys, budget, passes, memory) of every row that a condition predicts."""
    cases = [line.case for number in CONDITIONS for line in claimed(number) if line.case is not None]
    return {(c.keys, c.budget, c.passes, name) for c in cases for name in (c.better, c.worse)}


def outcome(branch: Branch, line: Line) -> str:
    """Whether a prediction holds in a comparison: "right", "wrong" or "undecided".

    `AHEAD` and `BEHIND` are right or wrong by the verdict of the page, and `NEITHER` is right if the effect is below `ALIKE`,
    and wrong if it is not and the comparison is decided.
    """
    verdict = line.comparison.verdict
    if branch.predicts == NEITHER:
        if abs(line.comparison.effect) < ALIKE:
            return "right"
        return "undecided" if verdict == "undecided" else "wrong"
    if verdict == "undecided":
        return "undecided"
    return "right" if (verdict == "reproduced") == (branch.predicts == AHEAD) else "wrong"
