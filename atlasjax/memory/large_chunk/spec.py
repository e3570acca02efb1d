"""`LargeChunkSpec`: what a `LargeChunkRule` is."""

import dataclasses
from typing import ClassVar

import jax
import numpy as np
from jaxtyping import Array, Float

from atlasjax import check
from atlasjax.memory.axes import features as features_lib
from atlasjax.memory.axes import objectives, optimizers, structures
from atlasjax.memory.axes import retention as retention_lib
from atlasjax.memory.axes.base import check_choice
from atlasjax.memory.bounds import largest_norm
from atlasjax.memory.family import FamilyRule
from atlasjax.memory.fast_weights.state import MemoryParams
from atlasjax.memory.large_chunk.state import LargeChunkState
from atlasjax.names import lookup
from pallas_kernels.newton_schulz import SCHEDULES, coefficients
from pallas_kernels.newton_schulz.reference import Triple

NEWTON_SCHULZ_STEPS = 5  # as published; "lact" has as many triples


@dataclasses.dataclass(frozen=True)
class LargeChunkSpec(FamilyRule[MemoryParams, LargeChunkState]):
    """The choices of a `LargeChunkRule`, and what follows from them. `rule` runs it."""

    # Traits that the checks of parts and the table of rules ask of every rule. This one has no choice of them.
    features: ClassVar[features_lib.Features] = features_lib.Identity()
    retention: ClassVar[retention_lib.Retention] = retention_lib.Full()
    window: ClassVar[int] = 1
    step_bound: ClassVar[float | None] = None

    structure: structures.Structure = structures.SwiGLU()
    objective: objectives.Objective = objectives.DotProduct()
    chunk_size: int = 2048
    momentum: bool = False
    schedule: str | None = None
    row_norm: bool = True

    def __post_init__(self) -> None:
        check_choice("LargeChunkRule", "structure", self.structure, structures.Structure)
        check_choice("LargeChunkRule", "objective", self.objective, objectives.Objective)
        check.integer("LargeChunkRule", "chunk_size", self.chunk_size)
        for name in ("momentum", "row_norm"):
            check.boolean("LargeChunkRule", name, getattr(self, name))
        if self.schedule is not None:
            lookup("Newton–Schulz schedule", self.schedule, SCHEDULES)
        if self.objective.own_keys or not self.objective.uses_step_size:
            raise ValueError(
                f"LargeChunkRule: objective is {self.objective!r}, must be one that writes at the key alone, with a step size."
            )

    @property
    def triples(self) -> tuple[Triple, ...] | None:
        """The coefficients of the Newton–Schulz steps, None if writes are not orthogonalized."""
        return None if self.schedule is None else coefficients(SCHEDULES[self.schedule], NEWTON_SCHULZ_STEPS)

    @property
    def optimizer(self) -> optimizers.Optimizer:
        """The optimizer of which a whole chunk is one step."""
        if self.schedule is not None:
            return optimizers.Muon(NEWTON_SCHULZ_STEPS, self.schedule)
        return optimizers.Momentum() if self.momentum else optimizers.GradientDescent()

    @property
    def limited_objective(self) -> objectives.Objective:
        """The loss whose gradients are taken."""
        return self.objective

    @property
    def names(self) -> tuple[str, ...]:
        """The weights in the order of `structure.weight_shapes`, which is that of the step sizes."""
        return tuple(self.structure.weight_shapes(1, 1))

    def gate_channels(self, key_dim: int, value_dim: int | None = None) -> dict[str, int | None]:
        """The gates of this rule: `step_size` with a channel for each weight, `momentum_decay` and `threshold` if they are used."""
        gates: dict[str, int | None] = {"step_size": len(self.names)}
        if self.momentum:
            gates["momentum_decay"] = None
        if self.objective.uses_threshold:
            gates["threshold"] = None
        return gates

    @property
    def has_constant_gradient(self) -> bool:
        return False  # also where gradients are constant: a read at the chunk's start depends on where that is

    @property
    def has_residual(self) -> bool:
        return self.structure.residual

    @property
    def reads_are_linear(self) -> bool:
        return self.structure.is_matrix

    @property
    def has_fixed_steps(self) -> bool:
        return self.schedule is not None

    @property
    def undivided(self) -> str | None:
        return None

    @property
    def part_multiple(self) -> int:
        return 1

    @property
    def undivided_documents(self) -> str | None:
        return "chunks begin with their documents, so how devices share them out would depend on the ids"

    def weight_norm(self, state: LargeChunkState) -> Float[Array, "batch heads"]:
        """The largest ‖W‖_F / √rows over the weights."""
        return largest_norm(jax.lax.stop_gradient(state.memory))

    def suggested_steps(
        self, key_dim: int, value_dim: int, forgetting: np.ndarray, momentum_decay: np.ndarray,
        window_weights: np.ndarray, similar_keys: bool,
    ) -> tuple[np.ndarray, float]:  # fmt: skip
        """The step sizes of LaCT: 0.001, and up to 16 times as much."""
        return np.full_like(forgetting, 1e-3), 16e-3
