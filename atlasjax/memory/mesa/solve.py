"""Solving (H_t + Diag(λ)) x_t = q_t for many tokens of one head together, and the derivatives of x_t.

By conjugate gradients (Hestenes & Stiefel 1952) no H_t is formed. Each step multiplies the tokens' directions p_t by their H_t,
which for a chunk with H_0 before it is

    H_t p_t = a_t H_0 p_t + Σ_{i≤t} P[t,i] β_i (k_i · p_t) k_i        a_t = α_1 … α_t, P[t,i] = α_{i+1} … α_t

so a step of all tokens is three products of matrices. Every solve starts at x = 0, in sequences and in decoding, so a token's
result does not depend on how the sequence is divided into calls.

The derivatives are those of the solution, not of the steps: with cotangent x̄ of x, u = (H_t + Diag(λ))⁻¹ x̄ is one more solve with
the same symmetric matrix, and the cotangents are u of q_t and −u_t x_tᵀ of H_t (`jax.lax.custom_linear_solve`).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from atlasjax.memory.blocks import row_sums
from atlasjax.memory.mesa.spec import MesaSpec
from pallas_kernels.varying import vary_like

Rows = Float[Array, "tokens key_dim"]


def solve(
    rule: MesaSpec,
    apply: Callable[[Rows], Rows],
    form: Callable[[], Float[Array, "matrices key_dim key_dim"]],
    q: Rows,
) -> Rows:
    """x_t of tokens of one head, at least float32.

    Args:
      apply: multiplies a direction of each token by its H_t + Diag(λ), which is symmetric and positive definite.
      form: these matrices, one for each token, or one for all. Used by the solver "exact" only.
      q: the right sides.
    """
    if rule.solver == "exact":
        # The factorization is inside, so that the backward pass keeps x and not one matrix for each token.
        by = lambda _, right: _by_cholesky(form(), right)
    else:
        by = lambda apply, right: _by_steps(apply, right, rule.steps)
    # Its derivative is one more solution with the same matrix, not the derivative of the steps.
    return jax.lax.custom_linear_solve(apply, q, by, symmetric=True)


def _by_cholesky(matrices: Float[Array, "matrices key_dim key_dim"], right: Rows) -> Rows:
    lower = jnp.linalg.cholesky(matrices)
    if len(lower) == 1:  # of all tokens
        return jax.scipy.linalg.cho_solve((lower[0], True), right.T).T
    return jax.vmap(lambda lower, b: jax.scipy.linalg.cho_solve((lower, True), b))(lower, right)


def _by_steps(apply: Callable[[Rows], Rows], right: Rows, steps: int) -> Rows:
    """Conjugate gradients from x = 0, a fixed number of steps for every token."""
    # ‖r_0‖², since x starts at zero.
    square = row_sums(right * right)
    # Where the residual has reached rounding, a token stays as it is. Its quotients would be those of rounding errors, and 0/0.
    done = square * float(jnp.finfo(right.dtype).eps) ** 2
    quotient = lambda a, b, holds: jnp.where(holds, a / jnp.where(holds, b, 1.0), 0.0)

    def step(_: int, carry: tuple[Rows, ...]) -> tuple[Rows, ...]:
        x, residual, direction, size = carry
        image = apply(direction)
        curvature = row_sums(direction * image)
        along = quotient(size, curvature, (size > done) & (curvature > 0))[:, None]
        x, residual = x + along * direction, residual - along * image
        after = row_sums(residual * residual)
        return x, residual, residual + quotient(after, size, size > done)[:, None] * direction, after

    carry = vary_like((jnp.zeros_like(right), right, right, square), apply(right))
    return jax.lax.fori_loop(0, steps, step, carry)[0]
