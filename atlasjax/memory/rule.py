"""`Rule`: what the functions of `atlasjax.memory` ask of a rule, whatever its memory is."""

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax.memory import check
from atlasjax.memory.gates import Gates, Weights


class Sizes(NamedTuple):
    """Sizes of learned parameters. num_heads is None where they fit any number of heads."""

    num_heads: int | None
    key_dim: int
    value_dim: int


class Rule(abc.ABC):
    """A memory, how it is written and how it is read: frozen and hashable, static under `jax.jit`.

    `MemoryRule`, `SoftmaxRule` and `CachedRule` are the library's. One of your own, with a memory of another kind, inherits from
    this class and runs in `memory.scan`, `step`, `read` and `reference`, which check the arguments and then call its methods.
    Arguments and results are those of the functions of the same names. Leaves of a state are [batch] or [batch, heads, …].

    `CachedRule` takes a rule with `cached_weights` and `read_cached`.
    """

    has_kernels: ClassVar[bool] = False  # whether registered backends are asked besides "xla" and "reference"
    has_connector: ClassVar[bool] = False  # whether `read` takes a connector
    # Choices of a `CachedRule` that this rule does not allow → why.
    caching_limits: ClassVar[Mapping[str, str]] = {
        'aggregation="soup"': 'is not supported for this rule: its reads cannot mix weights. Use "grm".'
    }

    @abc.abstractmethod
    def gate_channels(self, key_dim: int, value_dim: int | None = None) -> dict[str, int | None]:
        """The gates of this rule: name → number of channels (an axis after heads), or None for one scalar per token and head."""

    @abc.abstractmethod
    def sizes(self, params: Any) -> Sizes:
        """The sizes with which `params` were made."""

    @abc.abstractmethod
    def init_params(self, key: jax.Array, *, num_heads: int, key_dim: int, value_dim: int) -> Any:
        """Fresh learned parameters: a pytree whose leaves have the heads axis first."""

    @abc.abstractmethod
    def init_state(self, params: Any, *, batch_size: int, max_length: int | None = None) -> Any:
        """A fresh memory for every batch element."""

    @abc.abstractmethod
    def scan(
        self,
        params: Any,
        state: Any,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        gates: Gates,
        segment_ids: jax.Array | None = None,
        max_segments: int | None = None,
        *,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """The recurrence over a sequence, compiled by XLA.

        lengths: given by a `CachedRule` only, [batch]: how many tokens of each row there are. The others are not written, and
          nothing is read of their outputs.
        """

    @abc.abstractmethod
    def step(self, params: Any, state: Any, q: jax.Array, k: jax.Array, v: jax.Array, gates: Gates) -> tuple[Any, Any]:
        """One token: arrays without the time axis."""

    @abc.abstractmethod
    def read(self, params: Any, state: Any, q: jax.Array) -> jax.Array:
        """Look without writing. Where `has_connector`, it has a fourth argument."""

    @abc.abstractmethod
    def reference(
        self,
        params: Any,
        state: Any,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        gates: Gates,
        segment_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """The definition, token by token."""

    @property
    def chunk_size(self) -> int:
        """Tokens whose gradients are taken at one memory."""
        return 1

    @property
    def has_constant_gradient(self) -> bool:
        """Whether chunks have no effect."""
        return self.chunk_size == 1

    def check_params(self, params: Any, where: str) -> None:  # noqa: B027  (there may be nothing to check)
        """Raises where `params` is not of this rule."""

    def max_length(self, state: Any) -> int | None:
        """The `max_length` with which a state was made; None where it has no effect. `state` is whatever a caller gave."""
        return None

    def check_call(
        self, params: Any, state: Any, q: Any, k: Any, v: Any, gates: Any, *, time: bool, where: str
    ) -> None:
        """Raises TypeError or ValueError where an argument does not fit."""
        check.check_call(self, params, state, q, k, v, gates, time=time, where=where)

    def check_state(self, params: Any, state: Any, batch: int, heads: int, where: str) -> None:
        """Raises TypeError or ValueError where a state is not of this rule, these parameters and these sizes."""
        check.check_state(self, params, state, batch, heads, where)

    @property
    def forgets_fast(self) -> bool:
        """Whether `suggested_gates` begins with short time scales of retention: a write needs nothing that is already written."""
        return False

    def suggested_steps(
        self,
        key_dim: int,
        value_dim: int,
        forgetting: np.ndarray,
        momentum: np.ndarray,
        window: np.ndarray,
        similar_keys: bool,
    ) -> tuple[np.ndarray, float]:
        """Initial step sizes for `suggested_gates`, and their upper bound.

        Args:
          key_dim, value_dim: sizes.
          forgetting, momentum, window: initial 1 − α and θ [heads], and γ [heads, c].
          similar_keys: whether the keys of a chunk are expected to be nearly equal.
        """
        if "step_size" in self.gate_channels(key_dim, value_dim):
            raise ValueError(
                f"memory.suggested_gates: {type(self).__name__} has no suggested_steps; choose step sizes yourself."
            )
        return np.ones_like(forgetting), 1.0

    def start_scale(self, step_size: np.ndarray) -> np.ndarray:
        """Initial scale of each head's weights relative to their fan-in scale. step_size: initial η, [heads]."""
        return np.ones_like(step_size)

    @property
    def can_be_cached(self) -> bool:
        """Whether `CachedRule` takes it."""
        return type(self).cached_weights is not Rule.cached_weights

    def cached_weights(self, state: Any) -> Weights:
        """What a `CachedRule` keeps of a segment's last state, enough to read from: name → [batch, heads, …]."""
        raise NotImplementedError

    def read_cached(self, dtype: jnp.dtype, params: Any, weights: Weights, q: jax.Array) -> jax.Array:
        """The read of one cached memory of one head, without the residual: q [n, key_dim] → [n, value_dim].

        params, weights: of one head. dtype: that of the inputs of products.
        """
        raise NotImplementedError

    def reference_read(self, params: Any, weights: Weights, x: jax.Array) -> jax.Array:
        """The definition of a read of one cached memory of one head with its residual: x [key_dim] → [value_dim]."""
        y = self.read_cached(x.dtype, params, weights, x[None])[0]
        skip = self.residual(params, x[None])
        return y if skip is None else y + skip[0]

    def residual(self, params: Any, q: jax.Array) -> jax.Array | None:
        """What each read adds whatever the memory holds, of one head: q [..., key_dim] → [..., value_dim]; None for nothing."""
        return None


def check_rule(rule: Any, where: str) -> None:
    """Raises TypeError where `rule` is no rule."""
    if not isinstance(rule, Rule):
        hint = f" Give an instance, {rule.__name__}(...), not the class." if isinstance(rule, type) else ""
        raise TypeError(
            f"{where}: rule must be a MemoryRule, a SoftmaxRule, a CachedRule or another memory.Rule, "
            f"got {type(rule).__name__}.{hint}"
        )
