"""Retention: how the memory forgets.

Most retentions are decays towards zero, M_t = α_t M_{t−1} + S_t. `KL` and `Lq` have a map: the recurrence runs on an accumulator,
A_t = α_t A_{t−1} + S_t, and reads and gradients use the memory M_t = map(A_t), with the map applied to each matrix separately. For
these the weights in `MemoryParams` and `MemoryState` are accumulators, and `MemoryRule.weights` gives the memory.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from atlasjax import check
from atlasjax.memory.axes.base import Axis
from atlasjax.memory.blocks import divisible, exact, inner


def each_matrix(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`function` of every matrix [out, in] of x [..., out, in]: it is written for one matrix, and may mix all of its entries."""
    for _ in range(x.ndim - 2):
        function = jax.vmap(function)
    return function(x)


class Retention(Axis):
    """Base class of retentions: A_t = decay(A_{t−1}, α_t) + Δ_t, and M_t = map(A_t). Every method is called with one matrix.

    Attributes:
      gate: the gate α: "scalar" for one per token and head, "channel" for one per feature channel, None for no gate (α = 1).
      decay_first: whether gradients are taken at the decayed memory. Requires chunks of one token.
      follows_keys: whether a token is also forgotten along its key (`decay_along`), in the matrices that read it.
      has_map: whether there is a `map`, as in every class that defines one. A state then stores A, and `MemoryRule.weights` is M.
      is_linear: claim: decay(A, α) = α A.
      is_bounded: claim: M_t is bounded, whatever is written.
      shortcuts: methods that give what others would, with fewer operations. A subclass does not inherit them from its parent.
    """

    claims: ClassVar = {"is_linear": False, "is_bounded": False}
    shortcuts: ClassVar = ("change_along_outer", "stored_and_mapped")
    gate: str | None = "scalar"
    decay_first: bool = False
    follows_keys: bool = False
    has_map: bool = False
    is_linear: bool
    is_bounded: bool

    def __init_subclass__(cls, **arguments: object) -> None:
        """A class that defines `map` has one. The shortcuts of a parent would not see what a subclass overrides."""
        super().__init_subclass__(**arguments)
        if "map" in cls.__dict__ and "has_map" not in cls.__dict__:
            cls.has_map = True
        for name in Retention.shortcuts:
            if name not in cls.__dict__:
                setattr(cls, name, Retention.__dict__[name])

    def decay(self, weight: jax.Array, alpha: jax.Array) -> jax.Array:
        """The decayed accumulator [out, in] of one weight. alpha: a scalar, or [in] for a gate per channel."""
        return (alpha[None] if alpha.ndim else alpha) * weight

    def decay_along(self, weight: jax.Array, alpha: jax.Array, key: jax.Array, step: jax.Array) -> jax.Array:
        """`decay` of a matrix [out, in] that reads φ(k), if the retention `follows_keys`. key: φ(k) [in]; step: the token's η."""
        return self.decay(weight, alpha)

    def start(self, accumulator: jax.Array) -> jax.Array:
        """The form in which an accumulator [out, in] is stored. It must have the same map."""
        return accumulator

    def map(self, accumulator: jax.Array) -> jax.Array:
        """M from an accumulator, both [out, in]."""
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

    def change_along_outer(self, accumulator: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
        """`change_along` of the direction left ⊗ right, [out] and [in]."""
        return self.change_along(accumulator, left[:, None] * right)

    def stored_and_mapped(self, accumulator: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(`start` of an accumulator, the memory), all [out, in]."""
        stored = self.start(accumulator)
        return stored, self.map(stored)


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
class Delta(Retention):
    """The retention of delta gradient descent (HOPE; Nested Learning, NeurIPS 2025): M_t = M_{t−1} (α_t I − η_t φ(k) φ(k)ᵀ) + S_t
    in the matrices that read φ(k), such as W2 of an MLP, and α_t M_{t−1} + S_t in the others.

    With `Bound.step` s, the η of the decay is at most s / ‖φ(k)‖²: it forgets what was stored along φ(k), and no more.
    """

    follows_keys = True

    def decay_along(self, weight: jax.Array, alpha: jax.Array, key: jax.Array, step: jax.Array) -> jax.Array:
        return alpha * weight - step * exact(weight, key)[:, None] * key

    def summary(self) -> str:
        return "per head, and along the key"


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

    def change_along_outer(self, accumulator: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
        # The slope of a row's softmax is Diag(p) − p pᵀ: the variance of `right` under the probabilities p of each row.
        p = self.map(accumulator)
        mean, square = exact(p, right), exact(p, right * right)
        return jnp.sum(left * left * (square - mean * mean))

    def stored_and_mapped(self, accumulator: jax.Array) -> tuple[jax.Array, jax.Array]:
        largest = jax.lax.stop_gradient(jnp.max(accumulator, axis=-1, keepdims=True))  # no derivative depends on it
        shifted = accumulator - largest
        powers = jnp.exp(shifted)  # one exponential for both; the second would be a fifth of the forward pass on a CPU
        total = jnp.sum(powers, axis=-1, keepdims=True)
        return shifted - jnp.log(total), powers / total

    def slope(self, value_dim: int) -> float:
        return value_dim**-0.5  # between 1 (all weight on one entry) and 1/D (spread evenly, the start)

    def summary(self) -> str:
        return "per head, of log M"


def _power(x: jax.Array, exponent: float) -> jax.Array:
    """x^exponent for x ≥ 0, as products if the exponent is a whole number: a general power costs several times as much."""
    return jax.lax.integer_pow(x, int(exponent)) if exponent == int(exponent) else x**exponent


def _norm(q: float, x: jax.Array, axis: tuple[int, ...] | None = None) -> jax.Array:
    """‖x‖_q of all entries or over some axes, which stay, without overflow; its derivative is zero where x is."""
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(x), axis, keepdims=axis is not None))  # see `_relative`
    valid = divisible(largest)
    safe = jnp.where(valid, largest, 1.0)
    powers = jnp.sum(_power(jnp.abs(x) / safe, q), axis, keepdims=axis is not None)
    return jnp.where(valid, safe * jnp.where(valid, powers, 1.0) ** (1.0 / q), 0.0)


class _Relative(NamedTuple):
    """‖A‖_q = safe · norm and powers = (|A| / safe)^{q−2}. [..., out, in] and [..., 1, 1]."""

    safe: jax.Array
    powers: jax.Array
    norm: jax.Array


def _relative(q: float, A: jax.Array) -> _Relative:
    # ‖A‖_q is computed as max · (Σ (|a| / max)^q)^{1/q}, without overflow or division by zero. Its value does not depend on the
    # number used for max, so max is not differentiated; its square could underflow.
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(A), axis=(-2, -1), keepdims=True))
    valid = divisible(largest)
    safe = jnp.where(valid, largest, 1.0)
    if q % 2 == 0:  # the sign does not matter, and at q = 4 both powers are the same: two passes over A less
        size = A * (1.0 / safe)
        powers, half = _power(size, q - 2.0), _power(size, q / 2.0)
        total = inner(half, half)
    else:
        size = jnp.abs(A) / safe
        powers = _power(size, q - 2.0)
        total = inner(powers * size, size)
    return _Relative(safe, powers, jnp.where(valid, total, 1.0) ** (1.0 / q))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _mirror(q: float, A: jax.Array) -> jax.Array:
    """∇ ½‖A‖_q² for each matrix of A [..., out, in]."""
    _, powers, norm = _relative(q, A)
    return A * (powers / norm ** (q - 2.0))


@_mirror.defjvp
def _mirror_jvp(q: float, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """M and the Hessian of ½‖A‖_q² along D, (q − 1) (|A|/N)^{q−2} D − (q − 2) ⟨M, D⟩ M / N² with N = ‖A‖_q."""
    (A,), (D,) = primals, tangents
    safe, powers, norm = _relative(q, A)
    ratio = powers / norm ** (q - 2.0)
    unit = A * (ratio / (safe * norm))  # M/N
    return A * ratio, (q - 1.0) * ratio * D - (q - 2.0) * inner(unit, D) * unit


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
        check.boolean("Lq", "published", self.published)
        if self.q == float("inf"):
            raise ValueError("Lq: q must be finite, got inf.")

    def map(self, accumulator: jax.Array) -> jax.Array:
        if not self.published:
            return _mirror(self.q, accumulator)
        norm = _norm(self.q, accumulator, (-2, -1))
        return accumulator / _power(jnp.where(norm > 0, norm, 1.0), self.q - 2.0)

    def change_along(self, accumulator: jax.Array, direction: jax.Array) -> jax.Array:
        """(q − 1) ‖D‖_q², which holds for every A and s: ½‖·‖_q² is (q − 1)-smooth with respect to ‖·‖_q for q ≥ 2."""
        if self.published:
            return super().change_along(accumulator, direction)
        return (self.q - 1.0) * jnp.square(_norm(self.q, direction))

    def change_along_outer(self, accumulator: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
        if self.published:
            return super().change_along_outer(accumulator, left, right)
        return (self.q - 1.0) * jnp.square(_norm(self.q, left) * _norm(self.q, right))

    def summary(self) -> str:
        return f"per head, of A; ℓq norm, q = {self.q:g}"
