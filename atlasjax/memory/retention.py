"""How the memory forgets.

Most retentions are decays towards zero, M_t = α_t M_{t−1} + S_t. `KL` and `Lq` have a map: the recurrence runs on an accumulator,
A_t = α_t A_{t−1} + S_t, and the memory that is read, and at which gradients are taken, is M_t = map(A_t), one matrix at a time.
For those the weights in `MemoryParams` and `MemoryState` are accumulators; `MemoryRule.weights` gives the memory.
"""

import dataclasses

import jax
import jax.numpy as jnp


def _check_flag(owner: object, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{type(owner).__name__}: decay_first must be True or False, got {value!r}.")


@dataclasses.dataclass(frozen=True)
class Full:
    """α = 1: nothing decays, and there is no gate."""

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
    has_map = False

    def __post_init__(self) -> None:
        _check_flag(self, self.decay_first)


@dataclasses.dataclass(frozen=True)
class KL:
    """Memora's retention: M_t = softmax over each row of (α_t log M_{t−1} + S_t) (SEMANTICS 3; Miras, Behrouz et al. 2025).

    Rows of every weight matrix are probability vectors. The accumulator is kept as log M_t; a learned start is taken as logits.
    """

    has_map = True
    decay_first = False

    def start(self, accumulator: jax.Array) -> jax.Array:
        """The accumulator as it is stored: the same memory, without the free constant of each row."""
        return jax.nn.log_softmax(accumulator, axis=-1)

    def map(self, accumulator: jax.Array) -> jax.Array:
        return jax.nn.softmax(accumulator, axis=-1)


@dataclasses.dataclass(frozen=True)
class Lq:
    """Moneta's retention: M_t = A_t / ‖A_t‖_q^{q−2}, the norm over all entries of one matrix (Miras, Behrouz et al. 2025).

    At q = 2 the map is the identity. A zero matrix stays zero. For q > 3 the memory GROWS as its accumulator decays (at q = 4 it is
    of size 1/‖A‖): a memory that forgets faster than it is written diverges, so α must stay near 1.

    Attributes:
      q: ≥ 2.
    """

    q: float = 4.0
    has_map = True
    decay_first = False

    def __post_init__(self) -> None:
        if isinstance(self.q, bool) or not isinstance(self.q, int | float) or not self.q >= 2:
            raise ValueError(f"Lq: q must be a number ≥ 2, got {self.q!r}.")

    def start(self, accumulator: jax.Array) -> jax.Array:
        return accumulator

    def map(self, accumulator: jax.Array) -> jax.Array:
        # ‖A‖_q as max · (Σ (|a| / max)^q)^{1/q}: neither overflows nor divides by zero.
        size = jnp.abs(accumulator)
        largest = jnp.max(size, axis=(-2, -1), keepdims=True)
        safe = jnp.where(largest > 0, largest, 1.0)
        powers = jnp.sum((size / safe) ** self.q, axis=(-2, -1), keepdims=True)
        norm = safe * jnp.where(largest > 0, powers, 1.0) ** (1.0 / self.q)
        return accumulator / norm ** (self.q - 2.0)


Retention = Full | Scalar | Channel | KL | Lq
