"""What the papers of 2025 and 2026 claim of their rules, and the comparisons that decide it. A positive difference is the claim."""

from experiments.evidence import lines
from experiments.evidence.lines import Direction
from experiments.evidence.sources import Line, capacity, mqar
from experiments.stability.pairs import PAIRS

_OWN, _MATRIX, _TITANS = "linear, own erasing rate", "linear", "deep 2, momentum"
_ERASING = (
    "In the capacity experiment gates are constants and the channels of a key are alike, so the erasing rate b is one number, "
    "W + η (v − b W k) kᵀ, chosen with η for each number of pairs, against b = 1"
)


def erasing() -> list[Line]:
    """An erasing rate of its own."""
    return (
        capacity([(_OWN, _MATRIX)], budgets=(0, 256, 1024))
        + mqar([("gdn2", "kda")])
        + lines.whole_runs(PAIRS["erasing"])
    )


def gated_delta() -> list[Line]:
    """The rivals of Gated DeltaNet that have its decay, one for each head."""
    found = capacity([(_OWN, _MATRIX)], budgets=(0, 256, 1024)) + mqar([("comba", "gated_deltanet")])
    return found + lines.whole_runs(PAIRS["gated delta"])


def momentum() -> list[Line]:
    """Momentum against none, of a matrix and of a deep memory."""
    pairs = [("linear, momentum", _MATRIX), ("linear, momentum, buffers free", _MATRIX)]
    pairs += [("deep 2, momentum", "deep 2"), ("deep 2, momentum, buffers free", "deep 2")]
    recalled = mqar([("momentum_deltanet", "gated_deltanet")])
    return capacity(pairs, budgets=(0, 256, 1024)) + recalled + lines.whole_runs(PAIRS["momentum"])


def mesa() -> list[Line]:
    """A regression over all tokens against one step for each."""
    pairs = [("mesa", _MATRIX), ("mesa, sums of keys free", _MATRIX)]
    found = capacity(pairs, budgets=(0, 256, 1024)) + mqar([("mesa", "delta")]) + lines.whole_runs(PAIRS["mesa"])
    exact = [("mesa, exact", "mesa"), ("mesa, exact, sums of keys free", "mesa, sums of keys free")]
    return found + lines.not_claimed(capacity(exact, budgets=(0, 256, 1024)))


def tnt() -> list[Line]:
    """TNT against the rule that it is around, online, and with the chunks of its global memory."""
    free = f"{_TITANS}, TNT, buffers free"
    pairs = [(f"{_TITANS}, TNT", _TITANS), (free, f"{_TITANS}, buffers free")]
    pairs += [(free, f"{_TITANS}, chunks of 16, buffers free")]
    plain = [(f"{_TITANS}, TNT without projection, buffers free", f"{_TITANS}, buffers free")]
    found = capacity(pairs) + lines.not_claimed(capacity(plain))
    return found + mqar([("titans-tnt", "titans")]) + lines.whole_runs(PAIRS["tnt"])


def projection() -> list[Line]:
    """Local queries projected on the keys seen against queries as they are."""
    return capacity([(f"{_TITANS}, TNT, buffers free", f"{_TITANS}, TNT without projection, buffers free")])


DIRECTIONS = (
    Direction(
        "Gated DeltaNet-2 is better than KDA", "arXiv 2605.22791", erasing, ("capacity", "mqar", "zoo", "stability"),
        note=lambda: f"{_ERASING}.",
    ),
    Direction(
        "Comba and Gated DeltaProduct are better than Gated DeltaNet", "arXiv 2506.02475, 2502.10297", gated_delta,
        ("capacity", "mqar", "zoo", "stability"),
        note=lambda: f"{_ERASING}. Comba's read key is such a multiple of k; its correction of queries needs a query with its key. "
        "More writes of one key by constant gates are one write with another step size, so DeltaProduct has no such row.",
    ),
    Direction(
        "Momentum is better than none", "arXiv 2605.05838; Titans", momentum, ("capacity", "mqar", "zoo", "stability"),
        note=lambda: "Where gates are constant and nothing decays, the write gate of Momentum DeltaNet is a step size, so its "
        "memory is the matrix with momentum. Momentum counts as state unless buffers are free.",
        depends="On the keys and whether momentum counts as state: with free buffers or keys of 16 numbers it recalls more pairs "
        "if keys come in topics or are correlated, and a matrix fewer if they are independent or in 16 dimensions; where it "
        "counts, and in a deep memory of 256 floats, every other decided line is against it.",
    ),
    Direction(
        "A regression over all tokens (MesaNet) is better than the delta rule", "arXiv 2506.05233", mesa,
        ("capacity", "mqar", "zoo", "stability"),
        note=lambda: "Its state has the sums of the keys, d² numbers more, which count unless they are free; then keys are as wide "
        "as those of the matrix. The ridge is 1 and β at most 4, as published. Lines without a verdict compare the exact solution "
        "with 30 steps of conjugate gradients.",
        depends="On the keys, the floats and the passes: in one pass it recalls more pairs if keys are as wide as the "
        "matrix's; with as many floats it recalls more if they are correlated or come in topics and fewer if they are "
        "independent, because the sums of keys take a third of its floats or more; after 30 passes the delta rule has "
        "solved the regression too, and recalls more but for keys in 16 dimensions.",
    ),
    Direction(
        "TNT is better than Titans", "arXiv 2511.07343", tnt, ("capacity", "mqar", "zoo", "stability"),
        note=lambda: "A global memory with chunks of 16 pairs, and a local one, online, that restarts every 48. Both write all "
        "pairs, with step sizes of their own. The state counts both memories, their momentum and the sum of keys that projects "
        "queries. Nothing is trained. The line without a verdict has no projection, to which direction 39 leads. TNT's other "
        "claim, speed, is in the benchmarks.",
    ),
    Direction(
        "TNT: local queries should be projected on the keys seen", "arXiv 2511.07343", projection, ("capacity",),
        note=lambda: "In the paper the perplexity is 21.04 with it and 22.01 without. The sum of k kᵀ is no projection if keys are "
        "alike: it enlarges the direction that they share.",
    ),
)  # fmt: skip
