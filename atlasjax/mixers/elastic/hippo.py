"""HiPPO-LegS in closed form: a history of any length as its first N Legendre coefficients.

Elastic Memory (arXiv 2602.11212) §2, App. E. A signal f over [0, t] is compressed to c_n(t) = 1/t ∫_0^t f(x) g_n(x/t) dx, its
projection on g_n(u) = √(2n+1) P_n(2u − 1), which are orthonormal on [0, 1]. Σ_n c_n g_n(x/t) reconstructs it. c obeys
t c' = −A c + B f with A_nn = n+1, A_nk = √((2n+1)(2k+1)) for n > k, and B_n = √(2n+1) (Gu et al. 2020). Token k occupies
[k, k+1), so the step from `start` to `stop` tokens is linear:

    c(stop) = P c(start) + K f,    P = (start/stop)^A,    K_nj = ∫ g_n over [(start+j)/stop, (start+j+1)/stop]

No matrix power is computed, because A's eigenvectors are too ill-conditioned from N = 16 on. Instead
P_nm = r ∫_0^1 g_n(ru) g_m(u) du with r = start/stop, which N-point Gauss–Legendre quadrature evaluates exactly, and K is a
difference of antiderivatives. Matrices are float64 numpy arrays, computed outside of any trace.
"""

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from numbers import Integral

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from atlasjax import check
from atlasjax.memory.check import check_time
from atlasjax.memory.products import wide_dtype
from atlasjax.mixers.shapes import check_series
from atlasjax.names import lookup


def transition(
    order: int, start: int, stop: int, *, discretization: str = "zoh", legacy_hippo: bool = False
) -> np.ndarray:
    """P, which maps the coefficients after `start` tokens to those after `stop` tokens if the tokens in between are zero.

    Args:
      order: N ≥ 1 coefficients.
      start, stop: numbers of tokens, 0 ≤ start < stop. From start = 0 nothing is kept: P = 0.
      discretization: "zoh" is exact for a signal that is constant over each token. "forward", "backward" and "bilinear" take one
        Euler or trapezoidal step per token, from t = k to k + 1 for token k (the first token, at t = 0, is exact).
      legacy_hippo: number time as the published HiPPO code does: the state is zero at t = 1, token k occupies [k+1, k+2), and the
        Euler and trapezoidal steps of token k use t = k + 1 at both ends.

    Returns:
      float64 [order, order], lower triangular.

    Raises:
      ValueError: an argument is out of range.

    Warns:
      RuntimeWarning: "forward" is unstable and the result is useless. This happens while t is small compared with ‖A‖, about N².
    """
    return block(order, start, stop, discretization=discretization, legacy_hippo=legacy_hippo, parts="P")[0]


def kernel(order: int, start: int, stop: int, *, discretization: str = "zoh", legacy_hippo: bool = False) -> np.ndarray:
    """K, the contribution of tokens start … stop − 1 to the coefficients after `stop` tokens. Arguments as in `transition`.

    Returns:
      float64 [order, stop − start].
    """
    return block(order, start, stop, discretization=discretization, legacy_hippo=legacy_hippo, parts="K")[1]


def block(
    order: int, start: int, stop: int, *, discretization: str = "zoh", legacy_hippo: bool = False, parts: str = "PK"
) -> tuple[np.ndarray, np.ndarray]:
    """(P, K) of `transition` and `kernel` at once. With `parts` "P" or "K", the other one may be returned empty to save work."""
    check.integer("hippo", "order", order, 1, kinds=Integral)
    check.integer("hippo", "start", start, 0, kinds=Integral)
    check.integer("hippo", "stop", stop, start + 1, kinds=Integral)
    check.boolean("hippo", "legacy_hippo", legacy_hippo)
    lookup("discretization", discretization, DISCRETIZATIONS)
    p, k = build(order, start, stop, discretization, legacy_hippo, parts)
    if discretization != "zoh":
        largest = amplification(p, k, stop)
        if not largest <= 1:
            warnings.warn(
                f"hippo: discretization={discretization!r} with order={order} is unstable over tokens {start} to {stop}: it "
                f"amplifies a signal {largest:.1e}-fold, where the exact factor is at most 1. Use 'zoh', which is exact, or a "
                "smaller order.",
                RuntimeWarning,
                stacklevel=3,
            )
    return p, k


def build(
    order: int, start: int, stop: int, discretization: str, legacy_hippo: bool, parts: str = "PK"
) -> tuple[np.ndarray, np.ndarray]:
    """`block` without checks and warnings."""
    steps = DISCRETIZATIONS[discretization]
    if steps is not None:
        return _stepwise(order, start, stop, steps, legacy_hippo)
    first, last = start + legacy_hippo, stop + legacy_hippo
    p = _dilation(order, first / last) if "P" in parts else np.zeros((0, 0))
    if "K" not in parts:
        return p, np.zeros((0, 0))
    return p, np.diff(_antiderivatives(order, np.arange(first, last + 1) / last), axis=1)


def reconstruction(
    order: int,
    positions: Float[np.ndarray, " samples"] | Float[Array, " samples"] | Sequence[float],
    length: float = 1.0,
) -> Float[np.ndarray, "samples order"]:
    """R_jn = g_n(x_j / t), which evaluates the signal at positions x_j in [0, t] from its coefficients.

    R depends only on x_j / t, so the same R serves a growing history.

    Args:
      order: N ≥ 1 coefficients.
      positions: x_j, [samples].
      length: t > 0, in the same unit as the positions.

    Returns:
      float64 [samples, order].

    Raises:
      ValueError: an argument is out of range, or a position is outside [0, length].
    """
    check.integer("hippo", "order", order, 1, kinds=Integral)
    x = check_positions("positions", positions, length)
    return _basis(order, x / length).T


def compress(
    signal: Float[Array, "... time channels"],
    order: int,
    *,
    coefficients: Float[Array, "... order channels"] | None = None,
    start: int = 0,
    discretization: str = "zoh",
    legacy_hippo: bool = False,
) -> Float[Array, "... order channels"]:
    """The coefficients after start + time tokens.

    Args:
      signal: tokens start, start + 1, …, floating point [..., time, channels], time ≥ 1.
      order: N ≥ 1 coefficients per channel.
      coefficients: the coefficients after `start` tokens, [..., order, channels]. None if start is 0.
      start: number of tokens already read, an integer ≥ 0.
      discretization, legacy_hippo: see `transition`.

    Returns:
      [..., order, channels], float32, or float64 for a float64 signal.

    Raises:
      TypeError, ValueError: invalid arguments.
    """
    check_series("compress", "signal", signal, "[..., time ≥ 1, channels]")
    check_time("signal", signal.shape[-2], "compress")
    check.integer("compress", "start", start, 0, kinds=Integral)
    if (coefficients is None) != (start == 0):
        given = "None" if coefficients is None else "given"
        raise ValueError(
            f"compress: start={start} with coefficients {given}: give coefficients if, and only if, start > 0."
        )
    dtype = wide_dtype(signal.dtype)
    if coefficients is not None:
        check_series("compress", "coefficients", coefficients, "[..., order, channels]")
    p, k = block(order, start, start + signal.shape[-2], discretization=discretization, legacy_hippo=legacy_hippo)
    state = apply(jnp.asarray(k, dtype), signal.astype(dtype))
    if coefficients is None:
        return state
    if coefficients.shape != state.shape:
        raise ValueError(f"compress: coefficients has shape {coefficients.shape}, must be {state.shape}.")
    return apply(jnp.asarray(p, dtype), coefficients.astype(dtype)) + state


def reconstruct(
    coefficients: Float[Array, "... order channels"],
    positions: Float[np.ndarray, " samples"] | Float[Array, " samples"] | Sequence[float],
    length: float = 1.0,
) -> Float[Array, "... samples channels"]:
    """The signal at positions in [0, length], from coefficients [..., order, channels]: [..., samples, channels].

    Raises:
      TypeError, ValueError: as for `reconstruction`, or coefficients that are no floating-point array of at least two axes.
    """
    check_series("reconstruct", "coefficients", coefficients, "[..., order, channels]")
    matrix = reconstruction(coefficients.shape[-2], positions, length)
    return apply(jnp.asarray(matrix, wide_dtype(coefficients.dtype)), coefficients)


def apply(matrix: Float[Array, "rows n"], x: Float[Array, "... n channels"]) -> Float[Array, "... rows channels"]:
    """matrix [rows, n] times x [..., n, channels], in full float32 on every device. bfloat16 products are not accurate enough."""
    check.plain_array("hippo.apply", "matrix", matrix)
    check.plain_array("hippo.apply", "x", x)
    return jnp.matmul(matrix, x, precision=jax.lax.Precision.HIGHEST)


def check_length(length: float) -> None:
    """Raises ValueError unless `length` is a number > 0."""
    try:
        positive = math.isfinite(length) and length > 0
    except TypeError:
        positive = False
    if not positive:
        raise ValueError(f"hippo: length must be a number > 0, got {length!r}.")


def check_positions(
    name: str, positions: Float[np.ndarray, " samples"] | Float[Array, " samples"] | Sequence[float], length: float
) -> Float[np.ndarray, " samples"]:
    """Positions as float64 [samples ≥ 1]. Raises ValueError if one is outside [0, length]."""
    check_length(length)
    check.plain_array("hippo", name, positions)
    try:
        x = np.asarray(positions)
        if not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
            raise TypeError  # NumPy would cast dates and complex numbers
        x = x.astype(np.float64)
    except (TypeError, ValueError):
        shown = " ".join(repr(positions).split())[:60]
        raise ValueError(f"hippo: {name} must be numbers [samples ≥ 1], got {shown}.") from None
    if x.ndim != 1 or not x.size:
        raise ValueError(f"hippo: {name} has shape {x.shape}, must be [samples ≥ 1].")
    outside = ~((x >= 0) & (x <= length))
    if outside.any():
        raise ValueError(f"hippo: {name} must lie in [0, {length}], got {x[outside][0]} at index {np.argmax(outside)}.")
    return x


def build_bytes(order: int, block_size: int) -> int:
    """Peak bytes of float64 arrays while one block of the exact discretization is built."""
    return 8 * order * (3 * order + 3 * block_size)


def _legendre(order: int, z: np.ndarray) -> np.ndarray:
    """P_0 … P_{order−1} at z: [order, *z.shape], by the three-term recurrence."""
    p = np.empty((order, *z.shape))
    p[0] = 1.0
    if order > 1:
        p[1] = z
    for n in range(1, order - 1):
        np.multiply(p[n], z * ((2 * n + 1) / (n + 1)), out=p[n + 1])
        p[n + 1] -= (n / (n + 1)) * p[n - 1]
    return p


def _basis(order: int, u: np.ndarray) -> np.ndarray:
    """g_n(u): [order, *u.shape]."""
    g = _legendre(order, 2 * u - 1)
    g *= np.sqrt(2 * np.arange(order) + 1.0)[:, None]
    return g


def _antiderivatives(order: int, u: np.ndarray) -> np.ndarray:
    """∫ g_n up to a constant, [order, *u.shape]: (P_{n+1} − P_{n−1})(2u − 1) / (2√(2n+1)), and u for n = 0."""
    p = _legendre(order + 1, 2 * u - 1)
    out = np.empty((order, *u.shape))
    out[0] = u
    np.subtract(p[2:], p[: order - 1], out=out[1:])
    out[1:] /= 2 * np.sqrt(2 * np.arange(1, order) + 1.0)[:, None]
    return out


@functools.lru_cache(maxsize=2)
def _quadrature(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Gauss–Legendre nodes and weights on [0, 1], exact up to degree 2 · count − 1.

    Newton's method from Tricomi's estimate, for all roots at once. NumPy and SciPy solve an eigenvalue problem first.
    """
    k = np.arange(1, count + 1)
    z = np.cos(np.pi * (k - 0.25) / (count + 0.5)) * (1 - (1 - 1 / count) / (8 * count**2))
    for _ in range(5):
        before, p = np.ones(count), z.copy()
        for n in range(1, count):
            before, p = p, ((2 * n + 1) * z * p - n * before) / (n + 1)
        slope = count * (before - z * p) / (1 - z * z)
        z = z - p / slope
    z, slope = z[::-1], slope[::-1]
    return (z + 1) / 2, 1 / ((1 - z * z) * slope**2)


_TILES = 8


def _dilation(order: int, ratio: float) -> np.ndarray:
    """ratio^A, 0 ≤ ratio < 1."""
    p = np.zeros((order, order))
    if ratio == 0:
        return p
    nodes, weights = _quadrature(order)
    dilated, plain = _basis(order, ratio * nodes), _basis(order, nodes)
    plain *= ratio * weights
    edges = np.linspace(0, order, min(_TILES, order) + 1).astype(int)
    for low, high in itertools.pairwise(edges):  # entries above the diagonal are zero
        np.matmul(dilated[low:high], plain[:high].T, out=p[low:high, :high])
        p[low:high, low:high] = np.tril(p[low:high, low:high])
    return p


# Coefficients (a, b, d) of token k's step (I + a_k A)^{-1} ((I − b_k A) c + d_k B f), given the times t before and after it.
_Steps = Callable[[float, float], tuple[float, float, float]]
DISCRETIZATIONS: dict[str, _Steps | None] = {
    "zoh": None,
    "forward": lambda before, after: (0.0, 1 / before, 1 / before),
    "backward": lambda before, after: (1 / after, 0.0, 1 / after),
    "bilinear": lambda before, after: (0.5 / after, 0.5 / before, 0.5 / before + 0.5 / after),
}


def _stepwise(order: int, start: int, stop: int, steps: _Steps, legacy: bool) -> tuple[np.ndarray, np.ndarray]:
    """Products of one-token steps, from the last token to the first. A row takes O(order) operations, as A is semiseparable.

    Stored transposed, [order (input), order (output)], so that the recurrence runs over contiguous rows.
    """
    n = np.arange(order)
    b = np.sqrt(2 * n + 1.0)
    after = np.eye(order)  # (product of the later steps)ᵀ
    k = np.empty((stop - start, order))
    for token in range(stop - 1, start - 1, -1):
        if token == 0 and not legacy:
            k[0] = after[0]  # at t = 0 the coefficients become those of a constant, whatever the state was
            return np.zeros((order, order)), k.T.copy()
        implicit, explicit, gain = steps(token + 1, token + 1) if legacy else steps(token, token + 1)
        if implicit:
            after = _solve_transposed(implicit, n, b, after)
        k[token - start] = gain * (b @ after)
        if explicit:
            above = b[:, None] * after
            above = np.cumsum(above[::-1], axis=0)[::-1] - above  # Σ over rows below
            after = after - explicit * ((n + 1)[:, None] * after + b[:, None] * above)
    return after.T.copy(), k.T.copy()


def _solve_transposed(step: float, n: np.ndarray, b: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(I + step A)⁻ᵀ y, by substitution from the last row."""
    x = np.empty_like(y)
    below = np.zeros(y.shape[1])
    inverse = 1 / (1 + step * (n + 1))
    for i in range(len(n) - 1, -1, -1):
        x[i] = (y[i] - (step * b[i]) * below) * inverse[i]
        below += b[i] * x[i]
    return x


def amplification(p: np.ndarray, k: np.ndarray, stop: int) -> float:
    """A lower bound of the factor by which P and K, up to `stop` tokens, amplify a signal. Above 1 they are unstable.

    The exact matrices have ‖P‖ ≤ 1 and ‖K‖ ≤ 1/√stop, because a projection does not enlarge a signal.
    """
    return max(float(np.abs(p).max()), float(np.abs(k).max()) * math.sqrt(stop))
