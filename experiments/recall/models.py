"""The models of the recall experiment. Adding a line to `MODELS` adds a model everywhere."""

import dataclasses
import re
from typing import Any

from atlasjax.names import resolve, takes
from atlasjax.nn import MIXERS, ModelConfig
from atlasjax.nn.caching import CachingConfig
from atlasjax.nn.config import GAMConfig, MemoryConfig
from atlasjax.rules import REGISTRY

DIM = 64
SEGMENT = 8  # tokens after which a memory is cached: four pairs
CONVOLUTION = "gam"  # with fusion "local" it is just a causal depthwise convolution


def _memory(rule: str, key_dim: int, aggregation: str | None = None) -> dict[str, Any]:
    """One head with keys of size `key_dim` and values of size `DIM`, so the memory is a matrix of key_dim · DIM numbers."""
    caching = None if aggregation is None else CachingConfig(aggregation, segment_size=SEGMENT)  # type: ignore[arg-type]
    return {
        "mixer": (CONVOLUTION, "memory"),
        "memory": MemoryConfig(rule, caching=caching),
        "head_dim": key_dim,
        "value_expansion": DIM // key_dim,
    }


# Model → the fields of `ModelConfig` in which it differs from `model`'s base.
MODELS: dict[str, dict[str, Any]] = {
    "attention": {"mixer": (CONVOLUTION, "attention")},
    "linear-4": _memory("linear_attention", 4),
    "linear-8": _memory("linear_attention", 8),
    "linear-16": _memory("linear_attention", 16),
    "linear-32": _memory("linear_attention", 32),
    "delta-4": _memory("delta_rule", 4),
    "delta-16": _memory("delta_rule", 16),
    "linear-4-grm": _memory("linear_attention", 4, "grm"),
    "linear-4-ssc": _memory("linear_attention", 4, "ssc"),
    "delta-4-grm": _memory("delta_rule", 4, "grm"),
    "delta-4-ssc": _memory("delta_rule", 4, "ssc"),
    "gam": {"mixer": "gam", "gam": GAMConfig(slots=64)},
}


def fields(name: str) -> dict[str, Any]:
    """The changes of a model: a line of `MODELS`, or a rule or a mixer by name or as "package.module:object".

    A rule may be followed by the size of its keys, which divides 64 and is 64 by default, and by an aggregation of cached memories:
    "titans", "delta_rule-16", "my_parts:my_rule-16-grm".

    Raises:
      ValueError: no such name; the message suggests the nearest.
    """
    if name in MODELS:
        return MODELS[name]
    part, key_dim, aggregation = re.fullmatch(r"(.+?)(?:-(\d+)(?:-(\w+))?)?", name).groups()  # type: ignore[union-attr]
    # Some names are a rule's and a mixer's: with a size of keys the rule's, else the mixer's.
    table = REGISTRY | MIXERS if key_dim is None else MIXERS | REGISTRY
    is_mixer = takes(resolve("model, rule or mixer", part, MODELS | table), "rngs")
    if is_mixer and key_dim is None:
        return {"mixer": (CONVOLUTION, part)}
    width = DIM if key_dim is None else int(key_dim)
    if is_mixer or part in MODELS or not width or DIM % width:
        raise ValueError(f"model {name!r}: only a rule has a size of keys, and it divides {DIM}.")
    return _memory(part, width, aggregation)


def model(name: str, vocab_size: int) -> ModelConfig:
    """A model (`fields`): width 64, float32, no feed-forward networks, and twice a convolution over 3 tokens and the mixer.

    The mixers have no convolution of their own. GAM has one in each of its four layers.

    Raises:
      ValueError: as for `fields`.
    """
    base = ModelConfig(
        vocab_size=vocab_size, dim=DIM, num_layers=4, num_heads=1, ffn="none", conv_width=1,
        gam=GAMConfig(fusion="local", conv_width=3), dtype="float32", remat=False,
    )  # fmt: skip
    return dataclasses.replace(base, **fields(name))
