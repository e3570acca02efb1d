"""Newton–Schulz orthogonalization of a batch of matrices."""

from pallas_kernels.newton_schulz.api import MOST_COLUMNS, MOST_ROWS, newton_schulz
from pallas_kernels.newton_schulz.reference import EPSILON, SCHEDULES, coefficients

__all__ = ["EPSILON", "MOST_COLUMNS", "MOST_ROWS", "SCHEDULES", "coefficients", "newton_schulz"]
