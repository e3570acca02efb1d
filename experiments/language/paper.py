"""The runs of a pod: the same comparisons at 760M parameters and 30B tokens (A Table 2, M Table 1), and their commands."""

from collections.abc import Iterator

from experiments.studies.paper import plan_of

SIZE = "760m"
NAMES = (
    "titans", "titans-grm", "transformer++", "titans-no-momentum", "omeganet", "dla", "retnet-lmm", "swa", "gated-deltanet",
    "atlas", "titans-mag", "gla",
)  # fmt: skip


def runs() -> Iterator[tuple[str, str, str]]:
    """(name, preset, command) of every run of the first seed. Elastic Memory's runs are in `experiments.studies`."""
    for name in NAMES:
        preset = f"{name}-{SIZE}"
        command = f"atlasjax train --preset {preset} --run-dir runs/{name} --seed 0 --data.source prepared --data.paths fineweb"
        yield name, preset, command


def plan() -> str:
    """The cost of the runs, in parameters, tokens and FLOPs, and the commands."""
    test = "--tasks perplexity_by_position sliding_window_perplexity --lengths 4k 8k 16k --samples 100"
    told = "Then, for the loss by the position in contexts of one, two and four times those of training, of every run:"
    return plan_of(list(runs()), told, f"    atlasjax evaluate --run-dir runs/titans {test}")
