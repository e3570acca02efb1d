"""Qwen3.5 (dense) as transformers writes it (Qwen/Qwen3.5-0.8B …): three layers of Gated DeltaNet, then one of gated attention.

Only the language model is imported. The tensors of the vision tower and of multi-token prediction are kept with the run (`KEPT`).
"""

from collections.abc import Mapping

from atlasjax.interop.family import Family, Fields, Sizes, exact_fraction, given_dtype, mixer_pattern
from atlasjax.interop.layers import (
    HYBRID,
    MATTERS,
    attention_rows,
    gate_rows,
    head_row,
    hybrid_fields,
    mlp_rows,
    of_type,
    ranges,
    rows_of,
)
from atlasjax.interop.table import Row
from atlasjax.interop.unused import ROTARY
from atlasjax.nn import AttentionConfig, GatedDeltaNetConfig, HeadNormConfig, ModelConfig
from atlasjax.train.errors import ConfigError

_NAME = "Qwen3.5"
_DELTA = ("gated_deltanet",)
KEPT = ("model.visual.", "mtp.")
"""Beginnings of the names of tensors that are no part of the language model."""


def _names(name: str) -> tuple[str, str]:
    """The names of a tensor in a model of text only, and with the vision tower beside it."""
    return f"model.{name}", f"model.language_model.{name}"


def _in_layer(name: str) -> tuple[str, str]:
    return _names(f"layers.{{n}}.{name}")


def _in_delta(name: str) -> tuple[str, str]:
    return _in_layer(f"linear_attn.{name}")


def rows(config: ModelConfig) -> list[Row]:
    """The table."""
    return [
        Row(_names("embed_tokens.weight"), "embedding", "v d -> v d"),
        Row(_in_layer("input_layernorm.weight"), "layers.mixer_norm.scale", "d -> d"),
        Row(_in_layer("post_attention_layernorm.weight"), "layers.mlp_norm.scale", "d -> d"),
        *mlp_rows(_in_layer),
        *_delta_rows(config),
        *attention_rows(lambda name: _in_layer(f"self_attn.{name}"), config),
        Row(_names("norm.weight"), "norm.scale", "d -> d"),
        head_row(config),
    ]


def _delta_rows(config: ModelConfig) -> list[Row]:
    """`in_proj_qkv` and `conv1d` have the rows of all queries, then of all keys, then of all values."""
    row = rows_of(_in_delta, _DELTA)
    key, values = config.resolved_head_dim, config.value_heads // config.num_heads * config.value_dim
    found = []
    *joined, (_, gate) = ranges({"q": key, "k": key, "v": values, "g": values})
    for _, part in joined:
        taken = part.start * config.num_heads, part.stop * config.num_heads
        found += [
            row("in_proj_qkv.weight", "inputs.linear.kernel", "(h k) d -> d h k", (..., part), taken),
            row("conv1d.weight", "inputs.conv.kernel", "(h k) (1) w -> w h k", (..., part), taken),
        ]
    return [
        *found,
        row("in_proj_z.weight", "inputs.linear.kernel", "(h k) d -> d h k", (..., gate)),
        *gate_rows(_in_delta, "in_proj_{}"),
        row("norm.weight", "norm.scale", "k -> k"),
        row("out_proj.weight", "out.kernel", "d i -> i d"),
    ]


# Fields that say how, and not what, the language model computes.
_NEUTRAL = (
    "attention_dropout", "mamba_ssm_dtype", "max_window_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
    "output_attentions",
    "output_hidden_states", "sliding_window", "tie_word_embeddings",
)  # fmt: skip
_NEUTRAL_WHOLE = (
    "image_token_id", "language_model_only", "video_token_id", "vision_config", "vision_end_token_id", "vision_start_token_id",
)  # fmt: skip


def _to_ours(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    if given.get("model_type") != "qwen3_5":
        return _language_model(Fields(given, _NAME, sizes), None)
    whole = Fields(given, _NAME, sizes)
    text = whole.inside("text_config")
    tied = whole.boolean("tie_word_embeddings", False)
    whole.done(_NEUTRAL_WHOLE)
    return _language_model(text, None if given.get("tie_word_embeddings") is None else tied, given_dtype(given))


def _language_model(fields: Fields, tied: bool | None, dtype: object = None) -> ModelConfig:
    """tied: of the model around the language model, which decides if it is given. dtype: of that model, if its own is missing."""
    fields.fixed(hidden_act="silu", attn_output_gate=True, mlp_only_layers=[], use_sliding_window=False)
    own_tied = fields.boolean("tie_word_embeddings", False)
    layers, eps = fields.layers("num_hidden_layers", 32), fields.number("rms_norm_eps", default=1e-6)
    theta, fraction = _positions(fields)
    heads, key_dim = fields.integer("linear_num_key_heads", 16), fields.integer("linear_key_head_dim", 128)
    head_dim = fields.integer("head_dim", 256)
    bias = fields.boolean("attention_bias", False)
    config = ModelConfig(
        mixer=mixer_pattern([HYBRID[kind] for kind in _layer_types(fields, layers)]),
        num_layers=layers,
        vocab_size=fields.integer("vocab_size", 248320),
        dim=fields.integer("hidden_size", 4096),
        num_heads=heads,
        head_dim=key_dim,
        value_expansion=fields.ratio("linear_value_head_dim", key_dim, 128, "linear_key_head_dim"),
        conv_width=fields.integer("linear_conv_kernel_dim", 4),
        gated_deltanet=GatedDeltaNetConfig(value_heads=fields.integer("linear_num_value_heads", 32)),
        head_norm=HeadNormConfig(shared=True, eps=eps * key_dim),  # q is scaled by key_dim^{−1/2}
        attention=AttentionConfig(
            num_heads=fields.integer("num_attention_heads", 16),
            kv_heads=fields.integer("num_key_value_heads", 4),
            head_dim=head_dim,
            value_dim=head_dim,
            rope_theta=theta,
            rope_dim=int(fraction * head_dim),
            qk_norm="head",
            gate=True,
            bias=bias,
        ),
        norm="rms_plus_one",
        norm_eps=eps,
        mlp_dim=fields.integer("intermediate_size", 12288),
        tie_embeddings=own_tied if tied is None else tied,
        dtype=fields.dtype(dtype),
    )
    fields.done(_NEUTRAL)
    return config


def _layer_types(fields: Fields, layers: int) -> list[str]:
    interval = fields.integer("full_attention_interval", 4, is_axis=False)
    given = fields.strings("layer_types", layers, HYBRID)
    if given is not None:
        return given
    return ["linear_attention" if (n + 1) % interval else "full_attention" for n in range(layers)]


def _positions(fields: Fields) -> tuple[float, float]:
    """Base of the wavelengths, and the fraction of a head's channels that is rotated. A text has no second axis of positions."""
    inside = fields.rotation("mrope")
    found = []
    for name, default in (("rope_theta", 1e4), ("partial_rotary_factor", 0.25)):
        outer = fields.number(name, default=default)
        found.append(inside.number(name, default=outer))
    if found[1] > 1:
        raise ConfigError(f"config.json of {_NAME}: partial_rotary_factor is {found[1]:g}; it should be at most 1.")
    inside.done(("mrope_section", "mrope_interleaved"))
    return found[0], found[1]


def _to_peer(config: ModelConfig) -> dict[str, object]:
    size = config.attention_sizes.key_dim
    return hybrid_fields(config) | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "head_dim": size,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.attention.rope_theta,
            "partial_rotary_factor": exact_fraction(config.attention.rope_dim or size, size),
        },
    }


QWEN3_5 = Family(
    "qwen3_5", ("gated_deltanet", "attention"), of_type("qwen3_5", "qwen3_5_text"), _to_ours, _to_peer, rows, MATTERS,
    kept=KEPT, unused=(ROTARY,),
)  # fmt: skip
