"""Newton–Schulz orthogonalization of a batch of matrices."""

from pallas_kernels.newton_schulz.reference import SCHEDULES, coefficients, newton_schulz

__all__ = ["SCHEDULES", "coefficients", "newton_schulz"]
