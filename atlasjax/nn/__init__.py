"""Thin Flax NNX modules around the pure functions of `atlasjax.memory`, and the language model."""

from typing import TYPE_CHECKING

from atlasjax.names import lazily
from atlasjax.nn import config
from atlasjax.nn.config import *  # noqa: F403

if TYPE_CHECKING:
    from atlasjax.nn.abstract import abstract_model, count_parameters, logical_axes, state_bytes
    from atlasjax.nn.attention import AttentionHeads, AttentionMixer, SlidingWindowMixer
    from atlasjax.nn.elastic import BlockMixer, ElasticMixer
    from atlasjax.nn.gam import GAMMixer
    from atlasjax.nn.gates import GateProjection
    from atlasjax.nn.hybrids import MACMixer, MAGMixer, MALMixer
    from atlasjax.nn.lact import LaCTMixer
    from atlasjax.nn.layers import GELU, CausalConv, ChannelMixing, LayerNorm, Linear, RMSNorm, SwiGLU
    from atlasjax.nn.memory_mixer import MemoryHeads, MemoryMixer, MemoryMixerState
    from atlasjax.nn.mixers import MIXERS, Mixer, check_divided
    from atlasjax.nn.model import LanguageModel, PositionedCache
    from atlasjax.nn.parameters import AXES, param

__all__ = [
    "AXES",
    "GELU",
    "MIXERS",
    "AttentionHeads",
    "AttentionMixer",
    "BlockMixer",
    "CausalConv",
    "ChannelMixing",
    "ElasticMixer",
    "GAMMixer",
    "GateProjection",
    "LaCTMixer",
    "LanguageModel",
    "LayerNorm",
    "Linear",
    "MACMixer",
    "MAGMixer",
    "MALMixer",
    "MemoryHeads",
    "MemoryMixer",
    "MemoryMixerState",
    "Mixer",
    "PositionedCache",
    "RMSNorm",
    "SlidingWindowMixer",
    "SwiGLU",
    "abstract_model",
    "check_divided",
    "count_parameters",
    "logical_axes",
    "param",
    "state_bytes",
]
__all__ += config.__all__

# Loaded on first use, because Flax takes as long to import as jax. Configs do not need it.
__getattr__ = lazily(
    __name__,
    {
        "abstract": "abstract_model count_parameters logical_axes state_bytes",
        "attention": "AttentionHeads AttentionMixer SlidingWindowMixer",
        "elastic": "BlockMixer ElasticMixer",
        "gam": "GAMMixer",
        "gates": "GateProjection",
        "hybrids": "MACMixer MAGMixer MALMixer",
        "lact": "LaCTMixer",
        "layers": "GELU CausalConv ChannelMixing LayerNorm Linear RMSNorm SwiGLU",
        "memory_mixer": "MemoryHeads MemoryMixer MemoryMixerState",
        "mixers": "MIXERS Mixer check_divided",
        "model": "LanguageModel PositionedCache",
        "parameters": "AXES param",
    },
)
