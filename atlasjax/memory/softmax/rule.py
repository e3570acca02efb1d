"""`SoftmaxRule`: the rule of a memory on the infinite features of softmax attention."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from atlasjax import check
from atlasjax.memory import choices
from atlasjax.memory.axes import objectives, optimizers, structures
from atlasjax.memory.axes import retention as retention_lib
from atlasjax.memory.axes.base import Axis, check_choice
from atlasjax.memory.check import check_range
from atlasjax.memory.gates import Gates, Weights
from atlasjax.memory.rule import Rule, Sizes
from atlasjax.memory.softmax import state as states_lib
from atlasjax.memory.softmax.state import SoftmaxParams, SoftmaxState


@dataclasses.dataclass(frozen=True)
class SoftmaxRule(Rule[SoftmaxParams, SoftmaxState]):
    """DeepTransformer, SWDT, DOT and variants (A §4, Eq. 17–31; SEMANTICS 2). Frozen and hashable, static under `jax.jit`.

    The recurrence is that of `memory.MemoryRule` with infinitely many features φ*, whose inner products are
    φ*(k)·φ*(x) = κ(k, x) = exp(scale · k·x), scale = 1/√key_dim. The matrix that reads φ* is a sum over the tokens written,
    h_t(x) = Σ_i a_i(t) κ(k_i, x). It is never formed, but stored as a cache of keys k_i and coefficients a_i. With `normalized`,
    the sum is divided by Z_t(x) = Σ_i ρ_i(t) κ(k_i, x), where ρ_i(t) = α_{i+1} … α_t. An empty cache reads 0/0 = 0.

        matrix memory   y_t = h_t(q_t)                            a_i: [value_dim]
        MLP memory      y_t = q_t + W1 σ(h_t(q_t))                a_i: [expansion · value_dim]; W1 starts at a learned value

    Token t descends on the window's losses at the memory of its chunk's start t'. A step on token i's loss changes only a_i:

        s_i ← θ_t s_i − η_t γ_{t,t−i} ∂ℓ_i/∂h_{t'}(k_i)           (no 1/Z in the write)
        a_i ← α_t a_i + s_i                                       W1 is updated like any weight matrix

    With α = η = γ = 1, a matrix memory and the dot-product loss, the normalized memory is softmax attention.
    By default `step_bound` makes the steps of losses with a target smaller; `rule.unbounded()` is the papers' recurrence.

    `memory.scan` writes out its backward pass, so it has no forward-mode derivatives (jvp, jacfwd).

    Attributes:
      structure: `Matrix()`, `MLP(depth=2)` without a norm, or another of two matrices of which only the last reads the features. An
        MLP's residual is x itself, so its key_dim = value_dim.
      objective: `DotProduct()` (DeepTransformer, SWDT), `L2()` (DOT), or any loss without a threshold.
      optimizer: `GradientDescent()` or `Momentum()`: what is linear in the gradient.
      retention: `Full()` or `Scalar()`: one decay, without a map.
      window: c ≥ 1, the number of tokens on whose loss every step descends; 1 is the online rule.
      cache_window: w ≥ c, the number of most recent tokens that the cache holds (SWDT). None means all. W1 is not windowed.
      normalized: whether to divide by Z.
      scale: factor > 0 of the scores k·x. None means 1/√key_dim, as in attention. For keys of unit length that is nearly the same
        weight for every token, e^{±1/√key_dim}; see `for_unit_keys`.
      chunk_size: b ≥ 1, as in `MemoryRule`. No effect for a matrix memory with the dot-product loss.
      step_bound: > 0, how far the tokens of a chunk may step together, to first order; 1 means onto their targets. It acts for a
        loss with a target (DOT), with Z. With momentum, θ is at most 1 − 1/32 and a write at most 1/32 of the step. None means
        that step sizes are the gates, as in the paper. docs/semantics.md, 2.5.

    Raises:
      ValueError: an unsupported choice, which the message names, or a window larger than the cache.
    """

    caching_limits: ClassVar[Mapping[str, str]] = {
        'start="carry"': (
            "is not supported for a softmax memory: it stores its tokens, so every cached memory would store all earlier tokens "
            'again. Use start="fresh".'
        ),
        'aggregation="soup"': (
            "is not supported for a softmax memory: it would mix the sums before the division by Z and the activation, which a "
            'read of one memory does not return. Use "grm".'
        ),
    }

    structure: structures.Structure = structures.MLP()
    objective: objectives.Objective = objectives.DotProduct()
    optimizer: optimizers.Optimizer = optimizers.GradientDescent()
    retention: retention_lib.Retention = retention_lib.Scalar()
    window: int = 1
    cache_window: int | None = None
    normalized: bool = True
    chunk_size: int = 64
    scale: float | None = None
    step_bound: float | None = 1.0

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            check_choice("SoftmaxRule", name, getattr(self, name), kind)
        for name in ("window", "chunk_size", "cache_window"):
            value = getattr(self, name)
            if name != "cache_window" or value is not None:
                check.integer("SoftmaxRule", name, value)
        check.boolean("SoftmaxRule", "normalized", self.normalized)
        check.number("SoftmaxRule", "scale", self.scale, above=0, optional=True)
        check.number("SoftmaxRule", "step_bound", self.step_bound, above=0, optional=True)
        for message in _clashes(self):
            raise ValueError(f"SoftmaxRule: {message}")

    @property
    def soup_limit(self) -> str | None:
        return "its memory is a cache of tokens, and each sum over them is divided by its own Z"

    @property
    def has_constant_gradient(self) -> bool:
        """Whether ∇ℓ does not depend on the memory, so that the chunk size has no effect (SEMANTICS 1.4)."""
        return self.structure.is_matrix and self.objective.gradient_is_value

    @property
    def is_bounded(self) -> bool:
        """Whether `step_bound` acts. Without a target a loss has no step that is too large; without Z reads have no limit."""
        return self.step_bound is not None and self.objective.has_target and self.normalized

    def unbounded(self) -> Self:
        """The same rule without `step_bound`: the recurrence of the paper."""
        return dataclasses.replace(self, step_bound=None)

    def score_scale(self, key_dim: int) -> float:
        """The factor of k·x in κ."""
        return key_dim**-0.5 if self.scale is None else self.scale

    def for_unit_keys(self, key_dim: int) -> Self:
        """Scores √key_dim · k·x: for keys and queries of unit length, those of attention on keys whose entries are about 1.

        A rule with a scale of its own stays as it is. So does one without Z, whose reads would grow by e^{√key_dim}.
        """
        if self.scale is not None or not self.normalized:
            return self
        return dataclasses.replace(self, scale=key_dim**0.5)

    @property
    def inner(self) -> str:
        """Name of the matrix that reads φ*, which is never formed."""
        return list(self.structure.weight_shapes(1, 1))[-1]

    def width(self, value_dim: int) -> int:
        """Size of a coefficient a_i: value_dim for a matrix memory, the hidden width for an MLP."""
        return self.structure.weight_shapes(1, value_dim)[self.inner][0]

    @property
    def pending(self) -> int:
        """Maximum number of tokens of an unfinished chunk in a state: b − 1, or 0 if the chunk size has no effect."""
        return 0 if self.has_constant_gradient else self.chunk_size - 1

    def gate_channels(self, key_dim: int, value_dim: int | None = None) -> dict[str, int | None]:
        """The gates of this rule: name → number of channels, or None for one scalar per token and head. The sizes are ignored."""
        gates: dict[str, int | None] = {}
        if self.retention.gate is not None:
            gates["retention"] = None
        gates["step_size"] = None
        if self.optimizer.has_momentum:
            gates["momentum_decay"] = None
        if self.window > 1:
            gates["window_weights"] = self.window
        return gates

    # Methods of `Rule`, implemented in the modules of this package.
    def init_params(self, key: PRNGKeyArray, *, num_heads: int, key_dim: int, value_dim: int) -> SoftmaxParams:
        return states_lib.init_params(self, key, num_heads=num_heads, key_dim=key_dim, value_dim=value_dim)

    def init_state(self, params: SoftmaxParams, *, batch_size: int, max_length: int | None = None) -> SoftmaxState:
        return states_lib.init_state(self, params, batch_size=batch_size, max_length=max_length)

    def check_params(self, params: SoftmaxParams, where: str) -> None:
        states_lib.check_params(self, params, where)

    def for_heads(self, params: SoftmaxParams, heads: int) -> SoftmaxParams:
        return params if params.weights else dataclasses.replace(params, num_heads=heads)

    def scan(
        self,
        params: SoftmaxParams,
        state: SoftmaxState | None,
        q: Float[Array, "batch time heads key_dim"],
        k: Float[Array, "batch time heads key_dim"],
        v: Float[Array, "batch time heads value_dim"],
        gates: Gates,
        segment_ids: Int[Array, "batch time"] | None = None,
        max_segments: int | None = None,
        *,
        lengths: Int[Array, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch time heads value_dim"], SoftmaxState]:
        from atlasjax.memory.softmax.scan import xla_scan

        return xla_scan(self, params, state, q, k, v, gates, segment_ids, max_segments, lengths)

    def step(
        self,
        params: SoftmaxParams,
        state: SoftmaxState,
        q: Float[Array, "batch heads key_dim"],
        k: Float[Array, "batch heads key_dim"],
        v: Float[Array, "batch heads value_dim"],
        gates: Gates,
    ) -> tuple[Float[Array, "batch heads value_dim"], SoftmaxState]:
        from atlasjax.memory.softmax.step import xla_step

        return xla_step(self, params, state, q, k, v, gates)

    def step_layer(
        self,
        params: SoftmaxParams,
        states: SoftmaxState,
        layer: Int[Array, ""],
        q: Float[Array, "batch heads key_dim"],
        k: Float[Array, "batch heads key_dim"],
        v: Float[Array, "batch heads value_dim"],
        gates: Gates,
    ) -> tuple[Float[Array, "batch heads value_dim"], SoftmaxState]:
        from atlasjax.memory.softmax.step import xla_step_layer

        return xla_step_layer(self, params, states, layer, q, k, v, gates)

    def read(
        self, params: SoftmaxParams, state: SoftmaxState, q: Float[Array, "batch time heads key_dim"]
    ) -> Float[Array, "batch time heads value_dim"]:
        from atlasjax.memory.softmax.read import read_state

        return read_state(self, params, state, q)

    def reference(
        self,
        params: SoftmaxParams,
        state: SoftmaxState | None,
        q: Float[Array, "batch time heads key_dim"],
        k: Float[Array, "batch time heads key_dim"],
        v: Float[Array, "batch time heads value_dim"],
        gates: Gates,
        segment_ids: Int[Array, "batch time"] | None = None,
    ) -> tuple[Float[Array, "batch time heads value_dim"], SoftmaxState]:
        from atlasjax.memory.softmax.reference import reference_scan

        return reference_scan(self, params, state, q, k, v, gates, segment_ids)

    def sizes(self, params: SoftmaxParams) -> Sizes:
        # A matrix memory has no parameters per head, so any number of heads fits.
        num_heads = next(iter(params.weights.values())).shape[0] if params.weights else None
        return Sizes(num_heads, params.key_dim, params.value_dim)

    def max_length(self, state: object) -> int | None:
        keys = getattr(state, "keys", None)
        return max(1, keys.shape[2]) if keys is not None and getattr(keys, "ndim", 0) == 4 else 1

    def room(self, state: SoftmaxState) -> Int[Array, " batch"] | None:
        return None if self.cache_window is not None else state.keys.shape[2] - state.num_tokens - state.position

    def suggested_steps(
        self, key_dim: int, value_dim: int, forgetting: np.ndarray, momentum_decay: np.ndarray, window_weights: np.ndarray,
        similar_keys: bool,
    ) -> tuple[np.ndarray, float]:  # fmt: skip
        from atlasjax.memory.softmax.suggested import suggested_steps

        return suggested_steps(self, forgetting, momentum_decay, window_weights)

    @property
    def has_residual(self) -> bool:
        return self.structure.residual

    def start_scale(self, step_size: np.ndarray) -> np.ndarray:
        from atlasjax.memory.softmax.suggested import start_scale

        return start_scale(self, step_size)

    def check_state(self, params: SoftmaxParams, state: SoftmaxState, batch: int, heads: int, where: str) -> None:
        super().check_state(params, state, batch, heads, where)
        check_range("state.position", state.position, 0, max(0, self.chunk_size - 1), where)

    def cached_weights(self, state: SoftmaxState) -> Weights:
        from atlasjax.memory.softmax.read import cached_weights

        return cached_weights(state)

    def read_cached(
        self, dtype: jnp.dtype, params: SoftmaxParams, weights: Weights, q: Float[Array, "time key_dim"]
    ) -> Float[Array, "time value_dim"]:
        from atlasjax.memory.softmax.read import read_cached

        return read_cached(self, dtype, weights, q)

    def reference_read(
        self, params: SoftmaxParams, weights: Weights, x: Float[Array, " key_dim"]
    ) -> Float[Array, " value_dim"]:
        from atlasjax.memory.softmax.read import reference_read

        return reference_read(self, weights, x)

    def residual(self, params: SoftmaxParams, q: Float[Array, "... key_dim"]) -> Float[Array, "... value_dim"] | None:
        return q if self.structure.residual else None


_KINDS: dict[str, type[Axis]] = {
    "structure": structures.Structure,
    "objective": objectives.Objective,
    "optimizer": optimizers.Optimizer,
    "retention": retention_lib.Retention,
}


def _readers(structure: structures.Structure) -> list[str]:
    """The matrices that read the features."""
    found: list[str] = []
    applied: set[str] = set()
    shapes = choices.check_weight_shapes(structure, 1, 1)

    def apply(x: jax.Array) -> jax.Array:
        def linear(name: str, h: jax.Array) -> jax.Array:
            choices.check_applied(structure, name, shapes, applied)
            applied.add(name)
            if h is x:
                found.append(name)
            return jnp.zeros((1, shapes[name][0]))

        return structure.apply(linear, x, x if structure.residual else None, None)

    # Traced and not run, because creating a rule must not initialize devices before `jax.distributed.initialize`.
    told = f"{type(structure).__name__}.apply"
    choices.tried(told, lambda: jax.eval_shape(apply, jax.ShapeDtypeStruct((1, 1), jnp.float32)))
    return found


def _clashes(rule: SoftmaxRule) -> Iterator[str]:
    structure, objective, optimizer, retention = (
        f"{n}={getattr(rule, n)!r}" for n in ("structure", "objective", "optimizer", "retention")
    )
    if rule.structure.norm:
        yield f"{structure}: a LayerNorm inside is not supported for softmax memories; use norm=False."
    elif not rule.structure.is_matrix and (
        len(choices.check_weight_shapes(rule.structure, 1, 1)) != 2 or _readers(rule.structure) != [rule.inner]
    ):
        yield f"{structure}: a softmax memory must be Matrix(), or have two matrices, one of which reads φ*, such as MLP(depth=2)."
    if rule.objective.removes or rule.objective.uses_threshold:
        yield f"{objective}: a softmax memory needs a loss of M(φ*(k)) and v alone, such as DotProduct() or L2()."
    if not rule.optimizer.is_linear:
        yield f"{optimizer}: the coefficients of a softmax memory are known for GradientDescent() and Momentum() only."
    if rule.optimizer.every > 1:
        yield f"{optimizer}: a softmax memory writes every token; use every=1."
    if rule.optimizer.per_channel:
        yield f"{optimizer}: a step size per channel is not supported for softmax memories."
    if not rule.retention.is_linear or rule.retention.has_map or rule.retention.gate == "channel":
        yield f"{retention}: the coefficients of a softmax memory are known for Full() and Scalar() only."
    if rule.retention.decay_first:
        yield f"{retention}: decay_first is not supported for softmax memories."
    if rule.cache_window is not None and rule.window > rule.cache_window:
        yield (
            f"window={rule.window} is larger than the cache, cache_window={rule.cache_window}: a token that left the cache "
            "cannot be written. Use a window of at most cache_window."
        )
