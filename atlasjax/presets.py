"""Named model configurations: every rule of `atlasjax.rules` at the sizes of A Table 7, and tiny ones for a CPU.

A Table 7 gives layers, width and heads; it does not give the width of SwiGLU or say whether the head is tied. Both are chosen
here, one choice for each size, so that the parameter counts of all rules land near the paper's names (`sizes`): the head is tied
at 340M and 760M and not tied at 170M and 1.3B, and SwiGLU is 3.67, 2.25, 2.33 and 3 times the width. The vocabulary is the
paper's, 32,000.

Rules of the Omega family (omeganet, atlas, atlas_plus_plus) use elementwise powers of degree 2 here, D = 2 · head_dim. All
monomials, the default of `rules.atlas`, have D = C(head_dim + 2, 2): 2,145 for heads of 64, so a memory of 565 thousand numbers for
each head, 217 million parameters for the 24 layers of 16 heads of atlas-340m alone, and a state of three times as many float32
numbers for each sequence. Ask for them with `MemoryConfig(features="polynomial")`.
"""

import dataclasses
import inspect
from typing import Any

from atlasjax import rules
from atlasjax.names import lookup
from atlasjax.nn.abstract import count_parameters, state_bytes
from atlasjax.nn.config import MemoryConfig, ModelConfig

_PAPER_VOCABULARY = 32_000

# name → (the paper's number of parameters, sizes)
SIZES: dict[str, tuple[float, dict[str, Any]]] = {
    "170m": (170e6, {"num_layers": 12, "dim": 768, "num_heads": 16, "mlp_dim": 2816, "tie_embeddings": False}),
    "340m": (340e6, {"num_layers": 24, "dim": 1024, "num_heads": 16, "mlp_dim": 2304, "tie_embeddings": True}),
    "760m": (760e6, {"num_layers": 24, "dim": 1536, "num_heads": 16, "mlp_dim": 3584, "tie_embeddings": True}),
    "1.3b": (1.3e9, {"num_layers": 18, "dim": 2048, "num_heads": 8, "mlp_dim": 6144, "tie_embeddings": False}),
}

_TINY: dict[str, Any] = {"vocab_size": 256, "num_layers": 4, "dim": 128, "num_heads": 4, "dtype": "float32"}
# One orthogonalization per token of a memory of 4 · head_dim hidden units costs more than fifty times the rest of the tiny
# model. What two CPU cores can train in minutes is one in 32 tokens, of half the width.
_TINY_MUON: dict[str, Any] = {"newton_schulz_every": 32, "expansion": 2}


def _memory(rule: str, *, tiny: bool) -> MemoryConfig:
    parameters = inspect.signature(rules.REGISTRY[rule]).parameters
    config = MemoryConfig(rule=rule)
    if "features" in parameters:
        features = "sketch" if rule == "polysketch" else "elementwise"
        config = dataclasses.replace(config, features=features, degree=2)
    if tiny and "newton_schulz_every" in parameters:
        config = dataclasses.replace(config, **{k: v for k, v in _TINY_MUON.items() if k in config.overrides()})
    return config


def _presets() -> dict[str, ModelConfig]:
    presets = {}
    for rule in rules.REGISTRY:
        prefix = rule.replace("_", "-")
        presets[f"{prefix}-tiny"] = ModelConfig(memory=_memory(rule, tiny=True), **_TINY)
        for size, (_, sizes) in SIZES.items():
            presets[f"{prefix}-{size}"] = ModelConfig(
                vocab_size=_PAPER_VOCABULARY, memory=_memory(rule, tiny=False), **sizes
            )
    return presets


PRESETS: dict[str, ModelConfig] = _presets()


def get_preset(name: str) -> ModelConfig:
    """The configuration of that name, e.g. "atlas-tiny" or "omeganet-340m".

    Raises:
      ValueError: no such preset; the message suggests the nearest name.
    """
    return lookup("preset", name, PRESETS)


@dataclasses.dataclass(frozen=True)
class Size:
    """A row of `sizes`.

    Attributes:
      preset: its name.
      paper: number of parameters in the paper's name for it.
      parameters: number of parameters that it has here.
    """

    preset: str
    paper: float
    parameters: int

    @property
    def difference(self) -> float:
        """How far ours is from the paper's name, as a fraction of it."""
        return self.parameters / self.paper - 1


def sizes(rule: str = "atlas") -> list[Size]:
    """Our parameter counts beside the paper's names, for the presets of one rule.

    Raises:
      ValueError: no such rule.
    """
    lookup("memory rule", rule, rules.REGISTRY)
    names = {size: f"{rule.replace('_', '-')}-{size}" for size in SIZES}
    return [Size(name, SIZES[size][0], count_parameters(PRESETS[name])) for size, name in names.items()]


def describe(config: ModelConfig) -> dict[str, int]:
    """Sizes of a model, from shapes alone.

    Returns:
      parameters: all of them; non_embedding_parameters: without the embedding and an untied head;
      state_bytes_per_sequence: the cache of one sequence in decoding, whatever its length.
    """
    return {
        "parameters": count_parameters(config),
        "non_embedding_parameters": count_parameters(config, embeddings=False),
        "state_bytes_per_sequence": state_bytes(config),
    }
