"""The sizes of models by name, and what all architectures of one size share."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from atlasjax.nn.config import (
    AttentionConfig,
    BlockAttentionConfig,
    BlockRecurrenceConfig,
    ElasticConfig,
    HierarchyConfig,
    InfiniConfig,
    InnerLoopConfig,
    LaCTConfig,
    MelodiConfig,
    MemorizingConfig,
)

_PAPER_VOCABULARY = 32_000
# Muon memories, whose exact gradients grow exponentially with the distance → tokens over which they grow about tenfold at most
# (`MemoryConfig.truncation`). Writes that are rarer than every token make them grow faster.
TRUNCATION = {"atlas": 4096, "atlas_plus_plus": 512}


def _blocks(elastic: ElasticConfig, layers: int) -> dict[str, object]:
    """The configs of the mixers that attend within blocks, with blocks of the same size as Elastic Memory.

    The memories of a model have as many numbers as Elastic Memory's, which is in one layer and keeps a key and a value for each of
    its `order` coefficients. Melodi is in every layer and keeps only values (E §3.1, Table 1).
    """
    size, length = elastic.block_size, elastic.order
    return {
        "elastic": elastic,
        "block_attention": BlockAttentionConfig(size),
        "block_recurrence": BlockRecurrenceConfig(size),
        "memorizing": MemorizingConfig(length, size),
        "infini": InfiniConfig(size),
        "melodi": MelodiConfig(max(1, 2 * length // layers), size),
    }


@dataclasses.dataclass(frozen=True)
class Size:
    """The settings that all architectures of one size share.

    Attributes:
      parameters: the target number of parameters, from the name of the size. None means no target.
      fields: fields of `ModelConfig`.
      width_step: the width of the feed-forward network is a multiple of this.
      attention: the attention of architectures that have it.
      memory: overrides for the rules that accept them.
      mamba2_state: published state size of Mamba-2 and Mamba-3.
      cached_segment: number of tokens in a segment of Memory Caching (MC: 256).
      hierarchy: chunks and restarts of TNT's memories (TNT: 2,048 and 8).
      inner_loop: the inner loop of the architectures that have one, whose period is a chunk (TTT-E2E: 1,024).
      truncation: rule → `MemoryConfig.truncation`. A cached memory begins anew in each segment and needs none.
      max_positions: number of positions in models with learned positions.
      blocks: mixer → config, for the mixers that attend within blocks, or whose chunks are too long for the size.
    """

    parameters: float | None
    fields: dict[str, Any]
    width_step: int = 64
    attention: AttentionConfig = AttentionConfig(window=2048, segment_size=512)
    memory: dict[str, Any] = dataclasses.field(default_factory=lambda: {"cache_window": 2048})
    mamba2_state: int = 128
    cached_segment: int = 256
    hierarchy: HierarchyConfig = HierarchyConfig()
    inner_loop: InnerLoopConfig = InnerLoopConfig()
    truncation: Mapping[str, int] = dataclasses.field(default_factory=lambda: TRUNCATION)
    max_positions: int = 4096
    blocks: Mapping[str, object] = dataclasses.field(
        default_factory=lambda: _blocks(ElasticConfig(540, block_size=1024), layers=12)
    )


def _paper(parameters: float, layers: int, dim: int, heads: int, *, tied: bool) -> Size:
    fields = {"num_layers": layers, "dim": dim, "num_heads": heads, "tie_embeddings": tied}
    return Size(parameters, {"vocab_size": _PAPER_VOCABULARY, **fields})


SIZES: dict[str, Size] = {
    "tiny": Size(
        1.07e6,
        {"vocab_size": 256, "num_layers": 4, "dim": 128, "num_heads": 4, "dtype": "float32"},
        width_step=8,
        attention=AttentionConfig(window=64, segment_size=64),
        # One orthogonalization per token, with 4 · head_dim hidden units, would cost more than fifty times the rest of the tiny
        # model. With one every 32 tokens and half the width, two CPU cores can train it in minutes.
        memory={"newton_schulz_every": 32, "expansion": 2, "cache_window": 64},
        mamba2_state=64,
        cached_segment=64,
        hierarchy=HierarchyConfig(global_chunk=64, restart=128),
        inner_loop=InnerLoopConfig(periods=(32,)),
        truncation={"atlas": 1024, "atlas_plus_plus": 256},
        blocks=_blocks(ElasticConfig(64, block_size=64, context=512), layers=4)
        | {"lact": LaCTConfig(chunk_size=64, rank=8)},
        max_positions=512,
    ),
    "170m": _paper(170e6, 12, 768, 16, tied=False),
    "340m": _paper(340e6, 24, 1024, 16, tied=True),
    "760m": _paper(760e6, 24, 1536, 16, tied=True),
    "1.3b": _paper(1.3e9, 18, 2048, 8, tied=False),
}


def _elastic(dim: int, heads: int) -> Size:
    """The sizes of E: 12 layers, heads of 90, blocks of 2,048 and contexts of 32,768. The paper does not state the vocabulary."""
    fields = {"num_layers": 12, "dim": dim, "num_heads": heads, "head_dim": 90}
    blocks = _blocks(ElasticConfig(540, block_size=2048, context=32_768), layers=12)
    return Size(
        None, {"vocab_size": _PAPER_VOCABULARY, **fields}, attention=AttentionConfig(window=2048), blocks=blocks
    )


# Sizes of other papers, only for their own architectures. Their number of parameters is not adjusted.
PUBLISHED_SIZES: dict[str, Size] = {
    "98m": _elastic(720, 8),
    "205m": _elastic(1080, 12),
    "345m": _elastic(1440, 16),
    "22m": Size(
        None,
        {"vocab_size": 10_000, "num_layers": 6, "dim": 512, "num_heads": 8, "dtype": "float32"},
        max_positions=256,
    ),
    "0.8b": Size(
        None,
        {"vocab_size": 248_320, "num_layers": 24, "dim": 1024, "num_heads": 16, "head_dim": 128, "mlp_dim": 3584},
    ),
}
ALL_SIZES = SIZES | PUBLISHED_SIZES
