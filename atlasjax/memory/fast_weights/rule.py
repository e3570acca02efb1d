"""`MemoryRule`: a point in the design space of fast-weight memories."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from atlasjax import check
from atlasjax.memory import limits
from atlasjax.memory.axes import features as features_lib
from atlasjax.memory.axes import objectives, optimizers, structures
from atlasjax.memory.axes import retention as retention_lib
from atlasjax.memory.axes.base import check_choice
from atlasjax.memory.axes.optimizers import OptimizerState
from atlasjax.memory.blocks import Factors, exact
from atlasjax.memory.check import check_range
from atlasjax.memory.choices import check_feature_dim, check_parts
from atlasjax.memory.fast_weights import state as states_lib
from atlasjax.memory.fast_weights.bounds import Bound, LimitedSlope, largest_norm, within_norm
from atlasjax.memory.fast_weights.clashes import clashes
from atlasjax.memory.fast_weights.state import MemoryParams, MemoryState
from atlasjax.memory.gates import Gates, Weights
from atlasjax.memory.rule import Rule, ScanCall, Sizes

if TYPE_CHECKING:
    from atlasjax.memory.fast_weights.chunk import Soup


@dataclasses.dataclass(frozen=True)
class MemoryRule(Rule[MemoryParams, MemoryState]):
    """A memory, its inner objective and how it is optimized. Frozen and hashable, static under `jax.jit`.

    For every token t (SEMANTICS 1; A §3.2–3.3, §5):

        g_t = Σ_{j<c} γ_{t,j} ∇ℓ(M_{t'}; φ(k_{t−j}), v_{t−j})        M_{t'}: the memory at the start of t's chunk
        S_t = θ_t S_{t−1} − η_t g_t
        M_t = α_t M_{t−1} + S_t                                       Muon: S_t = θ_t S_{t−1} − g_t, M_t = α_t M_{t−1} + η_t NS(S_t)
        y_t = M_t(φ(q_t))

    This is the papers' recurrence, and that of `rule.unbounded()`. By default `bound` makes η_t and θ_t smaller where a step would
    pass its target (SEMANTICS 1.12), so that the memory cannot diverge.

    Attributes:
      structure: the memory M: `Matrix`, `MLP`, `PlainMLP` or `GatedMLP`. This and the next four may also be user-defined
        (docs/own_rule.md).
      objective: the inner loss ℓ: `L2`, `DotProduct`, `Lp`, `Huber` or `RemoveAndReplace`.
      features: the feature map φ of keys and queries: `Identity`, `Polynomial`, `Powers` or `TensorSketch`.
      optimizer: `GradientDescent`, `Implicit`, `Momentum` or `Muon`.
      retention: `Full`, `Scalar`, `Channel`, `KL` or `Lq`.
      window: c ≥ 1, the number of most recent tokens on whose loss every step descends (the Omega rule). 1 is the online rule.
      chunk_size: b ≥ 1, part of the model: gradients are taken at the memory at the chunk's start. 1 is exact online learning. No
        effect for a matrix memory with the dot-product loss and without Muon.
      bound: bounds that keep the memory from diverging (`bounds.Bound`). None means no bounds, as in the papers.

    Raises:
      ValueError: incompatible choices. The message names both.
    """

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
        """Whether padding must be masked. The gates of padding (α = 1, θ = 1, η = 0, γ = 0) suffice to make it a no-op for plain
        gradient descent and Muon, but with momentum M_t = α_t M_{t−1} + S_t would add S_t again."""
        return self.is_sequential or (self.optimizer.is_linear and self.optimizer.has_momentum)

    @property
    def step_bound(self) -> float | None:
        """`Bound.step` if it applies to the rule's steps, otherwise None.

        It does not apply to a loss without a target (dot products), nor to an optimizer that is not linear in the gradient: an
        orthogonalized step (Muon) has a fixed size, an implicit step cannot pass its target, and the effect of others is unknown.
        """
        free = not self.optimizer.is_linear or not self.objective.has_target or self.objective.removes
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
        return gates._replace(momentum_decay=limits.within_horizon(self.horizon, gates.momentum_decay))

    @property
    def limited_objective(self) -> objectives.Objective:
        """The loss whose gradients are taken: `objective` limited by `Bound.slope`, except in rules in which the chunk size has no
        effect."""
        free = self.is_linear or self.has_constant_gradient or self.objective.removes
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
        delta = (self.objective.gradient_is_error or self.objective.removes) and self.chunk_size == 1
        return delta or self.objective.gradient_is_value

    @property
    def undivided(self) -> str | None:
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
    ) -> tuple[Weights, OptimizerState]:
        """One token of one head: (A_t, S_t) from (A_{t−1}, S_{t−1}) and g_t, by the formulas of the optimizer and the retention.

        Args:
          stored: A_{t−1}, name → [out, in], which is the memory itself if the retention has no map.
          momentum: S_{t−1}.
          gradient: g_t.
          retention: α_t, a scalar or [in]. None means α = 1.
          step_size: η_t, a scalar, or [value_dim] for one per channel.
          momentum_decay: θ_t. None if the optimizer has no momentum.
        """
        eta = step_size[:, None] if self.optimizer.per_channel else step_size
        steps, momentum = self.optimizer.update(momentum, gradient, eta, momentum_decay)
        decayed = stored
        if retention is not None:
            decayed = {name: self.retention.decay(w, retention) for name, w in stored.items()}
        elif not self.retention.is_linear:  # of a kind without a gate
            decayed = {name: self.retention.decay(w, jnp.ones((), w.dtype)) for name, w in stored.items()}
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
        if self.objective.removes:
            gates["removal_key"] = feature_dim
            gates["removal"] = feature_dim
        else:
            gates["step_size"] = (value_dim or key_dim) if self.optimizer.per_channel else None
        if self.optimizer.has_momentum:
            gates["momentum_decay"] = None
        if self.window > 1:
            gates["window_weights"] = self.window
        if self.objective.uses_threshold:
            gates["threshold"] = None
        return gates

    def with_newton_schulz(self, steps: int | None = None, schedule: str | None = None) -> "MemoryRule":
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

    # Methods of `Rule`, implemented in the modules of this package.
    def soup(self, states: Sequence[MemoryState], weights: Float[Array, " states"]) -> MemoryState:
        return states_lib.soup(states, weights)

    def init_params(self, key: PRNGKeyArray, *, num_heads: int, key_dim: int, value_dim: int) -> MemoryParams:
        return states_lib.init_params(self, key, num_heads=num_heads, key_dim=key_dim, value_dim=value_dim)

    def init_state(self, params: MemoryParams, *, batch_size: int, max_length: int | None = None) -> MemoryState:
        return states_lib.init_state(self, params, batch_size=batch_size, max_length=max_length)

    def check_params(self, params: MemoryParams, where: str) -> None:
        states_lib.check_params(self, params, where)

    def scan(
        self,
        params: MemoryParams,
        state: MemoryState | None,
        q: Float[Array, "batch time heads key_dim"],
        k: Float[Array, "batch time heads key_dim"],
        v: Float[Array, "batch time heads value_dim"],
        gates: Gates,
        segment_ids: Int[Array, "batch time"] | None = None,
        max_segments: int | None = None,
        *,
        lengths: Int[Array, " batch"] | None = None,
        soup: "Soup | None" = None,
    ) -> tuple[Float[Array, "batch time heads value_dim"], MemoryState]:
        from atlasjax.memory.fast_weights.scan import xla_scan

        return xla_scan(self, params, state, q, k, v, gates, segment_ids, max_segments, lengths=lengths, soup=soup)

    def scan_part(
        self,
        axes: tuple[str, ...],
        run: ScanCall[MemoryParams, MemoryState],
        params: MemoryParams,
        state: MemoryState | None,
        q: Float[Array, "batch time heads key_dim"],
        k: Float[Array, "batch time heads key_dim"],
        v: Float[Array, "batch time heads value_dim"],
        gates: Gates,
        segment_ids: Int[Array, "batch time"] | None,
    ) -> tuple[Float[Array, "batch time heads value_dim"], MemoryState]:
        from atlasjax.memory.fast_weights.sequence_parallel import scan_part

        return scan_part(self, axes, run, params, state, q, k, v, gates, segment_ids)

    def step(
        self,
        params: MemoryParams,
        state: MemoryState,
        q: Float[Array, "batch heads key_dim"],
        k: Float[Array, "batch heads key_dim"],
        v: Float[Array, "batch heads value_dim"],
        gates: Gates,
        soup: "Soup | None" = None,
    ) -> tuple[Float[Array, "batch heads value_dim"], MemoryState]:
        from atlasjax.memory.fast_weights.step import xla_step

        return xla_step(self, params, state, q, k, v, gates, soup=soup)

    def step_layer(
        self,
        params: MemoryParams,
        states: MemoryState,
        layer: Int[Array, ""],
        q: Float[Array, "batch heads key_dim"],
        k: Float[Array, "batch heads key_dim"],
        v: Float[Array, "batch heads value_dim"],
        gates: Gates,
    ) -> tuple[Float[Array, "batch heads value_dim"], MemoryState]:
        from atlasjax.memory.fast_weights.step import xla_step_layer

        return xla_step_layer(self, params, states, layer, q, k, v, gates)

    def read(
        self, params: MemoryParams, state: MemoryState, q: Float[Array, "batch time heads key_dim"]
    ) -> Float[Array, "batch time heads value_dim"]:
        from atlasjax.memory.fast_weights.read import read_state

        return read_state(self, params, state, q)

    def reference(
        self,
        params: MemoryParams,
        state: MemoryState | None,
        q: Float[Array, "batch time heads key_dim"],
        k: Float[Array, "batch time heads key_dim"],
        v: Float[Array, "batch time heads value_dim"],
        gates: Gates,
        segment_ids: Int[Array, "batch time"] | None = None,
    ) -> tuple[Float[Array, "batch time heads value_dim"], MemoryState]:
        from atlasjax.memory.fast_weights.reference import reference_scan

        return reference_scan(self, params, state, q, k, v, gates, segment_ids)

    def sizes(self, params: MemoryParams) -> Sizes:
        outermost = next(iter(self.structure.weight_shapes(1, 1)))
        num_heads, value_dim, _ = params.weights[outermost].shape
        return Sizes(num_heads, states_lib.infer_key_dim(self, params), value_dim)

    @property
    def forgets_fast(self) -> bool:
        from atlasjax.memory.fast_weights.suggested import has_steps_of_one_size

        # Steps of fixed size and writes to a matrix do not need a gradient that scales with the memory.
        return (has_steps_of_one_size(self) or self.structure.is_matrix) and not self.retention.has_map

    def suggested_steps(
        self,
        key_dim: int,
        value_dim: int,
        forgetting: np.ndarray,
        momentum_decay: np.ndarray,
        window_weights: np.ndarray,
        similar_keys: bool,
    ) -> tuple[np.ndarray, float]:
        from atlasjax.memory.fast_weights.suggested import suggested_steps

        check_parts(self, key_dim, value_dim)  # a model asks for them before it creates the parameters
        return suggested_steps(self, key_dim, value_dim, forgetting, momentum_decay, window_weights, similar_keys)

    def check_state(self, params: MemoryParams, state: MemoryState, batch: int, heads: int, where: str) -> None:
        super().check_state(params, state, batch, heads, where)
        if state.position is not None:  # a state of a rule with longer chunks may be out of range
            check_range("state.position", state.position, 0, self.chunk_size - 1, where)
        if state.window_count is not None:
            check_range("state.window_count", state.window_count, 0, self.window - 1, where)

    def cached_weights(self, state: MemoryState) -> Weights:
        return self.weights(state.memory)

    def read_cached(
        self, dtype: jnp.dtype, params: MemoryParams, weights: Weights, q: Float[Array, "time key_dim"]
    ) -> Float[Array, "time value_dim"]:
        from atlasjax.memory.fast_weights.read import read_cached

        return read_cached(self, dtype, params, weights, q)

    def read_mixed(
        self,
        dtype: jnp.dtype,
        params: MemoryParams,
        weights: Weights,
        q: Float[Array, "time key_dim"],
        gamma: Float[Array, "time memories"],
    ) -> Float[Array, "time value_dim"]:
        """`read_cached` for a soup of several memories of one head: weights [memories, out, in]."""
        from atlasjax.memory.fast_weights.read import read_mixed

        return read_mixed(self, dtype, params, weights, q, gamma)

    def reference_read(
        self, params: MemoryParams, weights: Weights, x: Float[Array, " key_dim"]
    ) -> Float[Array, " value_dim"]:
        from atlasjax.memory.fast_weights.reference import read_weights

        return read_weights(self, params, weights, x)

    def residual(self, params: MemoryParams, q: Float[Array, "... key_dim"]) -> Float[Array, "... value_dim"] | None:
        from atlasjax.memory.fast_weights.read import residual

        return residual(self, params, q)
