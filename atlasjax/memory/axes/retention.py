"""How the memory forgets.

Most retentions are decays towards zero, M_t = α_t M_{t−1} + S_t. `KL` and `Lq` have a map: the recurrence runs on an accumulator,
A_t = α_t A_{t−1} + S_t, and the memory that is read, and at which gradients are taken, is M_t = map(A_t), one matrix at a time.
For those the weights in `MemoryParams` and `MemoryState` are accumulators; `MemoryRule.weights` gives the memory.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from atlasjax import check
from atlasjax.memory.axes.base import Axis
from atlasjax.memory.blocks import divisible


class Retention(Axis):
    """Base class of what a memory forgets by: A_t = decay(A_{t−1}, α_t) + Δ_t, and M_t = map(A_t).

    Attributes:
      gate: the gate α: "scalar", one for each token and head; "channel", one for each feature channel; None, no gate and α = 1.
      decay_first: whether gradients are taken at the decayed memory. Needs chunks of one token.
      has_map: whether there is a `map`; a state then stores A, and `MemoryRule.weights` gives M.
      is_linear: claim: decay(A, α) = α A.
      is_bounded: claim: every M_t is bounded, whatever is written.
    """

    claims: ClassVar = {"is_linear": False, "is_bounded": False}
    gate: str | None = "scalar"
    decay_first: bool = False
    has_map: bool = False
    is_linear: bool
    is_bounded: bool

    def decay(self, weight: jax.Array, alpha: jax.Array) -> jax.Array:
        """One accumulator [out, in] after forgetting; alpha: a scalar, or [in] for a gate per channel."""
        return alpha * weight

    def start(self, accumulator: jax.Array) -> jax.Array:
        """How an accumulator [..., out, in] is stored: with the same map."""
        return accumulator

    def map(self, accumulator: jax.Array) -> jax.Array:
        """M of an accumulator, [..., out, in]."""
        return accumulator

    def slope(self, value_dim: int) -> float:
        """How much smaller M moves than A at the start, for suggested step sizes."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class Full(Retention):
    """α = 1: nothing decays, and there is no gate."""

    gate = None
    is_linear = True

    def summary(self) -> str:
        return "no"


@dataclasses.dataclass(frozen=True)
class Scalar(Retention):
    """One α_t ∈ [0, 1] per token and head.

    Attributes:
      decay_first: the gradient is taken at the decayed memory α_t M_{t−1} (Gated DeltaNet) instead of M_{t−1}. Needs chunks of
        one token.
    """

    decay_first: bool = False
    is_linear = True

    def __post_init__(self) -> None:
        check.boolean(type(self).__name__, "decay_first", self.decay_first)

    def summary(self) -> str:
        return "per head"


@dataclasses.dataclass(frozen=True)
class Channel(Retention):
    """α_t ∈ [0, 1]^D, one for each feature channel: M_t = M_{t−1} Diag(α_t) + S_t. Matrix memories only (GLA).

    Attributes:
      decay_first: as in `Scalar`.
    """

    decay_first: bool = False
    gate = "channel"
    is_linear = True

    def __post_init__(self) -> None:
        check.boolean(type(self).__name__, "decay_first", self.decay_first)

    def summary(self) -> str:
        return "per channel"


@dataclasses.dataclass(frozen=True)
class KL(Retention):
    """Memora's retention: M_t = softmax over each row of (α_t log M_{t−1} + S_t) (SEMANTICS 3; Miras, Behrouz et al. 2025).

    Rows of every weight matrix are probability vectors. The accumulator is kept as log M_t; a learned start is taken as logits.
    """

    is_linear = True
    is_bounded = True
    has_map = True

    def start(self, accumulator: jax.Array) -> jax.Array:
        """The accumulator as it is stored: the same memory, without the free constant of each row."""
        return jax.nn.log_softmax(accumulator, axis=-1)

    def map(self, accumulator: jax.Array) -> jax.Array:
        return jax.nn.softmax(accumulator, axis=-1)

    def slope(self, value_dim: int) -> float:
        return value_dim**-0.5  # between 1 (all weight on one entry) and 1/D (spread evenly, the start)

    def summary(self) -> str:
        return "per head, of log M"


@dataclasses.dataclass(frozen=True)
class Lq(Retention):
    """Moneta's retention: A_t = α_t A_{t−1} + S_t, and the memory is the mirror map of ½‖·‖_q², one matrix at a time:

        M_t = ∇ ½‖A_t‖_q² = sign(A_t) |A_t|^{q−1} / ‖A_t‖_q^{q−2}

    It has the size of A (it is homogeneous of degree one), so it decays as its accumulator decays. Miras (Behrouz et al. 2025)
    prints A_t / ‖A_t‖_q^{q−2}, without the power. At q = 4 that is of size 1/‖A‖: it grows as A decays, and diverges. `published`
    takes the map as printed. Both are the identity at q = 2. A zero matrix stays zero.

    Attributes:
      q: ≥ 2.
      published: the map as it is printed.
    """

    q: float = 4.0
    published: bool = False
    is_linear = True
    has_map = True

    def __post_init__(self) -> None:
        check.number("Lq", "q", self.q, least=2)
        if self.q == float("inf"):
            raise ValueError("Lq: q must be finite, got inf.")

    def map(self, accumulator: jax.Array) -> jax.Array:
        # ‖A‖_q as max · (Σ (|a| / max)^q)^{1/q}: neither overflows nor divides by zero. It is the same for any other number in the
        # place of max, so its derivative needs none of max, whose square could underflow.
        size = jnp.abs(accumulator)
        largest = jax.lax.stop_gradient(jnp.max(size, axis=(-2, -1), keepdims=True))
        there = divisible(largest)
        safe = jnp.where(there, largest, 1.0)
        relative = size / safe
        powers = jnp.sum(relative**self.q, axis=(-2, -1), keepdims=True)
        norm = jnp.where(there, powers, 1.0) ** (1.0 / self.q)
        if self.published:
            return accumulator / (safe * norm) ** (self.q - 2.0)
        return accumulator * (relative / norm) ** (self.q - 2.0)

    def summary(self) -> str:
        return f"per head, of A; ℓq norm, q = {self.q:g}"
