"""Configs of softmax attention."""

import dataclasses
from typing import Literal, NamedTuple

from atlasjax import check


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Softmax attention, for the mixers that have it. Those within blocks ("block_attention", "elastic", "memorizing", "infini",
    "melodi", "block_recurrence") take only `rope_theta`. A model without any others must leave all other fields except `window` and
    `segment_size` at their defaults.

    Attributes:
      window: a token sees itself and the window − 1 tokens before it. Required by "swa", "mag" and "mal"; that of
        "lact" is lact.chunk_size if None. Of no effect elsewhere.
      rope_theta: base of the rotary wavelengths, > 0. None: no rotary positions.
      bias: whether the query, key and value projections have biases.
      output_bias: whether with `bias` the output projection of "attention" and "swa" has one as well.
      persistent_tokens: number of learned keys and values that every token sees, ≥ 0.
      segment_size: tokens per segment in "mac", ≥ 1. A multiple of the memory's chunk size. Of no effect elsewhere.
      rope_dim: number of channels of a head that are rotated (partial RoPE), even. None: all.
      qk_norm: RMS norm of queries and keys before the rotation: "none"; "head", of each head, all with the same scale [head_dim];
        or "all", of all heads together. It is 1 + scale with the model's norm "rms_plus_one".
      num_heads: number of heads of the queries, only for "attention" and "swa". None: the model's.
      kv_heads: number of heads of the keys and values, only for "attention" and "swa". It divides that of the queries: so many
        consecutive heads share keys and values (grouped-query attention, Ainslie et al. 2023). None: as many as queries.
      head_dim: size of the queries and keys of a head, only for "attention" and "swa". None: the model's.
      value_dim: size of the values of a head, only for "attention" and "swa". None: the model's value_expansion times head_dim.
      scale: factor of the scores qᵀk, > 0, only for "attention" and "swa". None: 1 / √head_dim.
      gate: whether the heads' outputs are multiplied by σ(x W_g), a gate per channel (Qiu et al. 2025), only for "attention" and
        "swa".
      conv_width: taps of a depthwise causal convolution of queries, keys and values, before their norm and rotation (A §5.1: 4; no
        nonlinearity), ≥ 1, only for "attention" and "swa". None: no convolution.
      fused: whether attention may run in a kernel of the platform, where that serves it: splash attention on TPUs, cuDNN on GPUs.
        Off by default, for it has not been measured on either.

    Raises:
      ValueError: a field is out of range.
    """

    window: int | None = None
    rope_theta: float | None = 1e4
    persistent_tokens: int = 0
    segment_size: int = 64
    bias: bool = False
    output_bias: bool = True
    rope_dim: int | None = None
    qk_norm: Literal["none", "head", "all"] = "none"
    num_heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    scale: float | None = None
    gate: bool = False
    conv_width: int | None = None
    fused: bool = False

    def __post_init__(self) -> None:
        optional = ("window", "rope_dim", "num_heads", "kv_heads", "head_dim", "value_dim", "conv_width")
        check.integers(self, {**dict.fromkeys(optional, 1), "persistent_tokens": 0, "segment_size": 1}, optional)
        check.number("AttentionConfig", "rope_theta", self.rope_theta, above=0, optional=True)
        check.number("AttentionConfig", "scale", self.scale, above=0, optional=True)
        check.declared(self)


class AttentionSizes(NamedTuple):
    """Sizes of softmax attention: heads of queries, heads of keys and values, size of a head's keys, and of its values."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
