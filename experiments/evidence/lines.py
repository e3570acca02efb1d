"""Directions, and the comparisons of those that take more than one source. A positive difference is what the paper says."""

import dataclasses
from collections.abc import Callable, Iterable

from experiments.efficiency.measure import REFERENCE
from experiments.evidence.functions import function_muon
from experiments.evidence.sources import (
    Line,
    ablation,
    capacity,
    language,
    mqar,
    needles,
    needles_at_test_time,
    recall,
    studies,
    trained,
    zoo,
)
from experiments.evidence.speed import efficiency
from experiments.stability.pairs import BASELINE, PAIRS

_WINDOWS = (2, 4, 8, 16)
# In place of a verdict: no paper has this comparison, and it helps to read those that one has.
NOT_CLAIMED = "not claimed"
# Models without a claim: attention in the layer of a memory, and Titans as a hybrid, where A Table 6 has Atlas alone.
_WITHOUT_A_CLAIM = {BASELINE, "titans-mag"}


@dataclasses.dataclass(frozen=True)
class Direction:
    """A claim of a paper.

    Attributes:
      name: the claim.
      paper: where it is.
      lines: its comparisons, from the rows that exist.
      experiments: keys of `directions.EXPERIMENTS` that have, or would have, its rows.
      note: what a reader must know.
      depends: one sentence on what the verdict depends, read from the decided lines; "" if they agree.
    """

    name: str
    paper: str
    lines: Callable[[], list[Line]]
    experiments: tuple[str, ...]
    note: Callable[[], str] = lambda: ""
    depends: str = ""


def omega() -> list[Line]:
    pairs = [("linear, c=4", "linear"), ("linear, c=16", "linear"), ("linear, c=4, buffers free", "linear")]
    pairs += [("deep 2, c=4", "deep 2"), ("deep 2, c=16, buffers free", "deep 2")]
    texts = zoo([("omeganet", "titans-no-momentum")]) + trained(PAIRS["omega"]) + language("omega")
    recalled = mqar([("omega", "omega-online")]) + needles([("omega", "omega-online")])
    return capacity(pairs) + recalled + texts + ablation([("base", "c=1")])


def polynomial() -> list[Line]:
    names = ("powers 2", "polynomial 2", "powers 3", "polynomial 3", "sketch 2")
    found = capacity([(name, "linear") for name in names], budgets=(256, 1024))
    found += capacity([(name, "linear") for name in names], budgets=(0,))
    pairs = [("omega-powers", "omega"), ("omega-matrix-powers", "omega-matrix")]
    return found + mqar(pairs) + trained(PAIRS["polynomial"]) + ablation([("base", "without polynomial features")])


def deep() -> list[Line]:
    found = capacity([("deep 2", "linear"), ("deep 3", "linear")], budgets=(0, 256, 1024))
    texts = zoo([("dla", "linear-attention")]) + trained(PAIRS["deep"]) + language("deep")
    recalled = mqar([("omega", "omega-matrix"), ("dla", "linear")]) + needles([("omega", "omega-matrix")])
    return found + recalled + texts + ablation([("base", "linear memory")])


def gated() -> list[Line]:
    ways = ("", ", momentum, buffers free", ", Muon 5, buffers free", ", c=4, buffers free")
    found = capacity([(f"gated{way}", f"deep 2{way}") for way in ways])
    found += mqar([("omega-gated", "omega"), ("atlas-gated", "atlas")])
    return found + zoo([("atlas++", "atlas")]) + trained(PAIRS["gated"]) + ablation([("gated memory", "base")])


def windows() -> list[Line]:
    names = ["linear", *(f"linear, c={c}" for c in _WINDOWS)]
    free = ["linear", *(f"linear, c={c}, buffers free" for c in _WINDOWS)]
    found = capacity(zip(names[1:], names)) + capacity(zip(free[1:], free))
    models = ["omega-online", "omega-2", "omega", "omega-8", "omega-16"]
    variants = ["c=1", "c=2", "base", "c=8", "c=16"]
    return found + mqar(zip(models[1:], models)) + ablation(zip(variants[1:], variants))


def muon() -> list[Line]:
    found = capacity(
        [
            ("linear, Muon, buffers free", "linear, momentum, buffers free"),
            ("deep 2, Muon 5, buffers free", "deep 2, momentum, buffers free"),
        ]
    )
    found += function_muon() + mqar([("atlas", "omega-powers")]) + needles([("atlas", "omeganet")])
    texts = zoo([("atlas", "omeganet")]) + trained(PAIRS["muon"]) + language("muon")
    return found + texts + ablation([("base", "without Muon")])


def newton_schulz_steps() -> list[Line]:
    steps = (1, 2, 3, 5, 7)
    matrix = ["linear, Muon, buffers free" if n == 5 else f"linear, Muon {n}, buffers free" for n in steps]
    deep = [f"deep 2, Muon {n}, buffers free" for n in steps]
    found = capacity(zip(matrix[1:], matrix)) + capacity(zip(deep[1:], deep))
    return found + needles_at_test_time("newton_schulz_steps", steps)


def dot() -> list[Line]:
    found = mqar([("dot", "deep_transformer"), ("deep_transformer", "attention"), ("dot", "attention")])
    found += needles([("dot", "deep_transformer"), ("deep_transformer", "attention"), ("dot", "attention")])
    return found + whole_runs(PAIRS["dot"])


def _stored(pairs: Iterable[tuple[str, str]]) -> list[Line]:
    """Memories of the capacity experiment, linear and deep, with caches whose size is free."""
    named = lambda memory, name: f"{memory}, {name}" if name else memory
    found = [(named(m, a), named(m, b)) for m in ("linear", "deep 2") for a, b in pairs]
    return capacity(found, budgets=(0, 1024))


def caching_order() -> list[Line]:
    """GRM, Soup and SSC among each other."""
    held = [("GRM", "Soup"), ("Soup", "SSC"), ("GRM", "SSC")]
    models = PAIRS["caching order"]
    recalled = [*((f"{a}-8", f"{b}-8") for a, b in models), ("linear-grm-8", "linear-ssc-8")]
    return _stored(held) + mqar(recalled) + needles(models) + whole_runs(models)


def caching() -> list[Line]:
    """GRM, Soup and SSC against the memory alone."""
    models = PAIRS["caching"]
    recalled = [*((f"{a}-8", b) for a, b in models), *((f"linear-{way}-8", "linear") for way in ("grm", "ssc"))]
    found = (
        _stored([(way, "") for way in ("GRM", "Soup", "SSC")]) + mqar(recalled) + recall([("linear-4-grm", "linear-4")])
    )
    return found + needles(models) + whole_runs(models) + studies("caching") + language("caching")


def residual() -> list[Line]:
    same = [dataclasses.replace(line, aside="control") for line in mqar([("linear-residual-8", "linear")])]
    return _stored([("Residual", "")]) + mqar([("titans-residual-8", "titans")]) + same + whole_runs(PAIRS["residual"])


def whole_runs(pairs: Iterable[tuple[str, str]]) -> list[Line]:
    """Both kinds of runs of tiny models. Pairs with a model without a claim come last, and have no verdict."""
    pairs = list(pairs)
    ours = [pair for pair in pairs if _WITHOUT_A_CLAIM & {*pair}]
    claimed = [pair for pair in pairs if pair not in ours]
    return zoo(claimed) + trained(claimed) + not_claimed(zoo(ours) + trained(ours))


def not_claimed(found: Iterable[Line]) -> list[Line]:
    """The same lines without verdicts; a reason that they already have stays."""
    return [dataclasses.replace(line, aside=line.aside or NOT_CLAIMED) for line in found]


def log_linear() -> list[Line]:
    texts = trained([*PAIRS["log-linear"], *((f"dla-{way}", "dla-log-linear") for way in ("grm", "soup", "ssc"))])
    held = [(name, "Log-Linear") for name in ("GRM", "Soup", "SSC")]
    return _stored(held) + mqar([("linear-grm-8", "log_linear"), ("linear-ssc-8", "log_linear")]) + texts


def context() -> list[Line]:
    return mqar([(f"{memory}-grm-8", f"{memory}-grm-8-age") for memory in ("titans", "linear")]) + studies("gate")


def gating() -> list[Line]:
    recalled = mqar([(f"{memory}-grm-8", f"{memory}-residual-8") for memory in ("titans", "linear")])
    return _stored([("GRM", "Residual")]) + recalled + whole_runs(PAIRS["gating"]) + studies("gating")


def gap() -> list[Line]:
    pairs = [
        ("attention", "titans"),
        ("attention", "titans-grm-8"),
        ("attention", "linear"),
        ("attention", "linear-grm-8"),
        ("attention", "delta"),
    ]
    small = recall([("attention", "linear-4"), ("attention", "linear-4-grm")])
    found = needles([("attention", name) for name in ("titans", "titans-grm", "gated_delta", "delta")])
    return mqar(pairs) + small + found


def elastic_memory() -> list[Line]:
    return whole_runs(PAIRS["elastic"]) + studies("memory") + language("memory")


def gam(*others: str) -> list[Line]:
    """GAM against some of the models that it is compared with."""
    return whole_runs(pair for pair in PAIRS["gam and attention"] if pair[1] in others)


def hybrid() -> list[Line]:
    return whole_runs(PAIRS["hybrid"]) + not_claimed(language("hybrid"))  # the latter are of titans-mag


def caching_speed() -> list[Line]:
    pairs = [("titans", "titans-ssc"), ("titans-ssc", "titans-grm"), ("titans-ssc", "titans-soup")]
    return efficiency([*pairs, *((f"titans-{name}", REFERENCE) for name in ("ssc", "grm", "soup"))])
