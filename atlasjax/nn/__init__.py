"""Thin Flax NNX modules around the pure functions of `atlasjax.memory`, and the language model."""

from atlasjax.nn.abstract import abstract_model, count_parameters, logical_axes, state_bytes
from atlasjax.nn.attention import AttentionHeads, AttentionMixer, SlidingWindowMixer
from atlasjax.nn.branch import BranchConfig
from atlasjax.nn.caching import CachingConfig
from atlasjax.nn.config import (
    AttentionConfig,
    BlockAttentionConfig,
    BlockRecurrenceConfig,
    ElasticConfig,
    GAMConfig,
    GatedDeltaNetConfig,
    HeadNormConfig,
    InfiniConfig,
    MelodiConfig,
    MemorizingConfig,
    MemoryConfig,
    ModelConfig,
    RWKV7Config,
    SSMConfig,
)
from atlasjax.nn.elastic import BlockMixer, ElasticMixer
from atlasjax.nn.gam import GAMMixer
from atlasjax.nn.gates import GateProjection
from atlasjax.nn.hybrids import MACMixer, MAGMixer, MALMixer
from atlasjax.nn.layers import GELU, CausalConv, ChannelMixing, LayerNorm, Linear, RMSNorm, SwiGLU
from atlasjax.nn.memory_mixer import MemoryHeads, MemoryMixer, MemoryMixerState
from atlasjax.nn.mixers import MIXERS, Mixer, check_divided
from atlasjax.nn.model import LanguageModel, PositionedCache
from atlasjax.nn.parameters import AXES, param

__all__ = [
    "AXES",
    "GELU",
    "MIXERS",
    "AttentionConfig",
    "AttentionHeads",
    "AttentionMixer",
    "BlockAttentionConfig",
    "BlockMixer",
    "BlockRecurrenceConfig",
    "BranchConfig",
    "CachingConfig",
    "CausalConv",
    "ChannelMixing",
    "ElasticConfig",
    "ElasticMixer",
    "GAMConfig",
    "GAMMixer",
    "GateProjection",
    "GatedDeltaNetConfig",
    "HeadNormConfig",
    "InfiniConfig",
    "LanguageModel",
    "LayerNorm",
    "Linear",
    "MACMixer",
    "MAGMixer",
    "MALMixer",
    "MelodiConfig",
    "MemorizingConfig",
    "MemoryConfig",
    "MemoryHeads",
    "MemoryMixer",
    "MemoryMixerState",
    "Mixer",
    "ModelConfig",
    "PositionedCache",
    "RMSNorm",
    "RWKV7Config",
    "SSMConfig",
    "SlidingWindowMixer",
    "SwiGLU",
    "abstract_model",
    "check_divided",
    "count_parameters",
    "logical_axes",
    "param",
    "state_bytes",
]
