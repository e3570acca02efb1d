"""The comparisons over seeds, each model at its best learning rate. Positive is what the paper says."""

import math
from collections.abc import Iterable

import numpy as np

from experiments.intervals import paired
from experiments.rows import Row
from experiments.studies.compare import Compared, Value

DIRECTIONS = {
    "omega": "The Omega rule is better than the online rule (A §3.2)",
    "deep": "A deep memory is better than a matrix (A Theorem 1)",
    "muon": "Muon is the better inner optimizer (A §5)",
    "caching": "Memory caching is better than the memory alone (M §4)",
    "gap": "Attention is ahead of memories where the context is long",
    "sampling": "Elastic Memory: exponential sampling is better than uniform (E Tables 2, 3)",
    "memory": "Elastic Memory is better than no memory (E Table 2)",
    "hybrid": "A hybrid with attention is better than the memory alone (A Table 6)",
    "language": "Atlas and OmegaNet are better than Titans, Transformer++ and Gated DeltaNet (A Table 2)",
    "baselines": "The order of ATLAS's baselines (A Table 2)",
}
# Direction → the models of each pair, the better one first.
PAIRS: dict[str, list[tuple[str, str]]] = {
    "omega": [("omeganet", "titans-no-momentum")],
    "deep": [("dla", "retnet-lmm")],
    "muon": [("atlas", "omeganet")],
    "caching": [("titans-grm", "titans")],
    "gap": [("attention", "titans"), ("attention", "titans-grm"), ("transformer++", "titans")],
    "sampling": [("elastic-exp", "elastic-uniform")],
    "memory": [("elastic-exp", "swa")],
    "hybrid": [("titans-mag", "titans")],
    "language": [
        (name, other) for other in ("titans", "transformer++", "gated-deltanet") for name in ("atlas", "omeganet")
    ],
    "baselines": [
        ("titans", "gated-deltanet"),
        ("gated-deltanet", "transformer++"),
        ("titans", "dla"),
        ("dla", "transformer++"),
    ],
}


def mean(row: Row, length: int, start: int, stop: int) -> float:
    """Bits per byte at positions [start, stop) of windows of a length, the mean of their bins."""
    width = row["recipe"]["bin"]
    return float(np.mean(row["by_position"][str(length)][start // width : stop // width]))


def places(length: int) -> dict[str, Value]:
    """The compared parts, for a length of training: the whole context, its end, its end less its beginning, and all beyond it."""
    end = lambda row: mean(row, length, length - length // 4, length)
    start = lambda row: mean(row, length, 0, length // 4)
    return {
        f"context of {length:,}": lambda row: row["bits_per_byte"],
        f"positions {length - length // 4:,} to {length:,}": end,
        f"fall of the loss from the first to the last quarter of {length:,}": lambda row: end(row) - start(row),
        f"positions {length:,} to {4 * length:,}": lambda row: mean(row, 4 * length, length, 4 * length),
    }


def rates(rows: Iterable[Row]) -> dict[str, float]:
    """Model → the learning rate of the short run with the lowest loss."""
    best: dict[str, tuple[float, float]] = {}
    for row in rows:
        if row["kind"] == "rate":
            loss = math.inf if row["loss"] is None else row["loss"]
            best[row["model"]] = min(best.get(row["model"], (math.inf, math.inf)), (loss, row["learning_rate"]))
    return {name: rate for name, (loss, rate) in best.items() if loss < math.inf}


def chosen(rows: Iterable[Row]) -> dict[str, dict[int, Row]]:
    """Model → seed → its whole run at the best learning rate."""
    rows = list(rows)
    best, found = rates(rows), {}  # type: ignore[var-annotated]
    for row in rows:
        if row["kind"] == "run" and best.get(row["model"]) == row["learning_rate"]:
            found.setdefault(row["model"], {})[row["seed"]] = row
    return found


def compared(rows: Iterable[Row]) -> list[Compared]:
    """All comparisons of which rows of both sides exist."""
    models, lines = chosen(rows), []
    for direction, pairs in PAIRS.items():
        for better, worse in pairs:
            a, b = models.get(better, {}), models.get(worse, {})
            for place, value in places(next(iter(a.values()))["recipe"]["length"]).items() if a else ():
                # A lower loss is better, so the loss of the worse one comes first.
                found = paired(*({seed: value(row) for seed, row in rows_of.items()} for rows_of in (b, a)))
                if found is not None:
                    lines.append(Compared(direction, f"{better} against {worse}: {place}", found))
    return lines
