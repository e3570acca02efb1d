"""The inner loss ℓ(M; φ(k), v) of a memory for a pair (k, v) (SEMANTICS 1.3).

Inner gradients are computed from `Objective.loss` by autodiff. First and second derivatives of every loss here are finite where the
error is zero.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from atlasjax.memory.axes.base import Axis


class Objective(Axis):
    """Base class of inner losses. Subclasses implement `loss` and state the claims that hold for it.

    Attributes:
      uses_threshold: whether `loss` uses the gate `threshold`, a positive number for each token and head.
      has_target: claim: the loss is convex in `out` with its minimum at v. Step sizes are then bounded (`bounds.Bound`).
      gradient_is_error: claim: ∂ℓ/∂out = out − v. A matrix memory then has the delta rule's closed form.
      gradient_is_value: claim: ∂ℓ/∂out = −v. A matrix memory is then linear attention, without effect of the chunk size.
      removes: claim: the write is RWKV-7's (`RemoveAndReplace`), with its gates instead of a step size, and there is no loss.
    """

    claims: ClassVar = {"has_target": False, "gradient_is_error": False, "gradient_is_value": False, "removes": False}
    uses_threshold = False
    has_target: bool
    gradient_is_error: bool
    gradient_is_value: bool
    removes: bool

    def loss(self, out: jax.Array, v: jax.Array, threshold: jax.Array | None = None) -> jax.Array:
        """ℓ [...] from out = M(φ(k)) and v, both [..., value_dim], and threshold [...]."""
        raise NotImplementedError(f"{type(self).__name__}.loss")


@dataclasses.dataclass(frozen=True)
class L2(Objective):
    """½‖out − v‖². With a matrix memory, the step size η is DeltaNet's β."""

    has_target = True
    gradient_is_error = True

    def loss(self, out: jax.Array, v: jax.Array, threshold: jax.Array | None = None) -> jax.Array:
        return 0.5 * jnp.sum(jnp.square(out - v), axis=-1)

    def summary(self) -> str:
        return "½‖M(φ(k)) − v‖²"


@dataclasses.dataclass(frozen=True)
class DotProduct(Objective):
    """−⟨out, v⟩: Hebbian writing. With a matrix memory, this is linear attention."""

    gradient_is_value = True

    def loss(self, out: jax.Array, v: jax.Array, threshold: jax.Array | None = None) -> jax.Array:
        return -jnp.sum(out * v, axis=-1)

    def summary(self) -> str:
        return "−⟨M(φ(k)), v⟩"


@dataclasses.dataclass(frozen=True)
class Lp(Objective):
    """(1/p)‖out − v‖_p^p, p ≥ 1 (Moneta's objective). For p < 2 the second derivative at zero error is set to zero."""

    p: float = 3.0
    has_target = True

    def __post_init__(self) -> None:
        if isinstance(self.p, bool) or not isinstance(self.p, int | float) or not 1 <= self.p < float("inf"):
            raise ValueError(f"Lp: p must be ≥ 1 and finite, got {self.p!r}.")

    def loss(self, out: jax.Array, v: jax.Array, threshold: jax.Array | None = None) -> jax.Array:
        magnitude = jnp.abs(out - v)
        nonzero = magnitude > 0
        powers = jnp.where(nonzero, jnp.where(nonzero, magnitude, 1.0) ** self.p, 0.0)
        return jnp.sum(powers, axis=-1) / self.p

    def summary(self) -> str:
        return f"(1/p)‖M(φ(k)) − v‖_p^p, p = {self.p:g}"


@dataclasses.dataclass(frozen=True)
class Huber(Objective):
    """Huber's loss on the NORM of the error, with a threshold δ per token and head (Yaad).

    ½r² for r = ‖out − v‖ ≤ δ, else δ(r − ½δ). δ belongs to the token whose pair is written, also within later tokens' windows.
    """

    has_target = True
    uses_threshold = True

    def loss(self, out: jax.Array, v: jax.Array, threshold: jax.Array | None = None) -> jax.Array:
        if threshold is None:
            raise ValueError("Huber: threshold (δ) is required.")
        square = jnp.sum(jnp.square(out - v), axis=-1)
        inside = square <= jnp.square(threshold)
        norm = jnp.sqrt(jnp.where(inside, 1.0, square))  # not differentiated at zero
        return jnp.where(inside, 0.5 * square, threshold * (norm - 0.5 * threshold))

    def summary(self) -> str:
        return "Huber_δ(‖M(φ(k)) − v‖)"


@dataclasses.dataclass(frozen=True)
class RemoveAndReplace(Objective):
    """RWKV-7's write (Peng et al. 2025): the value stored at one key is removed, and the new value is written at another key.

    S_t = −(M_{t−1} κ̂_t)(a_t ⊙ κ̂_t)ᵀ + v_t k_tᵀ, with the removal key κ̂ (gate `removal_key`), its rate a ∈ [0, 1] for each channel
    (gate `removal`), and the replacement key k. With κ̂ = k/‖k‖ and equal rates it is the delta rule. It is not a gradient step on
    a loss with a single key, so it has neither a `loss` nor a step size.
    """

    removes = True

    def loss(self, out: jax.Array, v: jax.Array, threshold: jax.Array | None = None) -> jax.Array:
        raise TypeError("RemoveAndReplace has no loss: its write is not the gradient of a function of M(φ(k)) and v.")

    def summary(self) -> str:
        return "remove at κ̂, write at k"
