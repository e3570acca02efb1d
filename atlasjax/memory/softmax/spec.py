"""`SoftmaxRule`: the rule of a memory on the infinite features of softmax attention."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlasjax import check
from atlasjax.memory import part_checks
from atlasjax.memory.axes import objectives, optimizers, structures
from atlasjax.memory.axes import retention as retention_lib
from atlasjax.memory.axes.base import Axis, check_choice
from atlasjax.memory.check import check_range
from atlasjax.memory.family import FamilyRule
from atlasjax.memory.rule import Sizes
from atlasjax.memory.softmax.state import SoftmaxParams, SoftmaxState


@dataclasses.dataclass(frozen=True)
class SoftmaxSpec(FamilyRule[SoftmaxParams, SoftmaxState]):
    """The choices of a `SoftmaxRule`, and what follows from them. `rule` runs it."""

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
    def has_scaling(self) -> bool:
        """Whether the coefficients of old entries change: decay or momentum."""
        return self.retention.gate is not None or self.optimizer.has_momentum

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

    def for_heads(self, params: SoftmaxParams, heads: int) -> SoftmaxParams:
        return params if params.weights else dataclasses.replace(params, num_heads=heads)

    def sizes(self, params: SoftmaxParams) -> Sizes:
        # A matrix memory has no parameters per head, so any number of heads fits.
        num_heads = next(iter(params.weights.values())).shape[0] if params.weights else None
        return Sizes(num_heads, params.key_dim, params.value_dim)

    def max_length(self, state: object) -> int | None:
        keys = getattr(state, "keys", None)
        return max(1, keys.shape[2]) if keys is not None and getattr(keys, "ndim", 0) == 4 else 1

    def room(self, state: SoftmaxState) -> Int[Array, " batch"] | None:
        return None if self.cache_window is not None else state.keys.shape[2] - state.num_tokens - state.position

    @property
    def has_residual(self) -> bool:
        return self.structure.residual

    def check_state(self, params: SoftmaxParams, state: SoftmaxState, batch: int, heads: int, where: str) -> None:
        super().check_state(params, state, batch, heads, where)
        check_range("state.position", state.position, 0, max(0, self.chunk_size - 1), where)

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
    shapes = part_checks.check_weight_shapes(structure, 1, 1)

    def apply(x: jax.Array) -> jax.Array:
        def linear(name: str, h: jax.Array) -> jax.Array:
            part_checks.check_applied(structure, name, shapes, applied)
            applied.add(name)
            if h is x:
                found.append(name)
            return jnp.zeros((1, shapes[name][0]))

        return structure.apply(linear, x, x if structure.residual else None, None)

    # Traced and not run, because creating a rule must not initialize devices before `jax.distributed.initialize`.
    method_name = f"{type(structure).__name__}.apply"
    part_checks.tried(method_name, lambda: jax.eval_shape(apply, jax.ShapeDtypeStruct((1, 1), jnp.float32)))
    return found


def _clashes(rule: SoftmaxSpec) -> Iterator[str]:
    structure, objective, optimizer, retention = (
        f"{n}={getattr(rule, n)!r}" for n in ("structure", "objective", "optimizer", "retention")
    )
    if rule.structure.norm:
        yield f"{structure}: a LayerNorm inside is not supported for softmax memories; use norm=False."
    elif not rule.structure.is_matrix and (
        len(part_checks.check_weight_shapes(rule.structure, 1, 1)) != 2 or _readers(rule.structure) != [rule.inner]
    ):
        yield f"{structure}: a softmax memory must be Matrix(), or have two matrices, one of which reads φ*, such as MLP(depth=2)."
    if rule.objective.own_keys or rule.objective.uses_threshold:
        yield f"{objective}: a softmax memory needs a loss of M(φ*(k)) and v alone, such as DotProduct() or L2()."
    if not rule.optimizer.is_linear:
        yield f"{optimizer}: the coefficients of a softmax memory are known for GradientDescent() and Momentum() only."
    if rule.optimizer.write_gate:
        yield f"{optimizer}: a softmax memory has no write gate; use Momentum()."
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
