"""Every architecture as small as it can be."""

import dataclasses

from atlasjax import nn
from atlasjax.nn import ModelConfig, SSMConfig
from atlasjax.presets import get_preset

VOCAB = 128
LONGEST = 4608  # positions of models that learn them


def small(preset: str) -> ModelConfig:
    """A tiny preset with every size cut down, so that 48 tokens are several chunks, windows, blocks and segments."""
    config = get_preset(preset)
    memory, takes = config.memory, config.memory.overrides()
    sizes = {"newton_schulz_every": 4, "newton_schulz_steps": 2, "cache_window": 11, "expansion": 2, "sketch_size": 8}
    cut = {field: size for field, size in sizes.items() if getattr(memory, field) is not None and field in takes}
    if memory.hierarchy is not None:
        cut["hierarchy"] = dataclasses.replace(memory.hierarchy, global_chunk=8, local_chunks=(4,), restart=8)
    elif memory.build().chunk_size > 1:
        cut["chunk_size"] = 8
    if memory.caching is not None:
        cut["caching"] = dataclasses.replace(memory.caching, segment_size=8)
    inner = config.inner_loop
    if inner is not None:
        inner = dataclasses.replace(inner, periods=tuple(8 * period // inner.chunk for period in inner.periods))
    tokens = min(2, config.attention.persistent_tokens)
    return dataclasses.replace(
        config, inner_loop=inner, vocab_size=VOCAB, dim=32, num_heads=2, mlp_dim=48, dropout=0.0, remat=False,
        num_layers=2 if len(config.pattern) < 3 else len(config.pattern), memory=dataclasses.replace(memory, **cut),
        attention=dataclasses.replace(config.attention, window=7, segment_size=8, persistent_tokens=tokens),
        ssm=SSMConfig(state_dim=8, head_dim=16), max_positions=config.max_positions and LONGEST,
        elastic=dataclasses.replace(config.elastic, order=6, samples=5, block_size=8, context=48),
        block_attention=nn.BlockAttentionConfig(8), block_recurrence=nn.BlockRecurrenceConfig(8),
        memorizing=nn.MemorizingConfig(6, 8), infini=nn.InfiniConfig(8), melodi=nn.MelodiConfig(6, 8),
        self_modifying=dataclasses.replace(config.self_modifying, chunk_size=8),
        lact=dataclasses.replace(config.lact, chunk_size=8, rank=2), gam=dataclasses.replace(config.gam, slots=16),
    )  # fmt: skip
