"""Comparisons of speed, and what their rows say of costs."""

import itertools
import math
from collections.abc import Collection, Iterable

from experiments.efficiency.measure import REFERENCE
from experiments.efficiency.report import ratios
from experiments.evidence.sources import Line, rows, texts
from experiments.intervals import paired


def efficiency(pairs: Iterable[tuple[str, str]], kind: str = "training") -> list[Line]:
    """(faster, slower) models: tokens per second at each length and on each device, in doublings.

    Models of a row are timed in turn with Transformer++, so each is measured in its speed: round by round, which are the seeds.
    """
    found = []
    for name in texts("efficiency"):
        group = [row for row in rows(f"efficiency/results/{name}.jsonl") if row["kind"] == kind]
        speeds = {(row["model"], row["length"]): dict(enumerate(map(math.log2, ratios(row)))) for row in group}
        tokens = {row["length"]: row["tokens"] for row in group}
        for (faster, slower), length in itertools.product(pairs, sorted(tokens)):
            sides = [
                dict.fromkeys(range(group[0]["recipe"]["rounds"]), 0.0)
                if model == REFERENCE
                else speeds.get((model, length), {})
                for model in (faster, slower)
            ]
            if (comparison := paired(*sides)) is not None:
                where = f"{group[0]['device'].split(':')[0]}, {group[0]['recipe']['size']}"
                told = f"{faster} against {slower}: {kind}, {length:,} tokens, {where}"
                found.append(Line(told, comparison, "doublings of speed", tokens[length], "efficiency"))
    return found


def not_run(models: Collection[str], kind: str = "training") -> str:
    """The rows of models that were not timed, because a step needs more than the memory that the recipe allows."""
    said = []
    for row in (row for name in texts("efficiency") for row in rows(f"efficiency/results/{name}.jsonl")):
        if row["kind"] == kind and row["model"] in models and row["seconds"] is None:
            need, most = row["temporary_bytes"] / 2**30, row["recipe"]["most_gib"]
            said.append(
                f"{row['model']} has no line at {row['length']:,} tokens: a step needs {need:.1f} GiB, and steps of more "
                f"than {most:g} GiB were not run."
            )
    return " ".join(said)


def gam_scaling() -> str:
    """How time and memory of GAM's block and of two forms of attention's grow from the shortest text to the longest."""
    said = []
    for name, field, what in (
        ("scaling-cpu", "seconds", "time"),
        ("bytes-cpu", "temporary_bytes", "temporary memory"),
    ):
        found = sorted(rows(f"gam/results/{name}.jsonl"), key=lambda row: row["length"])
        for block in ("gam", "attention", "attention-whole"):
            points = [(row["length"], row["blocks"][block][field]) for row in found]
            points = [point for point in points if point[1] is not None]  # a block that was too large to run
            if len(points) > 1:
                (start, low), (end, high) = points[0], points[-1]
                power = math.log(high / low) / math.log(end / start)
                said.append(f"{block}, {what} from {start:,} to {end:,} tokens: {power:.2f}")
    return "; ".join(said)
