"""Sizes and forms that follow from the fields of a model's config."""

import dataclasses

from atlasjax.nn.attention_config import AttentionConfig, AttentionSizes
from atlasjax.nn.experts_config import ExpertsConfig
from atlasjax.nn.mla_config import MLAConfig, MLASizes
from atlasjax.nn.recurrent_config import GatedDeltaNetConfig, RWKV7Config, SSMConfig


class ModelSizes:
    """The properties of a `ModelConfig`. The fields that they read are its own."""

    dim: int
    num_layers: int
    num_heads: int
    head_dim: int | None
    value_expansion: int
    mixer: str | tuple[str, ...]
    ffn: str | tuple[str, ...]
    block: str | tuple[str, ...]
    experts: ExpertsConfig
    attention: AttentionConfig
    mla: MLAConfig
    ssm: SSMConfig
    gated_deltanet: GatedDeltaNetConfig
    rwkv7: RWKV7Config
    mlp_dim: int | None

    @property
    def pattern(self) -> tuple[str, ...]:
        """The mixers of one repetition of the pattern. A single one if all layers have the same mixer."""
        return (self.mixer,) if isinstance(self.mixer, str) else self.mixer

    @property
    def blocks(self) -> tuple[str, ...]:
        """The kind of block of each layer of the pattern."""
        return self.block if isinstance(self.block, tuple) else (self.block,) * len(self.pattern)

    @property
    def mixers(self) -> tuple[str, ...]:
        """The different mixers of the pattern, with those that run in parallel one by one."""
        return tuple(dict.fromkeys(part for name in self.pattern for part in name.split("+")))

    @property
    def ffns(self) -> tuple[str, ...]:
        """The feed-forward network of each layer of the pattern."""
        return (self.ffn,) * len(self.pattern) if isinstance(self.ffn, str) else self.ffn

    @property
    def network(self) -> str:
        """The kind of feed-forward network that layers without experts have, "none" if none has one."""
        return next((name for name in self.ffns if name not in ("experts", "none")), "none")

    @property
    def has_experts(self) -> bool:
        """Whether a layer has a mixture of experts."""
        return "experts" in self.ffns

    @property
    def num_expert_layers(self) -> int:
        """Number of layers with a mixture of experts."""
        return self.ffns.count("experts") * (self.num_layers // len(self.pattern))

    @property
    def dense_width(self) -> int | None:
        """Hidden width of the feed-forward networks without experts. None without them."""
        return None if self.network == "none" else self.resolved_mlp_dim

    @property
    def expert_form(self) -> ExpertsConfig | None:
        """What of `experts` decides the function of the model: without the settings of training. None without experts."""
        if not self.has_experts:
            return None
        return dataclasses.replace(self.experts, width=self.expert_width, balance_loss=0.0, bias_update=0.0)

    @property
    def expert_width(self) -> int:
        """Hidden width of an expert."""
        return self.experts.width or self.resolved_mlp_dim

    @property
    def num_networks(self) -> int:
        """Number of feed-forward networks."""
        return sum(name != "none" for name in self.ffns) * (self.num_layers // len(self.pattern))

    @property
    def resolved_head_dim(self) -> int:
        """Size of the queries and keys of a head."""
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def value_dim(self) -> int:
        """Size of the values of a head."""
        return self.value_expansion * self.resolved_head_dim

    @property
    def value_heads(self) -> int:
        """Number of heads of values of the mixers "gated_deltanet", "momentum_deltanet", "comba" and "pgdn"."""
        return self.gated_deltanet.value_heads or self.num_heads

    @property
    def attention_sizes(self) -> AttentionSizes:
        """Sizes of the mixers "attention" and "swa"."""
        given = self.attention
        heads = self.num_heads if given.num_heads is None else given.num_heads
        size = self.resolved_head_dim if given.head_dim is None else given.head_dim
        value = self.value_expansion * size if given.value_dim is None else given.value_dim
        return AttentionSizes(heads, heads if given.kv_heads is None else given.kv_heads, size, value)

    @property
    def mla_sizes(self) -> MLASizes:
        """Sizes of the mixer "mla"."""
        given, size = self.mla, self.resolved_head_dim
        return MLASizes(
            given.num_heads or self.num_heads,
            given.kv_lora_rank or 4 * size,
            given.qk_nope_head_dim or size,
            given.qk_rope_head_dim or max(size // 2, 1),
            given.v_head_dim or self.value_dim,
        )

    @property
    def resolved_mlp_dim(self) -> int:
        """Hidden width of the feed-forward network."""
        if self.mlp_dim is not None:
            return self.mlp_dim
        return -(-8 * self.dim // (3 * 128)) * 128 if self.network in ("swiglu", "none") else 4 * self.dim

    @property
    def ssm_inner(self) -> int:
        """Inner width of "mamba2"."""
        return self.ssm.inner or self.ssm.expand * self.dim

    @property
    def resolved_dt_rank(self) -> int:
        """Rank of the step-size projection of Mamba and Longhorn."""
        return -(-self.dim // 16) if self.ssm.dt_rank is None else self.ssm.dt_rank

    @property
    def rwkv7_ranks(self) -> tuple[int, int, int, int]:
        """Ranks of RWKV-7's low-rank products: decay, removal rate, output gate, value residual."""
        return self.rwkv7.ranks(self.dim, self.resolved_head_dim)

    @property
    def output_scale(self) -> float:
        """Initial scale, relative to fan-in, of the output projections of branches: 1 / √(number of residual branches)."""
        if self.block == "bare":
            return 1.0
        return (self.num_layers + self.num_networks) ** -0.5
