"""Updates NS(S_j) of one weight, for the writing tokens of a block, and what they do to reads and to the memory.

The momenta are S_j = β_j S_0 + Σ_i D[j,i] left_i ⊗ input_i. For a matrix that is wide enough NS(S_j) = Q_j S_j with a polynomial
Q_j of S_j S_jᵀ [r, r], the shorter side, and neither S_j nor NS(S_j) is formed (`Polynomials`). With rows l_i of length r and
columns c_i of length n (left and input, or the other way round if the matrix has more rows than columns):

    S_j S_jᵀ = β_j² S_0 S_0ᵀ + H_j + H_jᵀ        H_j = Σ_i (β_j S_0 c_i + ½ Σ_e D[j,e] (c_e · c_i) l_e) D[j,i] l_iᵀ
    NS(S_j) h = Q_j (β_j S_0 h + Σ_i D[j,i] (c_i · h) l_i)

so a product with n is needed for each block and each query, but not for each write. Matrices for which this takes more operations
(nearly square ones), and memories with a decay per channel, which does not commute with Q, are formed (`Formed`).

Q is symmetric, but its rounding is not. Q S is far more accurate than Qᵀ S: in float32 1e-4 and 1e-2 for momenta of rank 8.
The rounding of S_j S_jᵀ is relative to its largest term: if S_j cancels β_j S_0 to a tenth, Q has a hundred times the rounding.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from atlasjax.memory.blocks import Factors, dot, exact
from atlasjax.memory.fast_weights import newton_schulz
from pallas_kernels.newton_schulz.reference import Triple


class Momenta(NamedTuple):
    """S_j of J writing tokens: start S_0 [out, in], beta [J], coefficients D [J, E], and the factors of E tokens."""

    start: jax.Array
    beta: jax.Array
    coefficients: jax.Array
    factors: Factors

    def last(self) -> jax.Array:
        """The last S_j, [out, in]."""
        left, inputs = self.factors
        return self.beta[-1] * self.start + exact(left.T * self.coefficients[-1][None], inputs)

    def formed(self) -> jax.Array:
        """[J, out, in]."""
        left, inputs = self.factors
        weighed = jnp.swapaxes(self.coefficients[:, :, None] * left[None], 1, 2)
        return self.beta[:, None, None] * self.start[None] + exact(weighed, inputs)


def _side_by_side(x: jax.Array) -> jax.Array:
    """[J, a, b] → [a, J b]."""
    return jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1)


class Formed(NamedTuple):
    """The updates as matrices, [J, out, in]."""

    updates: jax.Array

    def read(self, h: jax.Array, decay: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Σ_j decay[t,j] U_j h_t, [m, out]. h: [m, in]; decay: [m, J] or [m, J, in]."""
        if decay.ndim == 2:
            each = dot(h, self.updates.mT, dtype)
            return jnp.einsum("tj,jto->to", decay, each)
        return jnp.einsum("jto->to", dot(jnp.swapaxes(decay, 0, 1) * h[None], self.updates.mT, dtype))

    def total(self, weights: jax.Array) -> jax.Array:
        """Σ_j weights[j] U_j, [out, in]. weights: [J] or [J, in]."""
        return jnp.einsum("j...i,joi->oi" if weights.ndim == 2 else "j,joi->oi", weights, self.updates)


class Polynomials(NamedTuple):
    """The updates as Q_j S_j of wide matrices, or S_j Q_j of tall ones. All products are exact, because Q enlarges rounding.

    tall: whether `start` is S_0ᵀ. q: [J, r, r]. start: [r, n]. beta: [J]. rows: D[j,i] l_i, [J, E, r]. columns: c_i, [E, n].
    """

    tall: bool
    q: jax.Array
    start: jax.Array
    beta: jax.Array
    rows: jax.Array
    columns: jax.Array

    def read(self, h: jax.Array, decay: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Σ_j decay[t,j] U_j h_t, [m, out]. h: [m, in]; decay: [m, J]."""
        count, _, r = self.rows.shape
        if self.tall:
            each = decay[:, :, None] * exact(h, _side_by_side(self.q)).reshape(-1, count, r)
            started = jnp.einsum("tjr,j->tr", each, self.beta)
            written = exact(each.reshape(-1, count * r), _side_by_side(self.rows).T)
            return exact(started, self.start) + exact(written, self.columns)
        started = exact(h, self.start.T)[:, None] * self.beta[None, :, None]
        written = exact(exact(h, self.columns.T), _side_by_side(self.rows)).reshape(-1, count, r)
        each = decay[:, :, None] * (started + written)
        return exact(each.reshape(-1, count * r), _side_by_side(self.q).T)

    def total(self, weights: jax.Array) -> jax.Array:
        """Σ_j weights[j] U_j, [out, in]. weights: [J]."""
        start = jnp.einsum("j,jrs->rs", weights * self.beta, self.q)
        written = exact(_side_by_side(self.q), _side_by_side(weights[:, None, None] * self.rows).T)
        total = exact(start, self.start) + exact(written, self.columns)
        return total.T if self.tall else total


def updates(momenta: Momenta, triples: tuple[Triple, ...], tokens: int, *, channels: bool) -> Formed | Polynomials:
    """NS of each S_j, in the form with fewer operations. tokens: of the block; channels: whether the memory decays per channel."""
    rows, columns = sorted(momenta.start.shape)
    count, factors = momenta.coefficients.shape
    if channels or not _without_forming(rows, columns, count, factors, tokens, triples):
        return Formed(newton_schulz.orthogonalized(momenta.formed(), triples))
    left, inputs = momenta.factors
    # More rows than columns: Sᵀ in place of S, since Q must be of the shorter side.
    if left.shape[1] > inputs.shape[1]:
        return _polynomials(True, momenta, momenta.start.T, inputs, left, triples)
    return _polynomials(False, momenta, momenta.start, left, inputs, triples)


def _without_forming(r: int, n: int, count: int, factors: int, tokens: int, triples: tuple[Triple, ...]) -> bool:
    """Whether `Polynomials` is accurate and takes fewer multiplications per write than `Formed`."""
    if not triples or not newton_schulz.polynomial_is_accurate(triples):
        return False
    reads = tokens / count
    polynomials = (4 * len(triples) - 3) * r**3 + r * factors * (2 * r + factors) + 2 * r * r * n / count
    polynomials += reads * r * (count * (r + factors) + n)
    formed = newton_schulz.operations(r, n, len(triples)) + r * n * (factors + count * reads)
    return polynomials < formed


def _polynomials(
    tall: bool, momenta: Momenta, start: jax.Array, rows: jax.Array, columns: jax.Array, triples: tuple[Triple, ...]
) -> Polynomials:
    """start: [r, n]; rows: [E, r]; columns: [E, n]."""
    beta = momenta.beta[:, None, None]
    rows = momenta.coefficients[:, :, None] * rows[None]
    # With ½ here, H + Hᵀ counts each pair of gradients once, and the Gram matrix is exactly symmetric.
    half = beta * exact(columns, start.T)[None] + 0.5 * exact(exact(columns, columns.T), rows)
    half = exact(half.mT, rows)
    grams = beta * beta * exact(start, start.T)[None] + (half + half.mT)
    return Polynomials(tall, newton_schulz.polynomial(grams, triples), start, momenta.beta, rows, columns)
