"""The models of the studies. A line of `MODELS` adds one.

Elastic Memory as in its paper (E §3.1): all layers attend within blocks, and the third of four, at three quarters of the depth,
has the memory. "1x" has N / L = 16 / 64 coefficients for each token of a block, as the paper's 540 / 2,048. Memory Caching: two
layers of a memory with segments of 64 tokens, eight in a sequence.
"""

import dataclasses
from typing import Any

from atlasjax.names import lookup
from atlasjax.nn import ElasticConfig, MemoryConfig, ModelConfig
from atlasjax.nn.caching import CachingConfig
from atlasjax.nn.config import BlockAttentionConfig, MemorizingConfig

LENGTH, BLOCK, ORDER = 512, 64, 16
MEMORY_LAYER = 2
SIZES = (1, 2, 4, 16)  # of an elastic memory, in ORDER coefficients


def _blocks(mixer: str, **fields: Any) -> ModelConfig:
    mixers = tuple(mixer if i == MEMORY_LAYER else "block_attention" for i in range(4))
    return ModelConfig(
        dim=64, num_layers=4, num_heads=4, mixer=mixers, mlp_dim=176, block_attention=BlockAttentionConfig(BLOCK),
        dtype="float32", remat=False, **fields,
    )  # fmt: skip


def _elastic(sampling: str, times: int) -> ModelConfig:
    elastic = ElasticConfig(order=times * ORDER, block_size=BLOCK, context=LENGTH, sampling=sampling)
    return _blocks("elastic", elastic=elastic)


def _memorizing(tokens: int) -> ModelConfig:
    return _blocks("memorizing", memorizing=MemorizingConfig(tokens, BLOCK))


def _memory(rule: str, caching: CachingConfig | None, **fields: Any) -> ModelConfig:
    return ModelConfig(
        dim=64, num_layers=2, num_heads=4, mixer="memory", memory=MemoryConfig(rule, caching=caching, **fields), mlp_dim=176,
        dtype="float32", remat=False,
    )  # fmt: skip


def _titans(caching: CachingConfig | None) -> ModelConfig:
    return _memory("titans", caching, expansion=1, chunk_size=32)


def _linear(caching: CachingConfig | None) -> ModelConfig:
    return _memory("linear_attention", caching, chunk_size=32)


_GRM, _SSC = CachingConfig("grm", segment_size=BLOCK), CachingConfig("ssc", segment_size=BLOCK)
_EARLIER = LENGTH // BLOCK - 1  # as many memories as a sequence caches
_by_age = lambda caching: dataclasses.replace(caching, connector="age", capacity=_EARLIER)
_without = lambda caching: dataclasses.replace(caching, gate="ones")

# Most informative first: each is near what it is compared with.
MODELS: dict[str, ModelConfig] = {
    "elastic-exp-1x": _elastic("exponential", 1),
    "elastic-uniform-1x": _elastic("uniform", 1),
    "elastic-exp-4x": _elastic("exponential", 4),
    "memorizing-1x": _memorizing(ORDER),
    "block": _blocks("block_attention"),
    "titans-grm": _titans(_GRM),
    "titans-grm-age": _titans(_by_age(_GRM)),
    "linear-grm": _linear(_GRM),
    "linear-grm-age": _linear(_by_age(_GRM)),
    "elastic-exp-2x": _elastic("exponential", 2),
    "elastic-exp-16x": _elastic("exponential", 16),
    "elastic-uniform-4x": _elastic("uniform", 4),
    "memorizing-all": _memorizing(LENGTH - BLOCK),
    "titans-grm-ones": _titans(_without(_GRM)),
    "linear-grm-ones": _linear(_without(_GRM)),
    "titans-ssc": _titans(_SSC),
    "titans-ssc-age": _titans(_by_age(_SSC)),
    "titans": _titans(None),
}


def model(name: str) -> ModelConfig:
    """A model of `MODELS`.

    Raises:
      ValueError: no such model; the message suggests the nearest.
    """
    return lookup("model of the studies", name, MODELS)
