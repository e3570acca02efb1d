"""LFM2 and LFM2.5 as transformers writes them (LiquidAI/LFM2-350M …): gated short convolutions, and attention in some layers."""

from collections.abc import Mapping

from atlasjax.interop.family import Family, Fields, Sizes, mixer_pattern
from atlasjax.interop.layers import ALL, attention_rows, head_row, in_layer, mlp_rows, of_type, peer_frame, rows_of
from atlasjax.interop.table import Row
from atlasjax.nn import AttentionConfig, ModelConfig

_NAME = "LFM2"
_MIXER_OF = {"conv": "short_conv", "full_attention": "attention"}
_NAMES = {
    "o_proj.weight": "out_proj.weight",
    "q_norm.weight": "q_layernorm.weight",
    "k_norm.weight": "k_layernorm.weight",
    "feed_forward.gate_proj.weight": "feed_forward.w1.weight",
    "feed_forward.up_proj.weight": "feed_forward.w3.weight",
    "feed_forward.down_proj.weight": "feed_forward.w2.weight",
}


def rows(config: ModelConfig) -> list[Row]:
    """The table. The rows of the convolution's `in_proj` are B, C, z; the norm of the head is called that of the embedding."""
    conv = rows_of(lambda name: in_layer(f"conv.{name}"), ("short_conv",))
    parts = [(n * config.dim, (n + 1) * config.dim) for n in range(3)]
    return [
        *(conv("in_proj.weight", "inputs.kernel", "i d -> d i", (ALL, n), part) for n, part in enumerate(parts)),
        conv("conv.weight", "conv.kernel", "i (1) w -> w i"),
        conv("out_proj.weight", "out.kernel", "d i -> i d"),
        *attention_rows(lambda name: in_layer(f"self_attn.{_NAMES.get(name, name)}"), config),
        Row(in_layer("operator_norm.weight"), "layers.mixer_norm.scale", "d -> d"),
        Row(in_layer("ffn_norm.weight"), "layers.mlp_norm.scale", "d -> d"),
        *mlp_rows(lambda name: in_layer(_NAMES[name]), "feed_forward"),
        Row("model.embed_tokens.weight", "embedding", "v d -> v d"),
        Row("model.embedding_norm.weight", "norm.scale", "d -> d"),
        head_row(config),
    ]


def _width(fields: Fields) -> int:
    """Hidden width of the feed-forward network: the field, or two thirds of it with a factor, rounded up to a multiple."""
    given = fields.optional_integer("block_ff_dim", is_axis=False)
    width = given or fields.integer("intermediate_size", 12288, is_axis=False)
    multiple = fields.integer("block_multiple_of", 256, is_axis=False)
    factor = fields.optional_number("block_ffn_dim_multiplier", default=1.0)
    if not fields.boolean("block_auto_adjust_ff_dim", True):
        return fields.whole("intermediate_size", width, "channels")
    width = int(2 * width / 3)
    width = width if factor is None else -(-int(factor * width) // multiple) * multiple
    return fields.whole("intermediate_size", width, "channels")


# Older names of sizes, and initial values.
_NEUTRAL = (
    "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu", "block_use_xavier_init",
    "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc",
)  # fmt: skip


def _to_ours(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    fields = Fields(given, _NAME, sizes)
    fields.fixed(conv_bias=False)
    dim, layers = fields.integer("hidden_size", 2560), fields.layers("num_hidden_layers", 32)
    heads = fields.integer("num_attention_heads", 32)
    size = fields.quotient("hidden_size", dim, "num_attention_heads", heads)
    with_attention = fields.integers("full_attn_idxs", layers, default=[*range(layers)])
    kinds = fields.strings("layer_types", layers, _MIXER_OF)
    if kinds is None:
        kinds = ["full_attention" if n in with_attention else "conv" for n in range(layers)]
    tied = fields.boolean("tie_word_embeddings", True)
    config = ModelConfig(
        mixer=mixer_pattern([_MIXER_OF[kind] for kind in kinds]), dim=dim, num_layers=layers, num_heads=heads,
        vocab_size=fields.integer("vocab_size", 65536), conv_width=fields.integer("conv_L_cache", 3),
        attention=AttentionConfig(
            num_heads=heads, kv_heads=fields.integer("num_key_value_heads", 8), head_dim=size, value_dim=size,
            rope_theta=fields.theta(1e6), qk_norm="head",
        ),
        norm_eps=fields.number("norm_eps", default=1e-5), mlp_dim=_width(fields),
        tie_embeddings=fields.boolean("tie_embedding", tied), dtype=fields.dtype(),
    )  # fmt: skip
    fields.done(_NEUTRAL)
    return config


def _to_peer(config: ModelConfig) -> dict[str, object]:
    sizes, kinds = config.attention_sizes, {mixer: kind for kind, mixer in _MIXER_OF.items()}
    return peer_frame(config, "lfm2", "Lfm2ForCausalLM") | {
        "layer_types": [kinds[config.pattern[n % len(config.pattern)]] for n in range(config.num_layers)],
        "intermediate_size": config.resolved_mlp_dim, "block_auto_adjust_ff_dim": False, "norm_eps": config.norm_eps,
        "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads, "conv_L_cache": config.conv_width,
        "conv_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": config.attention.rope_theta or 1e6},
    }  # fmt: skip


LFM2 = Family(
    "lfm2", ("short_conv", "attention"), of_type("lfm2"), _to_ours, _to_peer, rows, ("conv_width", "resolved_mlp_dim")
)
