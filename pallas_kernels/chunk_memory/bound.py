"""Bounds that keep a memory from diverging, with matrix operations only: limits on step sizes and weight norms.

`atlasjax.memory.bounds` defines and derives the recurrence. This module has its arithmetic for a chunk that begins
with the memory M_0 at which its gradients are taken. With G_t = Σ_i Γ[t,i] ∇_i, f_t the windowed first-order decrease of the
loss down to the target, n_t = f_t + floor_t and u_t = H θ_t,

    η̄_t = min(η_t, step/H · f_t / ‖G_t‖²)        η'_t = η̄_t (1 + x_t / n_t)
    x_t = (a_{t−1} − 1) ⟨G_t, M_0⟩ + (s_{t−1} + u_t b_{t−1}) ⟨G_t, S_0⟩
          − Σ_{j<t} (T_α diag(β) T_θ + u_t T_θ)[t−1, j] η'_j ⟨G_t, G_j⟩

This is one unit lower-triangular system, and ⟨∇_i, ∇_j⟩ = (left_i · left_j)(input_i · input_j) for each weight.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import HIGHEST, Precision, before, finer, product
from pallas_kernels.chunk_memory.gates import Decays, Gates
from pallas_kernels.side_by_side import columns_of, diagonal_column, place, rows_of_columns, weighted
from pallas_kernels.triangular import solve_column

Weights = dict[str, jax.Array]
Factors = dict[str, tuple[jax.Array, jax.Array]]
Solve = Callable[[jax.Array, jax.Array, int, Precision], jax.Array]

SMALLEST = float(jnp.finfo(jnp.float32).tiny) ** 0.5  # of a divisor: the derivative of a quotient divides by its square
_STRIP = 64  # rows
# To which a weight of the largest norm is scaled before its square, which could overflow otherwise. Entries 2²³ times smaller than
# the norm do not count; if some are 2⁹⁶ times larger the factor may be zero.
_LIMIT = 2.0**-40


def windowed_floor(floor: jax.Array, window_weights: jax.Array | None, past: jax.Array | None = None) -> jax.Array:
    """Σ_j γ_{t,j} floor_{t−j}, [batch, time, heads], from floor of the same shape and γ [batch, time, heads, c] (None: c = γ = 1).

    past: floor of the tokens before the first one, [batch, heads, up to c − 1]. None means 0.
    """
    floor = floor.astype(jnp.float32)
    if window_weights is None:
        return floor
    time, c = window_weights.shape[1], window_weights.shape[-1]
    line = floor if past is None else jnp.concatenate([past.astype(jnp.float32).swapaxes(1, 2), floor], axis=1)
    line = jnp.pad(line, ((0, 0), (c - 1 + time - line.shape[1], 0), (0, 0)))
    parts = [window_weights[..., j].astype(jnp.float32) * line[:, c - 1 - j : c - 1 - j + time] for j in range(c)]
    return sum(parts[1:], parts[0])


def decrease(slope: jax.Array, out: jax.Array, v: jax.Array) -> jax.Array:
    """⟨∂ℓ/∂out, out − v⟩ of each token, [E, 1], from [E, value_dim]."""
    return jnp.maximum(jnp.sum(slope * (out - v), axis=1, keepdims=True), 0.0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gram(x: jax.Array, precision: Precision) -> jax.Array:
    """x xᵀ. Its derivative is one product, (D + Dᵀ) x; that of `product` would be two."""
    return product(x, x, 1, 1, precision)


_gram.defvjp(
    lambda x, precision: (_gram(x, precision), x), lambda precision, x, d: (product(d + d.T, x, 1, 0, precision),)
)


class Windowed(NamedTuple):
    """Products of the windowed gradients G_t. gram: ⟨G_t, G_i⟩ [m, P · m]. Columns: decreases, f_t; along, ⟨G_t, M_0⟩;
    along_momenta, ⟨G_t, S_0⟩. None without retention or momentum."""

    gram: jax.Array
    decreases: jax.Array
    along: jax.Array | None
    along_momenta: jax.Array | None


def windowed(
    gamma: jax.Array | None, decreases: jax.Array, factors: Factors, along: jax.Array | None, along_momenta: jax.Array | None,
    precision: Precision,
) -> Windowed:  # fmt: skip
    """The products for one head, from the factors of the gradients ∇_i of E tokens.

    Args:
      gamma: Γ [m, E] over the chunk's tokens and those of the window before it. None means the identity.
      decreases: `decrease` of the E tokens.
      factors: factors of their gradients.
      along: ⟨∇_i, M_0⟩ [E, 1], or None.
      along_momenta: ⟨∇_i, S_0⟩ [E, 1], or None.
      precision: precision of products of factors; those with Γ are `finer`.
    """
    parts = [_gram(left, precision) * _gram(inputs, precision) for left, inputs in factors.values()]
    gram = sum(parts[1:], parts[0])
    if gamma is None:
        return Windowed(gram, decreases, along, along_momenta)
    precision = finer(precision)
    over = lambda x: weighted(gamma, x, 1)
    return Windowed(
        product(product(gamma, gram, 1, 0, precision), gamma, 1, 1, precision), over(decreases),
        None if along is None else over(along), None if along_momenta is None else over(along_momenta),
    )  # fmt: skip


class System(NamedTuple):
    """The part of a chunk's gates in the system of its step sizes. Columns of tokens, and one matrix.

    step: η. most: step / H, the same for all tokens. floor: n − f. retained: a_{t−1} − 1, of ⟨G_t, M_0⟩, or None without
    retention. share: s_{t−1} + u_t b_{t−1}, of ⟨G_t, S_0⟩, or None without momentum. across:
    (T_α diag(β) T_θ + u_t T_θ)[t−1, j], [m, P · m].
    """

    step: jax.Array
    most: jax.Array
    floor: jax.Array
    retained: jax.Array | None
    share: jax.Array | None
    across: jax.Array


def system(step_bound: float, horizon: float, gates: Gates, decays: Decays, heads: int = 1) -> System:
    """The system of a chunk with these gates. step_bound: how far a token may step, 1: onto its target; horizon: H; heads: P."""
    assert gates.floor is not None
    step, floor = columns_of(gates.step, heads), columns_of(gates.floor, heads)
    retained = None if decays.start is None else before(decays.start, 1.0) - 1.0
    across = before(decays.pending, 0.0)
    most = jnp.full_like(step, step_bound / horizon)
    if gates.momentum_decay is None:
        return System(step, most, floor, retained, None, across)
    assert decays.momentum is not None
    assert decays.momentum_start is not None
    assert decays.started is not None
    pending = horizon * columns_of(gates.momentum_decay, heads)
    share = before(decays.started, 0.0) + pending * before(decays.momentum_start, 1.0)
    across = across + pending * before(decays.momentum, 0.0)
    return System(step, most, floor, retained, share, across)


class Equations(NamedTuple):
    """(I + L) y = r, whose solution `steps` turns into step sizes.

    lower: L [m, P · m], strictly lower triangular. right: r. capped: η̄. root: 1 / √n, or 0 where n is zero: η' = η̄ root y, or η̄.
    Columns of tokens but for L.
    """

    lower: jax.Array
    right: jax.Array
    capped: jax.Array
    root: jax.Array


def equations(known: System, of: Windowed, heads: int = 1) -> Equations:
    """The equations of the step sizes. of: with `along` if there is retention, and `along_momenta` if there is momentum."""
    shape = of.gram.shape
    row, lane = place(shape, 0, heads), place(shape, 1, heads)
    square = diagonal_column(of.gram, heads)
    # A quotient that `where` leaves out still has a derivative, which a divisor of zero makes NaN.
    most = known.most * of.decreases / jnp.where(square >= SMALLEST, square, 1.0)
    capped = jnp.where(square >= SMALLEST, jnp.minimum(known.step, most), known.step)

    moved = jnp.zeros_like(capped)
    for share, along in ((known.retained, of.along), (known.share, of.along_momenta)):
        if share is not None:
            assert along is not None
            moved = moved + share * along

    # The unknowns are multiplied by √n, which keeps the system's entries of similar size. Where n is zero the unknown is 1. The
    # step is zero too, but the step's derivative with respect to the token is not, so later tokens keep its column.
    scale = of.decreases + known.floor
    valid = scale >= SMALLEST
    safe = jnp.where(valid, scale, 1.0)
    column = jnp.where(valid, jax.lax.rsqrt(safe), 1.0)
    root = jnp.where(valid, column, 0.0)
    entries = root * (known.across * of.gram) * rows_of_columns(capped * column, heads)
    right = jnp.where(valid, root * (safe + moved), 1.0)
    return Equations(jnp.where(row > lane, entries, 0.0), right, capped, root)


def steps(capped: jax.Array, root: jax.Array, solved: jax.Array) -> jax.Array:
    """The bounded step sizes η', a column, from two columns of the equations and their solution."""
    return capped * jnp.where(root > 0.0, root * solved, 1.0)


def bounded_steps(
    known: System, of: Windowed, heads: int = 1, precision: Precision = HIGHEST, solve: Solve = solve_column
) -> jax.Array:
    """The bounded step sizes η', a row [1, P · m]. precision: of the products that solve their system."""
    system = equations(known, of, heads)
    solved = solve(system.lower, system.right, heads, precision)
    return rows_of_columns(steps(system.capped, system.root, solved), heads)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def within_norm(most: float, w: jax.Array) -> jax.Array:
    """The factor [1, 1] for W, a matrix, that makes ‖W‖_F ≤ most."""
    return _within_forward(most, w)[0]


def _within_forward(most: float, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    # A few rows at a time, because an intermediate of a whole weight would take as much vector memory again.
    strips = [w[start : start + _STRIP] for start in range(0, w.shape[0], _STRIP)]
    unit = _LIMIT / most
    square = functools.reduce(jnp.add, [_all(jnp.sum, jnp.square(strip * unit)) for strip in strips])
    over = square > _LIMIT * _LIMIT
    square = jnp.where(over, square, 1.0)
    factor = jnp.where(over, _LIMIT * jax.lax.rsqrt(square), 1.0)
    return factor, (w, jnp.where(over, -factor * unit / square * unit, 0.0))


def _within_backward(most: float, kept: tuple[jax.Array, ...], d: jax.Array) -> tuple[jax.Array]:
    w, slope = kept
    return (d * slope * w,)


within_norm.defvjp(_within_forward, _within_backward)


def _all(reduce: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    """Reduces a matrix to [1, 1]. Rows first: that is arithmetic on vectors, and few lanes are left to reduce across."""
    return reduce(reduce(x, axis=0, keepdims=True), axis=1, keepdims=True)
