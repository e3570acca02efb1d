"""Configs of the recurrent mixers: state space models, delta rules and RWKV-7."""

import dataclasses
from typing import Literal

from atlasjax import check


@dataclasses.dataclass(frozen=True)
class SSMConfig:
    """State space models: Mamba, Mamba-2, Mamba-3 and Longhorn.

    Attributes:
      state_dim: state size per channel.
      expand: ratio of the inner width to the width of the residual stream.
      head_dim: channels per head (Mamba-2, Mamba-3). Must divide the inner width.
      dt_rank: rank of the step-size projection (Mamba, Longhorn). None: dim / 16, rounded up.
      groups: number of groups of heads, each with its own B and C (Mamba-2, Mamba-3) and its own mean square in the norm
        (Mamba-2). Must divide the number of heads.
      inner: the inner width of "mamba2". None: expand · dim.
      output_norm: the norm of "mamba2" around its gate z: "gated", norm(y ⊙ SiLU(z)), as published; "before_gate",
        norm(y) ⊙ SiLU(z); or "none", y ⊙ SiLU(z), as in Falcon-H1.
      least_step, largest_step: bounds of Δ in "mamba2", ≥ 0. largest_step None: no bound.
      selection_eps: eps > 0 of RMS norms, without scales, of B, C and the input of Δ's projection (Mamba, Longhorn), as in
        Falcon-Mamba. None: no norms.

    Raises:
      ValueError: a field is out of range.
    """

    state_dim: int = 16
    expand: int = 2
    head_dim: int = 64
    dt_rank: int | None = None
    groups: int = 1
    inner: int | None = None
    output_norm: Literal["gated", "before_gate", "none"] = "gated"
    least_step: float = 0.0
    largest_step: float | None = None
    selection_eps: float | None = None

    def __post_init__(self) -> None:
        sizes = ("state_dim", "expand", "head_dim", "dt_rank", "groups", "inner")
        check.integers(self, dict.fromkeys(sizes, 1), ("dt_rank", "inner"))
        check.declared(self)
        check.number("SSMConfig", "least_step", self.least_step, least=0)
        check.number("SSMConfig", "largest_step", self.largest_step, above=self.least_step, optional=True)
        check.number("SSMConfig", "selection_eps", self.selection_eps, above=0, optional=True)


@dataclasses.dataclass(frozen=True)
class Mamba3Config:
    """Mamba-3 (mixer "mamba3"), with the sizes of `SSMConfig`.

    Attributes:
      rank: R, the number of keys, values and queries of a token in each head. 1 is the SISO form; the MIMO form as published has 4.
      rope_fraction: part of the channels of B and C that are rotated, 0.5 or 1.
      output_norm: whether each head's output is normalized before its gate.

    Raises:
      ValueError: a field is out of range.
    """

    rank: int = 1
    rope_fraction: float = 0.5
    output_norm: bool = False

    def __post_init__(self) -> None:
        check.integers(self, {"rank": 1})
        check.choice("Mamba3Config", "rope_fraction", self.rope_fraction, (0.5, 1.0))
        check.declared(self)


@dataclasses.dataclass(frozen=True)
class HeadNormConfig:
    """The norm of the heads' outputs in the recurrent mixers with heads: RetNet, GLA and those with a delta rule.

    Attributes:
      shared: whether all heads have the same scale [value_dim], as in flash-linear-attention, instead of one for each head.
      eps: added to the mean square, > 0. None: the model's norm_eps. Where queries are scaled by head_dim^{−1/2}, as in
        flash-linear-attention, the same function without that factor has an eps that is head_dim times as large.

    Raises:
      ValueError: a field is out of range.
    """

    shared: bool = False
    eps: float | None = None

    def __post_init__(self) -> None:
        check.declared(self)
        check.number("HeadNormConfig", "eps", self.eps, above=0, optional=True)


@dataclasses.dataclass(frozen=True)
class GatedDeltaNetConfig:
    """Gated DeltaNet (mixer "gated_deltanet"), and the sizes of Comba ("comba") and preconditioned Gated DeltaNet ("pgdn").

    Attributes:
      negative_eigenvalues: whether β is 2 σ(x W_β) instead of σ(x W_β), so that a write may reverse what is stored under a key
        (Grazzi et al. 2025). Not with Comba.
      value_heads: number of heads of values, each with its own memory and gates: a multiple of num_heads, the number of heads of
        queries and keys, which consecutive heads of values share. None: num_heads.

    Raises:
      ValueError: a field is out of range.
    """

    value_heads: int | None = None
    negative_eigenvalues: bool = False

    def __post_init__(self) -> None:
        check.integers(self, {"value_heads": 1}, ("value_heads",))
        check.declared(self)


@dataclasses.dataclass(frozen=True)
class KDAConfig:
    """Kimi Delta Attention, also preconditioned, and Gated DeltaNet-2 (mixers "kda", "pkda" and "gdn2").

    Attributes:
      value_heads, negative_eigenvalues: as in `GatedDeltaNetConfig`. In Gated DeltaNet-2 it is the erase gate that is doubled.
      lower_bound: of the logarithm of the decay, < 0: the bounded gate, −5 in Ling 3.0 and GLM-5.3. None: the plain gate.
      rank: of the products that give the decay and the output gate, ≥ 0. 0: full matrices, as in Ling 3.0. None: value_dim.
      gate_bias: whether the output gate has a bias, as in flash-linear-attention.

    Raises:
      ValueError: a field is out of range.
    """

    value_heads: int | None = None
    negative_eigenvalues: bool = False
    lower_bound: float | None = None
    rank: int | None = None
    gate_bias: bool = False

    def __post_init__(self) -> None:
        check.integers(self, {"value_heads": 1, "rank": 0}, ("value_heads", "rank"))
        check.number("KDAConfig", "lower_bound", self.lower_bound, below=0, optional=True)
        check.declared(self)


@dataclasses.dataclass(frozen=True)
class MesaConfig:
    """MesaNet (mixer "mesa").

    Attributes:
      output_gate: whether the outputs of the heads are multiplied by SiLU(x W_z) after their norm.
      solver, steps: those of `memory.MesaRule`.

    Raises:
      ValueError: a field is out of range.
    """

    output_gate: bool = False
    solver: Literal["conjugate_gradient", "exact"] = "conjugate_gradient"
    steps: int = 30

    def __post_init__(self) -> None:
        check.declared(self)
        check.integers(self, {"steps": 1})


@dataclasses.dataclass(frozen=True)
class DeltaProductConfig:
    """Gated DeltaProduct (mixer "gated_deltaproduct").

    Attributes:
      writes: n, number of writes for each token, each with its own key, value and β. With 1 it is Gated DeltaNet.
      value_heads, negative_eigenvalues: as in `GatedDeltaNetConfig`.
      forget_gate: whether the memory decays before the first write of a token. Without it the mixer is DeltaProduct.

    Raises:
      ValueError: a field is out of range.
    """

    writes: int = 2
    value_heads: int | None = None
    negative_eigenvalues: bool = True
    forget_gate: bool = True

    def __post_init__(self) -> None:
        check.integers(self, {"writes": 1, "value_heads": 1}, ("value_heads",))
        check.declared(self)


@dataclasses.dataclass(frozen=True)
class RWKV7Config:
    """RWKV-7's time mixing (mixer "rwkv7").

    Attributes:
      value_residual: whether each layer mixes its values with those of the first layer, v + σ(x_v A B + b) ⊙ (v_first − v), as
        published. The first layer of the model must have this mixer; its own A, B and b have no effect.
      decay_rank, rate_rank, gate_rank, value_rank: ranks of the low-rank products for decay, removal rate, output gate and value
        residual, ≥ 1. None: 2.5, 2.5, 5 and 1.7 times √dim (all but the gate's also times head_dim / 64), as a multiple of 32.
      norm_eps: added to the variance in the norm of the heads' outputs, times head_dim; > 0.
      key_eps: added to the squared length of the removal key, > 0. 1e-24 is max(‖κ‖, 1e-12) in float32.

    Raises:
      ValueError: a field is out of range.
    """

    value_residual: bool = False
    decay_rank: int | None = None
    rate_rank: int | None = None
    gate_rank: int | None = None
    value_rank: int | None = None
    norm_eps: float = 1e-5
    key_eps: float = 1e-6

    def __post_init__(self) -> None:
        check.declared(self)
        ranks = ("decay_rank", "rate_rank", "gate_rank", "value_rank")
        check.integers(self, dict.fromkeys(ranks, 1), ranks)
        for name in ("norm_eps", "key_eps"):
            check.number("RWKV7Config", name, getattr(self, name), above=0)

    def ranks(self, dim: int, head_dim: int) -> tuple[int, int, int, int]:
        """Ranks for the model's width and size of a head: decay, removal rate, output gate, value residual."""
        size = head_dim / 64
        rank = lambda chosen, factor: chosen or max(32, round(factor * dim**0.5 / 32) * 32)
        return (
            rank(self.decay_rank, 2.5 * size),
            rank(self.rate_rank, 2.5 * size),
            rank(self.gate_rank, 5.0),
            rank(self.value_rank, 1.7 * size),
        )
