"""Retention: how the memory forgets.

Most retentions are decays towards zero, M_t = α_t M_{t−1} + S_t. `KL` and `Lq` have a map: the recurrence runs on an accumulator,
A_t = α_t A_{t−1} + S_t, and reads and gradients use the memory M_t = map(A_t), with the map applied to each matrix separately. For
these the weights in `MemoryParams` and `MemoryState` are accumulators, and `MemoryRule.weights` gives the memory.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from atlasjax import check
from atlasjax.memory.axes.base import Axis
from atlasjax.memory.blocks import divisible


class Retention(Axis):
    """Base class of retentions: A_t = decay(A_{t−1}, α_t) + Δ_t, and M_t = map(A_t).

    Attributes:
      gate: the gate α: "scalar" for one per token and head, "channel" for one per feature channel, None for no gate (α = 1).
      decay_first: whether gradients are taken at the decayed memory. Requires chunks of one token.
      has_map: whether there is a `map`. A state then stores A, and `MemoryRule.weights` gives M.
      is_linear: claim: decay(A, α) = α A.
      is_bounded: claim: M_t is bounded, whatever is written.
    """

    claims: ClassVar = {"is_linear": False, "is_bounded": False}
    gate: str | None = "scalar"
    decay_first: bool = False
    has_map: bool = False
    is_linear: bool
    is_bounded: bool

    def decay(self, weight: jax.Array, alpha: jax.Array) -> jax.Array:
        """The decayed accumulator [out, in] of one weight. alpha: a scalar, or [in] for a gate per channel."""
        return alpha * weight

    def start(self, accumulator: jax.Array) -> jax.Array:
        """The form in which an initial accumulator [..., out, in] is stored. It must have the same map."""
        return accumulator

    def map(self, accumulator: jax.Array) -> jax.Array:
        """M from an accumulator, both [..., out, in]."""
        return accumulator

    def slope(self, value_dim: int) -> float:
        """Size of a change of M relative to the change of A, at the start. For suggested step sizes."""
        return 1.0

    def change_along(self, accumulator: jax.Array, direction: jax.Array) -> jax.Array:
        """⟨D, map(A + s D) − map(A)⟩ / s for an accumulator A and a direction D [out, in]: how far a step along D moves M along D.

        A scalar, for `Bound.step`, which keeps a step from passing its target. This is the value for small s. A map whose slope
        changes within a step should return an upper bound for every s > 0.
        """
        if not self.has_map:
            return jnp.sum(direction * direction)
        return jnp.sum(direction * jax.jvp(self.map, (accumulator,), (direction,))[1])


@dataclasses.dataclass(frozen=True)
class Full(Retention):
    """α = 1: no decay and no gate."""

    gate = None
    is_linear = True

    def summary(self) -> str:
        return "no"


@dataclasses.dataclass(frozen=True)
class Scalar(Retention):
    """One α_t ∈ [0, 1] per token and head.

    Attributes:
      decay_first: whether the gradient is taken at the decayed memory α_t M_{t−1} (Gated DeltaNet) instead of M_{t−1}. Requires
        chunks of one token.
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

    Rows of every weight matrix are probability vectors. The accumulator is log M_t. The learned initial weights are logits.
    """

    is_linear = True
    is_bounded = True
    has_map = True

    def start(self, accumulator: jax.Array) -> jax.Array:
        """The stored accumulator: logits normalized to log M, which removes each row's free constant."""
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

    The map is homogeneous of degree one, so the memory decays as its accumulator decays. Miras (Behrouz et al. 2025) prints
    A_t / ‖A_t‖_q^{q−2}, without the power. At q = 4 that has size 1/‖A‖: it grows as A decays, and diverges. `published` uses the
    map as printed. Both are the identity at q = 2. A zero matrix stays zero.

    Attributes:
      q: ≥ 2.
      published: whether to use the map as printed.
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
        # ‖A‖_q is computed as max · (Σ (|a| / max)^q)^{1/q}, without overflow or division by zero. Its value does not depend on the
        # number used for max, so max is not differentiated; its square could underflow.
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

    def change_along(self, accumulator: jax.Array, direction: jax.Array) -> jax.Array:
        """(q − 1) ‖D‖_q², which holds for every A and s: ½‖·‖_q² is (q − 1)-smooth with respect to ‖·‖_q for q ≥ 2."""
        if self.published:
            return super().change_along(accumulator, direction)
        largest = jax.lax.stop_gradient(jnp.max(jnp.abs(direction)))  # as in `map`
        there = divisible(largest)
        safe = jnp.where(there, largest, 1.0)
        powers = jnp.sum((jnp.abs(direction) / safe) ** self.q)
        norm = safe * jnp.where(there, powers, 1.0) ** (1.0 / self.q)
        return jnp.where(there, (self.q - 1.0) * norm * norm, 0.0)

    def summary(self) -> str:
        return f"per head, of A; ℓq norm, q = {self.q:g}"
