"""Both forms of Newton–Schulz and their backward passes for a few matrices [d, n], d ≤ n, on chip. Called by kernels."""

import functools
from collections.abc import Sequence

import jax

from pallas_kernels.blocks import product
from pallas_kernels.newton_schulz import direct, gram
from pallas_kernels.newton_schulz.reference import Triple

FORMS = ("direct", "gram")
GRAM_STEPS = 7  # beyond this the Gram form's rounding errors in the null space dominate the result


def _products(precision: jax.lax.Precision) -> tuple[gram.Dot, gram.Dot, gram.Dot]:
    """x y, x yᵀ and xᵀ y, accumulated in float32."""
    of = functools.partial(functools.partial, product, precision=precision)
    return of(x_axis=1, y_axis=0), of(x_axis=1, y_axis=1), of(x_axis=0, y_axis=0)


def forward(
    matrices: Sequence[jax.Array], triples: Sequence[Triple], form: str, precision: jax.lax.Precision
) -> list[jax.Array]:
    """NS of each matrix."""
    dot, dot_t, _ = _products(precision)
    if form == "direct":
        return direct.forward(dot, dot_t, matrices, triples)[0]
    qs, _ = gram.forward(dot, [dot_t(x, x) for x in matrices], triples)
    return [dot(q, x) for q, x in zip(qs, matrices)]


def backward(
    matrices: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
    triples: Sequence[Triple],
    form: str,
    precision: jax.lax.Precision,
) -> list[jax.Array]:
    """The cotangent of each matrix from that of its NS. The steps are recomputed."""
    dot, dot_t, t_dot = _products(precision)
    if form == "direct":
        _, before = direct.forward(dot, dot_t, matrices, triples)
        return direct.backward(dot, dot_t, t_dot, matrices, triples, before, cotangents)
    grams = [dot_t(x, x) for x in matrices]
    qs, steps = gram.forward(dot, grams, triples)
    dqs = [dot_t(d, x) for d, x in zip(cotangents, matrices)]
    dgrams = gram.backward(dot, grams, triples, steps, dqs)
    return [dot(q, d) + dot(p, x) + t_dot(p, x) for q, d, p, x in zip(qs, cotangents, dgrams, matrices)]


def operations(rows: int, columns: int, steps: int, form: str, *, backward: bool) -> int:
    """Floating-point operations of the products for one matrix: a matrix unit's lower bound, and the cost given to the compiler."""
    large, small = 2 * rows * rows * columns, 2 * rows**3
    if form == "direct":
        step = 2 * large + small
        # all steps except the last again, then X Xᵀ, dX' Xᵀ and three products with X or dX', A², A dP and dP A
        return steps * step if not backward else max(steps - 1, 0) * step + steps * (5 * large + 3 * small)
    chain = steps * small + (steps - 1) * 3 * small if steps else 0
    if not backward:
        return 2 * large + chain
    # each step: dQ Q, dP A, A dP, P dQ; all but the last: four more for the cotangent of the next A
    return 2 * large + chain + steps * 4 * small + max(steps - 1, 0) * 4 * small + 3 * large


def cheapest(rows: int, columns: int, steps: int, precision: jax.lax.Precision) -> tuple[str, jax.lax.Precision]:
    """The form and the precision of its products that take the fewest passes of a TPU's matrix unit.

    `precision` is HIGH or HIGHEST, of the direct form. The Gram form is exact, because it squares small singular values: three
    passes leave errors of several percent in it, and of 1e-3 in the direct form.
    """
    passes = {jax.lax.Precision.HIGH: 3, jax.lax.Precision.HIGHEST: 6}
    exact = jax.lax.Precision.HIGHEST
    found = [("direct", precision), *([("gram", exact)] if steps <= GRAM_STEPS else [])]
    return min(found, key=lambda of: passes[of[1]] * operations(rows, columns, steps, of[0], backward=False))


def cheaper(rows: int, columns: int, steps: int) -> str:
    """The form with fewer operations among those that are accurate enough for this number of steps."""
    return cheapest(rows, columns, steps, jax.lax.Precision.HIGHEST)[0]
