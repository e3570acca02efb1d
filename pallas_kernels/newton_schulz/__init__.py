"""Newton–Schulz orthogonalization of a batch of matrices."""

from pallas_kernels.newton_schulz.reference import EPSILON, SCHEDULES, coefficients, newton_schulz

__all__ = ["EPSILON", "SCHEDULES", "coefficients", "newton_schulz"]
