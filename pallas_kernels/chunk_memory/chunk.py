"""One chunk of a memory whose update is linear in its gradients, with matrix operations only. The TPU kernel runs it per chunk.

    M_t = α_t M_{t−1} + S_t,   S_t = θ_t S_{t−1} − η_t Σ_{j<c} γ_{t,j} ∇ℓ(M_{t'}; k_{t−j}, v_{t−j})

with M_{t'} at the chunk's start. Every gradient ∇_i of a weight is left_i ⊗ input_i. So with T_α[t,i] = α_{i+1} … α_t, T_θ defined
likewise, and Γ[t,i] = γ_{t,t−i} over the tokens of the chunk and of the window before it,

    C = T_α T_θ diag(−η) Γ        M_t h = a_t M_0 h + s_t S_0 h + Σ_i C[t,i] (input_i · h) left_i

takes a few masked products for each weight (the dual form), and no token's own weights are formed. The last c − 1 tokens are
carried from chunk to chunk with the memory, in whole tiles of eight rows. `bound` may first modify η and M_0.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Arrays, Product
from pallas_kernels.blocks import HIGHEST, Precision, entry, finer, product
from pallas_kernels.chunk_memory.bound import Solve, Windowed, bounded_steps, decrease, system, windowed, within_norm
from pallas_kernels.chunk_memory.gates import Coefficients, Gates, coefficients, decays, window_matrix
from pallas_kernels.side_by_side import beside, columns, columns_of, rows_of_columns
from pallas_kernels.triangular import solve_column
from pallas_kernels.varying import vary_like

Linear = Callable[[str, jax.Array], jax.Array]
Stage = Callable[..., Any]
Norm = dict[str, jax.Array]  # scale and bias of the LayerNorm inside a memory, [1, value_dim]


class Structure(Protocol):
    """M(x) as a function of its products W h, where `linear(name, h)` is h Wᵀ."""

    def apply(self, linear: Linear, x: jax.Array, skip: jax.Array | None, norm: Norm | None) -> jax.Array: ...


class Objective(Protocol):
    """ℓ of each token, [m], from M(k) and v [m, value_dim], and the gate `threshold` [m] if the memory has one."""

    def loss(self, out: jax.Array, v: jax.Array, threshold: jax.Array | None) -> jax.Array: ...


def tall(weights: Mapping[str, jax.Array]) -> tuple[str, ...]:
    """Names of the weights [..., out, in] with out > in.

    Transposed, they fill whole tiles where in < 128, and their gradients Σ left ⊗ input need fewer passes through a matrix unit,
    which takes the rows of one factor one by one.
    """
    return tuple(name for name, w in weights.items() if w.shape[-2] > w.shape[-1])


def window_rows(window: int) -> int:
    """Rows of the window's c − 1 tokens in the carry, in whole tiles of eight."""
    return -(-(window - 1) // 8) * 8


def after_window(
    window: tuple[jax.Array, ...], k: jax.Array, v: jax.Array, real: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """Keys, values and `real` of the carried window followed by those of the chunk, and the window after the chunk."""
    k, v, real = (jnp.concatenate(pair) for pair in zip(window, (k, v, real)))
    return k, v, real, tuple(x[-window[0].shape[0] :] for x in (k, v, real))


@dataclasses.dataclass(frozen=True)
class MemoryChunk:
    """A `chunk_scan.Chunk`.

    Carry: the weights by name [out, in], those of `transposed` as [in, out]; with `norm`, scale and bias of the LayerNorm inside
    the memory [1, value_dim], which do not change; with momentum, S in the form of the weights; for c > 1, keys and values of the
    window [`window_rows`, dim] and whether they are real [`window_rows`, 1]. Inputs: q, k, v [m, dim] and gates [n, m] with the
    rows η, real (1, or 0 for padding), α if `retention`, θ if `momentum`, β (0 for padding) if `write_gate`, n − a of the windowed
    losses if `step_bound`, the objective's δ if `threshold`, γ_0 … γ_{c−1} if c > 1. m is a power of two.

    Attributes:
      structure, objective: hashable; residual structures add φ(k) = k itself.
      names: names of the weights, in the carry's order.
      momentum, retention: whether there are S and θ, and whether there is α.
      write_gate: whether there is β; then there is momentum.
      norm: whether there is a LayerNorm inside the memory.
      threshold: whether the objective has one for each token; then c = 1.
      transposed: names of the weights whose matrices, also of momenta, are transposed (`tall`).
      window: c ≥ 1.
      precision: precision of products with tokens and weights. Those of gates alone are `blocks.finer`.
      step_bound: how far a token may step (`bound.bounded_steps`). None means that steps are η.
      horizon: H, how many times momentum may add a token's write; θ is at most 1 − 1/H. 1 without momentum.
      norm_bound: maximum of ‖W‖_F / √rows of a weight or momentum at the chunk's start. None means no limit.
      solve: solves the system of the bounded steps, with the arguments of `triangular.solve_column`.
    """

    structure: Structure
    objective: Objective
    names: tuple[str, ...]
    momentum: bool
    retention: bool
    window: int
    precision: Precision = HIGHEST
    step_bound: float | None = None
    horizon: float = 1.0
    norm_bound: float | None = None
    norm: bool = False
    threshold: bool = False
    transposed: tuple[str, ...] = ()
    write_gate: bool = False
    solve: Solve = solve_column

    def __call__(self, carry: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        return self._chunk(carry, xs, lambda of_head: of_head, lambda width, *of_head: self.coefficients(1, *of_head))

    def of_heads(self, carry: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        """The chunks of several heads [heads, …]: matrices of tokens lie side by side, and all else is vmapped."""
        return self._chunk(carry, xs, jax.vmap, functools.partial(beside, self.coefficients))

    def _chunk(
        self, carry: Arrays, xs: Arrays, each: Callable[[Stage], Stage], of_all: Callable[..., Coefficients]
    ) -> tuple[Arrays, Arrays]:
        """`each` makes a stage of one head one of all; `of_all(m, gates, …)` is `coefficients` of all."""
        begun = each(self._begin)(carry, xs)
        of_gates = of_all(xs[0].shape[-2], self.named(xs[-1]), begun.windowed)
        # Between both stages: small matrices of gates of all heads side by side fill a unit that one head's would not.
        return each(self._finish)(carry, xs[0], begun, of_gates)

    def _begin(self, carry: Arrays, xs: Arrays) -> "_Begun":
        """The gradients at the start of a head's chunk."""
        dot, count = self._dot, len(self.names)
        weights, norm, momenta = self._parts(carry)
        memory, momentum = self._scaled(weights), self._scaled(momenta)
        scales = [
            None if self.norm_bound is None else w.within(self.norm_bound)
            for x in (memory, momentum)
            for w in x.values()
        ]
        # Twice: the limits need the matrices without scales, and all that follows reads them with these.
        memory, momentum = self._scaled(weights, scales), self._scaled(momenta, scales[count:])
        _, k, v, rows = xs
        gamma: jax.Array | None = None
        left_over: Arrays = ()
        if self.window > 1:
            real, gamma = columns_of(rows[1:2]), window_matrix(columns(rows[-self.window :]), carry[-1].shape[0])
            k, v, real, left_over = after_window(carry[-3:], k, v, real)
            gamma = gamma * rows_of_columns(real)
        widths = {name: w.out for name, w in memory.items()}
        weight = lambda name, h: memory[name].product(h, dot)
        threshold = self.named(rows).threshold
        gradients = gradient_factors(self.structure, self.objective, weight, widths, k, v, norm, threshold)
        factors, of_window = gradients.factors, None
        if self.step_bound is not None:
            along = lambda products: _total(factors[name][0] * products(name) for name in self.names)
            of_window = windowed(
                gamma, decrease(gradients.slope, gradients.out, v), factors,
                along(lambda name: gradients.products[name]) if self.retention else None,
                along(lambda name: momentum[name].product(factors[name][1], dot)) if self.momentum else None,
                self.precision,
            )  # fmt: skip
        return _Begun(scales, factors, gamma, of_window, left_over)

    def coefficients(self, heads: int, gates: Gates, of_window: Windowed | None) -> Coefficients:
        """From the gates of heads side by side, [1, P · m] each."""
        precision = finer(self.precision)
        of_gates = decays(gates, heads, precision)
        step = gates.step
        if self.step_bound is not None:
            assert of_window is not None
            known = system(self.step_bound, self.horizon, gates, of_gates, heads)
            step = bounded_steps(known, of_window, heads, precision, self.solve)
        return coefficients(of_gates, step)

    def _finish(self, carry: Arrays, q: jax.Array, begun: "_Begun", of_gates: Coefficients) -> tuple[Arrays, Arrays]:
        """The reads of a head's chunk, and the carry after it."""
        dot, count, m = self._dot, len(self.names), q.shape[0]
        weights, norm, momenta = self._parts(carry)
        memory, momentum = self._scaled(weights, begun.scales), self._scaled(momenta, begun.scales[count:])
        column = lambda x: None if x is None else x[:, :1]  # of those in all lanes
        a, s, beta = column(of_gates.start), column(of_gates.started), column(of_gates.momentum_start)
        of_gradients = of_gates.memory
        if begun.gamma is not None:
            of_gradients = product(of_gradients, begun.gamma, 1, 0, finer(self.precision))

        def linear(name: str, h: jax.Array) -> jax.Array:
            left, inputs = begun.factors[name]
            out = memory[name].product(h, dot)
            if a is not None:
                out = a * out
            if s is not None:
                out = out + s * momentum[name].product(h, dot)
            return out + dot(dot(h, inputs, 1, 1) * of_gradients, left, 1, 0)

        y = self.structure.apply(linear, q, q, norm)

        def weigh(row: jax.Array) -> jax.Array:
            """The weight of each gradient, [1, E], from those of windowed ones, [1, m]."""
            if begun.gamma is None:
                return row
            return jnp.sum(begun.gamma * columns_of(row), axis=0, keepdims=True)

        at_end = [weigh(entry(of_gates.memory, m - 1))]
        if of_gates.momentum is not None:
            at_end.append(weigh(of_gates.momentum))
        after, momenta_after = [], []
        for name in self.names:
            left, inputs = begun.factors[name]
            step, *momentum_step = memory[name].outer_sums(at_end, left, inputs, dot)
            w = memory[name].times(None if a is None else entry(a, m - 1)) + step
            if s is not None:
                assert beta is not None
                w = w + momentum[name].times(entry(s, m - 1))
                momenta_after.append(momentum[name].times(beta) + momentum_step[0])
            after.append(w)
        kept = carry[count : count + 2 * self.norm]
        return (*after, *kept, *momenta_after, *begun.left_over), (y,)

    @property
    def _dot(self) -> Product:
        return functools.partial(product, precision=self.precision)

    def _parts(self, carry: Arrays) -> tuple[Arrays, Norm | None, Arrays]:
        """The weights, the LayerNorm, and the momenta of a carry."""
        count = len(self.names)
        momenta = count + 2 * self.norm
        norm = dict(zip(("scale", "bias"), carry[count:momenta])) if self.norm else None
        return carry[:count], norm, carry[momenta : momenta + count * self.momentum]

    def _scaled(
        self, matrices: Arrays, factors: Iterable[jax.Array | None] = itertools.repeat(None)
    ) -> dict[str, "_Scaled"]:
        return {
            name: _Scaled(w, factor, name in self.transposed) for name, w, factor in zip(self.names, matrices, factors)
        }

    def named(self, rows: jax.Array) -> Gates:
        """The gates as separate rows, [..., 1, m] each; those of the window follow them."""
        row = lambda place: rows[..., place : place + 1, :]
        theta = 2 + self.retention
        floor = theta + self.momentum + self.write_gate
        return Gates(
            row(0),
            row(1),
            row(2) if self.retention else None,
            row(theta) if self.momentum else None,
            row(theta + 1) if self.write_gate else None,
            None if self.step_bound is None else row(floor),
            row(floor + (self.step_bound is not None)) if self.threshold else None,
        )


class _Begun(NamedTuple):
    """The arrays of a head's chunk start that its read needs.

    scales: a factor of each weight and momentum, or None for 1. factors: of the gradients of the E tokens (`Gradients`). gamma: Γ
    [m, E], or None for the identity. windowed: with a bound on steps. left_over: the window after the chunk.
    """

    scales: list[jax.Array | None]
    factors: dict[str, tuple[jax.Array, jax.Array]]
    gamma: jax.Array | None
    windowed: Windowed | None
    left_over: Arrays


class _Scaled(NamedTuple):
    """W = factor · matrix, with the factor [1, 1] or None for 1, because a scaled copy would take as much vector memory again."""

    matrix: jax.Array
    factor: jax.Array | None
    transposed: bool  # whether the matrix is [in, out]

    @property
    def out(self) -> int:
        return self.matrix.shape[1 if self.transposed else 0]

    def product(self, h: jax.Array, dot: Product) -> jax.Array:
        """h Wᵀ."""
        out = dot(h, self.matrix, 1, 0 if self.transposed else 1)
        return out if self.factor is None else self.factor * out

    def times(self, share: jax.Array | None) -> jax.Array:
        """share · factor · matrix, with share [1, 1] or None for 1."""
        if self.factor is not None:
            share = self.factor if share is None else share * self.factor
        return self.matrix if share is None else share * self.matrix

    def within(self, norm_bound: float) -> jax.Array:
        """The factor of `within_norm`."""
        return within_norm(norm_bound * self.out**0.5, self.matrix)

    def outer_sums(
        self, weights: Sequence[jax.Array], left: jax.Array, inputs: jax.Array, dot: Product
    ) -> list[jax.Array]:
        """Σ_i w[i] left_i ⊗ input_i for each w [1, E], in the form of the matrix.

        They are one product, so the factor without weights is loaded into the matrix unit once.
        """
        rows, columns = (inputs, left) if self.transposed else (left, inputs)
        size, rows = rows.shape[1], rows.T
        sums = dot(jnp.concatenate([rows * w for w in weights]), columns, 1, 0)
        return [sums[start : start + size] for start in range(0, sums.shape[0], size)]


class Gradients(NamedTuple):
    """Gradients of E tokens.

    factors: (left, input) of each weight's gradients, name → ([E, out], [E, in]). products: W input, name → [E, out].
    out: M(k), [E, value_dim]. slope: ∂ℓ/∂out.
    """

    factors: dict[str, tuple[jax.Array, jax.Array]]
    products: dict[str, jax.Array]
    out: jax.Array
    slope: jax.Array


def gradient_factors(
    structure: Structure, objective: Objective, weight: Linear, widths: dict[str, int], k: jax.Array, v: jax.Array,
    norm: Norm | None = None, threshold: jax.Array | None = None,
) -> Gradients:  # fmt: skip
    """∇ℓ of each token as factors, at the weights W given by `weight(name, h)` = h Wᵀ [E, widths[name]]. threshold: a row [1, E].

    See `atlasjax.memory.fast_weights.chunk.gradient_factors`.
    """

    def out(zeros: dict[str, jax.Array]) -> tuple[jax.Array, tuple[dict[str, jax.Array], dict[str, jax.Array]]]:
        inputs, products = {}, {}

        def linear(name: str, h: jax.Array) -> jax.Array:
            inputs[name], products[name] = h, weight(name, h)
            # The cotangent of this zero is the left factor of the gradient, whose matrix is never formed.
            return products[name] + zeros[name]

        return structure.apply(linear, k, k, norm), (inputs, products)

    zeros = {name: jnp.zeros((k.shape[0], width), jnp.float32) for name, width in widths.items()}
    zeros = vary_like(zeros, k)  # under shard_map, the derivative of what does not vary would be summed over devices
    value, pullback, (inputs, products) = jax.vjp(out, zeros, has_aux=True)
    of_token = None if threshold is None else jnp.sum(columns_of(threshold), axis=1)
    slope = jax.grad(lambda y: jnp.sum(objective.loss(y, v, of_token)))(value)
    (left,) = pullback(slope)
    return Gradients({name: (left[name], inputs[name]) for name in widths}, products, value, slope)


def _total(products: Iterable[jax.Array]) -> jax.Array:
    """Sum over all channels of several arrays of tokens, [E, 1]."""
    return functools.reduce(jnp.add, (jnp.sum(x, axis=1, keepdims=True) for x in products))
