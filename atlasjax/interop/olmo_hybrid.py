"""OLMo-Hybrid as its public weights are (allenai/Olmo-Hybrid-7B …): layers of Gated DeltaNet, and of attention with post-norms.

transformers joins the three convolutions of a layer when it reads such weights. Its `save_pretrained` splits them again, which is
wrong if keys and values differ in width.
"""

from collections.abc import Mapping

from atlasjax.interop.family import Family, Fields, Sizes, mixer_pattern
from atlasjax.interop.table import Index, Row
from atlasjax.interop.unused import ROTARY
from atlasjax.nn import AttentionConfig, GatedDeltaNetConfig, HeadNormConfig, ModelConfig

_NAME = "OLMo-Hybrid"
_LAYER = "model.layers.{n}."
_DELTA, _ATTENTION = ("gated_deltanet",), ("attention",)
_MIXER_OF = {"linear_attention": "gated_deltanet", "full_attention": "attention"}
_BLOCK_OF = {"gated_deltanet": "pre_norm", "attention": "post_norm"}
_ALL = slice(None)
_HEAD_EPS = 1e-5  # of the norm of the heads of Gated DeltaNet, whatever config.json says


def rows(config: ModelConfig) -> list[Row]:
    """The table."""
    norm = lambda names, ours, mixers: Row(
        tuple(f"{_LAYER}{name}.weight" for name in names), f"layers.{ours}.scale", "d -> d", mixers=mixers
    )
    return [
        Row("model.embed_tokens.weight", "embedding", "v d -> v d"),
        norm(("attention_layer_norm", "input_layernorm"), "mixer_norm", _DELTA),
        norm(("feedforward_layer_norm", "post_attention_layernorm"), "mlp_norm", _DELTA),
        norm(("post_attention_layernorm", "feedforward_layer_norm"), "mixer_norm", _ATTENTION),
        norm(("post_feedforward_layernorm",), "mlp_norm", _ATTENTION),
        Row(_LAYER + "mlp.gate_proj.weight", "layers.mlp.gate_and_wide.kernel", "m d -> d m", part=(_ALL, 0)),
        Row(_LAYER + "mlp.up_proj.weight", "layers.mlp.gate_and_wide.kernel", "m d -> d m", part=(_ALL, 1)),
        Row(_LAYER + "mlp.down_proj.weight", "layers.mlp.out.kernel", "d m -> m d"),
        *_delta_rows(config),
        *_attention_rows(config),
        Row("model.norm.weight", "norm.scale", "d -> d"),
        Row("lm_head.weight", "embedding", "v d -> v d", copy=True)
        if config.tie_embeddings
        else Row("lm_head.weight", "head.kernel", "v d -> d v"),
    ]


def _delta_rows(config: ModelConfig) -> list[Row]:
    def row(name: str, ours: str, pattern: str, part: Index = ()) -> Row:
        return Row(f"{_LAYER}linear_attn.{name}", f"layers.mixer.{ours}", pattern, part=part, mixers=_DELTA)

    key, values = config.resolved_head_dim, config.value_heads // config.num_heads * config.value_dim
    found, start = [], 0
    for name, size in (("q", key), ("k", key), ("v", values), ("g", values)):
        part = (..., slice(start, start + size))
        found.append(row(f"{name}_proj.weight", "inputs.linear.kernel", "(h k) d -> d h k", part=part))
        if name != "g":
            found.append(row(f"{name}_conv1d.weight", "inputs.conv.kernel", "(h k) (1) w -> w h k", part=part))
        start += size
    return [
        *found,
        row("b_proj.weight", "gates.kernel", "h d -> d h", part=(_ALL, 0)),
        row("a_proj.weight", "gates.kernel", "h d -> d h", part=(_ALL, 1)),
        row("A_log", "A_log", "h -> h"),
        row("dt_bias", "dt_bias", "h -> h"),
        row("o_norm.weight", "norm.scale", "k -> k"),
        row("o_proj.weight", "out.kernel", "d i -> i d"),
    ]


def _attention_rows(config: ModelConfig) -> list[Row]:
    def row(name: str, ours: str, pattern: str, part: Index = ()) -> Row:
        return Row(f"{_LAYER}self_attn.{name}", f"layers.mixer.{ours}", pattern, part=part, mixers=_ATTENTION)

    sizes = config.attention_sizes
    queries = sizes.heads // sizes.kv_heads * sizes.key_dim
    found, start = [], 0
    for name, size in (("q", queries), ("k", sizes.key_dim), ("v", sizes.value_dim)):
        part = (..., slice(start, start + size))
        found.append(row(f"{name}_proj.weight", "attention.inputs.kernel", "(h k) d -> d h k", part=part))
        if config.attention.bias:
            found.append(row(f"{name}_proj.bias", "attention.inputs.bias", "(h k) -> h k", part=part))
        start += size
    return [
        *found,
        row("q_norm.weight", "attention.q_norm.scale", "i -> i"),
        row("k_norm.weight", "attention.k_norm.scale", "i -> i"),
        row("o_proj.weight", "out.kernel", "d i -> i d"),
        *([row("o_proj.bias", "out.bias", "d -> d")] if config.attention.bias else []),
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
    pattern = mixer_pattern([_MIXER_OF[kind] for kind in _layer_types(fields, layers)])
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
            rope_theta=_theta(fields),
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
    given = fields.strings("layer_types", layers, _MIXER_OF)
    if given is not None:
        return given
    kinds = ["full_attention" if n % 4 == 3 else "linear_attention" for n in range(layers)]
    return kinds if "full_attention" in kinds else [*kinds[:-1], "full_attention"]


def _theta(fields: Fields) -> float | None:
    """Base of the wavelengths; None without rotation, as in the public models."""
    outer = fields.optional_number("rope_theta")  # where older versions have it
    inside = fields.rotation()
    theta = inside.optional_number("rope_theta", default=outer)
    inside.done(())
    return theta


def _to_peer(config: ModelConfig) -> dict[str, object]:
    sizes, theta = config.attention_sizes, config.attention.rope_theta
    kinds = {mixer: kind for kind, mixer in _MIXER_OF.items()}
    return {
        "architectures": ["OlmoHybridForCausalLM"],
        "model_type": "olmo_hybrid",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.resolved_mlp_dim,
        "num_hidden_layers": config.num_layers,
        "layer_types": [kinds[config.pattern[n % len(config.pattern)]] for n in range(config.num_layers)],
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "attention_bias": config.attention.bias,
        "linear_num_key_heads": config.num_heads,
        "linear_num_value_heads": config.value_heads,
        "linear_key_head_dim": config.resolved_head_dim,
        "linear_value_head_dim": config.value_dim,
        "linear_conv_kernel_dim": config.conv_width,
        "linear_allow_neg_eigval": config.gated_deltanet.negative_eigenvalues,
        "rms_norm_eps": config.norm_eps,
        # Not null, for which transformers takes its default base: a base that is null is no rotation.
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
    }


OLMO_HYBRID = Family(
    "olmo_hybrid", ("gated_deltanet", "attention"), lambda given: given.get("model_type") == "olmo_hybrid", _to_ours, _to_peer,
    rows,
    ("num_heads", "resolved_head_dim", "value_dim", "value_heads", "gated_deltanet.negative_eigenvalues", "resolved_mlp_dim",
     "head_norm", "conv_width"),
    unused=(ROTARY,),
)  # fmt: skip
