"""Newton–Schulz: an odd matrix polynomial that drives every singular value towards one.

    X_0 = S / (‖S‖_F + ε),   X ← a X + (b A + c A²) X   with   A = X Xᵀ          (Muon; ATLAS §5)

The coefficients are data. A schedule is a sequence of triples, one per step, whose last triple is used for all further steps.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

EPSILON = 1e-7  # added to the norm, so that a matrix of zeros stays one

Triple = tuple[float, float, float]

# Amsel, Persson, Musco, Gower 2025 (arXiv 2505.16932): the published degree-5 table for singular values in [1e-3, 1].
# The authors divide all triples except the last, exact one by powers of 1.01, as a margin against rounding above one.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)

SCHEDULES: dict[str, tuple[Triple, ...]] = {
    # Muon's constants: fast, but not convergent. Singular values end up in about [0.68, 1.13].
    "standard": ((3.4445, -4.7750, 2.0315),),
    # Convergent: near-optimal early steps, then the quintic with derivative zero at one.
    "polar_express": (
        *((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in _POLAR_EXPRESS),
        (1.875, -1.25, 0.375),
    ),
    # LaCT's five steps (arXiv 2505.23884), each with other coefficients. Singular values above 3e-3 end up in [0.97, 1.15].
    "lact": (
        (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}  # fmt: skip


def coefficients(schedule: Sequence[Triple], steps: int) -> tuple[Triple, ...]:
    """The triples of the first `steps` steps of a schedule, with the last one repeated as needed."""
    return tuple(schedule[min(i, len(schedule) - 1)] for i in range(steps))


def wide(s: jax.Array) -> jax.Array:
    """In float32, or in float64 if it is."""
    return s if s.dtype == jnp.float64 else s.astype(jnp.float32)


def _normalize(s: jax.Array) -> jax.Array:
    square = jnp.sum(s * s, axis=(-2, -1), keepdims=True)
    nonzero = square > 0
    # The double `where` makes both the value and the derivative at S = 0 zero instead of NaN.
    norm = jnp.sqrt(jnp.where(nonzero, square, 1.0))
    return jnp.where(nonzero, s / (norm + EPSILON), 0.0)


def newton_schulz(s: jax.Array, steps: int = 5, schedule: Sequence[Triple] = SCHEDULES["standard"]) -> jax.Array:
    """Newton–Schulz of each matrix in a batch, in at least float32.

    Args:
      s: [..., rows, columns], floating point. A matrix with more rows than columns is transposed for the iteration.
      steps: number of steps, ≥ 0; 0 only normalizes. Rounding errors in the null space grow by the first coefficient in each step,
        so results of different machines agree only for about 7 steps with the standard schedule.
      schedule: triples (a, b, c), one per step; the last one repeats.

    Returns:
      An array of the shape of `s`, float32 (float64 for float64 input). A zero matrix gives zero, with derivative zero.
    """
    transposed = s.shape[-2] > s.shape[-1]
    x = wide(s)
    x = _normalize(x.mT if transposed else x)
    # A TPU's default float32 product is bfloat16, which gives noise for the rank-deficient momenta at a sequence's start.
    matmul = lambda p, q: jnp.matmul(p, q, precision=jax.lax.Precision.HIGHEST)
    for a, b, c in coefficients(schedule, steps):
        gram = matmul(x, x.mT)
        x = a * x + matmul(b * gram + c * matmul(gram, gram), x)
    return x.mT if transposed else x
