"""`MemoryRule`: a point in the design space of fast-weight memories."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlasjax import check
from atlasjax.memory import bounds
from atlasjax.memory.axes import features as features_lib
from atlasjax.memory.axes import objectives, optimizers, structures
from atlasjax.memory.axes import retention as retention_lib
from atlasjax.memory.axes.base import check_choice
from atlasjax.memory.axes.optimizers import OptimizerState
from atlasjax.memory.blocks import Factors, exact
from atlasjax.memory.bounds import Bound, LimitedSlope, capped_delta, largest_norm, within_norm
from atlasjax.memory.check import check_range
from atlasjax.memory.family import FamilyRule
from atlasjax.memory.fast_weights.clashes import clashes
from atlasjax.memory.fast_weights.state import MemoryParams, MemoryState
from atlasjax.memory.gates import Gates, Weights
from atlasjax.memory.part_checks import check_feature_dim


@dataclasses.dataclass(frozen=True)
class MemorySpec(FamilyRule[MemoryParams, MemoryState]):
    """The choices of a `MemoryRule`, and what follows from them. `rule` runs it."""

    has_kernels: ClassVar[bool] = True
    caching_limits: ClassVar[Mapping[str, str]] = {}

    structure: structures.Structure = structures.MLP()
    objective: objectives.Objective = objectives.L2()
    features: features_lib.Features = features_lib.Identity()
    optimizer: optimizers.Optimizer = optimizers.Momentum()
    retention: retention_lib.Retention = retention_lib.Scalar()
    window: int = 1
    chunk_size: int = 64
    bound: Bound | None = Bound()

    def __post_init__(self) -> None:
        kinds = {
            "structure": structures.Structure,
            "objective": objectives.Objective,
            "features": features_lib.Features,
            "optimizer": optimizers.Optimizer,
            "retention": retention_lib.Retention,
        }
        for name, kind in kinds.items():
            check_choice("MemoryRule", name, getattr(self, name), kind)
        check.instance("MemoryRule", "bound", self.bound, Bound, optional=True)
        for name in ("window", "chunk_size"):
            check.integer("MemoryRule", name, getattr(self, name))
        for part, other in clashes(self):
            raise ValueError(f"MemoryRule: {part} clashes with {other}")

    @property
    def uses_muon(self) -> bool:
        return self.optimizer.orthogonalizes

    @property
    def is_sequential(self) -> bool:
        """Whether the memory must be written token by token, because neither the dual form nor Muon's block form applies."""
        known = self.optimizer.is_linear or self.optimizer.orthogonalizes or self.optimizer.is_implicit
        rarely = self.optimizer.every > 1 and not self.optimizer.orthogonalizes
        return not (known and self.retention.is_linear) or self.retention.has_map or rarely

    @property
    def maps_sums(self) -> bool:
        """Whether the memory is the map of a decayed sum of gradients, which `mapped.mapped_block` takes."""
        return (
            self.retention.has_map
            and self.retention.is_linear
            and self.optimizer.is_linear
            and self.optimizer.every == 1
        )

    @property
    def has_constant_gradient(self) -> bool:
        """Whether ∇ℓ does not depend on the memory, so that the chunk size has no effect (SEMANTICS 1.4).

        False with Muon, where the chunk determines the tokens at which `Muon.every` writes.
        """
        constant = self.structure.is_matrix and self.objective.gradient_is_value
        return constant and self.optimizer.is_linear and not self.is_sequential

    @property
    def masks_padding(self) -> bool:
        """Whether padding must be masked. The gates of padding (α = 1, θ = 1, η = 0, β = 0, γ = 0) suffice to make it a no-op for
        Muon and for optimizers that are linear in the gradient."""
        return self.is_sequential and not self.maps_sums

    @property
    def step_bound(self) -> float | None:
        """`Bound.step` if it applies to the rule's steps, otherwise None.

        It does not apply to a loss without a target (dot products), nor to an optimizer that is not linear in the gradient: an
        orthogonalized step (Muon) has a fixed size, an implicit step cannot pass its target, and the effect of others is unknown.
        """
        free = not self.optimizer.is_linear or not self.objective.has_target
        return None if self.bound is None or free else self.bound.step

    @property
    def horizon(self) -> float:
        """H of `Bound.horizon` if the steps are bounded and have momentum, otherwise 1."""
        if self.bound is None or self.step_bound is None or not self.optimizer.has_momentum:
            return 1.0
        return self.bound.horizon

    def within_horizon(self, gates: Gates) -> Gates:
        """The gates with θ ≤ 1 − 1/H if the steps are bounded and have momentum, otherwise the same."""
        if self.step_bound is None or gates.momentum_decay is None or not self.optimizer.has_momentum:
            return gates
        return gates._replace(momentum_decay=bounds.within_horizon(self.horizon, gates.momentum_decay))

    @property
    def limited_objective(self) -> objectives.Objective:
        """The loss whose gradients are taken: `objective` limited by `Bound.slope`, except in rules in which the chunk size has no
        effect."""
        free = self.is_linear or self.has_constant_gradient
        if self.bound is None or self.bound.slope is None or free:
            return self.objective
        return LimitedSlope(self.objective, self.bound.slope)

    @property
    def norm_bound(self) -> float | None:
        """`Bound.weight_norm` if it applies to the rule's weights at the start of each chunk, otherwise None.

        It does not apply to rules in which the chunk size has no effect, nor to retentions whose map is bounded (`KL`).
        """
        free = self.is_linear or self.has_constant_gradient or self.retention.is_bounded
        return None if self.bound is None or free else self.bound.weight_norm

    @property
    def is_bounded(self) -> bool:
        """Whether `bound` acts: on step sizes, slopes or weights."""
        return not (self.step_bound is None and self.norm_bound is None and self.limited_objective is self.objective)

    def unbounded(self) -> Self:
        """The same rule without `bound`: the recurrence of the papers."""
        return dataclasses.replace(self, bound=None)

    def weight_norm(self, state: MemoryState) -> Float[Array, "batch heads"]:
        """The largest ‖W‖_F / √rows over the weights, which `Bound.weight_norm` limits."""
        return largest_norm(jax.lax.stop_gradient(self.weights(state.memory)))

    @property
    def reads_are_linear(self) -> bool:
        return self.structure.is_matrix

    @property
    def has_residual(self) -> bool:
        return self.structure.residual

    def read_part(self, state: MemoryState) -> MemoryState:
        return state._replace(
            chunk_start=None, momentum=None, window_keys=None, window_values=None, window_thresholds=None,
            window_count=None, position=None,
        )  # fmt: skip

    def with_read_part(self, part: MemoryState, state: MemoryState) -> MemoryState:
        return state._replace(memory=part.memory)

    def known_chunk_start(self, state: MemoryState) -> MemoryState:
        if state.position is not None:
            check_range("with at_chunk_start, state.position", state.position, 0, 0, "memory.scan")
        return state._replace(position=None)

    def after_known_start(
        self, after: MemoryState, state: MemoryState, time: int | Int[Array, " batch"]
    ) -> MemoryState:
        if state.position is None:
            return after
        position = jnp.asarray(time % self.chunk_size, state.position.dtype)
        return after._replace(position=jnp.broadcast_to(position, state.position.shape))

    @property
    def has_fixed_steps(self) -> bool:
        return self.uses_muon

    @property
    def is_linear(self) -> bool:
        """Whether a matrix memory is written by W_t = W_{t−1} Diag(α_t) − (W_{t−1} r_t) s_tᵀ + v_t k_tᵀ, so that the block-parallel
        form is exact and its block length has no effect: linear attention and, with chunks of one token, the delta rules."""
        if not self.structure.is_matrix or self.window > 1 or self.is_sequential:
            return False
        if self.optimizer.has_momentum or not (self.optimizer.is_linear or self.optimizer.is_implicit):
            return False
        delta = self.objective.gradient_is_error or self.objective.writes_at_own_keys
        return (delta and self.chunk_size == 1) or self.objective.gradient_is_value

    @property
    def is_linear_with_momentum(self) -> bool:
        """Whether a matrix memory and its momentum are written by a delta rule (`linear_momentum`), so that the block-parallel form
        is exact and its block length has no effect. Not with a bound that acts, which makes steps depend on the memory."""
        if (
            not self.structure.is_matrix
            or self.window > 1
            or self.chunk_size > 1
            or self.is_sequential
            or self.is_bounded
        ):
            return False
        if self.retention.gate == "channel" or self.optimizer.per_channel:
            return False
        return self.optimizer.is_linear and self.optimizer.has_momentum and self.objective.gradient_is_error

    @property
    def undivided(self) -> str | None:
        if self.is_linear_with_momentum:
            return "its momentum would have to pass from device to device with its memory"
        if not self.is_linear:
            return "its memory after a part of the sequence is not a linear function of the memory before it"
        if self.optimizer.per_channel:
            return "its step sizes per channel give each row of the memory another transition"
        return "its reads are not linear in the memory" if self.structure.residual or self.structure.norm else None

    def start(self, weights: Weights) -> Weights:
        """The stored form of `weights`, name → [..., out, in]: M_0, or its accumulator if the retention has a map."""
        if not self.retention.has_map:
            return weights
        return {name: retention_lib.each_matrix(self.retention.start, w) for name, w in weights.items()}

    def begin_chunk(self, stored: Weights) -> Weights:
        """The stored memory at the start of a chunk, scaled to within `norm_bound`."""
        return stored if self.norm_bound is None else within_norm(self.norm_bound, stored)

    def begin_momentum(self, momentum: OptimizerState) -> OptimizerState:
        """S at the start of a chunk, scaled to within `norm_bound` unless it is a user-defined state."""
        summed = momentum is not None and (self.optimizer.is_linear or self.optimizer.orthogonalizes)
        return within_norm(self.norm_bound, momentum) if summed and self.norm_bound is not None else momentum

    def start_momentum(self, stored: Weights) -> OptimizerState:
        """S_0 from stored memories, name → [batch, heads, out, in]. None if the optimizer has no state."""
        return jax.vmap(jax.vmap(self.optimizer.init))(stored)

    def write(
        self,
        stored: Weights,
        momentum: OptimizerState,
        gradient: Weights,
        retention: Float[Array, ""] | Float[Array, " feature_dim"] | None,
        step_size: Float[Array, ""] | Float[Array, " value_dim"],
        momentum_decay: Float[Array, ""] | None,
        write_size: Float[Array, ""] | None,
        key: Float[Array, " feature_dim"] | None = None,
    ) -> tuple[Weights, OptimizerState]:
        """One token of one head: (A_t, S_t) from (A_{t−1}, S_{t−1}) and g_t, by the formulas of the optimizer and the retention.

        Args:
          stored: A_{t−1}, name → [out, in], which is the memory itself if the retention has no map.
          momentum: S_{t−1}.
          gradient: g_t.
          retention: α_t, a scalar or [in]. None means α = 1.
          step_size: η_t, a scalar, or [value_dim] for one per channel.
          momentum_decay: θ_t. None if the optimizer has no momentum.
          write_size: β_t. None means β = 1.
          key: φ(k_t), for a retention that follows keys.
        """
        eta = step_size[:, None] if self.optimizer.per_channel else step_size
        steps, momentum = self.optimizer.update(momentum, gradient, eta, momentum_decay)
        if write_size is not None:
            steps = {name: write_size * step for name, step in steps.items()}
        decayed = stored
        if retention is not None:
            decayed = {name: self.retention.decay(w, retention) for name, w in stored.items()}
        elif not self.retention.is_linear:  # of a kind without a gate
            retention = jnp.ones((), step_size.dtype)
            decayed = {name: self.retention.decay(w, retention) for name, w in stored.items()}
        if self.retention.follows_keys:
            assert retention is not None
            assert key is not None
            along = step_size if self.step_bound is None else capped_delta(self.step_bound, step_size, key)
            for name in self.structure.readers:
                decayed[name] = self.retention.decay_along(stored[name], retention, key, along)
        return self.start({name: w + steps[name] for name, w in decayed.items()}), momentum

    def weights(self, stored: Weights) -> Weights:
        """The memory M_t from its stored form, through the retention's map if there is one; name → [..., out, in]."""
        if not self.retention.has_map:
            return stored
        return {name: retention_lib.each_matrix(self.retention.map, w) for name, w in stored.items()}

    def stored_and_mapped(self, accumulators: Weights) -> tuple[Weights, Weights]:
        """`start` of accumulators, and the memory; name → [out, in]."""
        both = {name: self.retention.stored_and_mapped(w) for name, w in accumulators.items()}
        return {name: stored for name, (stored, _) in both.items()}, {
            name: memory for name, (_, memory) in both.items()
        }

    def change_along(self, stored: Weights, gradient: Weights) -> Float[Array, ""]:
        """How far a step along `gradient`, name → [out, in], moves the memory along it: ‖g‖² if the retention has no map, see
        `Retention.change_along`."""
        parts = [self.retention.change_along(stored[name], g) for name, g in gradient.items()]
        return sum(parts[1:], parts[0])

    def change_along_factors(self, stored: Weights, gradient: dict[str, Factors]) -> Float[Array, ""]:
        """`change_along` of the gradient Σ_j left[j] ⊗ inputs[j], name → factors [c, …]."""
        if next(iter(gradient.values())).left.shape[0] > 1:
            return self.change_along(stored, {name: exact(f.left.T, f.inputs) for name, f in gradient.items()})
        parts = [
            self.retention.change_along_outer(stored[name], f.left[0], f.inputs[0]) for name, f in gradient.items()
        ]
        return sum(parts[1:], parts[0])

    def gate_channels(self, key_dim: int, value_dim: int | None = None) -> dict[str, int | None]:
        """The gates of this rule: name → number of channels (an axis after heads), or None for one scalar per token and head.

        Args:
          key_dim: size of a key. Per-channel retention has one α for each of the `features.dim(key_dim)` channels.
          value_dim: size of a value, for a step size per channel. None means key_dim.
        """
        feature_dim = check_feature_dim(self.features, key_dim)
        gates: dict[str, int | None] = {}
        if self.retention.gate is not None:
            gates["retention"] = feature_dim if self.retention.gate == "channel" else None
        gates |= dict.fromkeys(self.objective.own_keys, feature_dim)
        if self.objective.uses_step_size:
            gates["step_size"] = (value_dim or key_dim) if self.optimizer.per_channel else None
        if self.optimizer.has_momentum:
            gates["momentum_decay"] = None
        if self.optimizer.write_gate:
            gates["write_size"] = None
        if self.window > 1:
            gates["window_weights"] = self.window
        if self.objective.uses_threshold:
            gates["threshold"] = None
        return gates

    def with_newton_schulz(self, steps: int | None = None, schedule: str | None = None) -> Self:
        """The same rule with other Newton–Schulz steps or schedule. Changes test-time compute, but not parameters and state.

        Raises:
          ValueError: the rule's optimizer is not Muon.
        """
        muon = self.optimizer
        if not muon.orthogonalizes:
            raise ValueError(f"with_newton_schulz: the rule's optimizer is {muon!r}, not Muon.")
        changed = dataclasses.replace(  # type: ignore[type-var]
            muon, steps=muon.steps if steps is None else steps, schedule=muon.schedule if schedule is None else schedule
        )
        return dataclasses.replace(self, optimizer=changed)

    @property
    def soup_limit(self) -> str | None:
        if self.retention.has_map:
            return f"retention={self.retention!r} maps what is stored to the weights, and does not map a sum to the sum"
        if not (self.optimizer.is_linear or self.optimizer.orthogonalizes or self.optimizer.is_implicit):
            return f"the state of optimizer={self.optimizer!r} is not known to be a sum of gradients"
        return None

    def check_state(self, params: MemoryParams, state: MemoryState, batch: int, heads: int, where: str) -> None:
        super().check_state(params, state, batch, heads, where)
        if state.position is not None:  # a state of a rule with longer chunks may be out of range
            check_range("state.position", state.position, 0, self.chunk_size - 1, where)
        if state.window_count is not None:
            check_range("state.window_count", state.window_count, 0, self.window - 1, where)

    def cached_weights(self, state: MemoryState) -> Weights:
        return self.weights(state.memory)
