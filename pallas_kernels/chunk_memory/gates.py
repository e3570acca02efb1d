"""The gates of one chunk, the products of its decays, and the resulting coefficients of its gradients.

Matrices of tokens [m, P · m] are of P heads side by side (`side_by_side`). Columns of tokens are in all lanes of their head,
[m, P · m], or for one head [m, 1].
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import HIGHEST, Precision, entry
from pallas_kernels.side_by_side import first_column, place, times
from pallas_kernels.triangular import decay_products


class Gates(NamedTuple):
    """Rows [1, P · m], where all after `real` may be None (see `MemoryChunk`)."""

    step: jax.Array
    real: jax.Array
    retention: jax.Array | None
    momentum_decay: jax.Array | None
    write_size: jax.Array | None
    floor: jax.Array | None
    threshold: jax.Array | None


class Decays(NamedTuple):
    """start: a_t = α_0 … α_t, a column. pending: T_α diag(β) T_θ [m, P · m], or T_α without momentum, with β = 0 for padding, which
    adds no S. momentum_start: b_t = θ_0 … θ_t, a column. momentum: T_θ [m, P · m]. started: s_t, the coefficient of S_0 in M_t, a
    column. None without retention or momentum."""

    start: jax.Array | None
    pending: jax.Array
    momentum_start: jax.Array | None
    momentum: jax.Array | None
    started: jax.Array | None


class Coefficients(NamedTuple):
    """Coefficients of windowed gradients Σ_i Γ[t,i] ∇_i, and of the carry.

    memory: C Γ⁻¹ [m, P · m], of gradients in M_t. start, started: a and s, of M_0 and S_0. momentum: of gradients in S at the
    chunk's end, a row; momentum_start: of S_0, [1, …].
    """

    memory: jax.Array
    start: jax.Array | None
    started: jax.Array | None
    momentum: jax.Array | None
    momentum_start: jax.Array | None


def decays(gates: Gates, heads: int = 1, precision: Precision = HIGHEST) -> Decays:
    """`precision` is that of their products."""
    m = gates.step.shape[1] // heads
    shape = m, heads * m
    row, lane = place(shape, 0, heads), place(shape, 1, heads)
    a = momentum_start = products = s = None
    if gates.retention is None:
        pairwise = (row >= lane).astype(jnp.float32)
    else:
        pairwise, a = decay_products(gates.retention, heads, precision)
    pending = pairwise * (gates.real if gates.write_size is None else gates.write_size)
    if gates.momentum_decay is not None:
        products, momentum_start = decay_products(gates.momentum_decay, heads, precision)
        pending = times(pending, products, heads, precision)
        s = entry(momentum_start, 0) * first_column(pending, heads)
    return Decays(a, pending, momentum_start, products, s)


def coefficients(decays: Decays, step: jax.Array) -> Coefficients:
    """From step sizes as a row."""
    last = decays.pending.shape[0] - 1
    momentum = None if decays.momentum is None else entry(decays.momentum, last) * -step
    momentum_start = None if decays.momentum_start is None else entry(decays.momentum_start, last)
    return Coefficients(decays.pending * -step, decays.start, decays.started, momentum, momentum_start)


def window_matrix(gamma: jax.Array, before: int) -> jax.Array:
    """Γ [m, before + m] from γ [m, c]. Γ[t, i] weights token i; the first `before` tokens precede the chunk."""
    m, window = gamma.shape
    shape = (m, before + m)
    age = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + before - jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    total = jnp.zeros(shape, jnp.float32)
    for j in range(window):
        total = total + jnp.where(age == j, gamma[:, j : j + 1], 0.0)
    return total
