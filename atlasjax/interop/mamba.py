"""Mamba and Mamba-2 as transformers and mamba_ssm write them (state-spaces/mamba-130m …, mamba2-130m …), and Falcon-Mamba."""

import math
from collections.abc import Callable, Mapping

from atlasjax.check import is_integer
from atlasjax.interop import layers
from atlasjax.interop.family import Family, Fields, Sizes
from atlasjax.interop.layers import MAMBA2_MATTERS, head_row, of_type, peer_frame, step_limit
from atlasjax.interop.table import Row
from atlasjax.nn import ModelConfig, SSMConfig

_LAYER = "backbone.layers.{n}."
_MIXER = _LAYER + "mixer."
_PROJECTION, _CONV, _CONV_BIAS = _MIXER + "in_proj.weight", _MIXER + "conv1d.weight", _MIXER + "conv1d.bias"
_FIRST, _SECOND = (slice(None), 0), (slice(None), 1)  # of the two parts of `inputs.kernel`


def mamba_rows(config: ModelConfig) -> list[Row]:
    """The table of Mamba. The rows of `in_proj` are x, z; the rows of `x_proj` are Δ, B, C, as in our `selection`."""
    inner = config.ssm.expand * config.dim
    x, z = (0, inner), (inner, 2 * inner)
    return [
        *backbone_rows(config),
        Row(_MIXER + "out_proj.weight", "layers.mixer.out.kernel", "d i -> i d"),
        Row(_PROJECTION, "layers.mixer.inputs.kernel", "i d -> d i", x, _FIRST),
        Row(_PROJECTION, "layers.mixer.inputs.kernel", "i d -> d i", z, _SECOND),
        Row(_CONV, "layers.mixer.conv.kernel", "i (1) w -> w i"),
        Row(_CONV_BIAS, "layers.mixer.conv_bias", "i -> i"),
        Row(_MIXER + "x_proj.weight", "layers.mixer.selection.kernel", "s i -> i s"),
        Row(_MIXER + "dt_proj.weight", "layers.mixer.step.kernel", "i r -> r i"),
        Row(_MIXER + "dt_proj.bias", "layers.mixer.step_bias", "i -> i"),
        Row(_MIXER + "A_log", "layers.mixer.A_log", "i s -> i s"),
        Row(_MIXER + "D", "layers.mixer.D", "i -> i"),
    ]


def mamba2_rows(config: ModelConfig) -> list[Row]:
    """The table of Mamba-2."""
    return [*backbone_rows(config), *layers.mamba2_rows(in_mixer, config)]


def in_mixer(name: str) -> str:
    """The name of a tensor inside the mixer."""
    return _MIXER + name


def backbone_rows(config: ModelConfig) -> list[Row]:
    """The rows around the recurrence, which all of them have."""
    return [
        Row(("backbone.embeddings.weight", "backbone.embedding.weight"), "embedding", "v d -> v d"),
        Row("backbone.norm_f.weight", "norm.scale", "d -> d"),
        head_row(config),
        Row(_LAYER + "norm.weight", "layers.mixer_norm.scale", "d -> d"),
    ]


# transformers

_NEUTRAL = ("rescale_prenorm_residual", "time_step_floor", "time_step_max", "time_step_min")


def _read_transformers(fields: Fields, mixer: str, ssm: SSMConfig, *, tied: bool) -> ModelConfig:
    """Reads the fields that both have. ssm: already read. tied: the default of the tied head."""
    fields.fixed(use_bias=False, use_conv_bias=True, rms_norm=True)
    fields.require("hidden_act", "silu", "swish")
    return ModelConfig(
        mixer=mixer, num_heads=1, ffn="none", ssm=ssm, tie_embeddings=fields.boolean("tie_word_embeddings", tied),
        vocab_size=fields.integer("vocab_size"), dim=fields.integer("hidden_size"),
        num_layers=fields.layers("num_hidden_layers"), conv_width=fields.integer("conv_kernel", 4),
        norm_eps=fields.number("layer_norm_epsilon", default=1e-5), dtype=fields.dtype(),
    )  # fmt: skip


def _mamba_from_transformers(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    return _read_mamba_of_transformers(Fields(given, "Mamba", sizes), None)


def _falcon_mamba(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    inner, dim = given.get("intermediate_size"), given.get("hidden_size")
    if is_integer(inner, 1) and is_integer(dim, 1) and inner % dim == 0:
        given = {
            **given,
            "expand": inner // dim,
        }  # the peer then ignores its `expand`
    fields = Fields(given, "Falcon-Mamba", sizes)
    return _read_mamba_of_transformers(fields, fields.number("mixer_rms_eps", default=1e-6))


def _read_mamba_of_transformers(fields: Fields, selection_eps: float | None) -> ModelConfig:
    ssm = SSMConfig(
        state_dim=fields.integer("state_size", 16),
        expand=fields.integer("expand", 2),
        dt_rank=fields.integer_or("auto", "time_step_rank"),
        selection_eps=selection_eps,
    )
    config = _read_transformers(fields, "mamba", ssm, tied=True)
    inner = ssm.expand * config.dim
    # The names of mamba_ssm stand beside those of transformers in the files of state-spaces/mamba-130m-hf … 2.8b-hf.
    fields.fixed(intermediate_size=inner, d_inner=inner, d_model=config.dim, ssm_cfg={}, n_layer=config.num_layers)
    fields.done((*_NEUTRAL, "pad_vocab_size_multiple", "time_step_init_scheme", "time_step_scale", "use_associative_scan",
                 "use_falcon_mambapy", "use_mambapy"))  # fmt: skip
    return config


def _mamba2_from_transformers(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    fields = Fields(given, "Mamba-2", sizes)
    least, largest = fields.limits("time_step_limit")
    ssm = SSMConfig(
        state_dim=fields.integer("state_size", 128),
        expand=fields.integer("expand", 2),
        head_dim=fields.integer("head_dim", 64),
        groups=fields.integer("n_groups", 8),
        least_step=least,
        largest_step=largest,
    )
    config = _read_transformers(fields, "mamba2", ssm, tied=False)
    inner = ssm.expand * config.dim
    fields.fixed(num_heads=inner // ssm.head_dim, intermediate_size=inner)
    fields.done(
        (*_NEUTRAL, "chunk_size", "norm_before_gate", "time_step_init_scheme", "time_step_rank", "time_step_scale")
    )
    return config


def _to_transformers(config: ModelConfig, kind: str, architecture: str) -> dict[str, object]:
    return peer_frame(config, kind, architecture) | {
        "state_size": config.ssm.state_dim,
        "expand": config.ssm_inner // config.dim,
        "conv_kernel": config.conv_width,
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "layer_norm_epsilon": config.norm_eps,
    }


def _mamba_to_transformers(
    config: ModelConfig, kind: str = "mamba", architecture: str = "MambaForCausalLM"
) -> dict[str, object]:
    return _to_transformers(config, kind, architecture) | {
        "intermediate_size": config.ssm.expand * config.dim,
        "time_step_rank": config.resolved_dt_rank,
    }


def _falcon_mamba_to_transformers(config: ModelConfig) -> dict[str, object]:
    found = _mamba_to_transformers(config, "falcon_mamba", "FalconMambaForCausalLM")
    return found | {"mixer_rms_eps": config.ssm.selection_eps or 1e-6}


def _mamba2_to_transformers(config: ModelConfig) -> dict[str, object]:
    return _to_transformers(config, "mamba2", "Mamba2ForCausalLM") | {
        "head_dim": config.ssm.head_dim,
        "num_heads": config.ssm_inner // config.ssm.head_dim,
        "n_groups": config.ssm.groups,
        "time_step_limit": step_limit(config),
    }


# mamba_ssm

_INITIAL = ("dt_init_floor", "dt_max", "dt_min")  # fields of ssm_cfg for initial values


def _from_mamba_ssm(
    given: Mapping[str, object], sizes: Sizes, mixer: str, name: str, layer: str, read: Callable[[Fields], SSMConfig]
) -> ModelConfig:
    """Reads the fields that both have; `read` reads the rest of `ssm_cfg`."""
    fields = Fields(given, name, sizes)
    fields.fixed(d_intermediate=0, attn_layer_idx=[], attn_cfg={}, rms_norm=True)
    inside = fields.inside("ssm_cfg")
    inside.fixed(layer=layer, bias=False, conv_bias=True)
    width, ssm = inside.integer("d_conv", 4), read(inside)
    multiple = fields.integer("pad_vocab_size_multiple", 8, is_axis=False)
    rows = -(-fields.integer("vocab_size") // multiple) * multiple  # of the table; the tokenizer has fewer
    config = ModelConfig(
        mixer=mixer, num_heads=1, ffn="none", ssm=ssm, tie_embeddings=fields.boolean("tie_embeddings", True),
        vocab_size=rows, dim=fields.integer("d_model"), num_layers=fields.layers("n_layer"), conv_width=width,
        norm_eps=1e-5, dtype=fields.dtype(),
    )  # fmt: skip
    fields.done(())
    return config


def _read_mamba(inside: Fields) -> SSMConfig:
    ssm = SSMConfig(
        state_dim=inside.integer("d_state", 16),
        expand=inside.integer("expand", 2),
        dt_rank=inside.integer_or("auto", "dt_rank"),
    )
    inside.done((*_INITIAL, "dt_init", "dt_scale", "use_fast_path"))
    return ssm


def _read_mamba2(inside: Fields) -> SSMConfig:
    inside.fixed(rmsnorm=True, norm_before_gate=False, D_has_hdim=False, dt_limit=[0.0, math.inf])
    ssm = SSMConfig(
        state_dim=inside.integer("d_state", 128),
        expand=inside.integer("expand", 2),
        head_dim=inside.integer("headdim", 64),
        groups=inside.integer("ngroups", 1),
    )
    inside.done((*_INITIAL, "A_init_range", "chunk_size", "conv_init", "use_mem_eff_path"))
    return ssm


def _is_mamba_ssm(layer: str) -> Callable[[Mapping[str, object]], bool]:
    def is_mine(given: Mapping[str, object]) -> bool:
        inside = given.get("ssm_cfg")
        return "model_type" not in given and isinstance(inside, dict) and inside.get("layer", "Mamba1") == layer

    return is_mine


_MAMBA = ("ssm.state_dim", "ssm.expand", "ssm.selection_eps", "conv_width", "resolved_dt_rank")
_MAMBA2 = MAMBA2_MATTERS
MAMBA2_TRANSFORMERS = Family(
    "mamba2", ("mamba2",), of_type("mamba2"), _mamba2_from_transformers, _mamba2_to_transformers, mamba2_rows, _MAMBA2
)  # fmt: skip
MAMBA2_MAMBA_SSM = Family(
    "mamba2 of mamba_ssm", ("mamba2",), _is_mamba_ssm("Mamba2"),
    lambda given, sizes: _from_mamba_ssm(given, sizes, "mamba2", "Mamba-2", "Mamba2", _read_mamba2), None, mamba2_rows, _MAMBA2,
)  # fmt: skip
MAMBA_TRANSFORMERS = Family(
    "mamba", ("mamba",), of_type("mamba"), _mamba_from_transformers, _mamba_to_transformers, mamba_rows, _MAMBA
)  # fmt: skip
MAMBA_MAMBA_SSM = Family(
    "mamba of mamba_ssm", ("mamba",), _is_mamba_ssm("Mamba1"),
    lambda given, sizes: _from_mamba_ssm(given, sizes, "mamba", "Mamba", "Mamba1", _read_mamba), None, mamba_rows, _MAMBA,
)  # fmt: skip
FALCON_MAMBA = Family(
    "falcon_mamba", ("mamba",), of_type("falcon_mamba"), _falcon_mamba, _falcon_mamba_to_transformers, mamba_rows, _MAMBA
)  # fmt: skip
