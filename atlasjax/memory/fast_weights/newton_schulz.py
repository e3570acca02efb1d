"""Both forms of Newton–Schulz for the XLA engine, with derivatives that use what is symmetric.

The polynomial Q of the Gram form, all matrices of its steps, and their derivatives in a symmetric direction are symmetric, because
they are polynomials of one symmetric matrix. So A Ȧ + Ȧ A is one product and its transpose, and so is the derivative of P A P:

    Ṗ = b Ȧ + c (A Ȧ + Ȧ A)      Q̇_{i+1} = Ṗ Q + P Q̇      Ȧ_{i+1} = Y + Yᵀ,  Y = (½ P Ȧ + Ṗ A) P

The derivatives are written forward, and JAX transposes them. Five steps cost 17 products forward and 25 backward, where derivatives
of each product would cost 34; the direct form's cost three products with S and one small one per step, instead of four and two.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.newton_schulz import forms
from pallas_kernels.newton_schulz.reference import EPSILON, Triple

_MOST_GROWTH = 1000.0  # five steps of any schedule

_dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def _twice_symmetric(x: jax.Array) -> jax.Array:
    return x + x.mT


def _scale(square: jax.Array) -> jax.Array:
    """1 / (‖S‖ + ε) from ‖S‖², zero if S is zero."""
    nonzero = square > 0
    # The derivative of a root at 0 is infinite, also where it is not selected.
    norm = jnp.sqrt(jnp.where(nonzero, square, 1.0))
    return jnp.where(nonzero, 1.0 / (norm + EPSILON), 0.0)


def polynomial(gram: jax.Array, triples: tuple[Triple, ...]) -> jax.Array:
    """Q with NS(S) = Q S, from S Sᵀ (`pallas_kernels.newton_schulz.gram.forward`).

    Args:
      gram: [..., d, d], exactly symmetric, and so are its tangents; at least float32.
      triples: coefficients, one triple per step.

    Returns:
      [..., d, d], symmetric. Zero if S is zero.
    """
    # The trace of S Sᵀ is ‖S‖²_F.
    scale = _scale(jnp.trace(gram, axis1=-2, axis2=-1)[..., None, None])
    identity = jnp.eye(gram.shape[-1], dtype=gram.dtype)
    # Q maps S and not S/‖S‖, so one factor of the scale remains outside.
    return scale * _chain(gram * (scale * scale), triples) if triples else scale * identity


def _polynomial(x: jax.Array, triple: Triple) -> jax.Array:
    a, b, c = triple
    identity = jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape)
    return a * identity + b * x + c * _dot(x, x)


# The steps are jitted, with their coefficients as arguments, so that all steps of all weights share what is traced.


@jax.jit
def _begun(a: jax.Array, triple: Triple) -> jax.Array:
    return _polynomial(a, triple)


@jax.jit
def _continued(a: jax.Array, p: jax.Array, q: jax.Array, triple: Triple) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A, P and Q after one more step."""
    a = _dot(_dot(p, a), p)
    p = _polynomial(a, triple)
    return a, p, _dot(p, q)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _chain(a: jax.Array, triples: tuple[Triple, ...]) -> jax.Array:
    """Q of all steps, at least one, from A_0 with unit trace."""
    q = p = _begun(a, triples[0])
    for triple in triples[1:]:
        a, p, q = _continued(a, p, q, triple)
    return q


_Matrices = tuple[jax.Array, jax.Array, jax.Array]


def _slope(a: jax.Array, da: jax.Array, triple: Triple) -> jax.Array:
    return triple[1] * da + triple[2] * _twice_symmetric(_dot(a, da))


@jax.jit
def _begun_jvp(a: jax.Array, da: jax.Array, triple: Triple) -> jax.Array:
    return _slope(a, da, triple)


@jax.jit
def _continued_jvp(before: _Matrices, after: _Matrices, tangents: _Matrices, triple: Triple) -> _Matrices:
    """The derivatives of A, P and Q after a step from those before it."""
    (a, p, q), (next_a, next_p, _), (da, dp, dq) = before, after, tangents
    da = _twice_symmetric(_dot(0.5 * _dot(p, da) + _dot(dp, a), p))
    dp = _slope(next_a, da, triple)
    return da, dp, _dot(dp, q) + _dot(next_p, dq)


@_chain.defjvp
def _chain_jvp(
    triples: tuple[Triple, ...], primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (a,), (da,) = primals, tangents
    q = p = _begun(a, triples[0])
    dq = dp = _begun_jvp(a, da, triples[0])
    for triple in triples[1:]:
        after = _continued(a, p, q, triple)
        da, dp, dq = _continued_jvp((a, p, q), after, (da, dp, dq), triple)
        a, p, q = after
    return q, dq


def direct(s: jax.Array, triples: Sequence[Triple]) -> jax.Array:
    """The definition, `pallas_kernels.newton_schulz.reference`, of matrices [..., rows ≤ columns, columns] of at least float32."""
    x = s * _scale(jnp.sum(s * s, axis=(-2, -1), keepdims=True))
    for triple in triples:
        x = _step(x, triple)
    return x


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _step(x: jax.Array, triple: Triple) -> jax.Array:
    a, b, c = triple
    gram = _dot(x, x.mT)
    return a * x + _dot(b * gram + c * _dot(gram, gram), x)


@_step.defjvp
def _step_jvp(triple: Triple, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    a, b, c = triple
    gram = _dot(x, x.mT)
    dgram = _twice_symmetric(_dot(dx, x.mT))
    p = b * gram + c * _dot(gram, gram)
    dp = b * dgram + c * _twice_symmetric(_dot(gram, dgram))
    return a * x + _dot(p, x), a * dx + _dot(p, dx) + _dot(dp, x)


def polynomial_is_accurate(triples: Sequence[Triple]) -> bool:
    """Whether Q has at most four times the rounding of the direct form in float32, 4e-4 of the result, instead of a hundred times.

    The first coefficients multiply rounding in the null space of S at each step; here in S Sᵀ, so by their squares.
    """
    return math.prod(a for a, _, _ in triples) <= _MOST_GROWTH


def operations(rows: int, columns: int, steps: int) -> int:
    """Multiplications of `orthogonalized` for one matrix."""
    return forms.operations(rows, columns, steps, forms.cheaper(rows, columns, steps), backward=False) // 2


def orthogonalized(s: jax.Array, triples: tuple[Triple, ...]) -> jax.Array:
    """NS of matrices [..., rows, columns] of at least float32, in the form with fewer operations."""
    transposed = s.shape[-2] > s.shape[-1]
    x = s.mT if transposed else s
    rows, columns = x.shape[-2:]
    if polynomial_is_accurate(triples) and forms.cheaper(rows, columns, len(triples)) == "gram":
        y = _dot(polynomial(_dot(x, x.mT), triples), x)
    else:
        y = direct(x, triples)
    return y.mT if transposed else y
