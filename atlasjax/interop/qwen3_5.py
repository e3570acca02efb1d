"""Qwen3.5 (dense) as transformers writes it (Qwen/Qwen3.5-0.8B …): three layers of Gated DeltaNet, then one of gated attention.

Only the language model is imported. The tensors of the vision tower and of multi-token prediction are kept with the run (`KEPT`).
"""

import dataclasses
from collections.abc import Callable, Mapping

from atlasjax.interop.family import Family, Fields, Sizes, given_dtype, mixer_pattern
from atlasjax.interop.layers import (
    HYBRID,
    MATTERS,
    attention_rows,
    exact_fraction,
    gate_rows,
    head_row,
    hybrid_fields,
    mlp_rows,
    of_type,
    ranges,
    rows_of,
)
from atlasjax.interop.table import Index, Row
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


def in_layer(name: str) -> tuple[str, str]:
    """The names of a tensor in a layer."""
    return _names(f"layers.{{n}}.{name}")


def in_delta(name: str) -> tuple[str, str]:
    """The names of a tensor of Gated DeltaNet."""
    return in_layer(f"linear_attn.{name}")


def rows(config: ModelConfig) -> list[Row]:
    """The table."""
    return [*around_rows(config), *mlp_rows(in_layer), *delta_rows(config)]


def around_rows(config: ModelConfig) -> list[Row]:
    """Embedding, head, norms and attention."""
    return [
        Row(_names("embed_tokens.weight"), "embedding", "v d -> v d"),
        Row(in_layer("input_layernorm.weight"), "layers.mixer_norm.scale", "d -> d"),
        Row(in_layer("post_attention_layernorm.weight"), "layers.mlp_norm.scale", "d -> d"),
        *attention_rows(lambda name: in_layer(f"self_attn.{name}"), config),
        Row(_names("norm.weight"), "norm.scale", "d -> d"),
        head_row(config),
    ]


def delta_rows(config: ModelConfig) -> list[Row]:
    """`in_proj_qkv` and `conv1d` have the rows of all queries, then of all keys, then of all values."""
    row = rows_of(in_delta, _DELTA)
    *joined, (part, _) = _ranges(config)
    return [
        *(row("in_proj_qkv.weight", "inputs.linear.kernel", "(h k) d -> d h k", *one) for one in joined),
        row("in_proj_z.weight", "inputs.linear.kernel", "(h k) d -> d h k", part),
        *gate_rows(in_delta, "in_proj_{}"),
        *after_rows(config),
    ]


def after_rows(config: ModelConfig) -> list[Row]:
    """What follows the projections of Gated DeltaNet."""
    row = rows_of(in_delta, _DELTA)
    *joined, _ = _ranges(config)
    return [
        *(row("conv1d.weight", "inputs.conv.kernel", "(h k) (1) w -> w h k", *one) for one in joined),
        row("norm.weight", "norm.scale", "k -> k"),
        row("out_proj.weight", "out.kernel", "d i -> i d"),
    ]


def _ranges(config: ModelConfig) -> list[tuple[Index, tuple[int, int]]]:
    """The queries, keys, values and gates in our `inputs`, and their rows in a tensor where one follows the other."""
    key, values = config.resolved_head_dim, config.value_heads // config.num_heads * config.value_dim
    parts = [part for _, part in ranges({"q": key, "k": key, "v": values, "g": values})]
    return [((..., part), (part.start * config.num_heads, part.stop * config.num_heads)) for part in parts]


_DEFAULTS = {"num_hidden_layers": 32, "vocab_size": 248320, "hidden_size": 4096, "num_key_value_heads": 4}
# Fields that say how, and not what, the language model computes.
NEUTRAL = (
    "attention_dropout", "mamba_ssm_dtype", "max_window_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
    "output_attentions",
    "output_hidden_states", "sliding_window", "tie_word_embeddings",
)  # fmt: skip
_NEUTRAL_WHOLE = (
    "image_token_id", "language_model_only", "video_token_id", "vision_config", "vision_end_token_id", "vision_start_token_id",
)  # fmt: skip


Around = tuple[bool | None, object]
"""Of a model around the language model: whether its embeddings are tied, and its dtype. None where it does not say so."""


def text_part(given: Mapping[str, object], sizes: Sizes, name: str, around: str) -> tuple[Fields, Around]:
    """The fields of the language model, which may be in another model, whose model_type is `around`."""
    whole = Fields(given, name, sizes)
    if given.get("model_type") != around:
        return whole, (None, None)
    text = whole.inside("text_config")
    tied = whole.boolean("tie_word_embeddings", False)
    whole.done(_NEUTRAL_WHOLE)
    return text, (None if given.get("tie_word_embeddings") is None else tied, given_dtype(given))


def _to_ours(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    fields, around = text_part(given, sizes, _NAME, "qwen3_5")
    fields.fixed(mlp_only_layers=[])
    config = language_model(fields, around, lambda layers: ["swiglu"] * layers, _DEFAULTS)
    config = dataclasses.replace(config, mlp_dim=fields.integer("intermediate_size", 12288))
    fields.done(NEUTRAL)
    return config


def language_model(
    fields: Fields, around: Around, networks: Callable[[int], list[str]], defaults: Mapping[str, int]
) -> ModelConfig:
    """The model, except for the sizes of its networks.

    Args:
      fields: those of the language model.
      around: decides where it is given.
      networks: kinds of the networks of so many layers.
      defaults: of the fields in which families differ.
    """
    integer = lambda name: fields.integer(name, defaults[name])
    tied, dtype = around
    fields.fixed(hidden_act="silu", attn_output_gate=True, use_sliding_window=False)
    own_tied = fields.boolean("tie_word_embeddings", False)
    layers, eps = (
        fields.layers("num_hidden_layers", defaults["num_hidden_layers"]),
        fields.number("rms_norm_eps", default=1e-6),
    )
    theta, fraction = _positions(fields)
    heads, key_dim = fields.integer("linear_num_key_heads", 16), fields.integer("linear_key_head_dim", 128)
    head_dim = fields.integer("head_dim", 256)
    bias = fields.boolean("attention_bias", False)
    kinds = [f"{HYBRID[kind]} {network}" for kind, network in zip(_layer_types(fields, layers), networks(layers))]
    repeated = mixer_pattern(kinds)
    pattern = [kind.split() for kind in ((repeated,) if isinstance(repeated, str) else repeated)]
    return ModelConfig(
        mixer=tuple(mixer for mixer, _ in pattern) if len(pattern) > 1 else pattern[0][0],
        ffn=tuple(network for _, network in pattern),
        num_layers=layers,
        vocab_size=integer("vocab_size"),
        dim=integer("hidden_size"),
        num_heads=heads,
        head_dim=key_dim,
        value_expansion=fields.ratio("linear_value_head_dim", key_dim, 128, "linear_key_head_dim"),
        conv_width=fields.integer("linear_conv_kernel_dim", 4),
        gated_deltanet=GatedDeltaNetConfig(value_heads=fields.integer("linear_num_value_heads", 32)),
        head_norm=HeadNormConfig(shared=True, eps=eps * key_dim),  # q is scaled by key_dim^{−1/2}
        attention=AttentionConfig(
            num_heads=fields.integer("num_attention_heads", 16),
            kv_heads=integer("num_key_value_heads"),
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
        tie_embeddings=own_tied if tied is None else tied,
        dtype=fields.dtype(dtype),
    )


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
        raise ConfigError(f"config.json of {_NAME}: partial_rotary_factor is {found[1]:g}; it must be at most 1.")
    inside.done(("mrope_section", "mrope_interleaved"))
    return found[0], found[1]


def _to_peer(config: ModelConfig) -> dict[str, object]:
    return peer_fields(config, "qwen3_5_text", "Qwen3_5ForCausalLM")


def peer_fields(config: ModelConfig, kind: str, architecture: str) -> dict[str, object]:
    """The fields of config.json, except for those of the networks."""
    size = config.attention_sizes.key_dim
    return hybrid_fields(config, kind, architecture) | {
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
