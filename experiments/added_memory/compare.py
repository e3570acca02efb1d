"""The comparisons over seeds, as the README states them before the rows."""

import itertools
from collections.abc import Callable, Iterable

import numpy as np

from experiments.added_memory.arms import ARMS, CONTROL, PARAMETERS
from experiments.intervals import Comparison, compare
from experiments.rows import Row

Value = Callable[[Row], float]
_WORDS = {"reproduced": "yes", "refuted here": "no", "undecided": "undecided"}


def verdict(found: Comparison) -> str:
    """ "yes", if the difference is above zero by the rule of the page of evidence, "no" if it is below, or "undecided"."""
    return _WORDS[found.verdict]


def buckets(row: Row) -> list[tuple[int, int]]:
    """Start and end of each bucket of positions."""
    edges = [*map(int, row["by_position"]), row["recipe"]["length"] * row["recipe"]["times"]]
    return list(itertools.pairwise(edges))


def bits(row: Row, start: int, end: int) -> float:
    """Bits per byte at positions [start, end), whole buckets."""
    widths = {str(a): b - a for a, b in buckets(row) if start <= a < end}
    return float(np.average([row["by_position"][name] for name in widths], weights=list(widths.values())))


def recall(row: Row, start: int, end: int) -> float:
    """The share of right answers of facts that were stated [start, end) bytes before the answer."""
    kept = [str(a) for a, _ in buckets(row) if start <= a < end and row["asked"][str(a)]]
    return float(np.average([row["by_distance"][a] for a in kept], weights=[row["asked"][a] for a in kept]))


def slope(row: Row, other: Row) -> float:
    """The slope of other's bits per byte less row's over log₂ of the position, from the second bucket on: bits per doubling."""
    within = buckets(row)[1:]
    gains = [bits(other, a, b) - bits(row, a, b) for a, b in within]
    return float(np.polyfit([np.log2(a * b) / 2 for a, b in within], gains, 1)[0])


def measures(row: Row) -> dict[str, Callable[[Row, Row], float]]:
    """What is compared of an arm and a control, each a difference that is above zero if the arm is better. `row`: any row, for the
    sizes."""
    length, end = row["recipe"]["length"], row["recipe"]["length"] * row["recipe"]["times"]
    last = buckets(row)[-1][0]
    gain = lambda start, end: lambda arm, control: bits(control, start, end) - bits(arm, start, end)
    more = lambda start, end: lambda arm, control: recall(arm, start, end) - recall(control, start, end)
    return {
        f"bits per byte, positions 0 to {length:,}": gain(0, length),
        f"bits per byte, positions {length:,} to {end:,}": gain(length, end),
        f"bits per byte, positions {last:,} to {end:,}": gain(last, end),
        "bits per byte for each doubling of the position": slope,
        f"recall, distances to {length:,}": more(0, length),
        f"recall, distances {length:,} to {end:,}": more(length, end),
    }  # fmt: skip


def compared(rows: Iterable[Row]) -> list[tuple[str, str, str, Comparison]]:
    """(arm, control, measure, differences over the seeds of both), for each arm against nothing and parameters alone."""
    of: dict[str, dict[int, Row]] = {}
    for row in rows:
        of.setdefault(row["arm"], {})[row["seed"]] = row
    lines = []
    for arm in ARMS:
        for control in (CONTROL, PARAMETERS):
            seeds = sorted(of.get(arm, {}).keys() & of.get(control, {}).keys())
            if not seeds or arm in (CONTROL, control):
                continue
            for told, difference in measures(of[arm][seeds[0]]).items():
                each = [difference(of[arm][seed], of[control][seed]) for seed in seeds]
                lines.append((arm, control, told, compare(each, [0.0] * len(seeds))))
    return lines
