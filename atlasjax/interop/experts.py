"""Mixtures of experts in the words of DeepSeek-V3, which Kimi-Linear and Nemotron-3 have: their rows and fields."""

from collections.abc import Mapping

from atlasjax.interop.layers import ALL, Names
from atlasjax.interop.table import Row
from atlasjax.nn import ModelConfig


def network_numbers(config: ModelConfig, *kinds: str) -> tuple[int | None, ...]:
    """The number of each layer whose feed-forward network is of one of these kinds, None for the others."""
    period = len(config.pattern)
    return tuple(n if config.ffns[n % period] in kinds else None for n in range(config.num_layers))


def expert_rows(names: Names, config: ModelConfig, projections: Mapping[str, str]) -> list[Row]:
    """The rows of layers with experts, with the layers' own numbers.

    projections: the peer's names of an expert's projections, of "up" and "down" and, for SwiGLU, "gate".
    """
    given, found = config.experts, [Row(names("gate.weight"), "layers.mlp.router.kernel", "e d -> d e")]
    if given.correction_bias:
        found.append(Row(names("gate.e_score_correction_bias"), "layers.mlp.correction", "e -> e"))
    gated = given.network == "swiglu"
    first, wide = "gate_and_wide" if gated else "wide", {"gate": (ALL, 0), "up": (ALL, 1)} if gated else {"up": ()}
    for e in range(given.number):
        of_one = lambda name, e=e: names(f"experts.{e}.{projections[name]}.weight")
        found += [Row(of_one(name), "layers.mlp.wide", "m d -> d m", part=(e, *part)) for name, part in wide.items()]
        found.append(Row(of_one("down"), "layers.mlp.out", "d m -> m d", part=(e,)))
    if given.shared_width is not None:
        shared = lambda name: names(f"shared_experts.{name}_proj.weight")
        path = f"layers.mlp.shared.{first}.kernel"
        found += [Row(shared(name), path, "m d -> d m", part=part) for name, part in wide.items()]
        found.append(Row(shared("down"), "layers.mlp.shared.out.kernel", "d m -> m d"))
    return found
