"""RWKV-7 as flash-linear-attention writes it (fla-hub/rwkv7-…, RWKV/RWKV7-…)."""

from collections.abc import Mapping

from atlasjax.interop.family import Family, Fields, Sizes
from atlasjax.interop.fla import GENERATION
from atlasjax.interop.layers import head_row, of_type, peer_frame
from atlasjax.interop.table import Row
from atlasjax.nn import ModelConfig, RWKV7Config
from atlasjax.train.errors import ConfigError

_LAYER = "model.layers.{n}."
_ATTN, _FFN = _LAYER + "attn.", _LAYER + "ffn."
_SHIFTED = "rwkvag"  # rows of our `shift`
_NAME = "RWKV-7"


def _norm(peer: str, ours: str) -> list[Row]:
    return [Row(f"{peer}.weight", f"{ours}.scale", "d -> d"), Row(f"{peer}.bias", f"{ours}.bias", "d -> d")]


def _low_rank(name: str, ours: str, *, bias: bool = True, first: int = 0) -> list[Row]:
    rows = [
        Row(f"{_ATTN}{name}_lora.lora.0.weight", f"layers.mixer.{ours}.down.kernel", "r d -> d r", first=first),
        Row(f"{_ATTN}{name}_lora.lora.2.weight", f"layers.mixer.{ours}.up.kernel", "(h k) r -> r h k", first=first),
        Row(f"{_ATTN}{name}_lora.lora.2.bias", f"layers.mixer.{ours}.bias", "(h k) -> h k", first=first),
    ]
    return rows if bias else rows[:2]


def rows(config: ModelConfig) -> list[Row]:
    """The table. The first layer has no value residual."""
    per_head = lambda peer, ours, pattern="(h k) -> h k": Row(_ATTN + peer, f"layers.mixer.{ours}", pattern)
    return [
        Row("model.embeddings.weight", "embedding", "v d -> v d"),
        *(_norm("model.layers.0.pre_norm", "embedding_norm") if config.embedding_norm else []),
        *_norm(_LAYER + "attn_norm", "layers.mixer_norm"),
        *_norm(_LAYER + "ffn_norm", "layers.mlp_norm"),
        Row(_FFN + "x_k", "layers.mlp.shift", "d -> d"),
        Row(_FFN + "key.weight", "layers.mlp.wide.kernel", "m d -> d m"),
        Row(_FFN + "value.weight", "layers.mlp.out.kernel", "d m -> m d"),
        *_norm("model.norm", "norm"),
        head_row(config),
        *(Row(f"{_ATTN}x_{x}", "layers.mixer.shift", "1 1 d -> d", part=(i,)) for i, x in enumerate(_SHIFTED)),
        *(per_head(f"{x}_proj.weight", f"{x}.kernel", "(h k) d -> d h k") for x in "rkv"),
        *_low_rank("w", "w"),
        *_low_rank("a", "a"),
        *_low_rank("g", "g", bias=False),
        *_low_rank("v", "value", first=1),
        per_head("k_k", "removal_scale"),
        per_head("k_a", "replacement"),
        per_head("r_k", "bonus", "h k -> h k"),
        per_head("g_norm.weight", "norm_scale"),
        per_head("g_norm.bias", "norm_bias"),
        Row(_ATTN + "o_proj.weight", "layers.mixer.out.kernel", "d i -> i d"),
    ]


def _joined_shifts(rows: list[Row], config: ModelConfig) -> list[Row]:
    """The table of older versions, which have the six shifts of a layer in one tensor."""
    others = [row for row in rows if row.ours != "layers.mixer.shift"]
    return [*others, Row(_ATTN + "x_x", "layers.mixer.shift", "s d -> s d")]


_FUSED_EPS, _EPS = 1e-6, 1e-24  # of the removal key: added to its squared length, or the square of the least length


def _to_ours(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    fields = Fields(given, _NAME, sizes)
    fields.fixed(hidden_act="sqrelu", norm_bias=True, attn=None, attnres_block_size=None)
    dim, layers = fields.integer("hidden_size", 2048), fields.layers("num_hidden_layers", 24)
    heads, head_dim = _heads(fields, given, dim)
    ratio = fields.number("hidden_ratio", default=4)
    fused = fields.boolean("fuse_norm", True)
    eps = fields.number("norm_eps", default=1e-5)

    def rank(of: str, default: int) -> int | None:
        """Null is the published rank, and a missing field the default."""
        name = f"{of}_low_rank_dim"
        return None if given.get(name, default) is None else fields.integer(name, default)

    config = ModelConfig(
        mixer="rwkv7",
        ffn="channel_mixing",
        norm="layer",
        embedding_norm=fields.boolean("norm_first", True),
        vocab_size=fields.integer("vocab_size", 32000),
        dim=dim,
        num_layers=layers,
        num_heads=heads,
        head_dim=head_dim,
        value_expansion=_value_expansion(fields, given, dim, layers),
        mlp_dim=fields.integer("intermediate_size", -(-int(dim * ratio) // 32) * 32),
        norm_eps=eps,
        rwkv7=RWKV7Config(
            value_residual=True,
            decay_rank=rank("decay", 64),
            rate_rank=rank("a", 64),
            gate_rank=rank("gate", 128),
            value_rank=rank("v", 16),
            norm_eps=eps,
            key_eps=_FUSED_EPS if fused else _EPS,
        ),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        dtype=fields.dtype(),
    )
    fields.done(("attn_mode",))
    return config


def _heads(fields: Fields, given: Mapping[str, object], dim: int) -> tuple[int, int]:
    """Number and size of the heads, of which a config has one or both."""
    if given.get("head_dim") is None and given.get("num_heads") is not None:
        heads = fields.integer("num_heads")
        fields.require("head_dim", None)
    else:
        size = fields.integer("head_dim", 64)
        heads = dim // size
        fields.require("num_heads", heads, None)
        if dim % size:
            raise ConfigError(f"config.json of {_NAME}: head_dim is {size}; it should divide hidden_size, {dim}.")
    if dim % heads:
        raise ConfigError(f"config.json of {_NAME}: num_heads is {heads}; it should divide hidden_size, {dim}.")
    return heads, dim // heads


def _value_expansion(fields: Fields, given: Mapping[str, object], dim: int, layers: int) -> int:
    """Width of the values relative to `dim`, which may be given for each layer but must be the same."""
    multiples = (n for n in range(1, 9) if given.get("value_dim") in (n * dim, [n * dim] * layers))
    ratio = next(multiples, 1)
    fields.require("value_dim", ratio * dim, [ratio * dim] * layers, None)
    return ratio


def _to_peer(config: ModelConfig) -> dict[str, object]:
    decay_rank, rate_rank, gate_rank, value_rank = config.rwkv7_ranks
    return peer_frame(config, "rwkv7", "RWKV7ForCausalLM") | {
        "num_heads": config.num_heads,
        "head_dim": config.resolved_head_dim,
        "value_dim": [config.num_heads * config.value_dim] * config.num_layers,
        "intermediate_size": config.resolved_mlp_dim,
        "decay_low_rank_dim": decay_rank,
        "a_low_rank_dim": rate_rank,
        "gate_low_rank_dim": gate_rank,
        "v_low_rank_dim": value_rank,
        "hidden_act": "sqrelu",
        "norm_first": config.embedding_norm,
        "norm_bias": True,
        "norm_eps": config.norm_eps,
        "fuse_norm": config.rwkv7.key_eps != _EPS,
    }


RWKV7 = Family(
    "rwkv7", ("rwkv7",), of_type("rwkv7"), _to_ours, _to_peer, rows,
    ("num_heads", "resolved_head_dim", "value_dim", "resolved_mlp_dim", "rwkv7_ranks", "rwkv7.value_residual", "rwkv7.norm_eps",
     "rwkv7.key_eps"),
    unused=(r"model\.layers\.0\.attn\.v_lora\.lora\.(?:0\.weight|2\.weight|2\.bias)",),  # the first layer has no value residual
    generation=GENERATION,
    older={r"\.attn\.x_x$": _joined_shifts},
)  # fmt: skip
