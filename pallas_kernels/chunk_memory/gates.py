"""The gates of one chunk as columns, the products of its decays, and the resulting coefficients of its gradients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import from_start, iota, product, row_of
from pallas_kernels.triangular import decay_products


class Gates(NamedTuple):
    """Columns [m, 1], where retention, momentum_decay and floor may be None (see `MemoryChunk`).
    window_weights: γ [m, c], None for c = 1."""

    step: jax.Array
    real: jax.Array
    retention: jax.Array | None
    momentum_decay: jax.Array | None
    floor: jax.Array | None
    window_weights: jax.Array | None


class Decays(NamedTuple):
    """start: a_t = α_0 … α_t, [m, 1]. pairwise: T_α, [m, m], zero in the columns of padding, which adds no S.
    momentum_start: β_t = θ_0 … θ_t, [m, 1]. momentum: T_θ, [m, m]. started: s_t, the coefficient of S_0 in M_t, [m, 1].
    None without retention or momentum."""

    start: jax.Array | None
    pairwise: jax.Array
    momentum_start: jax.Array | None
    momentum: jax.Array | None
    started: jax.Array | None


def decays(gates: Gates) -> Decays:
    m = gates.step.shape[0]
    a = beta = products = s = None
    if gates.retention is None:
        pairwise = (iota(m, 0) >= iota(m, 1)).astype(jnp.float32)
    else:
        pairwise = decay_products(gates.retention)
        a = from_start(gates.retention, pairwise)
    pairwise = pairwise * row_of(gates.real)
    if gates.momentum_decay is not None:
        products = decay_products(gates.momentum_decay)
        beta = from_start(gates.momentum_decay, products)
        s = product(pairwise, beta, 1, 0)
    return Decays(a, pairwise, beta, products, s)


def coefficients(decays: Decays, step: jax.Array, gamma: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """C [m, E] and, with momentum, D [m, E], from step sizes [m, 1]. gamma: Γ [m, E], None for the identity."""
    if gamma is None:
        m = step.shape[0]
        D = jnp.where(iota(m, 0) == iota(m, 1), -step, 0.0)
    else:
        D = -step * gamma
    if decays.momentum is None:
        return product(decays.pairwise, D, 1, 0), None
    D = product(decays.momentum, D, 1, 0)
    return product(decays.pairwise, D, 1, 0), D


def window_matrix(gamma: jax.Array, before: int) -> jax.Array:
    """Γ [m, before + m] from γ [m, c]. Γ[t, i] weights token i; the first `before` tokens precede the chunk."""
    m, window = gamma.shape
    shape = (m, before + m)
    age = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + before - jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    total = jnp.zeros(shape, jnp.float32)
    for j in range(window):
        total = total + jnp.where(age == j, gamma[:, j : j + 1], 0.0)
    return total
