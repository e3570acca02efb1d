"""Architectures by name: the fields of `ModelConfig` that each of them changes, one line each."""

from typing import Any

from atlasjax import rules
from atlasjax.nn.config import (
    MIXER_NAMES,
    AttentionConfig,
    ExpertsConfig,
    GAMConfig,
    GatedDeltaNetConfig,
    HeadNormConfig,
    Mamba3Config,
    MLAConfig,
    SSMConfig,
)


def pattern(mixer: str | tuple[str, ...]) -> tuple[str, ...]:
    """The mixers of one repetition of the pattern, for a `ModelConfig.mixer`; those in parallel one by one."""
    return tuple(part for name in ((mixer,) if isinstance(mixer, str) else mixer) for part in name.split("+"))


# The architectures at each of these sizes.
_ELASTIC_TABLE = (
    "transformer++", "transformer-block-recurrence", "swa", "elastic-exp", "elastic-uniform", "elastic-uniform-mid", "memorizing",
    "infini", "melodi",
)  # fmt: skip
PUBLISHED = {
    **dict.fromkeys(("98m", "205m", "345m"), _ELASTIC_TABLE),
    "22m": ("gam", "gam-sum", "gam-global", "gam-local", "gam-transformer", "gam-mamba"),
    "0.8b": ("qwen3.5",),
}

# The rest of the model in GAM's paper, both for GAM and for its Transformer: LayerNorm, GELU, learned positions, dropout.
_GAM_FRAME = {"ffn": "gelu", "norm": "layer", "norm_eps": 1e-5, "positions": "learned", "dropout": 0.1}

# Published models → the fields of `ModelConfig` that they change (see `ARCHITECTURES`).
BASELINES: dict[str, dict[str, Any]] = {
    "transformer++": {"mixer": "attention"},
    "swa": {"mixer": "swa"},
    "e2e": {"mixer": "swa", "inner_loop": (1,)},
    "retnet": {"mixer": "retnet", "value_expansion": 2},
    "gla": {"mixer": "gla"},
    "deltanet": {"mixer": "deltanet"},
    "gated-deltanet": {"mixer": "gated_deltanet", "value_expansion": 2},
    "momentum-deltanet": {"mixer": "momentum_deltanet", "value_expansion": 2},
    "gated-deltanet-h2": {"mixer": ("mamba2", "gated_deltanet", "swa")},
    "kda": {"mixer": "kda"},
    "gated-deltaproduct": {"mixer": "gated_deltaproduct", "value_expansion": 2},
    "comba": {"mixer": "comba", "value_expansion": 2},
    "pgdn": {"mixer": "pgdn", "value_expansion": 2},
    "mamba": {"mixer": "mamba", "ffn": "none"},
    "mamba2": {"mixer": "mamba2", "ffn": "none"},
    "mamba3": {"mixer": "mamba3"},
    "mamba3-mimo": {"mixer": "mamba3", "mamba3": Mamba3Config(rank=4)},
    "samba": {"mixer": ("mamba", "swa")},
    "rwkv7": {"mixer": "rwkv7"},
    "longhorn": {"mixer": "longhorn", "ffn": "none"},
    "log-linear": {"mixer": "log_linear"},
    "log-linear++": {"mixer": "log_linear_plus_plus"},
    "log-linear-mamba2": {"mixer": "log_linear_mamba2", "ffn": "none"},
    # The layers of public hybrids, with their order in a short pattern, and without their multipliers.
    "granite-h": {"mixer": ("mamba2", "mamba2", "mamba2", "attention"), "attention": AttentionConfig(rope_theta=None)},
    "granite-h-experts": {
        "mixer": ("mamba2", "mamba2", "mamba2", "attention"),
        "attention": AttentionConfig(rope_theta=None),
        "ffn": "experts",
        "experts": ExpertsConfig(8, 2, shared_width=64, balance_loss=0.001),
    },
    "qwen3-next": {
        "mixer": ("gated_deltanet", "gated_deltanet", "gated_deltanet", "attention"),
        "norm": "rms_plus_one",
        "head_norm": HeadNormConfig(shared=True),
        "attention": AttentionConfig(qk_norm="head", gate=True),
        "ffn": "experts",
        "experts": ExpertsConfig(8, 2, shared_width=64, shared_gate=True, balance_loss=0.001),
    },
    "falcon-h1": {"mixer": "mamba2+attention", "ssm": SSMConfig(output_norm="none")},
    "nemotron-h": {
        "mixer": ("mamba2", "mamba2", "mamba2", "attention"),
        "ffn": ("relu2", "relu2", "none", "relu2"),
        "attention": AttentionConfig(rope_theta=None),
    },
    "lfm2": {
        "mixer": ("short_conv", "short_conv", "short_conv", "attention"),
        "conv_width": 3,
        "attention": AttentionConfig(qk_norm="head"),
    },
    "kimi-linear": {
        "mixer": ("kda", "kda", "kda", "mla"),
        "ffn": ("swiglu", "experts", "experts", "experts"),
        "mla": MLAConfig(rope_theta=None),
        "experts": ExpertsConfig(scores="sigmoid", scale=2.446, correction_bias=True, bias_update=1e-3),
        "head_norm": HeadNormConfig(shared=True),
    },
    "lact": {"mixer": "lact", "attention": AttentionConfig(rope_theta=5e5, qk_norm="all")},
    "self-modifying-titans": {"mixer": "self_modifying_titans"},
    "hope": {"mixer": "self_modifying_titans", "inner_loop": (1, 2)},
    "gam": {"mixer": "gam", **_GAM_FRAME},
    "gam-sum": {"mixer": "gam", "gam": GAMConfig(fusion="sum"), **_GAM_FRAME},
    "gam-global": {"mixer": "gam", "gam": GAMConfig(fusion="global"), **_GAM_FRAME},
    "gam-local": {"mixer": "gam", "gam": GAMConfig(fusion="local"), **_GAM_FRAME},
    "gam-transformer": {"mixer": "attention", "attention": AttentionConfig(rope_theta=None, bias=True), **_GAM_FRAME},
}

# Only at their published sizes. Qwen3.5 is the language model of Qwen/Qwen3.5-0.8B, as `atlasjax import` reads it. The layers of
# GAM's Mamba have neither a norm nor a residual, as published, and a deeper model would not train.
PUBLISHED_ONLY: dict[str, dict[str, Any]] = {
    "qwen3.5": {
        "mixer": ("gated_deltanet", "gated_deltanet", "gated_deltanet", "attention"),
        "norm": "rms_plus_one",
        "gated_deltanet": GatedDeltaNetConfig(value_heads=16),
        "head_norm": HeadNormConfig(shared=True, eps=128e-6),
        "attention": AttentionConfig(
            rope_theta=1e7, rope_dim=64, qk_norm="head", num_heads=8, kv_heads=2, head_dim=256, value_dim=256, gate=True
        ),
    },
    "gam-mamba": {"mixer": "mamba", **_GAM_FRAME, "ffn": "none", "block": "bare", "ssm": SSMConfig(expand=3)},
}

# Mixers that are used in one layer only, at three quarters of the depth (E §3.1). The other layers are sliding-window attention.
ONE_LAYER: tuple[str, ...] = ("elastic", "memorizing")

# Samplings of Elastic Memory (E §2.3) → suffix of the preset.
_ELASTIC = {"exp": "exponential", "uniform": "uniform", "uniform-mid": "uniform_mid"}
BASELINES |= {f"elastic-{suffix}": {"mixer": "elastic", "sampling": sampling} for suffix, sampling in _ELASTIC.items()}
BASELINES["transformer-block-recurrence"] = {"mixer": "block_recurrence"}

# Rules whose memories are cached (Memory Caching): suffix → aggregation, for the rules of that paper and of ATLAS.
CACHED_RULES = ("linear_attention", "gated_delta_rule", "dla", "swla", "titans", "omeganet", "atlas")
CACHING: tuple[str, ...] = ("residual", "grm", "soup", "ssc")
CACHED_SOFTMAX_RULES = ("dot",)  # they do not support "soup"
HIERARCHICAL_RULES = ("titans", "omeganet", "atlas")  # as TNT's memories; the paper has Titans and TTT
LOG_LINEAR_RULES = ("dla", "titans")  # those of Memory Caching's tables; linear attention has `log-linear`

# Backbones around a rule: suffix → mixer.
BACKBONES: dict[str, str] = {"lmm": "memory", "mac": "mac", "mag": "mag", "mal": "mal"}

# Every other mixer is a model of its own.
_in_a_model = {*BACKBONES.values(), *(name for changes in BASELINES.values() for name in pattern(changes["mixer"]))}
BASELINES |= {name.replace("_", "-"): {"mixer": name} for name in MIXER_NAMES if name not in _in_a_model}


def rule_name(rule: str) -> str:
    """A rule's name within a preset's name: `gated_delta_rule` → `gated-delta-rule`, `atlas_plus_plus` → `atlas++`."""
    return rule.removesuffix("_plus_plus").replace("_", "-") + ("++" if rule.endswith("_plus_plus") else "")


def _architectures() -> dict[str, dict[str, Any]]:
    table = {name: dict(changes) for name, changes in BASELINES.items()}
    for rule in rules.REGISTRY:
        table.setdefault(rule_name(rule), {"mixer": "memory", "memory": rule})
    for rule in rules.REGISTRY:
        for suffix, mixer in BACKBONES.items():
            table[f"{rule_name(rule)}-{suffix}"] = {"mixer": mixer, "memory": rule}
    for rule in CACHED_RULES + CACHED_SOFTMAX_RULES:
        for aggregation in CACHING:
            if aggregation == "soup" and rule in CACHED_SOFTMAX_RULES:
                continue
            table[f"{rule_name(rule)}-{aggregation}"] = {"mixer": "memory", "memory": rule, "caching": aggregation}
    for rule in LOG_LINEAR_RULES:
        table[f"{rule_name(rule)}-log-linear"] = {"mixer": "memory", "memory": rule, "caching": "log_linear"}
    for rule in HIERARCHICAL_RULES:
        table[f"{rule_name(rule)}-tnt"] = {"mixer": "memory", "memory": rule, "hierarchy": True}
    return table


# Architecture → the fields of `ModelConfig` that it changes. In this table, "memory" is the name of a rule, "caching" that of an
# aggregation, "hierarchy" says that the memory is TNT's, "inner_loop" has the periods of one, in
# chunks, and "sampling" is the name of a sampling of Elastic Memory.
ARCHITECTURES: dict[str, dict[str, Any]] = _architectures()
