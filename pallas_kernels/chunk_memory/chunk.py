"""One chunk of a memory whose update is linear in its gradients, of matrices alone: what the TPU kernel runs for each chunk.

    M_t = α_t M_{t−1} + S_t,   S_t = θ_t S_{t−1} − η_t Σ_{j<c} γ_{t,j} ∇ℓ(M_{t'}; k_{t−j}, v_{t−j})

with M_{t'} at the chunk's start. Every ∇_i of a weight is left_i ⊗ input_i, so with T_α[t,i] = α_{i+1} … α_t, T_θ alike and
Γ[t,i] = γ_{t,t−i} over the tokens of the chunk and of the window before it,

    C = T_α T_θ diag(−η) Γ        M_t h = a_t M_0 h + s_t S_0 h + Σ_i C[t,i] (input_i · h) left_i

is a few masked products for each weight (the dual form), and no weight of a single token exists. The last c − 1 tokens travel with
the memory from chunk to chunk, in whole rows of eight.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import HIGHEST, columns, decay_products, entry, from_start, iota, last_row, product, row_of

Linear = Callable[[str, jax.Array], jax.Array]


class Structure(Protocol):
    """M(x) as a function of its products W h, where `linear(name, h)` is h Wᵀ."""

    def apply(self, linear: Linear, x: jax.Array, skip: jax.Array | None, norm: None) -> jax.Array: ...


class Objective(Protocol):
    """ℓ of each token: [m] from M(k) and v [m, value_dim]."""

    def loss(self, out: jax.Array, v: jax.Array, threshold: None) -> jax.Array: ...


def window_rows(window: int) -> int:
    """Rows that the window's c − 1 tokens take in the carry: whole tiles of eight."""
    return -(-(window - 1) // 8) * 8


def after_window(
    window: tuple[jax.Array, ...], k: jax.Array, v: jax.Array, real: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """Keys, values and `real` of a chunk behind those of the window in the carry, and the window that the chunk leaves."""
    k, v, real = (jnp.concatenate(pair) for pair in zip(window, (k, v, real)))
    return k, v, real, tuple(x[-window[0].shape[0] :] for x in (k, v, real))


@dataclasses.dataclass(frozen=True)
class MemoryChunk:
    """A `chunk_scan.Chunk`.

    Carry: the weights by name, with momentum S alike, for c > 1 keys and values of the window [`window_rows`, dim] and whether they
    are real [`window_rows`, 1]. Inputs: q, k, v [m, dim] and gates [n, m] with the rows η, real (1, or 0 for padding), α if
    `retention`, θ if `momentum`, γ_0 … γ_{c−1} if c > 1. m is a power of two.

    Attributes:
      structure, objective: hashable; residual structures add φ(k) = k itself.
      names: of the weights, in the carry's order.
      momentum, retention: whether there are such gates.
      window: c ≥ 1.
      precision: of products with tokens and weights; those of gates alone are exact.
      columns: how gates [n, m] become columns [m, n]: on a TPU by a product, for XLA as a transpose.
    """

    structure: Any
    objective: Any
    names: tuple[str, ...]
    momentum: bool
    retention: bool
    window: int
    precision: jax.lax.Precision = HIGHEST
    columns: Callable[[jax.Array], jax.Array] = columns

    def __call__(self, carry: tuple[jax.Array, ...], xs: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        dot = functools.partial(product, precision=self.precision)
        count = len(self.names)
        memory = dict(zip(self.names, carry))
        momenta = dict(zip(self.names, carry[count:])) if self.momentum else {}
        q, k, v, gates = xs
        gates = self.columns(gates)
        before = 0
        if self.window > 1:
            before = window_rows(self.window)
            k, v, real, left_over = after_window(carry[-3:], k, v, gates[:, 1:2])

        factors = gradient_factors(self.structure, self.objective, memory, k, v, dot)
        a, s, beta, memory_gradients, momentum_gradients = self.coefficients(gates, real if before else None)

        def linear(name: str, h: jax.Array) -> jax.Array:
            left, inputs = factors[name]
            out = dot(h, memory[name], 1, 1)
            if a is not None:
                out = a * out
            if s is not None:
                out = out + s * dot(h, momenta[name], 1, 1)
            return out + dot(dot(h, inputs, 1, 1) * memory_gradients, left, 1, 0)

        y = self.structure.apply(linear, q, q, None)
        m = q.shape[0]
        at_end = last_row(memory_gradients)
        momentum_at_end = None if momentum_gradients is None else last_row(momentum_gradients)
        after, momenta_after = [], []
        for name in self.names:
            left, inputs = factors[name]
            w = memory[name] if a is None else entry(a, m - 1) * memory[name]
            w = w + _outer(at_end, left, inputs, dot)
            if s is not None:
                w = w + entry(s, m - 1) * momenta[name]
                assert momentum_at_end is not None
                step = _outer(momentum_at_end, left, inputs, dot)
                momenta_after.append(entry(beta, m - 1) * momenta[name] + step)
            after.append(w)
        return (*after, *momenta_after, *(left_over if self.window > 1 else ())), (y,)

    def coefficients(self, gates: jax.Array, real: jax.Array | None) -> tuple[Any, ...]:
        """a, s, β as columns (None: without), C and, with momentum, D [m, E], from the gates as columns [m, n].

        The E tokens are those of the chunk, behind those of the window where `real` [E, 1] says which of them exist.
        """
        before = 0 if real is None else real.shape[0] - gates.shape[0]
        m = gates.shape[0]
        row, column = iota(m, 0), iota(m, 1)
        step = gates[:, :1]
        index = 2
        a = s = beta = None
        if self.retention:
            alpha = gates[:, index : index + 1]
            pairwise = decay_products(alpha)
            a = from_start(alpha, pairwise)
            index += 1
        else:
            pairwise = (row >= column).astype(jnp.float32)
        pairwise = pairwise * row_of(gates[:, 1:2])  # padding adds no S
        theta = gates[:, index : index + 1]
        index += self.momentum
        if self.window > 1:
            assert real is not None
            D = -step * window_weights(gates[:, index : index + self.window], before) * row_of(real)
        else:
            D = jnp.where(row == column, -step, 0.0)
        if not self.momentum:
            return a, None, None, product(pairwise, D, 1, 0), None
        products = decay_products(theta)
        beta = from_start(theta, products)
        D = product(products, D, 1, 0)
        s = product(pairwise, beta, 1, 0)
        return a, s, beta, product(pairwise, D, 1, 0), D


def gradient_factors(
    structure: Structure, objective: Objective, memory: dict[str, jax.Array], k: jax.Array, v: jax.Array, dot: Any
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """(left, input) of each weight's gradients; see `atlasjax.memory.chunk.gradient_factors`."""

    def out(zeros: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        inputs = {}

        def linear(name: str, h: jax.Array) -> jax.Array:
            inputs[name] = h
            return dot(h, memory[name], 1, 1) + zeros[name]

        return structure.apply(linear, k, k, None), inputs

    zeros = {name: jnp.zeros((k.shape[0], w.shape[0]), jnp.float32) for name, w in memory.items()}
    value, pullback, inputs = jax.vjp(out, zeros, has_aux=True)
    (left,) = pullback(jax.grad(lambda y: jnp.sum(objective.loss(y, v, None)))(value))
    return {name: (left[name], inputs[name]) for name in memory}


def window_weights(gamma: jax.Array, before: int) -> jax.Array:
    """Γ [m, before + m] of γ [m, c]: Γ[t, i] weighs token i, the first `before` of which came before the chunk."""
    m, window = gamma.shape
    shape = (m, before + m)
    age = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + before - jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    total = jnp.zeros(shape, jnp.float32)
    for j in range(window):
        total = total + jnp.where(age == j, gamma[:, j : j + 1], 0.0)
    return total


def _outer(weights: jax.Array, left: jax.Array, inputs: jax.Array, dot: Any) -> jax.Array:
    """Σ_i weights[i] left_i ⊗ input_i: [out, in]; the weights go to the narrower factor."""
    if left.shape[1] <= inputs.shape[1]:
        return dot(left * weights, inputs, 0, 0)
    return dot(left, inputs * weights, 0, 0)
