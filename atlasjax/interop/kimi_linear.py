"""Kimi-Linear (moonshotai/Kimi-Linear-48B-A3B-Instruct), as its public weights and transformers have it: Kimi Delta Attention, and
multi-head latent attention without positions in some layers."""

import dataclasses
from collections.abc import Mapping

from atlasjax.interop.family import Family, Fields, Sizes, mixer_pattern
from atlasjax.interop.layers import (
    JOINED_EXPERTS,
    expert_rows,
    head_row,
    in_layer,
    input_rows,
    joined_experts,
    mlp_rows,
    of_type,
    peer_frame,
    router_rows,
    rows_of,
)
from atlasjax.interop.table import Row
from atlasjax.nn import ExpertsConfig, HeadNormConfig, MLAConfig, ModelConfig
from atlasjax.train.errors import ConfigError

_NAME = "Kimi-Linear"
_MIXER_OF = {"linear_attention": "kda", "full_attention": "mla"}


def _in_mixer(name: str) -> str:
    return in_layer(f"self_attn.{name}")


def _in_gate(name: str) -> tuple[str, str]:
    """The name of a tensor of the decay, in files and in transformers' module."""
    return _in_mixer(name), _in_mixer(f"forget_gate.{name}")


def _in_network(name: str) -> tuple[str, str]:
    """A dense network is `mlp` in the public weights; transformers writes it under the name of those with experts."""
    return in_layer(f"mlp.{name}"), in_layer(f"block_sparse_moe.{name}")


def _in_experts(name: str) -> tuple[str, str]:
    """The name in files, and in transformers' module."""
    return in_layer(f"block_sparse_moe.{name}"), in_layer(f"mlp.{name}")


def rows(config: ModelConfig) -> list[Row]:
    """The table."""
    return [
        Row("model.embed_tokens.weight", "embedding", "v d -> v d"),
        Row(in_layer("input_layernorm.weight"), "layers.mixer_norm.scale", "d -> d"),
        Row(in_layer("post_attention_layernorm.weight"), "layers.mlp_norm.scale", "d -> d"),
        *_kda_rows(config),
        *_mla_rows(config),
        *_network_rows(config),
        Row("model.norm.weight", "norm.scale", "d -> d"),
        head_row(config),
    ]


def _network_rows(config: ModelConfig) -> list[Row]:
    names = {"gate": "w1", "up": "w3", "down": "w2"}
    return [
        *mlp_rows(lambda name: _in_network(name.removeprefix("mlp."))),
        *router_rows(_in_experts),
        *expert_rows(lambda name: _in_experts(f"experts.{{e}}.{names[name]}.weight"), config),
        *mlp_rows(_in_experts, "shared_experts", "mlp.shared", "experts"),
    ]


def _kda_rows(config: ModelConfig) -> list[Row]:
    row, gate = rows_of(_in_mixer, ("kda",)), rows_of(_in_gate, ("kda",))
    return [
        *input_rows(_in_mixer, config, "kda", "qkv"),
        gate("f_a_proj.weight", "decay.logits.down.kernel", "r d -> d r"),
        gate("f_b_proj.weight", "decay.logits.up.kernel", "(h k) r -> r h k"),
        gate("A_log", "decay.A_log", "(1) (1) h (1) -> h"),
        gate("dt_bias", "decay.dt_bias", "(h k) -> h k"),
        row("b_proj.weight", "beta.kernel", "h d -> d h"),
        row("g_a_proj.weight", "gate.down.kernel", "r d -> d r"),
        row("g_b_proj.weight", "gate.up.kernel", "(h k) r -> r h k"),
        row("o_norm.weight", "norm.scale", "k -> k"),
        row("o_proj.weight", "out.kernel", "d i -> i d"),
    ]


def _mla_rows(config: ModelConfig) -> list[Row]:
    row = rows_of(_in_mixer, ("mla",))
    queries = [row("q_proj.weight", "q.kernel", "(h k) d -> d h k")]
    if config.mla.q_lora_rank is not None:
        queries = [
            row("q_a_proj.weight", "q_down.kernel", "r d -> d r"),
            row("q_a_layernorm.weight", "q_norm.scale", "r -> r"),
            row("q_b_proj.weight", "q.kernel", "(h k) r -> r h k"),
        ]
    return [
        *queries,
        row("kv_a_proj_with_mqa.weight", "down.kernel", "c d -> d c"),
        row("kv_a_layernorm.weight", "latent_norm.scale", "c -> c"),
        row("kv_b_proj.weight", "up.kernel", "(h k) c -> c h k"),
        row("o_proj.weight", "out.kernel", "d i -> i d"),
    ]


def _joined_convolutions(found: list[Row], config: ModelConfig) -> list[Row]:
    """The table where one tensor has the convolutions of queries, keys and values, as in transformers' module."""
    parts = [row for row in found if row.ours.endswith("inputs.conv.kernel")]
    size, name = config.num_heads * config.resolved_head_dim, _in_mixer("conv1d.weight")
    joined = [dataclasses.replace(row, peer=name, rows=(i * size, (i + 1) * size)) for i, row in enumerate(parts)]
    return [*(row for row in found if row not in parts), *joined]


def _layer_types(fields: Fields, older: Fields, layers: int) -> list[str]:
    """`layer_types`; or else the layers of each kind in linear_attn_config, counted from 1; or else every fourth is attention."""
    given = fields.strings("layer_types", layers, _MIXER_OF)
    numbers = {kind: older.integers(name, layers + 1, []) for kind, name in _COUNTED.items()}
    if given is not None or not any(numbers.values()):
        return given or ["full_attention" if n and n % 4 == 0 else "linear_attention" for n in range(layers)]
    kind_of = {n: kind for kind, found in numbers.items() for n in found}
    if sorted(n for found in numbers.values() for n in found) != list(range(1, layers + 1)):
        raise ConfigError(
            f"config.json of {_NAME}, linear_attn_config: kda_layers and full_attn_layers should together have each layer from 1 "
            f"to {layers} once."
        )
    return [kind_of[n] for n in range(1, layers + 1)]


def _networks(fields: Fields, layers: int) -> list[str]:
    """Our networks: from `mlp_layer_types`, or dense ones in the first first_k_dense_replace layers."""
    kinds = fields.strings("mlp_layer_types", layers, _NETWORK_OF)
    dense = fields.integer("first_k_dense_replace", 1, is_axis=False)
    return [_NETWORK_OF[kind] for kind in kinds or ["dense" if n < dense else "sparse" for n in range(layers)]]


def _experts(fields: Fields) -> ExpertsConfig:
    width = fields.integer("moe_intermediate_size", 1024)
    return ExpertsConfig(
        number=fields.integer("num_experts", 256), per_token=fields.integer("num_experts_per_token", 8), width=width,
        shared_width=width * fields.integer("num_shared_experts", 1), scores="sigmoid", correction_bias=True,
        normalize=fields.boolean("moe_renormalize", True), scale=fields.number("routed_scaling_factor", default=2.446),
        groups=fields.integer("num_expert_group", 1), top_groups=fields.integer("topk_group", 1),
    )  # fmt: skip


_NETWORK_OF = {"dense": "swiglu", "sparse": "experts"}
_COUNTED = {"linear_attention": "kda_layers", "full_attention": "full_attn_layers"}
# Fields of training and of rotary positions, which these models have not, and of nothing (the size of a head).
_NEUTRAL = (
    "attention_dropout", "head_dim", "model_max_length", "output_router_logits", "pretraining_tp", "rope_scaling", "rope_theta",
)  # fmt: skip
# Those of experts change nothing where all networks are dense.
_NO_EXPERTS = (
    "moe_intermediate_size", "moe_renormalize", "num_expert_group", "num_experts", "num_experts_per_token", "num_shared_experts",
    "routed_scaling_factor", "topk_group",
)  # fmt: skip


def _to_ours(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    fields = Fields(given, _NAME, sizes)
    fields.fixed(
        attention_bias=False, hidden_act="silu", mla_use_nope=True, num_nextn_predict_layers=0, moe_layer_freq=1,
        moe_router_activation_func="sigmoid", use_grouped_topk=True, tie_word_embeddings=False,
    )  # fmt: skip
    older = fields.inside("linear_attn_config")
    layers, heads = fields.layers("num_hidden_layers", 27), fields.integer("num_attention_heads", 32)
    fields.require("num_key_value_heads", heads, None)
    both = lambda name, inside, default: older.integer(inside, fields.integer(name, default))
    size, eps = both("linear_head_dim", "head_dim", 128), fields.number("rms_norm_eps", default=1e-5)
    own, shared = fields.integer("qk_nope_head_dim", 128), fields.integer("qk_rope_head_dim", 64)
    fields.require("qk_head_dim", own + shared)
    mla = MLAConfig(
        num_heads=heads, kv_lora_rank=fields.integer("kv_lora_rank", 512), q_lora_rank=fields.optional_integer("q_lora_rank"),
        qk_nope_head_dim=own, qk_rope_head_dim=shared,
        v_head_dim=fields.integer("v_head_dim", 128), rope_theta=None,
    )  # fmt: skip
    mixers, networks = [_MIXER_OF[kind] for kind in _layer_types(fields, older, layers)], _networks(fields, layers)
    pattern = mixer_pattern([" ".join(pair) for pair in zip(mixers, networks)])
    period = 1 if isinstance(pattern, str) else len(pattern)
    sparse = "experts" in networks
    config = ModelConfig(
        mixer=mixers[0] if period == 1 else tuple(mixers[:period]), ffn=tuple(networks[:period]), num_layers=layers,
        experts=_experts(fields) if sparse else ExpertsConfig(),
        num_heads=both("linear_num_heads", "num_heads", 32), head_dim=size, dim=fields.integer("hidden_size", 2304),
        vocab_size=fields.integer("vocab_size", 163840), mla=mla,
        conv_width=both("linear_conv_kernel_dim", "short_conv_kernel_size", 4), norm_eps=eps,
        head_norm=HeadNormConfig(shared=True, eps=eps * size),  # q is scaled by head_dim^{−1/2}
        mlp_dim=fields.integer("intermediate_size", 9216), tie_embeddings=False, dtype=fields.dtype(),
    )  # fmt: skip
    older.done(())
    fields.done(_NEUTRAL if sparse else (*_NEUTRAL, *_NO_EXPERTS))
    return config


def _to_peer(config: ModelConfig) -> dict[str, object]:
    kinds, sizes = {ours: kind for kind, ours in (_MIXER_OF | _NETWORK_OF).items()}, config.mla_sizes
    of_layers = lambda pattern: [kinds.get(pattern[n % len(pattern)], "dense") for n in range(config.num_layers)]
    given = config.expert_form
    experts = {} if given is None else {
        "num_experts": given.number, "num_experts_per_token": given.per_token, "moe_intermediate_size": given.width,
        "num_shared_experts": (given.shared_width or 0) // config.expert_width, "moe_renormalize": given.normalize,
        "routed_scaling_factor": given.scale, "num_expert_group": given.groups, "topk_group": given.top_groups,
    }  # fmt: skip
    return peer_frame(config, "kimi_linear", "KimiLinearForCausalLM") | experts | {
        "layer_types": of_layers(config.pattern), "mlp_layer_types": of_layers(config.ffns),
        "linear_num_heads": config.num_heads, "linear_head_dim": config.resolved_head_dim,
        "linear_conv_kernel_dim": config.conv_width, "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.heads,
        "kv_lora_rank": sizes.latent_dim, "q_lora_rank": config.mla.q_lora_rank, "qk_nope_head_dim": sizes.own_dim,
        "qk_rope_head_dim": sizes.shared_dim, "v_head_dim": sizes.value_dim, "intermediate_size": config.resolved_mlp_dim,
        "hidden_act": "silu", "rms_norm_eps": config.norm_eps,
    }  # fmt: skip


KIMI_LINEAR = Family(
    "kimi_linear", ("mla", "kda"), of_type("kimi_linear"), _to_ours, _to_peer, rows,
    ("num_heads", "resolved_head_dim", "value_dim", "head_norm", "conv_width", "kda", "mla_sizes", "mla.q_lora_rank",
     "mla.rope_theta", "mla.norm_eps", "dense_width", "expert_form"),
    # Both as in transformers' module.
    older={r"\.self_attn\.conv1d\.weight$": _joined_convolutions, JOINED_EXPERTS: joined_experts(in_layer)},
)  # fmt: skip
