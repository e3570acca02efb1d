"""OLMo-Hybrid as its public weights are (allenai/Olmo-Hybrid-7B …): layers of Gated DeltaNet, and of attention with post-norms.

transformers joins the three convolutions of a layer when it reads such weights. Its `save_pretrained` splits them again, which is
wrong if keys and values differ in width.
"""

from collections.abc import Mapping

from atlasjax.interop.family import Family, Fields, Sizes, mixer_pattern
from atlasjax.interop.layers import (
    HYBRID,
    MATTERS,
    attention_rows,
    gate_rows,
    head_row,
    hybrid_fields,
    in_layer,
    input_rows,
    mlp_rows,
    of_type,
    rows_of,
)
from atlasjax.interop.table import Row
from atlasjax.interop.unused import ROTARY
from atlasjax.nn import AttentionConfig, GatedDeltaNetConfig, HeadNormConfig, ModelConfig

_NAME = "OLMo-Hybrid"
_DELTA, _ATTENTION = ("gated_deltanet",), ("attention",)
_BLOCK_OF = {"gated_deltanet": "pre_norm", "attention": "post_norm"}
_HEAD_EPS = 1e-5  # of the norm of the heads of Gated DeltaNet, whatever config.json says


def _in_delta(name: str) -> str:
    return in_layer(f"linear_attn.{name}")


def rows(config: ModelConfig) -> list[Row]:
    """The table."""
    norm = lambda names, ours, mixers: Row(
        tuple(in_layer(f"{name}.weight") for name in names), f"layers.{ours}.scale", "d -> d", mixers=mixers
    )
    delta = rows_of(_in_delta, _DELTA)
    return [
        Row("model.embed_tokens.weight", "embedding", "v d -> v d"),
        norm(("attention_layer_norm", "input_layernorm"), "mixer_norm", _DELTA),
        norm(("feedforward_layer_norm", "post_attention_layernorm"), "mlp_norm", _DELTA),
        norm(("post_attention_layernorm", "feedforward_layer_norm"), "mixer_norm", _ATTENTION),
        norm(("post_feedforward_layernorm",), "mlp_norm", _ATTENTION),
        *mlp_rows(in_layer),
        *input_rows(_in_delta, config, *_DELTA, "qkvg", groups=config.value_heads // config.num_heads),
        *gate_rows(_in_delta),
        delta("o_norm.weight", "norm.scale", "k -> k"),
        delta("o_proj.weight", "out.kernel", "d i -> i d"),
        *attention_rows(lambda name: in_layer(f"self_attn.{name}"), config),
        Row("model.norm.weight", "norm.scale", "d -> d"),
        head_row(config),
    ]


# Initial values, and dropout in training.
_NEUTRAL = (
    "attention_dropout", "linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min",
)  # fmt: skip


def _to_ours(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    fields = Fields(given, _NAME, sizes)
    fields.require("hidden_act", "silu")
    dim, layers = fields.integer("hidden_size", 3840), fields.layers("num_hidden_layers", 32)
    heads = fields.integer("num_attention_heads", 30)
    size = fields.quotient("hidden_size", dim, "num_attention_heads", heads)
    key_heads = fields.integer("linear_num_key_heads", heads)
    key_dim = fields.integer("linear_key_head_dim", int(0.75 * dim / key_heads))
    pattern = mixer_pattern([HYBRID[kind] for kind in _layer_types(fields, layers)])
    mixers = (pattern,) if isinstance(pattern, str) else pattern
    config = ModelConfig(
        mixer=pattern,
        block=tuple(_BLOCK_OF[mixer] for mixer in mixers),
        num_layers=layers,
        vocab_size=fields.integer("vocab_size", 100352),
        dim=dim,
        num_heads=key_heads,
        head_dim=key_dim,
        value_expansion=fields.ratio("linear_value_head_dim", key_dim, 2 * key_dim, "linear_key_head_dim"),
        conv_width=fields.integer("linear_conv_kernel_dim", 4),
        gated_deltanet=GatedDeltaNetConfig(
            value_heads=fields.integer("linear_num_value_heads", heads),
            negative_eigenvalues=fields.boolean("linear_allow_neg_eigval", True),
        ),
        head_norm=HeadNormConfig(shared=True, eps=_HEAD_EPS * key_dim),  # q is scaled by key_dim^{−1/2}
        attention=AttentionConfig(
            num_heads=heads,
            kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=size,
            value_dim=size,
            rope_theta=fields.theta(),  # None without rotation, as in the public models
            qk_norm="all",
            bias=fields.boolean("attention_bias", False),
        ),
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        mlp_dim=fields.integer("intermediate_size", 11008),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        dtype=fields.dtype(),
    )
    fields.done(_NEUTRAL)
    return config


def _layer_types(fields: Fields, layers: int) -> list[str]:
    given = fields.strings("layer_types", layers, HYBRID)
    if given is not None:
        return given
    kinds = ["full_attention" if n % 4 == 3 else "linear_attention" for n in range(layers)]
    return kinds if "full_attention" in kinds else [*kinds[:-1], "full_attention"]


def _to_peer(config: ModelConfig) -> dict[str, object]:
    return hybrid_fields(config, "olmo_hybrid", "OlmoHybridForCausalLM") | {
        "linear_allow_neg_eigval": config.gated_deltanet.negative_eigenvalues,
        # Not null, for which transformers takes its default base: a base that is null is no rotation.
        "rope_parameters": {"rope_type": "default", "rope_theta": config.attention.rope_theta},
    }


OLMO_HYBRID = Family(
    "olmo_hybrid", ("gated_deltanet", "attention"), of_type("olmo_hybrid"), _to_ours, _to_peer, rows, MATTERS, unused=(ROTARY,)
)  # fmt: skip
