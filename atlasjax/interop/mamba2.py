"""Mamba-2 as transformers and mamba_ssm write it (state-spaces/mamba2-130m … 2.7b, Codestral Mamba)."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

from atlasjax.interop.family import Family, Fields
from atlasjax.interop.table import Row
from atlasjax.nn import ModelConfig, SSMConfig

_LAYER = "backbone.layers.{n}."


def rows(config: ModelConfig) -> list[Row]:
    """The table of Mamba-2. The rows of `in_proj` are z, x, B, C, Δ; the channels of `conv1d` x, B, C."""
    inner = config.ssm.expand * config.dim
    selection = 2 * config.ssm.groups * config.ssm.state_dim
    heads = inner // config.ssm.head_dim
    mixer = _LAYER + "mixer."
    ends = (0, inner, 2 * inner, 2 * inner + selection, 2 * inner + selection + heads)
    z, x, selected, step = itertools.pairwise(ends)
    projection, conv, bias = mixer + "in_proj.weight", mixer + "conv1d.weight", mixer + "conv1d.bias"
    mixed, chosen = (0, inner), (inner, inner + selection)
    same = lambda name: Row(mixer + name, f"layers.mixer.{name}", "h -> h")
    return [
        Row(("backbone.embeddings.weight", "backbone.embedding.weight"), "embedding", "v d -> v d"),
        Row(_LAYER + "norm.weight", "layers.mixer_norm.scale", "d -> d"),
        Row(projection, "layers.mixer.inputs.kernel", "i d -> d i", z, (slice(None), 0)),
        Row(projection, "layers.mixer.inputs.kernel", "i d -> d i", x, (slice(None), 1)),
        Row(projection, "layers.mixer.selection.kernel", "s d -> d s", selected),
        Row(projection, "layers.mixer.step.kernel", "h d -> d h", step),
        Row(conv, "layers.mixer.conv.kernel", "i (1) w -> w i", mixed),
        Row(conv, "layers.mixer.selection_conv.kernel", "s (1) w -> w s", chosen),
        Row(bias, "layers.mixer.conv_bias", "i -> i", mixed),
        Row(bias, "layers.mixer.selection_bias", "s -> s", chosen),
        *map(same, ("dt_bias", "A_log", "D")),
        Row(mixer + "norm.weight", "layers.mixer.norm.scale", "i -> i"),
        Row(mixer + "out_proj.weight", "layers.mixer.out.kernel", "d i -> i d"),
        Row("backbone.norm_f.weight", "norm.scale", "d -> d"),
        Row("lm_head.weight", "embedding", "v d -> v d", copy=True)
        if config.tie_embeddings
        else Row("lm_head.weight", "head.kernel", "v d -> d v"),
    ]


def _config(
    *, vocab_size: int, dim: int, num_layers: int, ssm: SSMConfig, conv_width: int, tied: bool, eps: float, dtype: Any
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size, dim=dim, num_layers=num_layers, num_heads=1, mixer="mamba2", ffn="none", ssm=ssm,
        conv_width=conv_width, tie_embeddings=tied, norm_eps=eps, dtype=dtype,
    )  # fmt: skip


def _from_transformers(given: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(given, "Mamba-2")
    fields.require("use_bias", False)
    fields.require("use_conv_bias", True)
    fields.require("rms_norm", True)
    fields.require("hidden_act", "silu", "swish")
    fields.require("time_step_limit", *_UNLIMITED)
    ssm = SSMConfig(
        state_dim=fields.integer("state_size", 128),
        expand=fields.integer("expand", 2),
        head_dim=fields.integer("head_dim", 64),
        groups=fields.integer("n_groups", 8),
    )
    config = _config(
        vocab_size=fields.integer("vocab_size"),
        dim=fields.integer("hidden_size"),
        num_layers=fields.integer("num_hidden_layers"),
        ssm=ssm,
        conv_width=fields.integer("conv_kernel", 4),
        tied=fields.boolean("tie_word_embeddings", False),
        eps=fields.number("layer_norm_epsilon", default=1e-5),
        dtype=fields.dtype(),
    )
    fields.require("num_heads", ssm.expand * config.dim // ssm.head_dim)
    fields.done(("chunk_size", "norm_before_gate", "rescale_prenorm_residual", "time_step_floor", "time_step_max",
                 "time_step_min", "time_step_rank"))  # fmt: skip
    return config


_INFINITY = {"__float__": "Infinity"}
_UNLIMITED = ([0.0, math.inf], [0.0, _INFINITY])


def _to_transformers(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "state_size": config.ssm.state_dim,
        "expand": config.ssm.expand,
        "head_dim": config.ssm.head_dim,
        "num_heads": config.ssm.expand * config.dim // config.ssm.head_dim,
        "n_groups": config.ssm.groups,
        "conv_kernel": config.conv_width,
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _from_mamba_ssm(given: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(given, "Mamba-2")
    fields.require("d_intermediate", 0)
    fields.require("attn_layer_idx", [])
    fields.require("attn_cfg", {})
    fields.require("rms_norm", True)
    inside = Fields(fields.inside("ssm_cfg"), "Mamba-2, ssm_cfg")
    inside.require("layer", "Mamba2")
    for name, value in (("bias", False), ("conv_bias", True), ("rmsnorm", True), ("norm_before_gate", False),
                        ("D_has_hdim", False), ("dt_limit", [0.0, math.inf])):  # fmt: skip
        inside.require(name, value)
    ssm = SSMConfig(
        state_dim=inside.integer("d_state", 128),
        expand=inside.integer("expand", 2),
        head_dim=inside.integer("headdim", 64),
        groups=inside.integer("ngroups", 1),
    )
    width = inside.integer("d_conv", 4)
    inside.done(("A_init_range", "chunk_size", "conv_init", "dt_init_floor", "dt_max", "dt_min", "use_mem_eff_path"))
    multiple = fields.integer("pad_vocab_size_multiple", 8)
    config = _config(
        vocab_size=-(-fields.integer("vocab_size") // multiple)
        * multiple,  # rows of the table; the tokenizer has fewer
        dim=fields.integer("d_model"),
        num_layers=fields.integer("n_layer"),
        ssm=ssm,
        conv_width=width,
        tied=fields.boolean("tie_embeddings", True),
        eps=1e-5,
        dtype=fields.dtype(),
    )
    fields.done(())
    return config


def _is_mamba_ssm(given: Mapping[str, Any]) -> bool:
    inside = given.get("ssm_cfg")
    return "model_type" not in given and isinstance(inside, dict) and inside.get("layer") == "Mamba2"


_MATTERS = ("ssm", "conv_width")
TRANSFORMERS = Family(
    "mamba2",
    "mamba2",
    lambda given: given.get("model_type") == "mamba2",
    _from_transformers,
    _to_transformers,
    rows,
    _MATTERS,
)
MAMBA_SSM = Family("mamba2 of mamba_ssm", "mamba2", _is_mamba_ssm, _from_mamba_ssm, None, rows, _MATTERS)
