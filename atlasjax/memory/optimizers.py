"""How the memory descends on its objective, token by token (A §5, Eq. 32 and 57; SEMANTICS 1, 1.2, 1.7)."""

import dataclasses

from atlasjax.names import lookup
from pallas_kernels.newton_schulz import SCHEDULES


@dataclasses.dataclass(frozen=True)
class GradientDescent:
    """S_t = −η_t g_t. There is no momentum state (θ = 0 is its own code path).

    Attributes:
      per_channel: η_t has one value for each channel of the value (each row of a matrix memory).
    """

    per_channel: bool = False
    has_momentum = False


@dataclasses.dataclass(frozen=True)
class Implicit:
    """The exact minimizer of a step's problem instead of one gradient step on it (Longhorn, Liu et al. 2024).

    M_t = argmin_M ½‖M − α_t M_{t−1}‖² + (β_t/2) ‖M φ(k_t) − v_t‖². With a matrix memory that is the delta rule with the step
    size β/(1 + β‖φ(k)‖²), which is below 2/‖φ(k)‖² for every β ≥ 0. The gate `step_size` is β.

    Attributes:
      per_channel: β_t has one value for each channel of the value.
    """

    per_channel: bool = False
    has_momentum = False


@dataclasses.dataclass(frozen=True)
class Momentum:
    """S_t = θ_t S_{t−1} − η_t g_t."""

    per_channel = False
    has_momentum = True


@dataclasses.dataclass(frozen=True)
class Muon:
    """S_t = θ_t S_{t−1} − g_t; M_t = α_t M_{t−1} + η_t NS_n(S_t), Newton–Schulz on each weight matrix by itself.

    Attributes:
      steps: n ≥ 0. A run-time setting (test-time compute): parameters and state do not depend on it.
      schedule: a name of `pallas_kernels.newton_schulz.SCHEDULES`.
      every: write the memory once every so many tokens. 1 is the paper's rule. With m > 1 the momentum still takes every
        token's gradient, and M_t = α_t M_{t−1} + η_t NS_n(S_t) holds where the token's place in its chunk (from 1) is a
        multiple of m; elsewhere M_t = α_t M_{t−1}. Must divide the chunk size.
    """

    steps: int = 5
    schedule: str = "standard"
    every: int = 1
    per_channel = False
    has_momentum = True

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 0:
            raise ValueError(f"Muon: steps (Newton–Schulz) must be an integer ≥ 0, got {self.steps!r}.")
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise ValueError(f"Muon: every must be an integer ≥ 1, got {self.every!r}.")
        lookup("Newton–Schulz schedule", self.schedule, SCHEDULES)


Optimizer = GradientDescent | Implicit | Momentum | Muon
