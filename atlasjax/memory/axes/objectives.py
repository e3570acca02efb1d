"""The inner loss ℓ(M; φ(k), v) of a memory for a pair (k, v) (SEMANTICS 1.3).

Inner gradients are computed from `Objective.loss` by autodiff. First and second derivatives of every loss here are finite where the
error is zero.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from atlasjax.memory.axes.base import Axis
from atlasjax.memory.blocks import capped, largest_entry, row_sums, spread

Read = Callable[[jax.Array], jax.Array]
OwnKeys = Mapping[str, jax.Array]  # gates of `Objective.own_keys` by name, [..., D]


class Objective(Axis):
    """Base class of inner losses. Subclasses implement `loss` and state the claims that hold for it.

    Attributes:
      uses_threshold: whether `loss` uses the gate `threshold`, a positive number for each token and head.
      uses_step_size: whether a write is scaled by the gate `step_size`.
      own_keys: names of the gates that are keys, beside k, at which a token reads and writes.
      has_target: claim: the loss is convex in `out` with its minimum at v. Step sizes are then bounded (`bounds.Bound`).
      gradient_is_error: claim: ∂ℓ/∂out = out − v. A matrix memory then has the delta rule's closed form.
      gradient_is_value: claim: ∂ℓ/∂out = −v. A matrix memory is then linear attention, without effect of the chunk size.
      writes_at_own_keys: claim: a matrix memory's write is the formula of `DeltaKeys`, with its `removed_at`.
    """

    claims: ClassVar = {
        "has_target": False, "gradient_is_error": False, "gradient_is_value": False, "writes_at_own_keys": False,
    }  # fmt: skip
    uses_threshold = False
    uses_step_size = True
    own_keys: ClassVar[tuple[str, ...]] = ()
    has_target: bool
    gradient_is_error: bool
    gradient_is_value: bool
    writes_at_own_keys: bool

    def loss(self, out: jax.Array, v: jax.Array, threshold: jax.Array | None = None) -> jax.Array:
        """ℓ [...] from out = M(φ(k)) and v, both [..., value_dim], and threshold [...]."""
        raise NotImplementedError(f"{type(self).__name__}.loss")

    def token_loss(
        self, read: Read, constant: Read, k: jax.Array, v: jax.Array, threshold: jax.Array, own: OwnKeys
    ) -> jax.Array:
        """ℓ of one token, a number; its gradient with respect to the memory is the token's write.

        read: key → M(φ(key)). constant: the same, but of a memory with respect to which the gradient is not taken.
        """
        return self.loss(read(k), v, threshold)

    def removed_at(self, k: jax.Array, own: OwnKeys) -> jax.Array:
        """s [..., D], the key at which a write at own keys removes what was read; k itself if it is the key of the value."""
        return k

    def within(self, step: float, k: jax.Array, own: OwnKeys, step_size: jax.Array) -> tuple[OwnKeys, jax.Array]:
        """Keys, and η [...], of tokens that step no further than `step` (`Bound.step`), for writes at own keys."""
        return own, step_size


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
class DeltaKeys(Objective):
    """The delta rule with a read key r (gate `removal_key`) beside its write key k.

        W_t = W_{t−1} Diag(α_t) + η_t (v_t − W̃_t r_t) k_tᵀ        W̃_t = W_{t−1} Diag(α_t), or W_{t−1} if the decay comes last

    With r = k this is the delta rule. Gated DeltaNet-2 has r = b ⊙ k, Comba r = p, and preconditioned DeltaNet the write key k ⊙ m
    with r = k. A subclass may remove at a key s of its own (`removed_at`): η_t (v_t k_tᵀ − (W̃_t r_t) s_tᵀ) is written then.

    The write is the semi-gradient of ⟨M(s), M(r)⟩ − ⟨M(k), v⟩, in which M(r) is constant, as in temporal-difference learning. It is
    not the gradient of any loss unless r and s are parallel.
    """

    own_keys: ClassVar[tuple[str, ...]] = ("removal_key",)
    writes_at_own_keys = True

    def loss(self, out: jax.Array, v: jax.Array, threshold: jax.Array | None = None) -> jax.Array:
        """−⟨out, v⟩, the part that writes the value."""
        return -jnp.sum(out * v, axis=-1)

    def within(self, step: float, k: jax.Array, own: OwnKeys, step_size: jax.Array) -> tuple[OwnKeys, jax.Array]:
        """Keys and η with η rᵀs ≤ step.

        A token whose rᵀs is negative would enlarge what it should remove. It removes nothing and only writes its value.
        """
        read_key = own["removal_key"]
        along = row_sums(read_key * self.removed_at(k, own))
        kept = jnp.where((along < 0)[..., None], 0.0, read_key)
        capped_size = capped(step, step_size, jnp.ones_like(along), jnp.maximum(along, 0.0))
        return {**own, "removal_key": kept}, capped_size

    def token_loss(
        self, read: Read, constant: Read, k: jax.Array, v: jax.Array, threshold: jax.Array, own: OwnKeys
    ) -> jax.Array:
        # Not `stop_gradient`: the derivatives of training go through what was stored.
        stored = constant(own["removal_key"])
        return self.loss(read(k), v, threshold) + jnp.sum(read(self.removed_at(k, own)) * stored)

    def summary(self) -> str:
        return "½‖M(r) − v‖², written at k"


@dataclasses.dataclass(frozen=True)
class RemoveAndReplace(DeltaKeys):
    """RWKV-7's write (Peng et al. 2025): the value stored at one key is removed, and the new value is written at another key.

        W_t = W̃_t − (W_{t−1} κ̂_t)(a_t ⊙ κ̂_t)ᵀ + v_t k_tᵀ

    It is `DeltaKeys` with r = κ̂ (gate `removal_key`), s = a ⊙ κ̂, rates a ∈ [0, 1] for each channel (gate `removal`) instead of a
    step size, and the replacement key k. With κ̂ = k/‖k‖ and equal rates it is the delta rule.
    """

    uses_step_size = False
    own_keys: ClassVar[tuple[str, ...]] = ("removal_key", "removal")
    writes_at_own_keys = True

    def removed_at(self, k: jax.Array, own: OwnKeys) -> jax.Array:
        return own["removal"] * own["removal_key"]

    def within(self, step: float, k: jax.Array, own: OwnKeys, step_size: jax.Array) -> tuple[OwnKeys, jax.Array]:
        """Rates a, scaled so that max(a) ‖κ̂‖² ≤ step; η as it is."""
        most = largest_entry(own["removal"]) * row_sums(own["removal_key"] * own["removal_key"])
        share = jnp.where(most > step, step / jnp.where(most > step, most, 1.0), 1.0)
        return {**own, "removal": own["removal"] * spread(share[..., None], own["removal"].shape[-1], -1)}, step_size

    def summary(self) -> str:
        return "remove at κ̂, write at k"
