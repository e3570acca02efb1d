"""The comparisons that the studies make, over the seeds that both sides have. Positive is what the paper says."""

import dataclasses
import math
from collections.abc import Callable

from experiments.intervals import Comparison, paired
from experiments.rows import Row
from experiments.studies.measure import RATES

Value = Callable[[Row], float]
BYTES = "bits per byte"  # of two models
SAME = "bits per byte, the same weights"  # of one model, tested in two ways
LOST = "share of keys and values lost"
ERROR = "mean squared error"


@dataclasses.dataclass(frozen=True)
class Compared:
    """One comparison.

    Attributes:
      direction: key of `DIRECTIONS`.
      told: what is compared.
      comparison: the paired differences.
      unit: of the differences.
    """

    direction: str
    told: str
    comparison: Comparison
    unit: str = BYTES


# Direction → the models of each pair, the better one first.
_PAIRS = {
    "gate": [
        (f"{memory}-{gate}", f"{memory}-{gate}{other}")
        for memory, gate, other in (
            ("titans", "grm", "-age"), ("linear", "grm", "-age"), ("titans", "ssc", "-age"),
        )
    ],
    "gating": [(f"{memory}-grm", f"{memory}-grm-ones") for memory in ("titans", "linear")],
    "sampling": [(f"elastic-exp-{n}x", f"elastic-uniform-{n}x") for n in (1, 4)],
    "size": [(f"elastic-exp-{more}x", f"elastic-exp-{less}x") for less, more in ((1, 2), (2, 4), (1, 4), (4, 16), (1, 16))]
    + [("elastic-uniform-4x", "elastic-uniform-1x")],
}  # fmt: skip
DIRECTIONS = {
    "gate": "The gate of caching should see the context (M Fig. 5)",
    "gating": "A gate is better than none (M Fig. 5)",
    "caching": "Memory Caching is better than the memory alone (M §4)",
    "sampling": "Exponential sampling is better than uniform (E Tables 2, 3)",
    "swap": "Trained uniform and tested exponential is better than uniform (E §3.5)",
    "size": "A larger memory is better (E Tables 3, 13)",
    "lost": "A larger memory loses less of keys and values (E Table 13)",
    "orders": "Corruption of the local context: the orders of E Table 7",
    "robust": "Elastic Memory is more robust to corruption of the local context than its baselines (E §3.6)",
    "memory": "Elastic Memory is better than no memory, and than a queue of as many numbers (E Table 2)",
}
_PAIRS["caching"] = [("titans-grm", "titans"), ("titans-ssc", "titans")]
_PAIRS["memory"] = [
    ("elastic-exp-1x", "block"),
    ("elastic-exp-1x", "memorizing-1x"),
    ("elastic-exp-16x", "memorizing-all"),
]
_CORRUPTED, _AGAINST = "elastic-exp-1x", ("memorizing-1x", "block")
_PLACES = {"memory": "the memory layer", "all": "all layers"}
# E Table 7, perplexity: without noise, and place → by the rates of `RATES`.
_TABLE_7: dict[str, tuple[float, dict[str, tuple[float, ...]]]] = {
    "elastic-exp-1x": (2.915, {"memory": (2.930, 2.948, 3.316), "all": (3.475, 4.367, 30.575)}),
    "memorizing-1x": (3.305, {"memory": (3.312, 3.316, 3.316), "all": (3.956, 5.118, 34.392)}),
}


def compared(rows: list[Row]) -> list[Compared]:
    """All comparisons of which rows of both sides exist."""
    by_model: dict[str, dict[int, Row]] = {}
    for row in rows:
        by_model.setdefault(row["model"], {})[row["seed"]] = row

    def pair(
        better: str, worse: str, value: Value, other: Value | None = None, needs: str = "bits_per_byte"
    ) -> Comparison | None:
        of = lambda name, value: {seed: value(row) for seed, row in by_model.get(name, {}).items() if needs in row}
        return paired(of(worse, other or value), of(better, value))  # a lower loss is better

    found: list[tuple[str, str, Comparison | None, str]] = []
    for direction, pairs in _PAIRS.items():
        found += [
            (direction, f"{a} against {b}", pair(a, b, lambda row: row["bits_per_byte"]), BYTES) for a, b in pairs
        ]
    for a, b in _PAIRS["size"]:
        for field, unit in (("mean_squared_error", ERROR), ("share", LOST)):
            lost = lambda row, field=field: row["reconstruction"][field]
            found.append(("lost", f"{a} against {b}: {unit}", pair(a, b, lost, needs="reconstruction"), unit))
    for name in ("elastic-uniform-1x", "elastic-uniform-4x"):
        read = lambda how: lambda row: row["by_sampling"][how]
        told = f"{name}, tested exponential against tested uniform"
        found.append(("swap", told, pair(name, name, read("exponential"), read("uniform")), SAME))
    for other in _AGAINST:
        for where, place in _PLACES.items():
            for rate in RATES:
                noise = f"{rate:.0%} noise in {place}"
                told = f"{_CORRUPTED} against {other}, {noise}: rise of the loss"
                found.append(("robust", told, pair(_CORRUPTED, other, rise(where, rate)), BYTES))
    for where, place in _PLACES.items():
        for rate in RATES:
            for what, value in (("loss", noisy(where, rate)), ("rise of the loss", rise(where, rate))):
                published = {name: _published(name, where, rate, what) for name in _TABLE_7}
                better, worse = sorted(published, key=lambda name: published[name])
                if published[better] < published[worse]:
                    told = f"{better} against {worse}, {rate:.0%} noise in {place}: {what}"
                    found.append(("orders", told, pair(better, worse, value), BYTES))
    order = list(DIRECTIONS)
    found.sort(key=lambda item: order.index(item[0]))
    return [Compared(d, told, c, unit) for d, told, c, unit in found if c is not None]


def _published(name: str, where: str, rate: float, what: str) -> float:
    """The numbers of a model in E Table 7, in nats per token: the loss under noise, or its rise from that without noise."""
    clean, noised = _TABLE_7[name]
    perplexity = noised[where][RATES.index(rate)]
    return math.log(perplexity if what == "loss" else perplexity / clean)


def noisy(where: str, rate: float) -> Value:
    """The loss of the last block with noise."""
    return lambda row: row["corrupted"][where][str(rate)]


def rise(where: str, rate: float) -> Value:
    """By how much the noise raises the loss of the last block."""
    return lambda row: row["corrupted"][where][str(rate)] - row["by_block"][-1]
