"""Mamba-3 as flash-linear-attention writes it."""

import itertools
from collections.abc import Mapping

from atlasjax.interop.family import Family, Fields, Sizes
from atlasjax.interop.fla import GENERATION
from atlasjax.interop.layers import ALL, of_type, peer_frame, rows_of
from atlasjax.interop.mamba import backbone_rows, in_mixer
from atlasjax.interop.table import Row
from atlasjax.nn import Mamba3Config, ModelConfig, SSMConfig
from atlasjax.train.errors import ConfigError


def _rows(config: ModelConfig) -> list[Row]:
    """The rows of `in_proj` are z, x, B and C, the logits of Δ, A and λ, the rates of the angles."""
    ssm, own, inner = config.ssm, config.mamba3, config.ssm.expand * config.dim
    widths = (
        0, inner, inner, 2 * own.rank * ssm.groups * ssm.state_dim, 3 * (inner // ssm.head_dim),
        int(ssm.state_dim * own.rope_fraction) // 2,
    )  # fmt: skip
    z, x, selected, gates, angles = itertools.pairwise(itertools.accumulate(widths))
    row = rows_of(in_mixer, ("mamba3",))
    found = [
        *backbone_rows(config),
        row("in_proj.weight", "inputs.kernel", "i d -> d i", (ALL, 0), z),
        row("in_proj.weight", "inputs.kernel", "i d -> d i", (ALL, 1), x),
        row("in_proj.weight", "selection.kernel", "s d -> d s", rows=selected),
        row("in_proj.weight", "gates.kernel", "(n h) d -> d n h", rows=gates),
        row("in_proj.weight", "rates.kernel", "a d -> d a", rows=angles),
        row("dt_bias", "dt_bias", "h -> h"),
        *(row(f"{x}_norm.weight", f"{x}_norm.scale", "s -> s") for x in "BC"),
        *(row(f"{x}_bias", f"{x}_bias", "h r s -> r h s") for x in "BC"),
        row("D", "D", "h -> h"),
        row("out_proj.weight", "out.kernel", "d i -> i d"),
    ]
    if own.rank > 1:
        found += [row(f"mimo_{x}", f"mimo_{x}", "h r k -> r h k") for x in "xzo"]
    if own.output_norm:
        found.append(row("norm.weight", "norm.scale", "(h k) -> h k"))
    return found


def _to_ours(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    fields = Fields(given, "Mamba-3", sizes)
    fields.fixed(use_bias=False, A_floor=1e-4)
    fields.require("hidden_act", "silu", "swish")
    rank = fields.integer("mimo_rank", 4)
    if not fields.boolean("is_mimo", False):
        rank = 1
    elif rank == 1:
        raise ConfigError("config.json of Mamba-3: mimo_rank is 1; it must be larger, or is_mimo false.")
    dim = fields.integer("hidden_size", 2048)
    ssm = SSMConfig(
        state_dim=fields.integer("state_size", 128),
        expand=fields.integer("expand", 2),
        head_dim=fields.integer("head_dim", 64),
        groups=fields.integer("n_groups", 1),
    )
    fields.fixed(num_heads=fields.quotient("expand · hidden_size", ssm.expand * dim, "head_dim", ssm.head_dim))
    config = ModelConfig(
        mixer="mamba3", num_heads=1, ffn="none", ssm=ssm, dim=dim, vocab_size=fields.integer("vocab_size", 32000),
        mamba3=Mamba3Config(
            rank, float(fields.require("rope_fraction", 0.5, 1.0)), fields.boolean("is_outproj_norm", False)  # type: ignore[arg-type]
        ),
        num_layers=fields.layers("num_hidden_layers", 48), norm_eps=fields.number("norm_eps", default=1e-5),
        tie_embeddings=fields.boolean("tie_word_embeddings", False), dtype=fields.dtype(),
    )  # fmt: skip
    fields.done(("chunk_size", "dt_init_floor", "dt_max", "dt_min", "rescale_prenorm_residual"))
    return config


def _to_peer(config: ModelConfig) -> dict[str, object]:
    ssm, own = config.ssm, config.mamba3
    rank = {"is_mimo": True, "mimo_rank": own.rank} if own.rank > 1 else {"is_mimo": False}
    return {
        **peer_frame(config, "mamba3", "Mamba3ForCausalLM"),
        **rank,
        "state_size": ssm.state_dim,
        "expand": ssm.expand,
        "head_dim": ssm.head_dim,
        "n_groups": ssm.groups,
        "rope_fraction": own.rope_fraction,
        "is_outproj_norm": own.output_norm,
        "norm_eps": config.norm_eps,
    }


MAMBA3 = Family(
    "mamba3", ("mamba3",), of_type("mamba3"), _to_ours, _to_peer, _rows,
    ("ssm.state_dim", "ssm.expand", "ssm.head_dim", "ssm.groups", "mamba3"), generation=GENERATION,
)  # fmt: skip
