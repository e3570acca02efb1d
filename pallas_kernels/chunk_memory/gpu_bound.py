"""Bounded step sizes in the GPU kernels of the chunkwise memory: the equations of a chunk, their solution, and their derivatives.

`bound` has the mathematics. The equations contain ⟨∇_i, ∇_j⟩ for each pair of tokens, of gradients at the memory before the chunk,
so they can only be formed inside the loop over chunks. What a phase finds for tokens and their pairs is written to memory, with a
barrier before the next phase, because it would fill the registers.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import gpu
from pallas_kernels.arguments import Index, Slice
from pallas_kernels.blocks import Precision
from pallas_kernels.chunk_memory.bound import System, Windowed, equations, steps
from pallas_kernels.chunk_memory.chunk import MemoryChunk
from pallas_kernels.chunk_memory.gpu_step import (
    Matrices,
    Refs,
    ScratchBlock,
    Settings,
    Step,
    StepGates,
    Tokens,
    narrow,
)
from pallas_kernels.gpu import LEAST

X = TypeVar("X")
_Array = Any  # an array, its reference in a kernel, or its shape

MOST_TOKENS = 64  # of a chunk: matrices of its pairs are held in registers


class Solved(TypedDict):
    """The arrays that `states` keeps of each chunk's system, [rows, chunks, …], for E tokens.

    Attributes:
      weights: of the gradients of each block in the next W and S, [1 or 2, E_b].
      hidden: h hᵀ, [E, E], of the inputs of the outer weight.
      gram: ⟨∇_i, ∇_j⟩, [E, E].
      lower: L of its `bound.Equations`, [m, m].
      right, capped, root: their columns, [m].
      solution: theirs, [m].
      columns: the decrease of each token's loss, and ⟨∇_i, M_0⟩ with retention, ⟨∇_i, S_0⟩ with momentum, [n, E].
    """

    weights: list[_Array]
    hidden: _Array
    gram: _Array
    lower: _Array
    right: _Array
    capped: _Array
    root: _Array
    solution: _Array
    columns: _Array


def solved(chunk: MemoryChunk, tokens: Tokens) -> Solved:
    """Shapes of one row's arrays."""
    chunks, size = tokens["scales"].shape[1], size_of(tokens)
    array = lambda *shape: jax.ShapeDtypeStruct((chunks, *shape), jnp.float32)
    assert tokens["step_gates"] is not None
    m, columns = tokens["step_gates"]["across"].shape[-1], 1 + chunk.retention + chunk.momentum
    return {
        "weights": [array(1 + chunk.momentum, k.shape[-2]) for k, _ in tokens["blocks"]],
        "hidden": array(size, size),
        "gram": array(size, size),
        "lower": array(m, m),
        "right": array(m),
        "capped": array(m),
        "root": array(m),
        "solution": array(m),
        "columns": array(columns, size),
    }


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def library_solve(lower: jax.Array, column: jax.Array, heads: int, precision: Precision) -> jax.Array:
    """`triangular.solve_column` of one head outside of a kernel, by a call of a library.

    Each of its products of halves would be a program, which XLA compiles in many forms on a GPU to find the fastest. jax's own
    derivative would be a product too.
    """
    return _library_forward(lower, column, heads, precision)[0]


def _library_forward(
    lower: jax.Array, column: jax.Array, heads: int, precision: Precision
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    assert heads == 1
    solved = _triangular(lower, column, transposed=False)
    return solved, (lower, solved)


def _library_backward(
    heads: int, precision: Precision, kept: tuple[jax.Array, jax.Array], d: jax.Array
) -> tuple[jax.Array, jax.Array]:
    lower, solved = kept
    g = _triangular(lower, d, transposed=True)
    return jnp.tril(-g * solved.T, -1), g


library_solve.defvjp(_library_forward, _library_backward)


def _triangular(lower: jax.Array, right: jax.Array, *, transposed: bool) -> jax.Array:
    """(I + L)⁻¹ r, or (I + L)⁻ᵀ r."""
    return jax.lax.linalg.triangular_solve(
        lower, right, left_side=True, lower=True, transpose_a=transposed, unit_diagonal=True
    )


def size_of(tokens: Tokens) -> int:
    """E, the number of a chunk's tokens and of those of the window before it."""
    return sum(k.shape[-2] for k, _ in tokens["blocks"])


@dataclasses.dataclass(frozen=True)
class BoundedSteps:
    """The step sizes of one chunk.

    Attributes:
      settings, step: the kernel's.
      blocks: the E tokens, whose g is stored.
      before: W and S before each chunk.
      gates: what they take from the chunk's gates.
      solved: the results.
      i: the chunk.
    """

    settings: Settings
    step: Step
    blocks: Sequence[ScratchBlock]
    before: Sequence[Refs]
    gates: StepGates
    solved: Solved
    i: Index

    @property
    def chunk(self) -> MemoryChunk:
        return self.settings.chunk

    @property
    def along_parts(self) -> list[int]:
        """Which of W and S before the chunk have inner products with the gradients in the system."""
        return [0] * self.chunk.retention + [1] * self.chunk.momentum

    @property
    def along(self) -> list[Refs]:
        return [self.before[part] for part in self.along_parts]

    def store_decrease(self, block: ScratchBlock, out: jax.Array) -> None:
        """The decrease of a block's losses, from W_outer h."""
        self.solved["columns"][self.i, 0, block.place] = self.step.decrease(block, out)

    def store_products(self) -> None:
        """The inner products of the gradients with each other, and with W and S."""
        for n, block in enumerate(self.blocks):
            for place, x in enumerate(self.inner(block, self.along), 1):
                self.solved["columns"][self.i, place, block.place] = x
            for other in self.blocks[: n + 1]:
                self._store_pair(block, other)

    def _store_pair(self, block: ScratchBlock, other: ScratchBlock) -> None:
        step, dot, i, same = self.step, self.step.dot, self.i, other is block
        wide = not narrow(max(x.shape[-1] for x in block.refs), block.refs[0].dtype)

        def add(j: Index, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            hidden, lefts = sums
            if wide:
                # Triton moves the tokens' loads out of a loop that stores nothing, and then spills them: 3 kB per thread at
                # d = 128. The solution is found later.
                self.solved["solution"][i, 0] = jnp.zeros((), jnp.float32)
            w = step.load(self.before[0], i, j)
            h, left = step.gradients(block, block.g[...], w, j)
            h_other, left_other = (h, left) if same else step.gradients(other, other.g[...], w, j)
            for name, x in left.items():
                lefts = lefts + dot(x, left_other[name], 1, 1)
            return hidden + dot(h, h_other, 1, 1), lefts

        zero = jnp.zeros((block.place.size, other.place.size), jnp.float32)
        hidden, lefts = step.tiles(add, (zero, zero))
        gram = dot(block.g[...], other.g[...], 1, 1) * hidden
        if step.layers.inner:
            gram = gram + lefts * dot(block.k, other.k, 1, 1)
        for target, x in ((self.solved["hidden"], hidden), (self.solved["gram"], gram)):
            target[i, block.place, other.place] = x
            if not same:
                target[i, other.place, block.place] = x.T

    def inner(self, block: ScratchBlock, parts: Sequence[Refs]) -> list[jax.Array]:
        """⟨∇_i, part⟩ with each for each token of a block, [E_b]."""
        layers, dot, i = self.step.layers, self.step.dot, self.i

        def add(j: Index, sums: list[jax.Array]) -> list[jax.Array]:
            h, left = self.step.gradients(block, block.g[...], self.step.load(self.before[0], i, j), j)

            def inner(part: Matrices) -> jax.Array:
                found = jnp.sum(dot(block.g[...], part[layers.outer], 1, 0) * h, axis=1)
                for name, x in left.items():
                    found = found + jnp.sum(x * dot(block.k, part[name], 1, 1), axis=1)
                return found

            return [x + inner(self.step.load(part, i, j)) for x, part in zip(sums, parts)]

        return self.step.tiles(add, [jnp.zeros((block.place.size,), jnp.float32) for _ in parts])

    def store_equations(self) -> None:
        """The equations of the step sizes."""
        of = equations(self.known, self.windowed())
        self.solved["lower"][self.i] = of.lower
        for name in ("right", "capped", "root"):
            self.solved[name][self.i] = jnp.sum(getattr(of, name), axis=1)

    def store_weights(self) -> None:
        """Solves the equations, and stores the weights of the gradients in the next W and S."""
        solved = self._substituted(self.solved["right"][self.i])
        self.solved["solution"][self.i] = solved
        sizes = self.steps(solved)
        for part in range(1 + self.chunk.momentum):
            weights = -self.at_end(part) * sizes
            for block, target in zip(self.blocks, self.solved["weights"]):
                target[self.i, part, :] = self.of_tokens(weights[:, None], block)

    def steps(self, solved: jax.Array) -> jax.Array:
        """The step sizes from the solution, [m] each."""
        return steps(self.solved["capped"][self.i], self.solved["root"][self.i], solved)

    def _substituted(self, right: jax.Array) -> jax.Array:
        """(I + L)⁻¹ r, [m], a token after another, each with a row of L from memory."""
        place = jax.lax.iota(jnp.int32, right.shape[0])

        def step(t: Index, x: jax.Array) -> jax.Array:
            here = place == t
            value = jnp.sum(jnp.where(here, right, 0.0) - self.solved["lower"][self.i, t, :] * x, axis=0)
            return jnp.where(here, value, x)

        return jax.lax.fori_loop(0, right.shape[0], step, jnp.zeros_like(right))

    @property
    def known(self) -> System:
        columns = (self.gates["columns"][self.i, place, :][:, None] for place in range(3 + len(self.along_parts)))
        step, most, floor = (next(columns) for _ in range(3))
        retained = next(columns) if self.chunk.retention else None
        share = next(columns) if self.chunk.momentum else None
        return System(step, most, floor, retained, share, self.gates["across"][self.i])

    def at_end(self, part: int) -> jax.Array:
        """The weights of windowed gradients in W or S at the chunk's end, for steps of −1: [m]."""
        return self.gates["columns"][self.i, 3 + len(self.along_parts) + part, :]

    def windowed(self) -> Windowed:
        decreases, *along = (self.over_window(self.solved["columns"], self.i, n) for n in range(1 + len(self.along)))
        of_memory = along.pop(0) if self.chunk.retention else None
        of_momenta = along.pop(0) if self.chunk.momentum else None
        return Windowed(self._gram(), decreases, of_memory, of_momenta)

    def _gram(self) -> jax.Array:
        """⟨G_t, G_i⟩, [m, m]."""
        gamma, gram, i = self.gates["gamma"], self.solved["gram"], self.i
        if gamma is None:
            return gram[i]
        m, exact = gamma.shape[1], self.exact

        def add(of: Slice, found: jax.Array) -> jax.Array:
            half = lambda at, y: y + exact(gamma[i, :, at], gram[i, at, of], 1, 0)
            return found + exact(self.over_tiles(half, jnp.zeros((m, LEAST), jnp.float32)), gamma[i, :, of], 1, 1)

        return self.over_tiles(add, jnp.zeros((m, m), jnp.float32))

    def over_tiles(self, add: Callable[[Slice, X], X], start: X, size: int | None = None) -> X:
        """A loop over tiles of tokens, of all E or of `size`: whole matrices of tokens would fill the registers."""
        size = self.solved["gram"].shape[1] if size is None else size
        return jax.lax.fori_loop(0, size // LEAST, lambda n, x: add(pl.ds(n * LEAST, LEAST), x), start)

    def over_window(self, rows: jax.Ref, *index: Index) -> jax.Array:
        """Σ_e Γ[t, e] x_e, a column [m, 1], from a row of E tokens."""
        gamma = self.gates["gamma"]
        if gamma is None:
            return rows[(*index, slice(None))][:, None]
        add = lambda at, x: x + jnp.sum(gamma[self.i, :, at] * rows[(*index, at)][None, :], axis=1, keepdims=True)
        return self.over_tiles(add, jnp.zeros((gamma.shape[1], 1), jnp.float32))

    def of_tokens(self, column: jax.Array, block: ScratchBlock) -> jax.Array:
        """Σ_t Γ[t, e] x_t for the tokens of a block, [E_b], from a column [m, 1]."""
        if self.gates["gamma"] is not None:
            return jnp.sum(self.gates["gamma"][self.i, :, block.place] * column, axis=0)
        shape = column.shape[0], block.place.size
        token, place = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        return jnp.sum(jnp.where(token == place + block.place.start, column, 0.0), axis=0)

    @property
    def exact(self) -> gpu.Product:
        return gpu.products(jnp.float32, self.settings.interpret)
