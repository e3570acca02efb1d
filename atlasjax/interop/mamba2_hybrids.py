"""Hybrids of Mamba-2 and attention with SwiGLU or experts in every layer, as transformers writes them: Granite 4.0 and Bamba."""

import dataclasses
from collections.abc import Callable, Mapping

from atlasjax.interop.family import Family, Fields, Sizes, mixer_pattern
from atlasjax.interop.layers import (
    MAMBA2_MATTERS,
    attention_rows,
    head_row,
    in_layer,
    joined_expert_rows,
    mamba2_rows,
    mlp_rows,
    of_type,
    peer_frame,
    step_limit,
)
from atlasjax.interop.table import Row
from atlasjax.nn import AttentionConfig, ExpertsConfig, ModelConfig, MultiplierConfig, SSMConfig

_MIXER_OF = {"linear_attention": "mamba2", "mamba": "mamba2", "full_attention": "attention", "attention": "attention"}
_GRANITE, _BAMBA = "Granite 4.0", "Bamba"


def around_rows(config: ModelConfig) -> list[Row]:
    """The embedding, the norm before the mixers and the head, in the words of these families and of Falcon-H1."""
    return [
        Row("model.embed_tokens.weight", "embedding", "v d -> v d"),
        Row(in_layer("input_layernorm.weight"), "layers.mixer_norm.scale", "d -> d"),
        head_row(config),
    ]


def _mixer_rows(config: ModelConfig) -> list[Row]:
    return [
        *mamba2_rows(lambda name: in_layer(f"mamba.{name}"), config),
        *attention_rows(lambda name: in_layer(f"self_attn.{name}"), config),
        *around_rows(config),
    ]


def granite_rows(config: ModelConfig) -> list[Row]:
    """The table of Granite 4.0. The rows of `input_linear` are the gate's, then those that it multiplies.

    Dense models have the network that is shared by all tokens, and no other.
    """
    experts = lambda name: in_layer(f"block_sparse_moe.{name}.weight")
    shared = "layers.mlp.shared." if config.has_experts else "layers.mlp."
    found = [
        *_mixer_rows(config),
        Row(in_layer("post_attention_layernorm.weight"), "layers.mlp_norm.scale", "d -> d"),
        Row(in_layer("shared_mlp.input_linear.weight"), f"{shared}gate_and_wide.kernel", "(p m) d -> d p m"),
        Row(in_layer("shared_mlp.output_linear.weight"), f"{shared}out.kernel", "d m -> m d"),
        Row("model.norm.weight", "norm.scale", "d -> d"),
    ]
    if config.has_experts:
        found += joined_expert_rows(experts("input_linear"), experts("output_linear"))
        found.append(Row(experts("router.layer"), "layers.mlp.router.kernel", "e d -> d e"))
    return found


def feed_forward_rows() -> list[Row]:
    """The feed-forward network and its norm in the words of Bamba and Falcon-H1, and the norm of the head."""
    return [
        Row(in_layer("pre_ff_layernorm.weight"), "layers.mlp_norm.scale", "d -> d"),
        *mlp_rows(in_layer, "feed_forward"),
        Row("model.final_layernorm.weight", "norm.scale", "d -> d"),
    ]


def read_mamba2(fields: Fields, dim: int) -> SSMConfig:
    """The fields of Mamba-2 with an inner width of mamba_expand · hidden_size."""
    fields.fixed(mamba_conv_bias=True, mamba_proj_bias=False)
    heads, inner = fields.integer("mamba_n_heads", 128), fields.integer("mamba_expand", 2) * dim
    size = fields.quotient("mamba_expand · hidden_size", inner, "mamba_n_heads", heads)
    fields.require("mamba_d_head", size, "auto")
    least, largest = fields.limits("time_step_limit")
    return SSMConfig(
        inner=inner, head_dim=size, state_dim=fields.integer("mamba_d_state", 256), groups=fields.integer("mamba_n_groups", 1),
        least_step=least, largest_step=largest,
    )  # fmt: skip


def mamba2_fields(config: ModelConfig) -> dict[str, object]:
    """The fields of Mamba-2 in config.json."""
    return {
        "mamba_n_heads": config.ssm_inner // config.ssm.head_dim, "mamba_d_head": config.ssm.head_dim,
        "mamba_d_state": config.ssm.state_dim, "mamba_n_groups": config.ssm.groups, "mamba_d_conv": config.conv_width,
        "mamba_conv_bias": True, "mamba_proj_bias": False, "time_step_limit": step_limit(config),
    }  # fmt: skip


def _model(
    fields: Fields,
    kinds: Callable[[Fields, int], list[str]],
    attention: Callable[[Fields, int], dict],
    network: Callable[[Fields], dict],
    eps: float,
) -> ModelConfig:
    """The config, from the fields that both families have.

    kinds: reads our mixer of each of so many layers. attention: reads the fields of attention that differ, for a size of a head.
    network: reads those of the feed-forward network. eps: default of the norms.
    """
    fields.fixed(attention_bias=False)
    fields.require("hidden_act", "silu", "swish")
    dim, layers = fields.integer("hidden_size", 4096), fields.layers("num_hidden_layers", 32)
    heads = fields.integer("num_attention_heads", 32)
    size = fields.quotient("hidden_size", dim, "num_attention_heads", heads)
    kv_heads = fields.integer("num_key_value_heads", heads)
    return ModelConfig(
        mixer=mixer_pattern(kinds(fields, layers)), num_layers=layers, dim=dim, num_heads=heads,
        vocab_size=fields.integer("vocab_size", 32000), ssm=read_mamba2(fields, dim), conv_width=fields.integer("mamba_d_conv", 4),
        attention=AttentionConfig(
            num_heads=heads, kv_heads=kv_heads, head_dim=size, value_dim=size, **attention(fields, size)
        ),
        norm_eps=fields.number("rms_norm_eps", default=eps), **network(fields),
        tie_embeddings=fields.boolean("tie_word_embeddings", False), dtype=fields.dtype(),
    )  # fmt: skip


def _fields(config: ModelConfig, kind: str, architecture: str) -> dict[str, object]:
    """The fields of config.json that both families have."""
    sizes = config.attention_sizes
    return peer_frame(config, kind, architecture) | {
        "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads, "attention_bias": False, "hidden_act": "silu",
        "mamba_expand": config.ssm_inner // config.dim, **mamba2_fields(config), "rms_norm_eps": config.norm_eps,
    }  # fmt: skip


def _layer_kinds(config: ModelConfig) -> list[str]:
    return [config.pattern[n % len(config.pattern)] for n in range(config.num_layers)]


def _granite_kinds(fields: Fields, layers: int) -> list[str]:
    """`layer_types`; older files have `layers_block_type`."""
    old = fields.strings("layers_block_type", layers, _MIXER_OF)
    given = fields.strings("layer_types", layers, _MIXER_OF) or old or ["linear_attention"] * layers
    return [_MIXER_OF[kind] for kind in given]


def _granite_attention(fields: Fields, size: int) -> dict[str, object]:
    """Without rotation unless the config asks for it, with a scale of its own."""
    rotated = fields.require("position_embedding_type", None, "nope", "rope") == "rope"
    theta = fields.theta(1e4)
    return {
        "rope_theta": theta if rotated else None, "scale": fields.number("attention_multiplier", default=1.0)
    }  # fmt: skip


def _granite_dense(fields: Fields) -> dict[str, object]:
    fields.fixed(num_local_experts=0)
    return {"mlp_dim": fields.integer("shared_intermediate_size", 1024)}


def _granite_experts(fields: Fields) -> dict[str, object]:
    """Experts, and a network for all tokens."""
    experts = ExpertsConfig(
        number=fields.integer("num_local_experts", 8), per_token=fields.integer("num_experts_per_tok", 2),
        width=fields.integer("intermediate_size", 11008), shared_width=fields.integer("shared_intermediate_size", 1024),
    )  # fmt: skip
    return {"ffn": "experts", "experts": experts}


_GRANITE_NEUTRAL = (
    "attention_dropout", "init_method", "intermediate_size", "logits_to_keep", "mamba_chunk_size", "normalization_function",
    "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef",
)  # fmt: skip


def _granite_to_ours(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    fields = Fields(given, _GRANITE, sizes)
    multipliers = MultiplierConfig(
        embedding=fields.number("embedding_multiplier", default=1.0),
        residual=fields.number("residual_multiplier", default=1.0),
        logits=1 / fields.number("logits_scaling", default=1.0),
    )
    network = _granite_dense if given.get("num_local_experts") == 0 else _granite_experts
    config = _model(fields, _granite_kinds, _granite_attention, network, 1e-6)
    fields.done(_GRANITE_NEUTRAL)
    return dataclasses.replace(config, multipliers=multipliers)


def _granite_to_peer(config: ModelConfig) -> dict[str, object]:
    kinds = {"mamba2": "linear_attention", "attention": "full_attention"}
    theta, scale = config.attention.rope_theta, config.attention.scale
    experts, shared = config.expert_form, config.resolved_mlp_dim
    number, chosen, width = (0, 0, shared) if experts is None else (experts.number, experts.per_token, experts.width)
    return _fields(config, "granitemoehybrid", "GraniteMoeHybridForCausalLM") | {
        "layer_types": [kinds[kind] for kind in _layer_kinds(config)],
        "num_local_experts": number, "num_experts_per_tok": chosen, "intermediate_size": width,
        "shared_intermediate_size": shared if experts is None else experts.shared_width or 1,
        "position_embedding_type": None if theta is None else "rope",
        "rope_parameters": {"rope_type": "default", "rope_theta": theta or 1e4},
        "attention_multiplier": config.attention_sizes.key_dim**-0.5 if scale is None else scale,
        "embedding_multiplier": config.multipliers.embedding, "residual_multiplier": config.multipliers.residual,
        "logits_scaling": 1 / config.multipliers.logits,
    }  # fmt: skip


def _bamba_kinds(fields: Fields, layers: int) -> list[str]:
    with_attention = fields.integers("attn_layer_indices", layers, default=[])
    return ["attention" if n in with_attention else "mamba2" for n in range(layers)]


def _bamba_attention(fields: Fields, size: int) -> dict[str, object]:
    """transformers rotates half of each head's channels, whatever config.json says."""
    outer, inside = fields.optional_number("rope_theta", default=1e4), fields.rotation()
    fields.fixed(attn_rotary_emb=size // 2)
    inside.fixed(partial_rotary_factor=0.5)
    theta = inside.optional_number("rope_theta", default=outer)
    inside.done(())
    return {"rope_theta": theta, "rope_dim": size // 2}


def _bamba_to_ours(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    fields = Fields(given, _BAMBA, sizes)
    fields.fixed(mlp_bias=False, partial_rotary_factor=0.5)
    config = _model(
        fields, _bamba_kinds, _bamba_attention, lambda fields: {"mlp_dim": fields.integer("intermediate_size")}, 1e-5
    )
    fields.done(("attention_dropout", "mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"))
    return config


def _bamba_to_peer(config: ModelConfig) -> dict[str, object]:
    return _fields(config, "bamba", "BambaForCausalLM") | {
        "intermediate_size": config.resolved_mlp_dim,
        "attn_layer_indices": [n for n, kind in enumerate(_layer_kinds(config)) if kind == "attention"],
        "rope_parameters": {
            "rope_type": "default", "rope_theta": config.attention.rope_theta or 1e4, "partial_rotary_factor": 0.5
        },
    }  # fmt: skip


_MATTERS = (*MAMBA2_MATTERS, "dense_width", "expert_form")
GRANITE = Family(
    "granitemoehybrid", ("mamba2", "attention"), of_type("granitemoehybrid"), _granite_to_ours, _granite_to_peer, granite_rows,
    _MATTERS,
)  # fmt: skip
BAMBA = Family(
    "bamba", ("mamba2", "attention"), of_type("bamba"), _bamba_to_ours, _bamba_to_peer,
    lambda config: [*_mixer_rows(config), *feed_forward_rows()], _MATTERS,
)  # fmt: skip
