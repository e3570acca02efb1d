"""Nemotron-H, Nemotron Nano 2 and Nemotron-3 Nano as transformers writes them: blocks of one mixer each, Mamba-2, attention, an MLP
or experts.

A block that is an MLP or has experts is here the feed-forward network of the layer before it.
"""

import dataclasses
from collections.abc import Callable, Mapping

from atlasjax.interop.family import Family, Fields, Sizes, mixer_pattern
from atlasjax.interop.layers import (
    MAMBA2_MATTERS,
    attention_rows,
    expert_rows,
    head_row,
    mamba2_rows,
    of_type,
    peer_frame,
    router_rows,
)
from atlasjax.interop.table import Row
from atlasjax.nn import AttentionConfig, ExpertsConfig, ModelConfig, SSMConfig
from atlasjax.train.errors import ConfigError

_NAME = "Nemotron-H"
_MIXER_OF = {"mamba": "mamba2", "linear_attention": "mamba2", "attention": "attention", "full_attention": "attention"}
_NETWORK_OF = {"mlp": "relu2", "moe": "experts"}
_OF_LETTER = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def _numbers(config: ModelConfig) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
    """The peer's numbers of the mixer and of the feed-forward network, dense or of experts, of each of our layers."""
    mixers: list[int] = []
    networks: list[int | None] = []
    number = 0
    for n in range(config.num_layers):
        has_network = config.ffns[n % len(config.pattern)] != "none"
        mixers.append(number)
        networks.append(number + 1 if has_network else None)
        number += 2 if has_network else 1
    return tuple(mixers), tuple(networks)


def rows(config: ModelConfig) -> list[Row]:
    """The table."""
    mixers, networks = _numbers(config)
    in_block = lambda name: f"backbone.layers.{{n}}.{name}"
    in_mixer = lambda name: in_block(f"mixer.{name}")
    found = [
        *mamba2_rows(in_mixer, config),
        *attention_rows(in_mixer, config),
        Row(in_block("norm.weight"), "layers.mixer_norm.scale", "d -> d"),
    ]
    of_network = [
        Row(in_block("norm.weight"), "layers.mlp_norm.scale", "d -> d"),
        *_network_rows(in_mixer, "mlp", "relu2"),
        *router_rows(in_mixer),
        *expert_rows(lambda name: in_mixer(f"experts.{{e}}.{name}_proj.weight"), config),
        *_network_rows(lambda name: in_mixer(f"shared_experts.{name}"), "mlp.shared", "experts"),
    ]
    return [
        *(dataclasses.replace(row, numbers=mixers) for row in found),
        *(dataclasses.replace(row, numbers=networks) for row in of_network),
        Row("backbone.embeddings.weight", "embedding", "v d -> v d"),
        Row("backbone.norm_f.weight", "norm.scale", "d -> d"),
        head_row(config),
    ]


def _network_rows(names: Callable[[str], str], ours: str, network: str) -> list[Row]:
    """An MLP, which is at `ours` in layers with a `network` of this kind."""
    return [
        Row(names("up_proj.weight"), f"layers.{ours}.wide.kernel", "m d -> d m", network=network),
        Row(names("down_proj.weight"), f"layers.{ours}.out.kernel", "d m -> m d", network=network),
    ]


def _blocks(fields: Fields) -> list[str]:
    """The kinds of all blocks: `layers_block_type`, or `hybrid_override_pattern`, a string of M, *, - and E in older files."""
    pattern = fields.letters("hybrid_override_pattern", _OF_LETTER)
    old = None if pattern is None else [_OF_LETTER[letter] for letter in pattern]
    kinds = (*_MIXER_OF, *_NETWORK_OF)
    given = fields.strings("layers_block_type", None, kinds) or fields.strings("layer_types", None, kinds) or old
    if given is None:
        raise ConfigError(f"config.json of {_NAME}: layers_block_type is missing.")
    fields.require("num_hidden_layers", len(given))
    for before, kind in zip(["mlp", *given], given):
        if before in _NETWORK_OF and kind in _NETWORK_OF:
            raise ConfigError(
                f"config.json of {_NAME}: layers_block_type has an MLP that does not follow a mixer; it should follow Mamba-2 or "
                "attention, whose feed-forward network it is here."
            )
    return given


def _layers(blocks: list[str]) -> list[tuple[str, str]]:
    """(mixer, feed-forward network) of each of our layers."""
    return [
        (_MIXER_OF[kind], _NETWORK_OF.get(after, "none"))
        for kind, after in zip(blocks, [*blocks[1:], ""])
        if kind not in _NETWORK_OF
    ]


def _experts(fields: Fields) -> ExpertsConfig:
    fields.fixed(moe_latent_size=None, n_shared_experts=1)
    return ExpertsConfig(
        number=fields.integer("n_routed_experts", 8), per_token=fields.integer("num_experts_per_tok", 2), network="relu2",
        width=fields.integer("moe_intermediate_size", 7688), scores="sigmoid", correction_bias=True,
        shared_width=fields.integer("moe_shared_expert_intermediate_size", 7688),
        normalize=fields.boolean("norm_topk_prob", True), scale=fields.number("routed_scaling_factor", default=1.0),
        groups=fields.integer("n_group", 1), top_groups=fields.integer("topk_group", 1),
    )  # fmt: skip


# Dropout, initial values, and the sizes of predictions of later tokens, of which these models have none.
_NEUTRAL = (
    "attention_dropout", "chunk_size", "hidden_dropout", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap",
    "mtp_hybrid_override_pattern", "mtp_layers_block_type", "num_logits_to_keep", "output_router_logits",
    "rescale_prenorm_residual", "time_step_floor", "time_step_limit", "time_step_max", "time_step_rank", "use_mamba_kernels",
)  # fmt: skip
# Those of experts change nothing in a model without them.
_NO_EXPERTS = (
    "moe_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size", "n_group", "n_routed_experts",
    "n_shared_experts", "norm_topk_prob", "num_experts_per_tok", "routed_scaling_factor", "topk_group",
)  # fmt: skip


def _to_ours(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    fields = Fields(given, _NAME, sizes)
    fields.fixed(
        attention_bias=False, mlp_bias=False, use_bias=False, mamba_proj_bias=False, use_conv_bias=True, sliding_window=None,
        num_nextn_predict_layers=0,
    )  # fmt: skip
    fields.require("mamba_hidden_act", "silu", "swish")
    fields.require("mlp_hidden_act", "relu2")
    layers = _layers(_blocks(fields))
    pattern = mixer_pattern([f"{mixer} {network}" for mixer, network in layers])
    names = [name.split() for name in ((pattern,) if isinstance(pattern, str) else pattern)]
    networks = {network for _, network in layers}
    sparse = "experts" in networks
    heads, size = fields.integer("num_attention_heads", 32), fields.integer("head_dim", 128)
    state_heads, state_size = fields.integer("mamba_num_heads", 128), fields.integer("mamba_head_dim", 64)
    config = ModelConfig(
        mixer=tuple(mixer for mixer, _ in names) if len(names) > 1 else names[0][0], ffn=tuple(network for _, network in names),
        experts=_experts(fields) if sparse else ExpertsConfig(),
        num_layers=len(layers), num_heads=heads, head_dim=size, dim=fields.integer("hidden_size", 4096),
        vocab_size=fields.integer("vocab_size", 131072), conv_width=fields.integer("conv_kernel", 4),
        ssm=SSMConfig(
            inner=state_heads * state_size, head_dim=state_size, state_dim=fields.integer("ssm_state_size", 128),
            groups=fields.integer("n_groups", 8), least_step=fields.number("time_step_min", default=1e-3),
        ),
        attention=AttentionConfig(
            num_heads=heads, kv_heads=fields.integer("num_key_value_heads", 8), head_dim=size, value_dim=size, rope_theta=None
        ),
        norm_eps=fields.number("layer_norm_epsilon", "norm_eps", default=1e-5),
        mlp_dim=fields.integer("intermediate_size", 21504, is_axis="relu2" in networks),
        tie_embeddings=fields.boolean("tie_word_embeddings", False), dtype=fields.dtype(),
    )  # fmt: skip
    known = (*_NEUTRAL, "expand", "norm_eps", "rope_theta", "partial_rotary_factor")
    fields.done(known if sparse else (*known, *_NO_EXPERTS))
    return config


def _to_peer(config: ModelConfig) -> dict[str, object]:
    sizes, kinds = config.attention_sizes, {"mamba2": "linear_attention", "attention": "full_attention"}
    of_network = {network: kind for kind, network in _NETWORK_OF.items()}
    blocks: list[str] = []
    for n in range(config.num_layers):
        at = n % len(config.pattern)
        network = config.ffns[at]
        blocks += [kinds[config.pattern[at]], *([of_network.get(network, "mlp")] if network != "none" else [])]
    given = config.expert_form
    experts = {} if given is None else {
        "n_routed_experts": given.number, "num_experts_per_tok": given.per_token, "moe_intermediate_size": given.width,
        "moe_shared_expert_intermediate_size": given.shared_width, "n_shared_experts": 1, "norm_topk_prob": given.normalize,
        "routed_scaling_factor": given.scale, "n_group": given.groups, "topk_group": given.top_groups,
    }  # fmt: skip
    return peer_frame(config, "nemotron_h", "NemotronHForCausalLM") | experts | {
        "layers_block_type": blocks, "num_hidden_layers": len(blocks),
        "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads, "head_dim": sizes.key_dim,
        "intermediate_size": config.resolved_mlp_dim, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu",
        "mamba_num_heads": config.ssm_inner // config.ssm.head_dim, "mamba_head_dim": config.ssm.head_dim,
        "ssm_state_size": config.ssm.state_dim, "n_groups": config.ssm.groups, "conv_kernel": config.conv_width,
        "time_step_min": config.ssm.least_step, "layer_norm_epsilon": config.norm_eps,
    }  # fmt: skip


NEMOTRON_H = Family(
    "nemotron_h", ("mamba2", "attention"), of_type("nemotron_h"), _to_ours, _to_peer, rows,
    (*MAMBA2_MATTERS, "dense_width", "expert_form"),
)  # fmt: skip
