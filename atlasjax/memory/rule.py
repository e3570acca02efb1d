"""`MemoryRule`: one row of the design space, as a value."""

import dataclasses

from atlasjax.memory import features as features_lib
from atlasjax.memory import objectives, optimizers, structures
from atlasjax.memory import retention as retention_lib


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
      objective: the inner loss ℓ: `L2`, `DotProduct`, `Lp` or `Huber`.
      features: the feature map φ of keys and queries: `Identity`, `Polynomial`, `Powers` or `TensorSketch`.
      optimizer: `GradientDescent`, `Momentum` or `Muon`.
      retention: `Full`, `Scalar` or `Channel`.
      window: c ≥ 1, the number of last tokens whose loss every step descends on (the Omega rule); 1 is the online rule.
      chunk_size: b ≥ 1. Part of the model: gradients are taken at the memory of the chunk's start; 1 is exact online
        learning. (Without effect for a matrix memory under the dot-product loss without Muon.)

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
        for name in ("window", "chunk_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"MemoryRule: {name} must be an integer ≥ 1, got {value!r}.")
        if isinstance(self.retention, retention_lib.Channel) and not isinstance(self.structure, structures.Matrix):
            raise ValueError(
                "MemoryRule: retention=Channel() clashes with structure="
                f"{self.structure!r}: a decay per feature channel is defined for Matrix() only. Use retention=Scalar()."
            )
        if isinstance(self.optimizer, optimizers.Muon) and self.chunk_size % self.optimizer.every:
            raise ValueError(
                f"MemoryRule: optimizer=Muon(every={self.optimizer.every}) clashes with chunk_size={self.chunk_size}: "
                "`every` must divide the chunk size."
            )

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
    def is_online_delta(self) -> bool:
        """Whether this is W_t = α_t W_{t−1} − η_t (W_{t−1} φ(k) − v) φ(k)ᵀ: then many tokens can be taken at once, exactly."""
        return (
            isinstance(self.structure, structures.Matrix)
            and isinstance(self.objective, objectives.L2)
            and isinstance(self.optimizer, optimizers.GradientDescent)
            and not isinstance(self.retention, retention_lib.Channel)
            and self.window == self.chunk_size == 1
        )

    def gate_channels(self, key_dim: int) -> dict[str, int | None]:
        """The gates of this rule: name → number of channels (an axis after heads), or None for one scalar per token and head.

        Args:
          key_dim: size of a key; per-channel retention has one α for each of the `features.dim(key_dim)` channels.
        """
        gates: dict[str, int | None] = {}
        if isinstance(self.retention, retention_lib.Scalar):
            gates["retention"] = None
        elif isinstance(self.retention, retention_lib.Channel):
            gates["retention"] = self.features.dim(key_dim)
        gates["step_size"] = None
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
