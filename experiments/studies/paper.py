"""The runs of the papers, and their commands."""

from collections.abc import Iterable, Iterator
from typing import Any

# E §3.3, Table 3: Proof-Pile, N = 540 times 1 to 16. M Fig. 5 does not name a size; 760M is the smaller of its two.
_ELASTIC_SIZES = (1, 2, 4, 8, 16)
_SHORT = "block_attention"


def _mixers(memory: str, layers: int = 12) -> str:
    """All layers attend within blocks, and the ninth of twelve has the memory."""
    return " ".join(memory if i == round(3 * layers / 4) - 1 else _SHORT for i in range(layers))


def runs() -> Iterator[tuple[str, str, str]]:
    """(name, preset, command) of every run of the first seed."""

    def run(name: str, preset: str, options: str, part: str = "") -> tuple[str, str, str]:
        # Options of a part that may be absent come last, after its name.
        return name, preset, f"atlasjax train --preset {preset} --run-dir runs/{name} --seed 0 {options} {part}".strip()

    text = "--model.block-attention.block-size 2048 --data.source prepared --data.paths proof-pile"
    for sampling in ("exp", "uniform"):
        for times in _ELASTIC_SIZES:
            options = f"--model.mixer {_mixers('elastic')} --model.elastic.order {540 * times} {text}"
            yield run(f"elastic-{sampling}-{times}x", f"elastic-{sampling}-98m", options)
    yield run("memorizing-1x", "memorizing-98m", f"--model.mixer {_mixers('memorizing')} {text}")
    yield run("block", "memorizing-98m", f"--model.mixer {_SHORT} {text}")
    part, field = "model.memory.caching:caching-config", "--model.memory.caching"
    gates = {"": "", "-age": f"{part} {field}.connector age {field}.capacity 15", "-ones": f"{part} {field}.gate ones"}
    for aggregation in ("grm", "ssc"):
        for name, gate in gates.items():
            preset = f"titans-{aggregation}-760m"
            yield run(f"titans-{aggregation}{name}", preset, "--data.source prepared --data.paths fineweb", gate)


def plan() -> str:
    """The cost of the runs, in parameters, tokens and FLOPs, and a command for each."""
    test = (
        "Then, for sampling at test time and corruption, of every run of Elastic Memory and its baselines:",
        "    python -m experiments.studies.run --run-dir runs/elastic-uniform-1x",
    )
    return plan_of(list(runs()), *test)


def plan_of(chosen: list[tuple[str, str, str]], *test: str) -> str:
    """What is printed of the runs of a pod: their cost, their commands, and the lines that say how they are tested."""
    return "\n".join(
        [
            *costs(chosen),
            "On every host of a pod (prepare the texts with `atlasjax prepare`; other --seed and --run-dir for more seeds):",
            *(f"    {command}" for _, _, command in chosen),
            *test,
        ]
    )


def costs(chosen: Iterable[tuple[str, str, str]]) -> list[str]:
    """A table of runs as those of `runs`: parameters, tokens and FLOPs of each and of all."""
    from atlasjax.presets import describe, get_preset
    from atlasjax.train.defaults import default_config

    lines, total = [f"{'run':22} {'preset':20} {'parameters':>12} {'tokens':>8} {'EFLOP':>7}"], 0.0
    for name, preset, _ in chosen:
        config: Any = default_config(preset)
        tokens = config.steps * config.data.batch_size * config.data.sequence_length
        parameters = describe(get_preset(preset), length=config.data.sequence_length)["parameters"]
        flops = 6 * parameters * tokens
        total += flops
        lines.append(f"{name:22} {preset:20} {parameters:12,} {tokens / 1e9:7.0f}B {flops / 1e18:7.0f}")
    hours = total / (0.4 * 459e12) / 3600
    told = (
        f"Together {total / 1e18:,.0f} EFLOP for one seed, 6 for each parameter and token: {hours:,.0f} hours of a TPU v5p at "
        "40% of its peak. Not counted: attention and memories."
    )
    return [*lines, told]
