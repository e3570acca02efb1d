"""Gated DeltaNet, DeltaNet and GLA as flash-linear-attention writes them (fla-hub/…), also with attention in some layers."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from atlasjax.interop.family import Family, Fields, Sizes, mixer_pattern
from atlasjax.interop.layers import (
    attention_rows,
    exact_fraction,
    gate_rows,
    head_row,
    in_layer,
    input_rows,
    mlp_rows,
    of_type,
    peer_frame,
    rows_of,
)
from atlasjax.interop.table import Row
from atlasjax.interop.unused import ROTARY
from atlasjax.nn import AttentionConfig, GatedDeltaNetConfig, HeadNormConfig, ModelConfig
from atlasjax.train.errors import ConfigError

SOFTMAX = ("attention", "swa")
# Fields of these families' config.json that say how, and not what, their layers compute.
NEUTRAL = ("attn_mode", "chunk_size", "mode", "use_output_norm", "use_gk")


def in_mixer(name: str) -> str:
    return in_layer(f"attn.{name}")


def _frame(config: ModelConfig) -> list[Row]:
    """Everything but the mixer."""
    return [
        Row(("model.embeddings.weight", "model.embed_tokens.weight"), "embedding", "v d -> v d"),
        Row(in_layer("attn_norm.weight"), "layers.mixer_norm.scale", "d -> d"),
        Row(in_layer("mlp_norm.weight"), "layers.mlp_norm.scale", "d -> d"),
        *mlp_rows(in_layer),
        Row("model.norm.weight", "norm.scale", "d -> d"),
        head_row(config),
    ]


def recurrent_rows(
    config: ModelConfig, mixer: str, norm: Sequence[str], inputs: list[Row], gates: list[Row]
) -> list[Row]:
    """The table of a model whose recurrent layers have `mixer`: names of its norm, rows of its inputs and gates."""
    row = rows_of(in_mixer, (mixer,))
    return [
        *_frame(config),
        *inputs,
        Row(tuple(map(in_mixer, norm)), "layers.mixer.norm.scale", "k -> k", mixers=(mixer,)),
        row("o_proj.weight", "out.kernel", "d i -> i d"),
        *gates,
        *(attention_rows(in_mixer, config, SOFTMAX) if len(config.pattern) > 1 else []),
    ]


def _gated_deltanet_rows(config: ModelConfig) -> list[Row]:
    groups = config.value_heads // config.num_heads
    inputs = input_rows(in_mixer, config, "gated_deltanet", "qkvg", groups=groups)
    return recurrent_rows(config, "gated_deltanet", ("o_norm.weight",), inputs, gate_rows(in_mixer))


def _deltanet_rows(config: ModelConfig) -> list[Row]:
    inputs = input_rows(in_mixer, config, "deltanet", "qkv")
    write = rows_of(in_mixer, ("deltanet",))("b_proj.weight", "write.kernel", "h d -> d h")
    return recurrent_rows(config, "deltanet", ("o_norm.weight",), inputs, [write])


def _gla_rows(config: ModelConfig) -> list[Row]:
    row = rows_of(in_mixer, ("gla",))
    decay = [
        row("gk_proj.0.weight", "decay_in.kernel", "r d -> d r"),
        row("gk_proj.1.weight", "decay_out.kernel", "(h k) r -> r h k"),
        row("gk_proj.1.bias", "decay_bias", "(h k) -> h k"),
    ]
    inputs = input_rows(in_mixer, config, "gla", "qkvg", convolved=False)
    return recurrent_rows(config, "gla", ("g_norm_swish_gate.weight", "g_norm.weight"), inputs, decay)


def layer_fields(fields: Fields, name: str, mixer: str, dim: int, layers: int) -> dict[str, Any]:
    """Our fields for the mixers of all layers, of which `attn` lists those with attention.

    Several specifications in `attn` may differ in whether they have the window.
    """
    found, configs = [mixer] * layers, []
    for one in fields.objects("attn"):
        window = one.optional_integer("window_size", is_axis=False)
        for n in one.integers("layers", below=layers):
            if found[n] != mixer:
                raise ConfigError(f"config.json of {name}: attn has layer {n} twice.")
            found[n] = "attention" if window is None else "swa"
        heads = one.integer("num_heads")
        size = fields.whole("attn.num_heads", dim / heads, "channels of a head")
        configs.append(
            AttentionConfig(
                window=window, num_heads=heads, kv_heads=one.optional_integer("num_kv_heads") or heads, head_dim=size,
                value_dim=size, bias=one.boolean("qkv_bias", False), output_bias=False,
                rope_theta=one.number("rope_theta", default=1e4),
            )
        )  # fmt: skip
        one.done(())
    windows = [config.window for config in configs if config.window is not None]
    same = {dataclasses.replace(config, window=None) for config in configs}
    if len(same) > 1 or len(set(windows)) > 1:
        raise ConfigError(
            f"config.json of {name}: the specifications in attn may only differ in their layers and in having a window."
        )
    made: dict[str, Any] = {"mixer": mixer_pattern(found), "num_layers": layers}
    if same:
        made["attention"] = dataclasses.replace(*same, window=max(windows, default=None))
    return made


def shared_fields(fields: Fields, dim: int) -> dict[str, Any]:
    """Our fields that the three families have in common, by name."""
    fields.require("hidden_act", "swish", "silu")
    fields.fixed(
        attnres_block_size=None, conv_bias=False, elementwise_affine=True, rope_scaling=None, share_conv_kernel=False
    )
    fields.require("gate_fn", "swish", "silu")
    ratio = fields.integer("hidden_ratio", 4, is_axis=False)
    rounded = -(-int(dim * ratio * 2 / 3) // 256) * 256  # as GatedMLP of flash-linear-attention
    return {
        "vocab_size": fields.integer("vocab_size", 32000),
        "dim": dim,
        "ffn": "swiglu",
        "mlp_dim": fields.integer("intermediate_size", rounded),
        "norm_eps": fields.number("norm_eps", "rms_norm_eps", default=1e-6),
        "tie_embeddings": fields.boolean("tie_word_embeddings", False),
        "dtype": fields.dtype(),
    }


def _widths(fields: Fields, dim: int, heads: int, expand_k: float, expand_v: float) -> dict[str, Any]:
    """Sizes of a head, where the config has the widths of all heads relative to `dim`."""
    expand_k, expand_v = fields.number("expand_k", default=expand_k), fields.number("expand_v", default=expand_v)
    key = fields.whole("expand_k", expand_k * dim / heads, "channels of a head's keys")
    ratio = fields.whole("expand_v", expand_v * dim / heads / key, "times the size of the keys for values")
    return {"num_heads": heads, "head_dim": key, "value_expansion": ratio}


def _gated_deltanet(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    name = "Gated DeltaNet"
    fields = Fields(given, name, sizes)
    fields.fixed(use_gate=True, use_short_conv=True)
    fields.require("output_gate_activation", "swish", "silu")
    fields.fixed(use_mamba_gate=True, use_residual=False)  # of old versions
    dim, heads = fields.integer("hidden_size", 2048), fields.integer("num_heads", 6)
    expand = fields.optional_number("expand_k")
    size = None if expand is None else fields.whole("expand_k", expand * dim / heads, "channels of a head's keys")
    head_dim = fields.integer("head_dim", size or 256)
    if size not in (None, head_dim):
        raise ConfigError(
            f"config.json of {name}: expand_k is {expand:g}; it must be {head_dim * heads / dim:g} or missing, since head_dim is "
            f"{head_dim}."
        )
    shared = shared_fields(fields, dim)
    config = ModelConfig(
        **layer_fields(fields, name, "gated_deltanet", shared["dim"], fields.layers("num_hidden_layers", 21)),
        num_heads=heads,
        head_dim=head_dim,
        value_expansion=fields.whole("expand_v", fields.number("expand_v", default=2.0), "times the size of the keys"),
        gated_deltanet=GatedDeltaNetConfig(
            value_heads=fields.optional_integer("num_v_heads"),
            negative_eigenvalues=fields.boolean("allow_neg_eigval", False),
        ),
        conv_width=fields.integer("conv_size", 4),
        head_norm=HeadNormConfig(shared=True, eps=shared["norm_eps"] * head_dim),  # q is scaled by head_dim^{−1/2}
        **shared,
    )
    fields.done(NEUTRAL)
    return config


def _deltanet(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    name = "DeltaNet"
    fields = Fields(given, name, sizes)
    fields.fixed(
        use_gate=False, use_short_conv=True, allow_neg_eigval=False, use_beta=True, qk_norm="l2", qk_activation="silu",
        use_elu=False, use_rope=False,
    )  # fmt: skip
    dim, heads = fields.integer("hidden_size", 2048), fields.integer("num_heads", 16)
    widths = _widths(fields, dim, heads, 1.0, 1.0)
    shared = shared_fields(fields, dim)
    config = ModelConfig(
        **layer_fields(fields, name, "deltanet", dim, fields.layers("num_hidden_layers", 24)),
        conv_width=fields.integer("conv_size", 4),
        # q is scaled by head_dim^{−1/2}
        head_norm=HeadNormConfig(shared=True, eps=shared["norm_eps"] * widths["head_dim"]),
        **widths,
        **shared,
    )
    fields.done(NEUTRAL)
    return config


def _gla(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    fields = Fields(given, "GLA", sizes)
    fields.fixed(
        use_short_conv=False, use_output_gate=True, clamp_min=None, feature_map=None, use_gv=False,
        gate_logit_normalizer=16, gate_low_rank_dim=16,
    )  # fmt: skip
    dim, heads = fields.integer("hidden_size", 2048), fields.integer("num_heads", 4)
    fields.require("num_kv_heads", None, heads)
    config = ModelConfig(
        **layer_fields(fields, "GLA", "gla", dim, fields.layers("num_hidden_layers", 24)),
        head_norm=HeadNormConfig(shared=True),
        **_widths(fields, dim, heads, 0.5, 1.0),
        **shared_fields(fields, dim),
    )
    fields.done((*NEUTRAL, "conv_size"))
    return config


def fla_frame(config: ModelConfig, kind: str, architecture: str) -> dict[str, object]:
    return peer_frame(config, kind, architecture) | {
        "num_heads": config.num_heads,
        "intermediate_size": config.resolved_mlp_dim,
        "norm_eps": config.norm_eps,
        "attn": _peer_attention(config),
    }


def _peer_attention(config: ModelConfig) -> list[dict[str, object]] | dict[str, object] | None:
    """The specifications of the layers with attention."""
    sizes, given, period = config.attention_sizes, config.attention, len(config.pattern)
    specifications = []
    for mixer, window in (("attention", None), ("swa", given.window)):
        layers = [n for n in range(config.num_layers) if config.pattern[n % period] == mixer]
        if layers:
            specifications.append({
                "layers": layers, "num_heads": sizes.heads, "num_kv_heads": sizes.kv_heads, "qkv_bias": given.bias,
                "window_size": window, "rope_theta": given.rope_theta,
            })  # fmt: skip
    return specifications if len(specifications) > 1 else specifications[0] if specifications else None


def _peer_gated_deltanet(config: ModelConfig) -> dict[str, object]:
    return fla_frame(config, "gated_deltanet", "GatedDeltaNetForCausalLM") | {
        "head_dim": config.resolved_head_dim,
        "expand_v": config.value_expansion,
        "num_v_heads": config.gated_deltanet.value_heads,
        "allow_neg_eigval": config.gated_deltanet.negative_eigenvalues,
        "conv_size": config.conv_width,
    }


def _peer_sizes(config: ModelConfig) -> dict[str, object]:
    inner = config.num_heads * config.resolved_head_dim
    return {
        "expand_k": exact_fraction(inner, config.dim),
        "expand_v": exact_fraction(config.value_expansion * inner, config.dim),
    }


def _peer_deltanet(config: ModelConfig) -> dict[str, object]:
    frame = fla_frame(config, "delta_net", "DeltaNetForCausalLM")
    return frame | _peer_sizes(config) | {"conv_size": config.conv_width}


def _peer_gla(config: ModelConfig) -> dict[str, object]:
    return fla_frame(config, "gla", "GLAForCausalLM") | _peer_sizes(config)


GENERATION = {"use_cache": False}
"""For generation_config.json: `generate` of transformers 5.24 gives the cache under a name that version 0.6.0 ignores, and goes on
from the last token alone. Without a cache it reads the whole text for each token, which is slow and right."""
MATTERS = ("num_heads", "resolved_head_dim", "value_dim", "resolved_mlp_dim", "head_norm")
_D = r"model\.layers\.\d+\.attn\.D"  # of Gated DeltaNet, made by older versions and used by none
GATED_DELTANET = Family(
    "gated_deltanet", ("gated_deltanet", *SOFTMAX), of_type("gated_deltanet"), _gated_deltanet, _peer_gated_deltanet,
    _gated_deltanet_rows, (*MATTERS, "value_heads", "gated_deltanet.negative_eigenvalues", "conv_width"), unused=(ROTARY, _D),
    generation=GENERATION,
)  # fmt: skip
DELTANET = Family(
    "delta_net", ("deltanet", *SOFTMAX), of_type("delta_net"), _deltanet, _peer_deltanet, _deltanet_rows,
    (*MATTERS, "conv_width"), unused=(ROTARY,), generation=GENERATION,
)  # fmt: skip
GLA = Family(
    "gla",
    ("gla", *SOFTMAX),
    of_type("gla"),
    _gla,
    _peer_gla,
    _gla_rows,
    MATTERS,
    unused=(ROTARY,),
    generation=GENERATION,
)
