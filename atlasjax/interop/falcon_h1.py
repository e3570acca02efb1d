"""Falcon-H1 as transformers writes it (tiiuae/Falcon-H1-0.5B …): Mamba-2 and attention in parallel in every layer."""

from collections.abc import Mapping

from atlasjax.interop.family import Family, Fields, Sizes
from atlasjax.interop.layers import MAMBA2_MATTERS, attention_rows, in_layer, mamba2_rows, of_type, peer_frame
from atlasjax.interop.mamba2_hybrids import around_rows, feed_forward_rows, mamba2_fields
from atlasjax.interop.table import Row
from atlasjax.nn import AttentionConfig, ModelConfig, MultiplierConfig, SSMConfig

_NAME = "Falcon-H1"
_MIXER = "mamba2+attention"


def rows(config: ModelConfig) -> list[Row]:
    """The table."""
    return [
        *mamba2_rows(lambda name: in_layer(f"mamba.{name}"), config, (_MIXER,), "mixer_0."),
        *attention_rows(lambda name: in_layer(f"self_attn.{name}"), config, (_MIXER,), "mixer_1."),
        *feed_forward_rows(),
        *around_rows(config),
    ]


def _read_ssm(fields: Fields, dim: int) -> SSMConfig:
    fields.fixed(mamba_conv_bias=True, mamba_proj_bias=False)
    expand = fields.integer("mamba_expand", 2)
    inner = fields.optional_integer("mamba_d_ssm") or expand * dim
    heads = fields.integer("mamba_n_heads", 128)
    size = fields.quotient("mamba_d_ssm", inner, "mamba_n_heads", heads)
    fields.require("mamba_d_head", size, "auto")
    least, largest = fields.limits("time_step_limit")
    is_before = fields.boolean("mamba_norm_before_gate", True)
    has_norm = fields.boolean("mamba_rms_norm", False)
    return SSMConfig(
        inner=inner, head_dim=size, state_dim=fields.integer("mamba_d_state", 256), groups=fields.integer("mamba_n_groups", 1),
        output_norm="none" if not has_norm else "before_gate" if is_before else "gated", least_step=least, largest_step=largest,
    )  # fmt: skip


def _read_multipliers(fields: Fields) -> tuple[MultiplierConfig, float]:
    """Our multipliers, and the factor of the scores of attention.

    The constant before the projections of attention is squared in the scores and stands once in the values; before those of
    Mamba-2 it multiplies each of them.
    """
    of = lambda name: fields.number(name, default=1.0)
    before, after = of("attention_in_multiplier"), of("attention_out_multiplier")
    inputs, gate_and_out = of("ssm_in_multiplier"), fields.numbers("mlp_multipliers", 2)
    multipliers = MultiplierConfig(
        embedding=of("embedding_multiplier"),
        logits=of("lm_head_multiplier"),
        mlp_gate=gate_and_out[0],
        mlp_out=gate_and_out[1],
        attention_out=before * after,
        ssm=tuple(inputs * x for x in fields.numbers("ssm_multipliers", 5)),
        ssm_out=of("ssm_out_multiplier"),
    )
    return multipliers, before**2 * of("key_multiplier")


# Dropout in training, lengths of texts, initial values, and how much of the logits is computed.
_NEUTRAL = ("attention_dropout", "mamba_chunk_size", "mamba_use_mlp", "num_logits_to_keep")


def _to_ours(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    fields = Fields(given, _NAME, sizes)
    fields.fixed(attention_bias=False, mlp_bias=False, projectors_bias=False, mamba_use_mlp=True)
    fields.require("hidden_act", "silu", "swish")
    dim, heads = fields.integer("hidden_size", 4096), fields.integer("num_attention_heads", 32)
    size = fields.optional_integer("head_dim") or fields.quotient("hidden_size", dim, "num_attention_heads", heads)
    multipliers, factor = _read_multipliers(fields)
    config = ModelConfig(
        mixer=_MIXER, dim=dim, num_heads=heads, head_dim=size, num_layers=fields.layers("num_hidden_layers", 32),
        vocab_size=fields.integer("vocab_size", 128000), ssm=_read_ssm(fields, dim), multipliers=multipliers,
        conv_width=fields.integer("mamba_d_conv", 4),
        attention=AttentionConfig(
            num_heads=heads, kv_heads=fields.integer("num_key_value_heads", heads), head_dim=size, value_dim=size,
            rope_theta=fields.theta(1e4), scale=factor * size**-0.5,
        ),
        norm_eps=fields.number("rms_norm_eps", default=1e-5), mlp_dim=fields.integer("intermediate_size", 14336),
        tie_embeddings=fields.boolean("tie_word_embeddings", False), dtype=fields.dtype(),
    )  # fmt: skip
    fields.done(_NEUTRAL)
    return config


def _to_peer(config: ModelConfig) -> dict[str, object]:
    sizes, multipliers = config.attention_sizes, config.multipliers
    scale = 1.0 if config.attention.scale is None else config.attention.scale * sizes.key_dim**0.5
    return peer_frame(config, "falcon_h1", "FalconH1ForCausalLM") | {
        "intermediate_size": config.resolved_mlp_dim, "hidden_act": "silu", "rms_norm_eps": config.norm_eps,
        "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads, "head_dim": sizes.key_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.attention.rope_theta or 1e4},
        "mamba_d_ssm": config.ssm_inner, **mamba2_fields(config), "mamba_rms_norm": config.ssm.output_norm != "none",
        "mamba_norm_before_gate": config.ssm.output_norm == "before_gate",
        "embedding_multiplier": multipliers.embedding, "lm_head_multiplier": multipliers.logits, "key_multiplier": scale,
        "attention_in_multiplier": 1.0, "attention_out_multiplier": multipliers.attention_out,
        "mlp_multipliers": [multipliers.mlp_gate, multipliers.mlp_out], "ssm_in_multiplier": 1.0,
        "ssm_multipliers": list(multipliers.ssm), "ssm_out_multiplier": multipliers.ssm_out,
    }  # fmt: skip


FALCON_H1 = Family(
    "falcon_h1", (_MIXER,), of_type("falcon_h1"), _to_ours, _to_peer, rows, (*MAMBA2_MATTERS, "resolved_mlp_dim")
)
