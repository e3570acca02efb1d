"""Thin Flax NNX modules around the pure functions of `atlasjax.memory`, and the language model."""

from atlasjax.nn.abstract import abstract_model, count_parameters, logical_axes, state_bytes
from atlasjax.nn.config import AttentionConfig, MemoryConfig, ModelConfig, SSMConfig
from atlasjax.nn.gates import GateProjection, initial_gates
from atlasjax.nn.layers import CausalConv, Linear, RMSNorm, SwiGLU
from atlasjax.nn.memory_mixer import MemoryMixer, MemoryMixerState
from atlasjax.nn.mixers import MIXERS, Mixer
from atlasjax.nn.model import LanguageModel
from atlasjax.nn.parameters import AXES

__all__ = [
    "AXES",
    "MIXERS",
    "AttentionConfig",
    "CausalConv",
    "GateProjection",
    "LanguageModel",
    "Linear",
    "MemoryConfig",
    "MemoryMixer",
    "MemoryMixerState",
    "Mixer",
    "ModelConfig",
    "RMSNorm",
    "SSMConfig",
    "SwiGLU",
    "abstract_model",
    "count_parameters",
    "initial_gates",
    "logical_axes",
    "state_bytes",
]
