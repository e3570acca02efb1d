"""The families of public models that can be imported and exported."""

from collections.abc import Mapping

from atlasjax.interop import (
    falcon_h1,
    fla,
    fla_delta_rules,
    kimi_linear,
    lfm2,
    mamba,
    mamba2_hybrids,
    mamba3,
    nemotron_h,
    olmo_hybrid,
    qwen3_5,
    qwen_experts,
    rwkv7,
)
from atlasjax.interop.family import Family
from atlasjax.train.errors import ConfigError

FAMILIES = (
    mamba.MAMBA2_TRANSFORMERS, mamba.MAMBA2_MAMBA_SSM, mamba.MAMBA_TRANSFORMERS, mamba.MAMBA_MAMBA_SSM,
    fla.GATED_DELTANET, fla.DELTANET, fla.GLA, qwen3_5.QWEN3_5, olmo_hybrid.OLMO_HYBRID, rwkv7.RWKV7,
    mamba2_hybrids.GRANITE, falcon_h1.FALCON_H1, nemotron_h.NEMOTRON_H, lfm2.LFM2, mamba2_hybrids.BAMBA,
    fla_delta_rules.KDA, fla_delta_rules.GATED_DELTAPRODUCT, fla_delta_rules.COMBA, fla_delta_rules.MESA_NET,
    mamba.FALCON_MAMBA, mamba3.MAMBA3, qwen_experts.QWEN3_NEXT, qwen_experts.QWEN3_5_MOE,
    kimi_linear.KIMI_LINEAR,
)  # fmt: skip
"""The families that can be imported and exported. A run that was not imported is exported as the first one that has its layers."""


def family_of(given: Mapping[str, object]) -> Family:
    """The family of a config.json. Raises ConfigError if it is none of them."""
    for family in FAMILIES:
        if family.is_mine(given):
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise ConfigError(f"config.json has model_type {given.get('model_type')!r}; the families known here are: {known}.")
