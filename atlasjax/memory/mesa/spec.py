"""`MesaRule`: the rule of a memory that is the solution of a ridge regression."""

import dataclasses
from typing import ClassVar, Literal

import numpy as np

from atlasjax import check
from atlasjax.memory.axes import structures
from atlasjax.memory.family import FamilyRule
from atlasjax.memory.gates import Weights
from atlasjax.memory.mesa.state import MesaParams, MesaState
from atlasjax.memory.rule import Sizes

SOLVERS = ("conjugate_gradient", "exact")


@dataclasses.dataclass(frozen=True)
class MesaSpec(FamilyRule[MesaParams, MesaState]):
    """The choices of a `MesaRule`, and what follows from them. `rule` runs it."""

    structure: ClassVar[structures.Structure] = structures.Matrix()

    solver: Literal["conjugate_gradient", "exact"] = "conjugate_gradient"
    steps: int = 30
    floor: float = 0.25

    def __post_init__(self) -> None:
        check.choice("MesaRule", "solver", self.solver, SOLVERS)
        check.integer("MesaRule", "steps", self.steps)
        check.number("MesaRule", "floor", self.floor, above=0)

    @property
    def characteristics(self) -> dict[str, str]:
        """The columns of the table of rules (`table1.Row`), which other rules fill from their parts."""
        by_steps = f"conjugate gradients, {self.steps} steps"
        return {
            "objective": "Σ_i β_i ‖W k_i − v_i‖² + ridge",
            "optimizer": "one solution for each token" if self.solver == "exact" else by_steps,
            "decay": "per head",
            "depth": self.structure.summary(),
            "capacity": "D = d",
            "optimality": "exact minimizer over all tokens",
            "context": "all tokens",
        }

    def gate_channels(self, key_dim: int, value_dim: int | None = None) -> dict[str, int | None]:
        """α is `retention`, β is `step_size`, the weight of a token in the regression."""
        return {"retention": None, "step_size": None}

    def sizes(self, params: MesaParams) -> Sizes:
        heads, value_dim, key_dim = params.weights["W"].shape
        return Sizes(heads, key_dim, value_dim)

    @property
    def reads_are_linear(self) -> bool:
        return False

    @property
    def forgets_fast(self) -> bool:
        """A token's terms of H and G do not depend on earlier tokens."""
        return True

    def suggested_steps(
        self, key_dim: int, value_dim: int, forgetting: np.ndarray, momentum_decay: np.ndarray, window_weights: np.ndarray,
        similar_keys: bool,
    ) -> tuple[np.ndarray, float]:  # fmt: skip
        """β is a weight, of which no value is too large: it starts at 1/2 and ends at 1, as published."""
        return np.full_like(forgetting, 0.5), 1.0

    def cached_weights(self, state: MesaState) -> Weights:
        return {"key_sums": state.key_sums, "value_sums": state.value_sums}
