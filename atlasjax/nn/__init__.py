"""Thin Flax NNX modules around the pure functions of `atlasjax.memory`, and the language model."""

import importlib
from typing import TYPE_CHECKING

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

# Loaded on first use, because Flax takes as long to import as jax. Configs do not need it.
_HOME = {
    "abstract_model": "abstract",
    "count_parameters": "abstract",
    "logical_axes": "abstract",
    "state_bytes": "abstract",
    "AttentionHeads": "attention",
    "AttentionMixer": "attention",
    "SlidingWindowMixer": "attention",
    "BlockMixer": "elastic",
    "ElasticMixer": "elastic",
    "GAMMixer": "gam",
    "GateProjection": "gates",
    "MACMixer": "hybrids",
    "MAGMixer": "hybrids",
    "MALMixer": "hybrids",
    "LaCTMixer": "lact",
    "GELU": "layers",
    "CausalConv": "layers",
    "ChannelMixing": "layers",
    "LayerNorm": "layers",
    "Linear": "layers",
    "RMSNorm": "layers",
    "SwiGLU": "layers",
    "MemoryHeads": "memory_mixer",
    "MemoryMixer": "memory_mixer",
    "MemoryMixerState": "memory_mixer",
    "MIXERS": "mixers",
    "Mixer": "mixers",
    "check_divided": "mixers",
    "LanguageModel": "model",
    "PositionedCache": "model",
    "AXES": "parameters",
    "param": "parameters",
}

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


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
