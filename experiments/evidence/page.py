"""The tables of docs/evidence.md and of this folder's README.md, which `python docs/generate.py` writes."""

import math
from collections import Counter

from experiments import pages
from experiments.evidence import held
from experiments.evidence.counting import NO_BETTER
from experiments.evidence.directions import DIRECTIONS, EXPERIMENTS, Direction
from experiments.evidence.sources import Line, language_spread
from experiments.intervals import LEAST_SEEDS, Interval, runs_needed
from experiments.orders import AT_CHANCE

LANGUAGE = "bits per byte"
DEPENDS = "depends on the setting"


def verdict(lines: list[Line]) -> str:
    """The verdict of the decided lines if they agree, "in part" if others have enough seeds and decide nothing."""
    if not lines:
        return "not run"
    decided = {line.verdict for line in lines} & {"reproduced", "refuted here"}
    if not decided:
        return "undecided"
    if len(decided) > 1:
        return DEPENDS
    left = any(
        line.verdict in ("undecided", AT_CHANCE, NO_BETTER) and line.comparison.seeds >= LEAST_SEEDS for line in lines
    )
    return decided.pop() + (" in part" if left else "")


def distinct(lines: list[Line]) -> list[Line]:
    """Without repetitions: keys of 16 numbers make a larger budget the same experiment, with the same differences."""
    found: dict[tuple[tuple[float, ...], str], Line] = {}
    for line in lines:
        found.setdefault((line.comparison.differences, line.source), line)
    return list(found.values())


def summary() -> str:
    """One line for each direction. Lines with the same differences count once."""
    text = [
        "| | direction | paper | verdict | comparisons: reproduced, refuted here, undecided | seeds | held on fresh seeds |",
        "| ---: | --- | --- | --- | --- | ---: | ---: |",
    ]
    for number, direction in enumerate(DIRECTIONS, 1):
        lines = direction.lines()
        counts = Counter(line.verdict for line in distinct(lines))
        told = ", ".join(str(counts[name]) for name in ("reproduced", "refuted here", "undecided")) if lines else ""
        seeds = sorted({line.comparison.seeds for line in lines})
        spread = "" if not seeds else str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]}–{seeds[-1]}"
        name, paper, said = direction.name, direction.paper, f"**{verdict(lines)}**"
        text.append(pages.line((_link(number), name, paper, said, told, spread, held.score(number))))
    return "\n".join(text) + "\n"


def settings() -> str:
    """On what each direction depends that does, with the numbers of fresh seeds where it has a condition."""
    found = [(number, d) for number, d in enumerate(DIRECTIONS, 1) if verdict(d.lines()) == DEPENDS]
    said = []
    for number, direction in found:
        numbers = held.numbers(number)
        measured = f" *Fresh seeds:* {numbers}." if numbers else ""
        said.append(f"- {_link(number)} **{direction.name}.** {direction.depends}{measured}")
    return "\n".join(said) + "\n"


def _link(number: int) -> str:
    return f"[{number}](../experiments/evidence/README.md#{number})"


def commands() -> str:
    """The commands that measure the rows of each experiment."""
    return "\n".join(["```sh", *(command for command, _ in EXPERIMENTS.values()), "```", ""])


def details() -> str:
    """Each direction with its comparisons, its power calculation and its plots."""
    return "\n".join(_section(number, direction) for number, direction in enumerate(DIRECTIONS, 1))


def _section(number: int, direction: Direction) -> str:
    lines = direction.lines()
    text = [
        f"## {number}. {direction.name} {{ #{number} }}\n",
        f"{direction.paper}. **{verdict(lines).capitalize()}.**",
    ]
    if note := direction.note():
        text[-1] += f" {note}." if not note.endswith(".") else f" {note}"
    text.append("")
    if lines:
        columns = ("comparison", "effect", "95%, bootstrap", "95%, t", "seeds", "tokens per run", "verdict")
        text += [*pages.table(columns, map(_cells, lines), left=(0, -1)), ""]
        for part in filter(None, (_counted(lines), _power(lines))):
            text += [part, ""]
    plots = (f"[{name.replace('_', ' ')}]({EXPERIMENTS[name][1]})" for name in direction.experiments)
    text += [f"Plots and tables: {', '.join(plots)}.", ""]
    return "\n".join(text)


def _cells(line: Line) -> tuple[object, ...]:
    found = line.comparison
    intervals = [_interval(x) for x in (found.bootstrap, found.student)] if found.seeds > 1 else ["", ""]
    return line.setting, f"{found.effect:+.3f} {line.unit}", *intervals, found.seeds, f"{line.tokens:,}", line.verdict


def _interval(interval: Interval) -> str:
    return f"{interval[0]:+.3f} to {interval[1]:+.3f}"


def _counted(lines: list[Line]) -> str:
    """The language models of a direction that are not clearly better than a trigram, each once for each text."""
    found: dict[str, dict[str, None]] = {}
    for line in lines:
        where, models = line.counted
        found.setdefault(where, {}).update(dict.fromkeys(models))
    said = [f"{where}: {', '.join(models)}" for where, models in found.items() if models]
    return f"**Not clearly better than a trigram**, in bits per byte: {'; '.join(said)}." if said else ""


def _power(lines: list[Line]) -> str:
    """The seeds that would decide the undecided lines, by their own spread or by a borrowed one."""
    own, alone = [], []
    for line in lines:
        found = line.comparison
        if line.verdict != "undecided":
            continue
        if found.spread is not None:
            own.append((line, found.spread, found.runs_needed))
        elif line.unit == LANGUAGE:
            spread = math.sqrt(2) * language_spread()
            alone.append((line, spread, runs_needed(spread, found.effect)))
    said = []
    for group, whence in ((own, "their spread between seeds"), (alone, "the spread of titans-tiny between seeds")):
        if group:
            needed = [_runs(line, spread, runs) for line, spread, runs in sorted(group, key=lambda g: g[2] or math.inf)]
            shown = needed[:6] + ([f"{len(needed) - 6} more need as many or more seeds"] if len(needed) > 6 else [])
            said.append(f"**Power**, by {whence} (80% at 5%, paired t test): " + "; ".join(shown) + ".")
    return "\n\n".join(said)


def _runs(line: Line, spread: float, runs: int | None) -> str:
    many = "no number of seeds up to 10,000" if runs is None else f"{max(runs, LEAST_SEEDS):,} seeds"
    return f"{line.setting}: {many} (spread {spread:.3f}, effect {line.comparison.effect:+.3f})"
