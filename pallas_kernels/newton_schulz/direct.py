"""The direct form of Newton–Schulz and its backward pass, for lists of matrices [d, n] with d ≤ n. Shared by all kernels."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.newton_schulz.gram import Dot
from pallas_kernels.newton_schulz.reference import EPSILON, Triple


def _norm(s: jax.Array) -> tuple[jax.Array, jax.Array]:
    """‖S‖ [1, 1], or 1 if S is zero, and whether S is nonzero."""
    square = jnp.sum(jnp.sum(s * s, axis=1, keepdims=True), axis=0, keepdims=True)
    nonzero = square > 0
    return jnp.sqrt(jnp.where(nonzero, square, 1.0)), nonzero


def forward(
    dot: Dot, dot_t: Dot, matrices: Sequence[jax.Array], triples: Sequence[Triple]
) -> tuple[list[jax.Array], list[list[jax.Array]]]:
    """NS of each matrix, and X_0, X_1, …, the iterates before each step.

    Args:
      dot: (x, y) → x y; dot_t: (x, y) → x yᵀ.
    """
    xs = []
    for s in matrices:
        norm, nonzero = _norm(s)
        xs.append(jnp.where(nonzero, s / (norm + EPSILON), 0.0))
    before = []
    for a, b, c in triples:
        before.append(xs)
        grams = [dot_t(x, x) for x in xs]
        polynomials = [b * gram + c * dot(gram, gram) for gram in grams]
        xs = [a * x + dot(p, x) for p, x in zip(polynomials, xs)]
    return xs, before


def backward(
    dot: Dot,
    dot_t: Dot,
    t_dot: Dot,
    matrices: Sequence[jax.Array],
    triples: Sequence[Triple],
    before: Sequence[Sequence[jax.Array]],
    cotangents: Sequence[jax.Array],
) -> list[jax.Array]:
    """Cotangents of the matrices; `t_dot`: (x, y) → xᵀ y."""
    ds: list[jax.Array] = list(cotangents)
    for (a, b, c), xs in zip(reversed(triples), reversed(before)):
        grams = [dot_t(x, x) for x in xs]
        polynomials = [b * gram + c * dot(gram, gram) for gram in grams]  # symmetric
        dps = [dot_t(d, x) for d, x in zip(ds, xs)]
        dgrams = [b * dp + c * (dot(dp, gram) + dot(gram, dp)) for dp, gram in zip(dps, grams)]
        ds = [
            a * d + dot(p, d) + dot(dgram, x) + t_dot(dgram, x)
            for d, p, dgram, x in zip(ds, polynomials, dgrams, xs)
        ]  # fmt: skip
    out = []
    for s, d in zip(matrices, ds):
        norm, nonzero = _norm(s)
        inner = jnp.sum(jnp.sum(s * d, axis=1, keepdims=True), axis=0, keepdims=True)
        scale = 1.0 / (norm + EPSILON)
        out.append(jnp.where(nonzero, scale * d - (scale * scale * inner / norm) * s, 0.0))
    return out
