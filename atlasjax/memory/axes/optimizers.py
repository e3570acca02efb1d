"""Inner optimizers: how the memory descends on its objective, token by token (A §5, Eq. 32 and 57; SEMANTICS 1, 1.2, 1.7)."""

import dataclasses
from typing import ClassVar, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from atlasjax import check
from atlasjax.memory.axes.base import Axis
from atlasjax.names import lookup
from pallas_kernels.newton_schulz import SCHEDULES, newton_schulz

OptimizerState: TypeAlias = PyTree[jax.Array]  # S, what `Optimizer.init` makes; None has no leaves: there is no state


class Optimizer(Axis):
    """Base class of inner optimizers: (Δ_t, S_t) = update(S_{t−1}, g_t), and M_t = α_t M_{t−1} + β_t Δ_t.

    Subclasses implement `update`, and override `init` if S_0 is not zeros in the shapes of the weights.

    Attributes:
      has_momentum: whether `update` uses θ, the gate `momentum_decay`.
      write_gate: whether there is β, the gate `write_size`. Otherwise β = 1. `update` does not see it: S_t does not depend on it.
      per_channel: whether η has one value for each channel of the value. Only for matrix memories.
      every: the memory is written once every `every` tokens: η is zero for tokens whose position in their chunk, counted from 1, is
        not a multiple of it. Must divide the chunk size.
      optimality: its use of the curvature, as named in the table of rules.
      is_linear: claim: S_t = θ_t S_{t−1} − η_t g_t and Δ_t = S_t, or without momentum Δ_t = −η_t g_t. Then the gradients of single
        tokens are not formed, and step sizes are bounded (`bounds.Bound`).
      is_implicit: claim: the step is that of `Implicit`, which is not a function of the gradient.
      orthogonalizes: claim: S_t = θ_t S_{t−1} − g_t and Δ_t = η_t NS(S_t), as in `Muon`, with attributes `steps` and `schedule`.
    """

    claims: ClassVar = {"is_linear": False, "is_implicit": False, "orthogonalizes": False}
    has_momentum: bool = False
    write_gate: bool = False
    per_channel: bool = False
    every: int = 1
    optimality: str = "first order"
    is_linear: bool
    is_implicit: bool
    orthogonalizes: bool
    steps: int  # this and the next only if it orthogonalizes
    schedule: str

    def init(self, weights: dict[str, jax.Array]) -> OptimizerState:
        """S_0 of one head, from M_0 (name → [out, in]): any pytree of floating-point arrays, also of counts, or None without a
        state. `update` must keep their shapes and dtypes. They are float32 in it, and float64 for float64 inputs.
        """
        return jax.tree.map(jnp.zeros_like, weights) if self.has_momentum else None

    def update(
        self,
        state: OptimizerState,
        gradient: dict[str, jax.Array],
        step_size: jax.Array,
        momentum_decay: jax.Array | None,
    ) -> tuple[dict[str, jax.Array], OptimizerState]:
        """One token of one head.

        Args:
          state: S_{t−1}.
          gradient: g_t, name → [out, in].
          step_size: η_t, a scalar, or [value_dim, 1] for one per channel.
          momentum_decay: θ_t, a scalar, or None if it is not used.

        Returns:
          Δ_t, name → [out, in], and S_t.
        """
        raise NotImplementedError(f"{type(self).__name__}.update")


def _scaled(by: jax.Array, tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: by * x for name, x in tree.items()}


@dataclasses.dataclass(frozen=True)
class GradientDescent(Optimizer):
    """S_t = −η_t g_t. There is no momentum state; θ = 0 has a separate code path.

    Attributes:
      per_channel: whether η_t has one value for each channel of the value (each row of a matrix memory).
    """

    per_channel: bool = False
    is_linear = True

    def __post_init__(self) -> None:
        check.boolean(type(self).__name__, "per_channel", self.per_channel)

    def update(
        self,
        state: OptimizerState,
        gradient: dict[str, jax.Array],
        step_size: jax.Array,
        momentum_decay: jax.Array | None,
    ) -> tuple[dict[str, jax.Array], OptimizerState]:
        return _scaled(-step_size, gradient), state

    def summary(self) -> str:
        return "gradient descent"


@dataclasses.dataclass(frozen=True)
class Implicit(Optimizer):
    """The exact minimizer of each step's problem, instead of a gradient step on it (Longhorn, Liu et al. 2024).

    M_t = argmin_M ½‖M − α_t M_{t−1}‖² + (β_t/2) ‖M φ(k_t) − v_t‖². With a matrix memory this is the delta rule with the step
    size β/(1 + β‖φ(k)‖²), which is below 2/‖φ(k)‖² for every β ≥ 0. The gate `step_size` is β.

    Attributes:
      per_channel: whether β_t has one value for each channel of the value.
    """

    per_channel: bool = False
    optimality = "the step's exact minimizer"
    is_implicit = True

    def summary(self) -> str:
        return "implicit step"


@dataclasses.dataclass(frozen=True)
class Momentum(Optimizer):
    """S_t = θ_t S_{t−1} − η_t g_t, and M_t = α_t M_{t−1} + β_t S_t.

    Attributes:
      write_gate: whether β_t, how much of the momentum a token writes, is a gate (`write_size`), as in Momentum DeltaNet
        (arXiv:2605.05838). Otherwise β = 1. It is neither part of η nor of θ: a token with β = 0 writes nothing, but S_t takes its
        gradient. `dataclasses.replace(rules.titans(), optimizer=optimizers.Momentum(write_gate=True))` is Titans with it.

    Raises:
      ValueError: `write_gate` is not a bool.
    """

    write_gate: bool = False
    has_momentum = True
    is_linear = True

    def __post_init__(self) -> None:
        check.boolean(type(self).__name__, "write_gate", self.write_gate)

    def update(
        self,
        state: OptimizerState,
        gradient: dict[str, jax.Array],
        step_size: jax.Array,
        momentum_decay: jax.Array | None,
    ) -> tuple[dict[str, jax.Array], OptimizerState]:
        S = {name: momentum_decay * state[name] - step_size * g for name, g in gradient.items()}
        return S, S

    def summary(self) -> str:
        return "momentum, gated writes" if self.write_gate else "momentum"


@dataclasses.dataclass(frozen=True)
class Muon(Optimizer):
    """S_t = θ_t S_{t−1} − g_t; M_t = α_t M_{t−1} + η_t NS_n(S_t), with Newton–Schulz on each weight matrix separately.

    There is no `write_gate`: η_t is one already.

    Attributes:
      steps: n ≥ 0. A run-time setting (test-time compute): parameters and state do not depend on it.
      schedule: a name in `pallas_kernels.newton_schulz.SCHEDULES`.
      every: m ≥ 1, the memory is written once every m tokens. 1 is the paper's rule. With m > 1 the momentum still takes every
        token's gradient. M_t = α_t M_{t−1} + η_t NS_n(S_t) holds where the token's position in its chunk, counted from 1, is a
        multiple of m; elsewhere M_t = α_t M_{t−1}. Must divide the chunk size.
    """

    steps: int = 5
    schedule: str = "standard"
    every: int = 1
    has_momentum = True
    optimality = "approximate second order"
    orthogonalizes = True

    def __post_init__(self) -> None:
        check.integer("Muon", "steps (Newton–Schulz)", self.steps, 0)
        check.integer("Muon", "every", self.every)
        lookup("Newton–Schulz schedule", self.schedule, SCHEDULES)

    def update(
        self,
        state: OptimizerState,
        gradient: dict[str, jax.Array],
        step_size: jax.Array,
        momentum_decay: jax.Array | None,
    ) -> tuple[dict[str, jax.Array], OptimizerState]:
        S = {name: momentum_decay * state[name] - g for name, g in gradient.items()}
        return {name: step_size * newton_schulz(s, self.steps, SCHEDULES[self.schedule]) for name, s in S.items()}, S

    def summary(self) -> str:
        return f"Muon, {self.steps} Newton–Schulz steps"
