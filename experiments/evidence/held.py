"""What fresh seeds say of the conditions, and a model of the effects. `docs/generate.py` writes these tables."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from experiments import pages
from experiments.capacity.report import TITLES, area
from experiments.evidence import conditions, sources
from experiments.evidence.conditions import CONDITIONS, Branch
from experiments.evidence.directions import DIRECTIONS
from experiments.evidence.sources import Case, Line
from experiments.intervals import compare, student
from experiments.rows import Row

HALF = 5  # seeds of a half
OUTCOMES = ("right", "wrong", "undecided")


@functools.cache
def tested(number: int) -> tuple[tuple[Branch | None, Line, Line], ...]:
    """(branch, its comparison on seeds 0 to 9, the same on fresh seeds) for each comparison of a direction that has both."""
    lines = list(conditions.claimed(number))
    pairs = dict.fromkeys((line.case.better, line.case.worse) for line in lines if line.case)
    fresh = {line.case: line for line in sources.capacity(pairs, (0, 256, 1024), sources.FRESH)}
    branch = lambda line: conditions.branch_of(number, line.case)
    return tuple((branch(line), line, fresh[line.case]) for line in lines if line.case in fresh)


def counts(number: int) -> Counter[str]:
    """Outcomes of a direction's predictions on fresh seeds."""
    return Counter(conditions.outcome(branch, fresh) for branch, _, fresh in tested(number) if branch is not None)


@functools.cache
def halves(number: int) -> tuple[int, int]:
    """The comparisons of a direction without a condition that are decided on seeds 0 to 4, and those of them that are decided
    in the same way on all later seeds, five or more. (0, 0) if the direction has none with ten seeds."""
    repeated, decided = 0, 0
    for line in DIRECTIONS[number - 1].lines():
        differences = line.comparison.differences
        if len(differences) >= 2 * HALF and not line.aside:
            first, then = (
                compare(part, [0.0] * len(part)).verdict for part in (differences[:HALF], differences[HALF:])
            )
            decided += first != "undecided"
            repeated += first != "undecided" and first == then
    return decided, repeated


def score(number: int) -> str:
    """ "held of predicted" on fresh seeds, by the condition or by the first half of the seeds; "" without either."""
    if number in CONDITIONS:
        found = counts(number)
        made, right = found.total(), found["right"]
    else:
        made, right = halves(number) if DIRECTIONS[number - 1].depends else (0, 0)
    return f"{right} of {made}" if made else ""


def numbers(number: int) -> str:
    """The branches of a condition in words, each with its mean effect on fresh seeds and how many of its comparisons held."""
    told = []
    for branch in CONDITIONS.get(number, ()):
        found = [fresh for b, _, fresh in tested(number) if b is branch]
        if found:
            held = sum(conditions.outcome(branch, line) == "right" for line in found)
            effect = np.mean([line.comparison.effect for line in found])
            told.append(f"{branch.says}: {branch.predicts}, {effect:+.2f} ({held} of {len(found)})")
    return "; ".join(told)


def fresh() -> str:
    """One line for each direction with a condition: predictions, and what fresh seeds said of them."""
    text = [
        "| | predictions | right | wrong | undecided | on seeds 0–9 | no prediction | not run yet |",
        "| ---: |" + " ---: |" * 7,
    ]
    whole: Counter[str] = Counter()
    for number in CONDITIONS:
        found = counts(number)
        whole += found
        own = Counter(conditions.outcome(b, line) for b, line, _ in tested(number) if b is not None)
        left = len(list(conditions.claimed(number))) - len(tested(number))
        silent = sum(branch is None for branch, _, _ in tested(number))
        outcomes = (found[name] for name in OUTCOMES)
        text.append(pages.line((f"[{number}](#{number})", found.total(), *outcomes, own["right"], silent, left)))
    text.append(f"{pages.line(('all', whole.total(), *(whole[name] for name in OUTCOMES)))} | | |")
    return "\n".join(text) + "\n" + _missed()


def _missed() -> str:
    said = []
    for number in CONDITIONS:
        for branch, _, line in tested(number):
            if branch is not None and conditions.outcome(branch, line) == "wrong":
                effect = line.comparison.effect
                said.append(f"- [{number}](#{number}) {line.setting}: {effect:+.2f}, predicted {branch.predicts}")
    return "\nWrong on fresh seeds:\n\n" + "\n".join(said) + "\n" if said else ""


# The model.

FACTORS: dict[str, Callable[[Case], float]] = {
    "constant": lambda c: 1.0,
    "keys alike": conditions.alike,
    "keys in 16 dimensions": lambda c: c.keys == "narrow",
    "30 passes": lambda c: not conditions.once(c),
    "30 passes and keys alike": lambda c: conditions.alike(c) and not conditions.once(c),
    "256 floats": lambda c: c.budget == 256,
    "keys of 16 numbers, any floats": lambda c: c.budget == 0,
    "buffers free": lambda c: c.better.endswith("free"),
    "a deep memory": conditions.deep,
    "all monomials or a sketch": lambda c: c.better.startswith(("polynomial", "sketch")),
    "Muon": conditions.muon,
    "a window of more than 4": lambda c: "c=" in c.better and conditions.window(c) > 4,
    "more than 2 Newton–Schulz steps": lambda c: conditions.muon(c) and conditions.steps(c) > 2,
}


@dataclasses.dataclass(frozen=True)
class Model:
    """Least squares of the effects in doublings on factors.

    Attributes:
      effects: factor → its coefficient for each seed; all comparisons of a seed share its pairs, so seeds are the unit.
      own, fresh: share of the variance between comparisons that the mean coefficients explain, of seeds 0 to 9 and 10 to 19.
    """

    effects: dict[str, np.ndarray]
    own: float
    fresh: float


def fit(number: int) -> Model:
    """The model of a direction's comparisons. A factor that others before it give is left out."""
    cases = [line.case for _, line, _ in tested(number)]
    columns: dict[str, np.ndarray] = {}
    for name, factor in FACTORS.items():
        tried = np.stack([*columns.values(), np.asarray([float(factor(c)) for c in cases if c])], -1)
        if np.linalg.matrix_rank(tried) == tried.shape[1]:
            columns[name] = tried[:, -1]
    x = np.stack(list(columns.values()), -1)
    own, fresh = (np.asarray([pair[i].comparison.differences for pair in tested(number)]) for i in (1, 2))
    coefficients = np.linalg.pinv(x) @ own  # [factors, seeds]: least squares is linear, so each seed has its own
    explained = lambda y: 1 - np.square(y - x @ coefficients.mean(1)).sum() / np.square(y - y.mean()).sum()
    return Model(dict(zip(columns, coefficients, strict=True)), explained(own.mean(1)), explained(fresh.mean(1)))


def model() -> str:
    """The models of all directions with a condition: a column each."""
    models = {number: fit(number) for number in CONDITIONS if len(tested(number)) > len(FACTORS)}
    lines = [(name, *(_coefficient(m.effects.get(name)) for m in models.values())) for name in FACTORS]
    lines = [line for line in lines if any(line[1:])]
    for told, part in (("variance explained, seeds 0–9", "own"), ("of seeds 10–19", "fresh")):
        lines.append((told, *(f"{getattr(m, part):.2f}" for m in models.values())))
    return "\n".join(pages.table(("factor", *(f"[{n}](#{n})" for n in models)), lines)) + "\n"


def _coefficient(values: np.ndarray | None) -> str:
    if values is None:
        return ""
    low, high = student(values)
    return f"{values.mean():+.2f} ± {(high - low) / 2:.2f}"


# Which memory for which data.

COUNTED = (
    "linear", "linear, c=4", "linear, c=16", "linear, momentum", "powers 2", "polynomial 2", "deep 2", "gated", "mesa",
)  # fmt: skip
FREE = ("linear, c=4, buffers free", "linear, c=16, buffers free", "linear, momentum, buffers free",
        "linear, Muon, buffers free", "deep 2, Muon 5, buffers free", "deep 2, c=16, buffers free",
        "mesa, sums of keys free")  # fmt: skip
AT = 64  # pairs


def choices(budget: int = 1024) -> str:
    """For each kind of keys the memory that is best on seeds 0 to 9, and its numbers on fresh seeds, where it has them."""
    columns = ("keys", "pairs are read", f"delta rule: of {AT} pairs", "best, all state counted", "best, buffers free")
    lines = []
    own, fresh = (_by_setting(path, budget) for path in (sources.CAPACITY, sources.FRESH))
    for passes in (1, 30):
        for keys, title in TITLES.items():
            there, then = own.get((keys, passes), {}), fresh.get((keys, passes), {})
            if "linear" in then:
                best = (_best(names, there, then) for names in (COUNTED, FREE))
                times = "once" if passes == 1 else f"{passes} times"
                lines.append((title, times, f"{_recalled(then['linear']):.0%}", *best))
    return "\n".join(pages.table(columns, lines, left=(0, 1, 3, 4))) + "\n"


def _by_setting(path: str, budget: int) -> dict[tuple[str, int], dict[str, Row]]:
    found: dict[tuple[str, int], dict[str, Row]] = {}
    for row in sources.rows(path):
        if row["budget"] == budget:
            found.setdefault((row["keys"], row["passes"]), {})[row["memory"]] = row
    return found


def _best(names: Sequence[str], own: dict[str, Row], fresh: dict[str, Row]) -> str:
    known = [name for name in names if name in own]
    if not known:
        return "not measured"
    name = max(known, key=lambda n: np.mean(area(own[n])))
    if name == "linear":
        return "the delta rule"
    rows, mark = (fresh, "") if name in fresh else (own, " \\*")
    gain = compare(area(rows[name]), area(rows["linear"]))
    low, high = gain.student
    told = f"{gain.effect:+.2f} doublings ({low:+.2f} to {high:+.2f})"
    short = name.removesuffix(", buffers free").removesuffix(", sums of keys free")
    return f"{short}: {_recalled(rows[name]):.0%}, {told}{mark}"


def _recalled(row: Row) -> float:
    return float(np.mean([seed[row["recipe"]["pairs"].index(AT)] for seed in row["recalled"]]))
