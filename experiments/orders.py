"""Orders of models that a paper's table has, and the same pairs here, compared over seeds."""

import dataclasses
from collections.abc import Iterable, Mapping

from experiments import pages
from experiments.intervals import Comparison, clearly_above, paired

Published = Mapping[str, Mapping[str, float]]  # model → task → accuracy in percent
Ours = Mapping[tuple[str, str], Mapping[int, float]]  # (task, model) → seed → accuracy
Levels = Mapping[str, float | Mapping[int, float]]  # task → the accuracy that needs no memory, or seed → it
AT_CHANCE = "at chance"  # in place of a verdict: neither model is clearly above what needs no memory


@dataclasses.dataclass(frozen=True)
class Order:
    """Two models of which a paper has one above the other on a task.

    Attributes:
      paper, task, better, worse: what is claimed.
      published: the accuracies of both in percent.
      comparison: ours, over the seeds that both have.
      at_chance: neither model is clearly above what needs no memory, so the comparison decides nothing.
    """

    paper: str
    task: str
    better: str
    worse: str
    published: tuple[float, float]
    comparison: Comparison
    at_chance: bool = False

    @property
    def verdict(self) -> str:
        return AT_CHANCE if self.at_chance else self.comparison.verdict


def orders(
    paper: str,
    published: Published,
    ours: Ours,
    tasks: Iterable[str],
    pairs: Iterable[tuple[str, str]],
    levels: Levels | None = None,
) -> list[Order]:
    """The orders of `pairs` of models for which there are rows of both; equal published numbers have none."""
    pairs, found = list(pairs), []
    for task in tasks:
        for a, b in pairs:
            if task not in published[a] or published[a][task] == published[b][task]:
                continue
            better, worse = (a, b) if published[a][task] > published[b][task] else (b, a)
            sides = [ours.get((task, name), {}) for name in (better, worse)]
            if (comparison := paired(*sides)) is not None:
                numbers = published[better][task], published[worse][task]
                level = (levels or {}).get(task)
                chance = level is not None and not any(clearly_above(side, level) for side in sides)
                found.append(Order(paper, task, better, worse, numbers, comparison, chance))
    return found


def intervals(comparison: Comparison) -> list[str]:
    """The bootstrap interval and that of t, in points; empty for one seed."""
    return [
        f"{100 * low:+.1f} to {100 * high:+.1f}" if comparison.seeds > 1 else ""
        for low, high in (comparison.bootstrap, comparison.student)
    ]


def table(paper: str, found: Iterable[Order]) -> Iterable[str]:
    """Lines of Markdown."""
    yield (
        f"**{paper}**: what it has in this order, and the paired differences here, in points; "
        f"a positive one agrees with the paper. {AT_CHANCE.capitalize()}: neither model is clearly above "
        "what needs no memory.\n"
    )
    columns = ("task", "order", "published", "here", "95%, bootstrap", "95%, t", "seeds", "verdict", "seeds needed")
    yield from pages.table(columns, map(_cells, found), left=(0, 1, 7))


def _cells(order: Order) -> tuple[object, ...]:
    ours = order.comparison
    needed = ours.runs_needed if order.verdict == "undecided" else None
    return (
        order.task.replace("_", " "), f"{order.better} > {order.worse}", f"{order.published[0]:g} – {order.published[1]:g}",
        f"{100 * ours.effect:+.1f}", *intervals(ours), ours.seeds, order.verdict, "" if needed is None else f"{needed:,}",
    )  # fmt: skip
