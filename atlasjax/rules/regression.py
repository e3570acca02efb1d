"""Regression: rules whose memory is no step towards the minimum of a loss, but the minimum."""

from typing import Literal

from atlasjax.memory.mesa import MesaRule
from atlasjax.rules.registry import register


@register("W_t = G_t (H_t + Diag(λ))⁻¹, H_t = α H_{t−1} + β k kᵀ, G_t = α G_{t−1} + β v kᵀ")
def mesa(
    solver: Literal["conjugate_gradient", "exact"] = "conjugate_gradient", steps: int = 30, floor: float = 0.25
) -> MesaRule:
    """W_t solves a ridge regression over all tokens (MesaNet, von Oswald et al. 2025, arXiv 2506.05233). The gate η is its β.

    solver, steps, floor: see `memory.MesaRule`.
    """
    return MesaRule(solver, steps, floor)
