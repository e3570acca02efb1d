"""Newton–Schulz orthogonalization of a batch of matrices."""

from pallas_kernels.newton_schulz.api import newton_schulz
from pallas_kernels.newton_schulz.reference import EPSILON, SCHEDULES, coefficients

__all__ = ["EPSILON", "SCHEDULES", "coefficients", "newton_schulz"]
