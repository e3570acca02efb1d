"""Config of multi-head latent attention."""

import dataclasses
from typing import NamedTuple

from atlasjax import check


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (mixer "mla"). The default sizes are those of DeepSeek-V2 (arXiv 2405.04434, 2.1.4).

    Attributes:
      num_heads: number of heads. None: the model's.
      kv_lora_rank: size of the latent that gives keys and values, ≥ 1. None: 4 times the model's head_dim.
      q_lora_rank: size of a latent that gives the queries, ≥ 1. None: they are projected from the layer input.
      qk_nope_head_dim: channels of a head's keys that come from the latent, ≥ 1. None: the model's head_dim.
      qk_rope_head_dim: channels of the key that all heads share, ≥ 1, even if they are rotated. None: half the model's head_dim.
      v_head_dim: size of the values of a head, ≥ 1. None: the model's value_dim.
      rope_theta: base of the rotary wavelengths of the shared key, > 0. None: no rotary positions, as in Kimi-Linear.
      norm_eps: added to the mean square in the norms of the latents, > 0.

    Raises:
      ValueError: a field is out of range.
    """

    num_heads: int | None = None
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    rope_theta: float | None = 1e4
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        sizes = (
            "num_heads",
            "kv_lora_rank",
            "q_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        )
        check.integers(self, dict.fromkeys(sizes, 1), sizes)
        check.number("MLAConfig", "rope_theta", self.rope_theta, above=0, optional=True)
        check.number("MLAConfig", "norm_eps", self.norm_eps, above=0)
        if self.rope_theta is not None and self.qk_rope_head_dim is not None and self.qk_rope_head_dim % 2:
            raise ValueError(f"MLAConfig: qk_rope_head_dim={self.qk_rope_head_dim} must be even for rotary positions.")


class MLASizes(NamedTuple):
    """Sizes of multi-head latent attention: heads, the latent (c), of a head's keys the channels of its own (n) and the shared ones
    (r), and a head's values."""

    heads: int
    latent_dim: int
    own_dim: int
    shared_dim: int
    value_dim: int
