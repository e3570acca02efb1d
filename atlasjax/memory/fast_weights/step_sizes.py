"""Step sizes of a block of tokens of one head under `Bound.step`. The docstring of `bounds` has the recurrence.

With the tokens' memories in the form of `blocks`, x_t is linear in the steps of the block's earlier tokens, which are the only
unknowns:

    x_t = ⟨G_t, a_{t−1} M_0 + s_{t−1} S_0 − M_{t'}⟩ + u_t b_{t−1} ⟨G_t, S_0⟩
          − Σ_{j<t} (T_α diag(β) T_θ + u T_θ)[t−1, j] η'_j ⟨G_t, G_j⟩

with G_t = Σ_i Γ[t,i] ∇_i and u_t = H θ_t. Row t − 1 belongs to the previous token, or to the start of the block for t = 0.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from atlasjax.memory import bounds
from atlasjax.memory.blocks import (
    BlockGates,
    Decays,
    Factors,
    applied,
    before,
    capped,
    decay_products,
    exact,
    gram,
    row_sums,
    scaled_columns,
    scaled_rows,
)
from atlasjax.memory.gates import Weights


class Losses(NamedTuple):
    """a, n and ⟨∇_i, M_{t'}⟩ of the E tokens of a block and of the window before it: [E]."""

    decrease: jax.Array
    scale: jax.Array
    along: jax.Array


class Origin(NamedTuple):
    """The reference point for the bounded steps of a block.

    Attributes:
      step: `Bound.step`, divided by H.
      horizon: H, `MemoryRule.horizon`.
      weights: M_{t'} as stored, name → [out, in].
      gradients: the factors of ∇_i, never scaled by step sizes. (A block's own factors are, with one step size per channel.)
      losses: the `Losses` of the E tokens.
      moved: static, whether the block's start can differ from M_{t'}.
      capped: static, whether the gates already hold η̄.
    """

    step: float
    horizon: float
    weights: Weights
    gradients: dict[str, Factors]
    losses: Losses
    moved: bool
    capped: bool


def _capped(origin: Origin, gates: BlockGates, decrease: jax.Array, square: jax.Array) -> jax.Array:
    if origin.capped:
        return gates.step_size
    return capped(origin.step, gates.step_size, decrease, square)


def _along(gradients: dict[str, Factors], weights: Weights) -> jax.Array:
    """⟨∇_i, W⟩, summed over all weights: [E]."""
    parts = [row_sums(left * applied(h, weights[name], h.dtype)) for name, (left, h) in gradients.items()]
    return sum(parts[1:], parts[0])


def _products(a: dict[str, Factors], b: dict[str, Factors]) -> jax.Array:
    """⟨∇_i, ∇_j⟩, summed over all weights: [E, E]."""
    of_rows = lambda x, y: gram(x) if x is y else applied(x, y, x.dtype)
    parts = [of_rows(a[name].left, b[name].left) * of_rows(a[name].inputs, b[name].inputs) for name in a]
    return sum(parts[1:], parts[0])


def dual_steps(
    memory: Weights,
    momentum: Weights | None,
    origin: Origin,
    factors: dict[str, Factors],
    gates: BlockGates,
    decays: Decays,
) -> jax.Array:
    """η' [m] of a block with scalar retention, without forming gradients. Arguments as in `dual.dual_block`."""
    m = gates.step_size.shape[0]
    diagonal = jnp.eye(m, dtype=bool)
    products = _products(origin.gradients, factors)
    if gates.gamma.shape[1] == m:  # no window: Γ is diagonal
        own = row_sums(jnp.where(diagonal, gates.gamma, 0.0))
        windowed = lambda x: own * x
        products = scaled_columns(own, scaled_rows(own, products))
    else:
        windowed = lambda x: exact(gates.gamma, x)
        products = exact(windowed(products), gates.gamma.T)
    step_size = _capped(origin, gates, windowed(origin.losses.decrease), row_sums(jnp.where(diagonal, products, 0.0)))

    moved = jnp.zeros_like(step_size)
    a = None if decays.start is None else before(decays.start, 1.0)
    if a is not None:
        # ⟨G, a M_{t'} − M_{t'}⟩ from what `gradient_factors` has already summed.
        moved = moved + (a - 1.0) * windowed(origin.losses.along)
    if origin.moved:
        change = jax.tree.map(jnp.subtract, memory, origin.weights)
        change = windowed(_along(origin.gradients, change))
        moved = moved + (change if a is None else a * change)
    # Row t belongs to t − 1: a token's step depends on the memory before it.
    across = before(decays.pairwise, 0.0)
    if momentum is not None:
        assert gates.momentum_decay is not None
        assert decays.momentum is not None
        assert decays.momentum_start is not None
        assert decays.started is not None
        pending = origin.horizon * gates.momentum_decay
        share = before(decays.started, 0.0) + pending * before(decays.momentum_start, 1.0)
        moved = moved + share * windowed(_along(origin.gradients, momentum))
        across = exact(across, decays.momentum) + scaled_rows(pending, before(decays.momentum, 0.0))
    return step_size * bounds.solve(moved, windowed(origin.losses.scale), scaled_columns(step_size, across * products))


def channel_steps(
    memory: Weights,
    momentum: Weights | None,
    origin: Origin,
    factors: dict[str, Factors],
    gates: BlockGates,
) -> jax.Array:
    """η' [m] of a short block whose gradients may be formed, for a retention per channel."""
    highest = jax.lax.Precision.HIGHEST
    m = gates.step_size.shape[0]
    form = lambda all_factors: {
        name: jnp.einsum("te,eo,ei->toi", gates.gamma, left, h, precision=highest)
        for name, (left, h) in all_factors.items()
    }
    gradients, steps = form(origin.gradients), form(factors)
    square = moved = jnp.zeros_like(gates.step_size)
    products = jnp.zeros((m, m), square.dtype)

    assert gates.retention is not None
    start, pairwise = decay_products(gates.retention)  # [m, D], [m, m, D]
    if gates.write_size is not None:
        pairwise = pairwise * gates.write_size[:, None]
    across, a, share = before(pairwise, 0.0), before(start, 1.0), None
    if momentum is not None:
        assert gates.momentum_decay is not None
        momentum_start, carried = decay_products(gates.momentum_decay)
        pending = origin.horizon * gates.momentum_decay
        started = jnp.einsum("tjd,j->td", pairwise, momentum_start, precision=highest)
        share = before(started, 0.0) + (pending * before(momentum_start, 1.0))[:, None]
        soon = pending[:, None] * before(carried, 0.0)
        across = jnp.einsum("tjd,ji->tid", across, carried, precision=highest) + soon[:, :, None]

    for name, G in gradients.items():
        change = (a[:, None] - 1.0) * origin.weights[name]
        if origin.moved:
            change = change + a[:, None] * (memory[name] - origin.weights[name])
        if momentum is not None and share is not None:
            change = change + share[:, None] * momentum[name]
        moved = moved + jnp.einsum("toi,toi->t", G, change, precision=highest)
        square = square + jnp.einsum("toi,toi->t", G, G, precision=highest)
        products = products + jnp.einsum("toi,joi,tji->tj", G, steps[name], across, precision=highest)
    step_size = _capped(origin, gates, exact(gates.gamma, origin.losses.decrease), square)
    return step_size * bounds.solve(moved, exact(gates.gamma, origin.losses.scale), products * step_size)
