"""Gated DeltaNet, DeltaNet and GLA as flash-linear-attention writes them (fla-hub/…), also with attention in some layers."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Literal, NotRequired, TypedDict

from atlasjax.interop.family import Family, Fields, Sizes, exact_fraction, mixer_pattern
from atlasjax.interop.table import Row
from atlasjax.interop.unused import ROTARY
from atlasjax.nn import AttentionConfig, GatedDeltaNetConfig, HeadNormConfig, ModelConfig
from atlasjax.train.errors import ConfigError

_LAYER = "model.layers.{n}."
_ATTN = _LAYER + "attn."
_ALL = slice(None)
_SOFTMAX = ("attention", "swa")
# Fields of these families' config.json that say how, and not what, their layers compute.
_NEUTRAL = ("attn_mode", "chunk_size", "mode", "use_output_norm", "use_gk")


def _frame(config: ModelConfig) -> list[Row]:
    """Everything but the mixer."""
    rows = [
        Row(("model.embeddings.weight", "model.embed_tokens.weight"), "embedding", "v d -> v d"),
        Row(_LAYER + "attn_norm.weight", "layers.mixer_norm.scale", "d -> d"),
        Row(_LAYER + "mlp_norm.weight", "layers.mlp_norm.scale", "d -> d"),
        Row(_LAYER + "mlp.gate_proj.weight", "layers.mlp.gate_and_wide.kernel", "m d -> d m", part=(_ALL, 0)),
        Row(_LAYER + "mlp.up_proj.weight", "layers.mlp.gate_and_wide.kernel", "m d -> d m", part=(_ALL, 1)),
        Row(_LAYER + "mlp.down_proj.weight", "layers.mlp.out.kernel", "d m -> m d"),
        Row("model.norm.weight", "norm.scale", "d -> d"),
    ]
    if config.tie_embeddings:
        return [*rows, Row("lm_head.weight", "embedding", "v d -> v d", copy=True)]
    return [*rows, Row("lm_head.weight", "head.kernel", "v d -> d v")]


def _attention_rows(config: ModelConfig) -> list[Row]:
    """Layers of `config.attn`. Consecutive heads of queries share keys and values, in our `inputs` too."""
    sizes, rows, start = config.attention_sizes, [], 0
    for name, size in (
        ("q", sizes.heads // sizes.kv_heads * sizes.key_dim),
        ("k", sizes.key_dim),
        ("v", sizes.value_dim),
    ):
        peer, ours, part = f"{_ATTN}{name}_proj", "layers.mixer.attention.inputs", (..., slice(start, start + size))
        rows.append(Row(f"{peer}.weight", f"{ours}.kernel", "(h k) d -> d h k", part=part, mixers=_SOFTMAX))
        if config.attention.bias:
            rows.append(Row(f"{peer}.bias", f"{ours}.bias", "(h k) -> h k", part=part, mixers=_SOFTMAX))
        start += size
    return [*rows, Row(_ATTN + "o_proj.weight", "layers.mixer.out.kernel", "d i -> i d", mixers=_SOFTMAX)]


def _recurrent(
    mixer: str,
    config: ModelConfig,
    names: str,
    norm: str | tuple[str, ...],
    *more: Row,
    convolved: bool = True,
    groups: int = 1,
) -> list[Row]:
    """The whole table of a model whose recurrent layers have `mixer`: inputs `names` ("qkv" or "qkvg") of the heads of keys, their
    convolutions, the norm and the output, and `more`. groups: heads of values of a head of keys."""
    key, value = config.resolved_head_dim, groups * config.value_dim
    sizes = {"q": key, "k": key, "v": value, "g": value}
    rows, start = [], 0
    for name in names:
        part = (..., slice(start, start + sizes[name]))
        ours = "layers.mixer.inputs"
        rows.append(Row(f"{_ATTN}{name}_proj.weight", f"{ours}.linear.kernel", "(h k) d -> d h k", part=part))
        if convolved and name != "g":
            rows.append(Row(f"{_ATTN}{name}_conv1d.weight", f"{ours}.conv.kernel", "(h k) (1) w -> w h k", part=part))
        start += sizes[name]
    rows += [
        Row(norm, "layers.mixer.norm.scale", "k -> k"),
        Row(_ATTN + "o_proj.weight", "layers.mixer.out.kernel", "d i -> i d"),
        *more,
    ]
    if len(config.pattern) == 1:
        return [*_frame(config), *rows]
    return [*_frame(config), *(dataclasses.replace(row, mixers=(mixer,)) for row in rows), *_attention_rows(config)]


def _gated_deltanet_rows(config: ModelConfig) -> list[Row]:
    return _recurrent(
        "gated_deltanet",
        config,
        "qkvg",
        _ATTN + "o_norm.weight",
        Row(_ATTN + "b_proj.weight", "layers.mixer.gates.kernel", "h d -> d h", part=(_ALL, 0)),
        Row(_ATTN + "a_proj.weight", "layers.mixer.gates.kernel", "h d -> d h", part=(_ALL, 1)),
        Row(_ATTN + "A_log", "layers.mixer.A_log", "h -> h"),
        Row(_ATTN + "dt_bias", "layers.mixer.dt_bias", "h -> h"),
        groups=config.value_heads // config.num_heads,
    )


def _deltanet_rows(config: ModelConfig) -> list[Row]:
    write = Row(_ATTN + "b_proj.weight", "layers.mixer.write.kernel", "h d -> d h")
    return _recurrent("deltanet", config, "qkv", _ATTN + "o_norm.weight", write)


def _gla_rows(config: ModelConfig) -> list[Row]:
    return _recurrent(
        "gla",
        config,
        "qkvg",
        (_ATTN + "g_norm_swish_gate.weight", _ATTN + "g_norm.weight"),
        Row(_ATTN + "gk_proj.0.weight", "layers.mixer.decay_in.kernel", "r d -> d r"),
        Row(_ATTN + "gk_proj.1.weight", "layers.mixer.decay_out.kernel", "(h k) r -> r h k"),
        Row(_ATTN + "gk_proj.1.bias", "layers.mixer.decay_bias", "(h k) -> h k"),
        convolved=False,
    )


class _Layers(TypedDict):
    mixer: str | tuple[str, ...]
    num_layers: int
    attention: NotRequired[AttentionConfig]


def _layers(fields: Fields, name: str, mixer: str, dim: int, layers: int) -> _Layers:
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
    made: _Layers = {"mixer": mixer_pattern(found), "num_layers": layers}
    if same:
        made["attention"] = dataclasses.replace(*same, window=max(windows, default=None))
    return made


class _Shared(TypedDict):
    vocab_size: int
    dim: int
    ffn: Literal["swiglu"]
    mlp_dim: int
    norm_eps: float
    tie_embeddings: bool
    dtype: Literal["float32", "bfloat16"]


def _shared(fields: Fields, dim: int) -> _Shared:
    """Our fields that the three families have in common, by name."""
    fields.require("hidden_act", "swish", "silu")
    for field, value in (("attnres_block_size", None), ("conv_bias", False), ("elementwise_affine", True), ("rope_scaling", None),
                         ("share_conv_kernel", False)):  # fmt: skip
        fields.require(field, value)
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


class _Widths(TypedDict):
    num_heads: int
    head_dim: int
    value_expansion: int


def _widths(fields: Fields, dim: int, heads: int, expand_k: float, expand_v: float) -> _Widths:
    """Sizes of a head, where the config has the widths of all heads relative to `dim`."""
    expand_k, expand_v = fields.number("expand_k", default=expand_k), fields.number("expand_v", default=expand_v)
    key = fields.whole("expand_k", expand_k * dim / heads, "channels of a head's keys")
    ratio = fields.whole("expand_v", expand_v * dim / heads / key, "times the size of the keys for values")
    return {"num_heads": heads, "head_dim": key, "value_expansion": ratio}


def _gated_deltanet(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    name = "Gated DeltaNet"
    fields = Fields(given, name, sizes)
    fields.require("use_gate", True)
    fields.require("use_short_conv", True)
    fields.require("output_gate_activation", "swish", "silu")
    fields.require("use_mamba_gate", True)  # of old versions, as the next ones
    fields.require("use_residual", False)
    dim, heads = fields.integer("hidden_size", 2048), fields.integer("num_heads", 6)
    expand = fields.optional_number("expand_k")
    size = None if expand is None else fields.whole("expand_k", expand * dim / heads, "channels of a head's keys")
    head_dim = fields.integer("head_dim", size or 256)
    if size not in (None, head_dim):
        raise ConfigError(
            f"config.json of {name}: expand_k is {expand:g}; it should be {head_dim * heads / dim:g} or missing, since head_dim is "
            f"{head_dim}."
        )
    shared = _shared(fields, dim)
    config = ModelConfig(
        **_layers(fields, name, "gated_deltanet", shared["dim"], fields.layers("num_hidden_layers", 21)),
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
    fields.done(_NEUTRAL)
    return config


def _deltanet(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    name = "DeltaNet"
    fields = Fields(given, name, sizes)
    for field, value in (("use_gate", False), ("use_short_conv", True), ("allow_neg_eigval", False), ("use_beta", True),
                         ("qk_norm", "l2"), ("qk_activation", "silu"), ("use_elu", False), ("use_rope", False)):  # fmt: skip
        fields.require(field, value)
    dim, heads = fields.integer("hidden_size", 2048), fields.integer("num_heads", 16)
    widths = _widths(fields, dim, heads, 1.0, 1.0)
    shared = _shared(fields, dim)
    config = ModelConfig(
        **_layers(fields, name, "deltanet", dim, fields.layers("num_hidden_layers", 24)),
        conv_width=fields.integer("conv_size", 4),
        head_norm=HeadNormConfig(
            shared=True, eps=shared["norm_eps"] * widths["head_dim"]
        ),  # q is scaled by head_dim^{−1/2}
        **widths,
        **shared,
    )
    fields.done(_NEUTRAL)
    return config


def _gla(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    fields = Fields(given, "GLA", sizes)
    for field, value in (("use_short_conv", False), ("use_output_gate", True), ("clamp_min", None), ("feature_map", None),
                         ("use_gv", False), ("gate_logit_normalizer", 16), ("gate_low_rank_dim", 16)):  # fmt: skip
        fields.require(field, value)
    dim, heads = fields.integer("hidden_size", 2048), fields.integer("num_heads", 4)
    fields.require("num_kv_heads", None, heads)
    config = ModelConfig(
        **_layers(fields, "GLA", "gla", dim, fields.layers("num_hidden_layers", 24)),
        head_norm=HeadNormConfig(shared=True),
        **_widths(fields, dim, heads, 0.5, 1.0),
        **_shared(fields, dim),
    )
    fields.done((*_NEUTRAL, "conv_size"))
    return config


def _peer_frame(config: ModelConfig, kind: str, architecture: str) -> dict[str, object]:
    return {
        "architectures": [architecture],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_heads": config.num_heads,
        "intermediate_size": config.resolved_mlp_dim,
        "norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
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
    return _peer_frame(config, "gated_deltanet", "GatedDeltaNetForCausalLM") | {
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
    frame = _peer_frame(config, "delta_net", "DeltaNetForCausalLM")
    return frame | _peer_sizes(config) | {"conv_size": config.conv_width}


def _peer_gla(config: ModelConfig) -> dict[str, object]:
    return _peer_frame(config, "gla", "GLAForCausalLM") | _peer_sizes(config)


def _is(kind: str) -> Callable[[Mapping[str, object]], bool]:
    return lambda given: given.get("model_type") == kind


GENERATION = {"use_cache": False}
"""For generation_config.json: `generate` of transformers 5.24 gives the cache under a name that version 0.6.0 ignores, and goes on
from the last token alone. Without a cache it reads the whole text for each token, which is slow and right."""
_MATTERS = ("num_heads", "resolved_head_dim", "value_dim", "resolved_mlp_dim", "head_norm")
_D = re.escape(_ATTN).replace(r"\{n\}", r"\d+") + "D"  # of Gated DeltaNet, made by older versions and used by none
GATED_DELTANET = Family(
    "gated_deltanet", ("gated_deltanet", *_SOFTMAX), _is("gated_deltanet"), _gated_deltanet, _peer_gated_deltanet,
    _gated_deltanet_rows, (*_MATTERS, "value_heads", "gated_deltanet.negative_eigenvalues", "conv_width"), unused=(ROTARY, _D),
    generation=GENERATION,
)  # fmt: skip
DELTANET = Family(
    "delta_net", ("deltanet", *_SOFTMAX), _is("delta_net"), _deltanet, _peer_deltanet, _deltanet_rows,
    (*_MATTERS, "conv_width"), unused=(ROTARY,), generation=GENERATION,
)  # fmt: skip
GLA = Family(
    "gla", ("gla", *_SOFTMAX), _is("gla"), _gla, _peer_gla, _gla_rows, _MATTERS, unused=(ROTARY,), generation=GENERATION
)
