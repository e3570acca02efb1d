"""`MemoryRule`: one row of the design space, as a value."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from atlasjax.memory import features as features_lib
from atlasjax.memory import objectives, optimizers, structures
from atlasjax.memory import retention as retention_lib
from atlasjax.memory.bounds import Bound, within_norm

_Mapped = retention_lib.KL | retention_lib.Lq


@dataclasses.dataclass(frozen=True)
class MemoryRule:
    """Which memory, what it learns, and how: frozen and hashable, static under `jax.jit`.

    For every token t (SEMANTICS 1; A §3.2–3.3, §5):

        g_t = Σ_{j<c} γ_{t,j} ∇ℓ(M_{t'}; φ(k_{t−j}), v_{t−j})        M_{t'}: the memory at the start of t's chunk
        S_t = θ_t S_{t−1} − η_t g_t
        M_t = α_t M_{t−1} + S_t                                       Muon: S_t = θ_t S_{t−1} − g_t, M_t = α_t M_{t−1} + η_t NS(S_t)
        y_t = M_t(φ(q_t))

    Attributes:
      structure: the memory M: `Matrix`, `MLP` or `GatedMLP`.
      objective: the inner loss ℓ: `L2`, `DotProduct`, `Lp` or `Huber`; or `RemoveAndReplace`.
      features: the feature map φ of keys and queries: `Identity`, `Polynomial`, `Powers` or `TensorSketch`.
      optimizer: `GradientDescent`, `Implicit`, `Momentum` or `Muon`.
      retention: `Full`, `Scalar`, `Channel`, `KL` or `Lq`.
      window: c ≥ 1, the number of last tokens whose loss every step descends on (the Omega rule); 1 is the online rule.
      chunk_size: b ≥ 1. Part of the model: gradients are taken at the memory of the chunk's start; 1 is exact online
        learning. (Without effect for a matrix memory under the dot-product loss without Muon.)
      bound: what keeps the memory from diverging (`bounds.Bound`); None: nothing does, as in the papers.

    Raises:
      ValueError: choices that clash, with the names of both.
    """

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
            value = getattr(self, name)
            if not isinstance(value, kind):
                hint = " Give an instance, not the class." if isinstance(value, type) else ""
                raise ValueError(f"MemoryRule: {name} must be one of {kind}, got {value!r}.{hint}")
        if self.bound is not None and not isinstance(self.bound, Bound):
            raise ValueError(f"MemoryRule: bound must be a Bound or None, got {self.bound!r}.")
        for name in ("window", "chunk_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"MemoryRule: {name} must be an integer ≥ 1, got {value!r}.")
        for part, other in _clashes(self):
            raise ValueError(f"MemoryRule: {part} clashes with {other}")

    @property
    def uses_muon(self) -> bool:
        return isinstance(self.optimizer, optimizers.Muon)

    @property
    def has_constant_gradient(self) -> bool:
        """Whether ∇ℓ does not depend on the memory, so that the chunk size has no effect (SEMANTICS 1.4).

        With Muon the chunk still sets the tokens at which `Muon.every` writes, so such rules do not count.
        """
        linear = isinstance(self.structure, structures.Matrix) and isinstance(self.objective, objectives.DotProduct)
        return linear and not self.uses_muon

    @property
    def step_bound(self) -> float | None:
        """`Bound.step` where the rule's steps are bounded by it.

        None for a loss without a target (dot products), an orthogonal step (Muon), which has one size, and an implicit one,
        which cannot pass its target.
        """
        free = self.uses_muon or isinstance(self.optimizer, optimizers.Implicit) or not self.objective.has_target
        return None if self.bound is None or free else self.bound.step

    @property
    def norm_bound(self) -> float | None:
        """`Bound.weight_norm` where the rule's weights are held by it at the starts of chunks.

        None for rules in which chunks have no effect, and for a map whose results are bounded (`KL`).
        """
        free = self.is_linear or self.has_constant_gradient or self.retention.is_bounded
        return None if self.bound is None or free else self.bound.weight_norm

    def unbounded(self) -> "MemoryRule":
        """The recurrence of the papers: the same rule without `bound`."""
        return dataclasses.replace(self, bound=None)

    @property
    def is_linear(self) -> bool:
        """Whether a matrix memory is written by W_t = W_{t−1} Diag(α_t) − (W_{t−1} r_t) s_tᵀ + v_t k_tᵀ, so that many tokens can be
        taken at once, exactly, and chunks have no effect: linear attention and, in chunks of one token, the delta rules."""
        if not isinstance(self.structure, structures.Matrix) or self.retention.has_map or self.window > 1:
            return False
        if not isinstance(self.optimizer, optimizers.GradientDescent | optimizers.Implicit):
            return False
        delta = isinstance(self.objective, objectives.L2 | objectives.RemoveAndReplace) and self.chunk_size == 1
        return delta or isinstance(self.objective, objectives.DotProduct)

    def start(self, weights: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """What a state stores for the learned start `weights`: M_0, or its accumulator where retention has a map."""
        retention = self.retention
        return jax.tree.map(retention.start, weights) if isinstance(retention, _Mapped) else weights

    def begin_chunk(self, stored: dict[str, jax.Array] | None) -> Any:
        """What a state stores, or its momentum, at the start of a chunk: within `norm_bound`."""
        return stored if stored is None or self.norm_bound is None else within_norm(self.norm_bound, stored)

    def weights(self, stored: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The memory M_t of what a state stores: itself, or the retention's map of it; name → [..., out, in]."""
        retention = self.retention
        return jax.tree.map(retention.map, stored) if isinstance(retention, _Mapped) else stored

    def gate_channels(self, key_dim: int, value_dim: int | None = None) -> dict[str, int | None]:
        """The gates of this rule: name → number of channels (an axis after heads), or None for one scalar per token and head.

        Args:
          key_dim: size of a key; per-channel retention has one α for each of the `features.dim(key_dim)` channels.
          value_dim: size of a value, for a step size per channel; None: key_dim.
        """
        feature_dim = self.features.dim(key_dim)
        gates: dict[str, int | None] = {}
        if isinstance(self.retention, retention_lib.Channel):
            gates["retention"] = feature_dim
        elif not isinstance(self.retention, retention_lib.Full):
            gates["retention"] = None
        if isinstance(self.objective, objectives.RemoveAndReplace):
            gates["removal_key"] = feature_dim
            gates["removal"] = feature_dim
        else:
            gates["step_size"] = (value_dim or key_dim) if self.optimizer.per_channel else None
        if self.optimizer.has_momentum:
            gates["momentum"] = None
        if self.window > 1:
            gates["window"] = self.window
        if self.objective.uses_threshold:
            gates["threshold"] = None
        return gates

    def with_newton_schulz(self, steps: int | None = None, schedule: str | None = None) -> "MemoryRule":
        """The same rule with other Newton–Schulz steps or schedule: same parameters, same state, other test-time compute.

        Raises:
          ValueError: the rule's optimizer is not Muon.
        """
        if not isinstance(self.optimizer, optimizers.Muon):
            raise ValueError(f"with_newton_schulz: the rule's optimizer is {self.optimizer!r}, not Muon.")
        muon = self.optimizer
        changed = optimizers.Muon(
            muon.steps if steps is None else steps, muon.schedule if schedule is None else schedule, muon.every
        )
        return dataclasses.replace(self, optimizer=changed)


def _clashes(rule: MemoryRule) -> Iterator[tuple[str, str]]:
    """Pairs of choices that do not go together: (one, "the other: why and what to do")."""
    retention, optimizer, structure = f"retention={rule.retention!r}", f"optimizer={rule.optimizer!r}", rule.structure
    matrix = isinstance(structure, structures.Matrix)
    online = rule.window == rule.chunk_size == 1
    if isinstance(rule.retention, retention_lib.Channel) and not matrix:
        yield (
            retention,
            f"structure={structure!r}: a decay per feature channel is defined for Matrix() only. Use Scalar().",
        )
    if rule.retention.decay_first and rule.chunk_size > 1:
        yield (
            retention,
            f"chunk_size={rule.chunk_size}: gradients are taken at the memory of the chunk's start, which is "
            "not decayed token by token. Use chunk_size=1.",
        )
    if rule.retention.has_map and rule.uses_muon:
        yield retention, f"{optimizer}: an orthogonal step and a retention map do not combine. Use GradientDescent()."
    if isinstance(optimizer_ := rule.optimizer, optimizers.Muon) and rule.chunk_size % optimizer_.every:
        yield optimizer, f"chunk_size={rule.chunk_size}: `every` must divide the chunk size."
    if rule.optimizer.per_channel and not matrix:
        yield optimizer, f"structure={structure!r}: a step size per channel of the value is defined for Matrix() only."
    if rule.optimizer.per_channel and rule.window > 1:
        yield optimizer, f"window={rule.window}: a step size per channel is defined for window=1 only."
    if isinstance(rule.optimizer, optimizers.Implicit):
        if not (matrix and isinstance(rule.objective, objectives.L2) and online):
            yield (
                optimizer,
                "the other choices: the step's minimizer is known for Matrix(), L2() and window=chunk_size=1 only.",
            )
        if not (isinstance(rule.retention, retention_lib.Full) or rule.retention.decay_first):
            yield (
                optimizer,
                f"{retention}: it decays first. Use Full(), Scalar(decay_first=True) or Channel(decay_first=True).",
            )
    if isinstance(rule.objective, objectives.RemoveAndReplace):
        plain = isinstance(rule.optimizer, optimizers.GradientDescent) and not rule.optimizer.per_channel
        identity = isinstance(rule.features, features_lib.Identity)
        if not (matrix and online and plain and identity) or rule.retention.has_map or rule.retention.decay_first:
            yield (
                "objective=RemoveAndReplace()",
                "the other choices: it is defined for Matrix(), Identity(), GradientDescent(), a decay that does not come "
                "first, and window=chunk_size=1 only.",
            )
