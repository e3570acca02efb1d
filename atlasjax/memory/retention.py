"""How the memory forgets.

Most retentions are decays towards zero, M_t = α_t M_{t−1} + S_t. `KL` and `Lq` have a map: the recurrence runs on an accumulator,
A_t = α_t A_{t−1} + S_t, and the memory that is read, and at which gradients are taken, is M_t = map(A_t), one matrix at a time.
For those the weights in `MemoryParams` and `MemoryState` are accumulators; `MemoryRule.weights` gives the memory.
"""

import dataclasses

import jax
import jax.numpy as jnp

from atlasjax.memory.blocks import divisible


def _check_flag(owner: object, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{type(owner).__name__}: decay_first must be True or False, got {value!r}.")


@dataclasses.dataclass(frozen=True)
class Full:
    """α = 1: nothing decays, and there is no gate."""

    is_bounded = False
    has_map = False
    decay_first = False


@dataclasses.dataclass(frozen=True)
class Scalar:
    """One α_t ∈ [0, 1] per token and head.

    Attributes:
      decay_first: the gradient is taken at the decayed memory α_t M_{t−1} (Gated DeltaNet) instead of M_{t−1}. Needs chunks of
        one token.
    """

    decay_first: bool = False
    is_bounded = False
    has_map = False

    def __post_init__(self) -> None:
        _check_flag(self, self.decay_first)


@dataclasses.dataclass(frozen=True)
class Channel:
    """α_t ∈ [0, 1]^D, one for each feature channel: M_t = M_{t−1} Diag(α_t) + S_t. Matrix memories only (GLA).

    Attributes:
      decay_first: as in `Scalar`.
    """

    decay_first: bool = False
    is_bounded = False
    has_map = False

    def __post_init__(self) -> None:
        _check_flag(self, self.decay_first)


@dataclasses.dataclass(frozen=True)
class KL:
    """Memora's retention: M_t = softmax over each row of (α_t log M_{t−1} + S_t) (SEMANTICS 3; Miras, Behrouz et al. 2025).

    Rows of every weight matrix are probability vectors. The accumulator is kept as log M_t; a learned start is taken as logits.
    """

    is_bounded = True
    has_map = True
    decay_first = False

    def start(self, accumulator: jax.Array) -> jax.Array:
        """The accumulator as it is stored: the same memory, without the free constant of each row."""
        return jax.nn.log_softmax(accumulator, axis=-1)

    def map(self, accumulator: jax.Array) -> jax.Array:
        return jax.nn.softmax(accumulator, axis=-1)


@dataclasses.dataclass(frozen=True)
class Lq:
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
    is_bounded = False
    has_map = True
    decay_first = False

    def __post_init__(self) -> None:
        if isinstance(self.q, bool) or not isinstance(self.q, int | float) or not self.q >= 2:
            raise ValueError(f"Lq: q must be a number ≥ 2, got {self.q!r}.")

    def start(self, accumulator: jax.Array) -> jax.Array:
        return accumulator

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


Retention = Full | Scalar | Channel | KL | Lq
