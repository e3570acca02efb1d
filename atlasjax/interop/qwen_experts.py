"""Qwen3.5-MoE and Qwen3-Next as transformers writes them: Gated DeltaNet and gated attention, with experts in most layers."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

from atlasjax.interop.family import Family, Fields, Sizes
from atlasjax.interop.layers import (
    ALL,
    JOINED_EXPERTS,
    MATTERS,
    expert_rows,
    joined_experts,
    mlp_rows,
    of_type,
    rows_of,
)
from atlasjax.interop.qwen3_5 import (
    KEPT,
    NEUTRAL,
    after_rows,
    around_rows,
    delta_rows,
    in_delta,
    in_layer,
    language_model,
    peer_fields,
    text_part,
)
from atlasjax.interop.table import Row
from atlasjax.interop.unused import ROTARY
from atlasjax.nn import ExpertsConfig, ModelConfig

_MIXERS = ("gated_deltanet", "attention")


def _network_rows(config: ModelConfig) -> list[Row]:
    """Dense networks; experts with their router, and the network that all tokens go to with its gate."""
    dense = [] if config.network == "none" else mlp_rows(in_layer)
    if not config.has_experts:
        return dense
    row = functools.partial(Row, network="experts")
    return [
        *dense,
        *mlp_rows(in_layer, "mlp.shared_expert", "mlp.shared", "experts"),
        *expert_rows(lambda name: in_layer(f"mlp.experts.{{e}}.{name}_proj.weight"), config),
        row(in_layer("mlp.gate.weight"), "layers.mlp.router.kernel", "e d -> d e"),
        row(in_layer("mlp.shared_expert_gate.weight"), "layers.mlp.shared_gate.kernel", "o d -> d o"),
    ]


def _next_delta_rows(config: ModelConfig) -> list[Row]:
    """`in_proj_qkvz` has the rows of a head of keys together, as ours; `in_proj_ba` those of its heads of values: b, then a."""
    row = rows_of(in_delta, ("gated_deltanet",))
    each = config.value_heads // config.num_heads
    found = [row("in_proj_qkvz.weight", "inputs.linear.kernel", "(h k) d -> d h k")]
    for head in range(config.num_heads):
        own, start = slice(head * each, (head + 1) * each), 2 * head * each
        for which in range(2):
            rows = start + which * each, start + (which + 1) * each
            found.append(row("in_proj_ba.weight", "gates.kernel", "h d -> d h", (ALL, which, own), rows))
    return [*found, row("A_log", "A_log", "h -> h"), row("dt_bias", "dt_bias", "h -> h"), *after_rows(config)]


_DEFAULTS = {"num_hidden_layers": 40, "vocab_size": 248320, "hidden_size": 2048, "num_key_value_heads": 2}
_NEXT_DEFAULTS = _DEFAULTS | {"num_hidden_layers": 48, "vocab_size": 151936}
# The balance loss is a setting of training.
_NEUTRAL = (*NEUTRAL, "output_router_logits", "router_aux_loss_coef")


def _experts(fields: Fields, number: int, chosen: int, normalize: bool) -> ExpertsConfig:
    """The experts, with a family's defaults."""
    return ExpertsConfig(
        number=fields.integer("num_experts", number), per_token=fields.integer("num_experts_per_tok", chosen),
        width=fields.integer("moe_intermediate_size", 512), normalize=normalize,
        shared_width=fields.integer("shared_expert_intermediate_size", 512), shared_gate=True,
    )  # fmt: skip


def _to_ours(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    fields, around = text_part(given, sizes, "Qwen3.5-MoE", "qwen3_5_moe")
    fields.fixed(mlp_only_layers=[], decoder_sparse_step=1, norm_topk_prob=True)
    config = language_model(fields, around, lambda layers: ["experts"] * layers, _DEFAULTS)
    config = dataclasses.replace(config, experts=_experts(fields, 256, 8, True))
    fields.done((*_NEUTRAL, "intermediate_size"))
    return config


def _next_to_ours(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    fields = Fields(given, "Qwen3-Next", sizes)

    def networks(layers: int) -> list[str]:
        """Layers of `mlp_only_layers` are dense, and all but each `decoder_sparse_step`-th one."""
        dense, step = (
            fields.integers("mlp_only_layers", layers, default=[]),
            fields.integer("decoder_sparse_step", 1, is_axis=False),
        )
        return ["swiglu" if n in dense or (n + 1) % step else "experts" for n in range(layers)]

    config = language_model(fields, (None, None), networks, _NEXT_DEFAULTS)
    normalize = fields.boolean("norm_topk_prob", True)
    width = fields.integer("intermediate_size", 5632, is_axis="swiglu" in config.ffns)
    experts = _experts(fields, 512, 10, normalize) if config.has_experts else config.experts
    config = dataclasses.replace(config, mlp_dim=width, experts=experts)
    fields.done(_NEUTRAL)
    return config


def _expert_fields(config: ModelConfig) -> dict[str, object]:
    given = config.expert_form or ExpertsConfig()
    return {
        "num_experts": given.number, "num_experts_per_tok": given.per_token, "moe_intermediate_size": given.width or 1,
        "shared_expert_intermediate_size": given.shared_width or 1,
    }  # fmt: skip


def _to_peer(config: ModelConfig) -> dict[str, object]:
    return peer_fields(config, "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM") | _expert_fields(config)


def _next_to_peer(config: ModelConfig) -> dict[str, object]:
    kinds = [config.ffns[n % len(config.pattern)] for n in range(config.num_layers)]
    return peer_fields(config, "qwen3_next", "Qwen3NextForCausalLM") | _expert_fields(config) | {
        "norm_topk_prob": config.experts.normalize,
        "decoder_sparse_step": 1, "mlp_only_layers": [n for n, kind in enumerate(kinds) if kind != "experts"],
    }  # fmt: skip


def _family(
    name: str, kinds: tuple[str, ...], to_ours: Callable[[Mapping[str, object], Sizes], ModelConfig],
    to_peer: Callable[[ModelConfig], dict[str, object]], mixer_rows: Callable[[ModelConfig], list[Row]],
) -> Family:  # fmt: skip
    rows = lambda config: [*around_rows(config), *_network_rows(config), *mixer_rows(config)]
    return Family(
        name,
        _MIXERS,
        of_type(*kinds),
        to_ours,
        to_peer,
        rows,
        MATTERS,
        kept=KEPT,
        unused=(ROTARY,),
        older={JOINED_EXPERTS: joined_experts(in_layer)},
    )


QWEN3_5_MOE = _family("qwen3_5_moe", ("qwen3_5_moe", "qwen3_5_moe_text"), _to_ours, _to_peer, delta_rows)
QWEN3_NEXT = _family("qwen3_next", ("qwen3_next",), _next_to_ours, _next_to_peer, _next_delta_rows)
