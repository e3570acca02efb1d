"""The models of the recall experiment. Adding a line to `MODELS` adds a model everywhere."""

import dataclasses
from typing import Any

from atlasjax.names import lookup
from atlasjax.nn import ModelConfig
from atlasjax.nn.caching import CachingConfig
from atlasjax.nn.config import GAMConfig, MemoryConfig

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


def model(name: str, vocab_size: int) -> ModelConfig:
    """A model in `MODELS`: width 64, float32, no feed-forward networks, and twice a convolution over 3 tokens and the mixer.

    The mixers have no convolution of their own. GAM has one in each of its four layers.

    Raises:
      ValueError: unknown model; the message suggests the nearest name.
    """
    base = ModelConfig(
        vocab_size=vocab_size, dim=DIM, num_layers=4, num_heads=1, ffn="none", conv_width=1,
        gam=GAMConfig(fusion="local", conv_width=3), dtype="float32", remat=False,
    )  # fmt: skip
    return dataclasses.replace(base, **lookup("model", name, MODELS))
