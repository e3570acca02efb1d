"""Qwen3.5 (dense) as transformers writes it (Qwen/Qwen3.5-0.8B …): three layers of Gated DeltaNet, then one of gated attention.

Only the language model is imported. The tensors of the vision tower and of multi-token prediction are kept with the run (`KEPT`).
"""

from collections.abc import Mapping

from atlasjax.interop.family import Family, Fields, Sizes, exact_fraction, given_dtype, mixer_pattern
from atlasjax.interop.table import Index, Row
from atlasjax.interop.unused import ROTARY
from atlasjax.nn import AttentionConfig, GatedDeltaNetConfig, HeadNormConfig, ModelConfig
from atlasjax.train.errors import ConfigError

_NAME = "Qwen3.5"
_DELTA, _ATTENTION = ("gated_deltanet",), ("attention",)
_MIXER_OF = {"linear_attention": "gated_deltanet", "full_attention": "attention"}
_ALL = slice(None)
KEPT = ("model.visual.", "mtp.")
"""Beginnings of the names of tensors that are no part of the language model."""


def _names(name: str) -> tuple[str, str]:
    """The names of a tensor in a model of text only, and with the vision tower beside it."""
    return f"model.{name}", f"model.language_model.{name}"


def _in_layer(
    name: str,
    ours: str,
    pattern: str,
    rows: tuple[int, int] | None = None,
    part: Index = (),
    mixers: tuple[str, ...] | None = None,
) -> Row:
    return Row(_names(f"layers.{{n}}.{name}"), f"layers.{ours}", pattern, rows, part, mixers=mixers)


def rows(config: ModelConfig) -> list[Row]:
    """The table. The rows of `in_proj_qkv` and the channels of `conv1d` are those of all queries, keys and values."""
    return [
        Row(_names("embed_tokens.weight"), "embedding", "v d -> v d"),
        _in_layer("input_layernorm.weight", "mixer_norm.scale", "d -> d"),
        _in_layer("post_attention_layernorm.weight", "mlp_norm.scale", "d -> d"),
        _in_layer("mlp.gate_proj.weight", "mlp.gate_and_wide.kernel", "m d -> d m", part=(_ALL, 0)),
        _in_layer("mlp.up_proj.weight", "mlp.gate_and_wide.kernel", "m d -> d m", part=(_ALL, 1)),
        _in_layer("mlp.down_proj.weight", "mlp.out.kernel", "d m -> m d"),
        *_delta_rows(config),
        *_attention_rows(config),
        Row(_names("norm.weight"), "norm.scale", "d -> d"),
        Row("lm_head.weight", "embedding", "v d -> v d", copy=True)
        if config.tie_embeddings
        else Row("lm_head.weight", "head.kernel", "v d -> d v"),
    ]


def _delta_rows(config: ModelConfig) -> list[Row]:
    def row(name: str, ours: str, pattern: str, part: Index = (), rows: tuple[int, int] | None = None) -> Row:
        return _in_layer(f"linear_attn.{name}", f"mixer.{ours}", pattern, rows, part, _DELTA)

    key = config.resolved_head_dim
    values = config.value_heads // config.num_heads * config.value_dim
    found, start = [], 0
    for size in (key, key, values):
        end = start + size
        part, taken = (..., slice(start, end)), (start * config.num_heads, end * config.num_heads)
        found += [
            row("in_proj_qkv.weight", "inputs.linear.kernel", "(h k) d -> d h k", part, taken),
            row("conv1d.weight", "inputs.conv.kernel", "(h k) (1) w -> w h k", part, taken),
        ]
        start = end
    gate = (..., slice(start, start + values))
    return [
        *found,
        row("in_proj_z.weight", "inputs.linear.kernel", "(h k) d -> d h k", part=gate),
        row("in_proj_b.weight", "gates.kernel", "h d -> d h", part=(_ALL, 0)),
        row("in_proj_a.weight", "gates.kernel", "h d -> d h", part=(_ALL, 1)),
        row("A_log", "A_log", "h -> h"),
        row("dt_bias", "dt_bias", "h -> h"),
        row("norm.weight", "norm.scale", "k -> k"),
        row("out_proj.weight", "out.kernel", "d i -> i d"),
    ]


def _attention_rows(config: ModelConfig) -> list[Row]:
    """`q_proj` has the queries of each head followed by their gate, and so has our `inputs`."""

    def row(name: str, ours: str, pattern: str, part: Index = ()) -> Row:
        return _in_layer(f"self_attn.{name}", f"mixer.{ours}", pattern, part=part, mixers=_ATTENTION)

    sizes = config.attention_sizes
    queries = sizes.heads // sizes.kv_heads * (sizes.key_dim + sizes.value_dim)
    found, start = [], 0
    for name, size in (("q", queries), ("k", sizes.key_dim), ("v", sizes.value_dim)):
        part = (..., slice(start, start + size))
        found.append(row(f"{name}_proj.weight", "attention.inputs.kernel", "(h k) d -> d h k", part=part))
        if config.attention.bias:
            found.append(row(f"{name}_proj.bias", "attention.inputs.bias", "(h k) -> h k", part=part))
        start += size
    return [
        *found,
        row("q_norm.weight", "attention.q_norm.scale", "k -> k"),
        row("k_norm.weight", "attention.k_norm.scale", "k -> k"),
        row("o_proj.weight", "out.kernel", "d i -> i d"),
        *([row("o_proj.bias", "out.bias", "d -> d")] if config.attention.bias else []),
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
    for name, value in (
        ("hidden_act", "silu"),
        ("attn_output_gate", True),
        ("mlp_only_layers", []),
        ("use_sliding_window", False),
    ):
        fields.require(name, value)
    own_tied = fields.boolean("tie_word_embeddings", False)
    layers, eps = fields.layers("num_hidden_layers", 32), fields.number("rms_norm_eps", default=1e-6)
    theta, fraction = _positions(fields)
    heads, key_dim = fields.integer("linear_num_key_heads", 16), fields.integer("linear_key_head_dim", 128)
    head_dim = fields.integer("head_dim", 256)
    bias = fields.boolean("attention_bias", False)
    config = ModelConfig(
        mixer=mixer_pattern([_MIXER_OF[kind] for kind in _layer_types(fields, layers)]),
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
    given = fields.strings("layer_types", layers, _MIXER_OF)
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
    sizes = config.attention_sizes
    kinds = {mixer: kind for kind, mixer in _MIXER_OF.items()}
    period = len(config.pattern)
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.resolved_mlp_dim,
        "num_hidden_layers": config.num_layers,
        "layer_types": [kinds[config.pattern[n % period]] for n in range(config.num_layers)],
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.key_dim,
        "attention_bias": config.attention.bias,
        "linear_num_key_heads": config.num_heads,
        "linear_num_value_heads": config.value_heads,
        "linear_key_head_dim": config.resolved_head_dim,
        "linear_value_head_dim": config.value_dim,
        "linear_conv_kernel_dim": config.conv_width,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.attention.rope_theta,
            "partial_rotary_factor": exact_fraction(config.attention.rope_dim or sizes.key_dim, sizes.key_dim),
        },
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
    }


QWEN3_5 = Family(
    "qwen3_5", ("gated_deltanet", "attention"), lambda given: given.get("model_type") in ("qwen3_5", "qwen3_5_text"), _to_ours,
    _to_peer, rows,
    ("num_heads", "resolved_head_dim", "value_dim", "value_heads", "gated_deltanet.negative_eigenvalues", "resolved_mlp_dim",
     "head_norm", "conv_width"),
    kept=KEPT, unused=(ROTARY,),
)  # fmt: skip
