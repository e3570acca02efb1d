"""The cotangents of bounded step sizes in the GPU kernel of the chunkwise memory (`gpu_bound`, whose matrices they take)."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Index, Slice
from pallas_kernels.chunk_memory.bound import Windowed, equations, steps
from pallas_kernels.chunk_memory.chunk import MemoryChunk
from pallas_kernels.chunk_memory.gpu_bound import BoundedSteps, size_of
from pallas_kernels.chunk_memory.gpu_step import Layers, Refs, ScratchBlock, Tokens, barrier
from pallas_kernels.gpu import LEAST

_Array = Any  # an array, its reference in a kernel, or its shape


class Scratch(TypedDict):
    """Arrays of one row for the cotangents of a chunk.

    Attributes:
      of_columns: of `Solved.columns`, [n, E]; before, the cotangents of `Solved.weights`.
      of_solution: of the right side of the equations, and of the step sizes, [2, m].
      of_windowed: D + Dᵀ for D of the windowed gradients' Gram matrix, [m, m].
      of_gram: the same of `Solved.gram`, [E, E].
      of_outer: for each block, what the Gram matrix adds to the cotangent of g, [E_b, value_dim].
      of_factors: for each block, what it adds to the cotangents of h, the input of the outer weight, and of the left factors of
        the inner weights, by name of the weight, [E_b, width]. Empty without a hidden layer.
    """

    of_columns: _Array
    of_solution: _Array
    of_windowed: _Array
    of_gram: _Array
    of_outer: list[_Array]
    of_factors: list[dict[str, _Array]]


def scratch_of_steps(chunk: MemoryChunk, tokens: Tokens, width: int) -> Scratch:
    """Shapes of one row's arrays."""
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    size = size_of(tokens)
    layers = Layers.of(chunk.structure)
    assert layers is not None
    assert tokens["step_gates"] is not None
    m = tokens["step_gates"]["across"].shape[-1]
    names = (layers.outer, *layers.inner) if layers.inner else ()
    return {
        "of_columns": array(1 + chunk.retention + chunk.momentum, size),
        "of_solution": array(2, m),
        "of_windowed": array(m, m),
        "of_gram": array(size, size),
        "of_outer": [array(*v.shape[2:]) for _, v in tokens["blocks"]],
        "of_factors": [{name: array(k.shape[-2], width) for name in names} for k, _ in tokens["blocks"]],
    }


@dataclasses.dataclass(frozen=True)
class StepCotangents(BoundedSteps):
    """The cotangents of the step sizes of one chunk, and what they add to those of the gradients' factors.

    A term of a token's cotangent is as if another memory had been written with the gradient: `along` with the weights `columns`.

    Attributes:
      scratch: arrays for the results.
    """

    scratch: Scratch

    def store_all(self, after: Sequence[Refs]) -> None:
        """All cotangents, from those of the next W and S: each phase reads what other threads wrote in the one before."""
        self.store_weights_cotangents(after)
        for store in (
            self.store_solution_cotangents, self.store_system_cotangents, self.store_of_gram, self.store_of_factors,
            self.store_of_outer,
        ):  # fmt: skip
            barrier(self.settings.interpret)
            store()

    def store_weights_cotangents(self, after: Sequence[Refs]) -> None:
        """Cotangents of the gradients' weights: inner products with the cotangents `after` of the next W and S."""
        for block in self.blocks:
            for place, x in enumerate(self.inner(block, after)):
                self.scratch["of_columns"][place, block.place] = x

    def store_solution_cotangents(self) -> None:
        """Cotangents of the equations' right side, which also gives that of L, and of the step sizes."""
        sizes = jnp.zeros((), jnp.float32)
        for part in range(1 + self.chunk.momentum):
            sizes = sizes - self.at_end(part)[:, None] * self.over_window(self.scratch["of_columns"], part)
        sizes = jnp.sum(sizes, axis=1)
        (d,) = jax.vjp(self.steps, self.solved["solution"][self.i])[1](sizes)
        self.scratch["of_solution"][0, :] = self._substituted_transposed(d)
        self.scratch["of_solution"][1, :] = sizes

    def _substituted_transposed(self, d: jax.Array) -> jax.Array:
        """(I + L)⁻ᵀ d, [m], from the last token to the first."""
        place = jax.lax.iota(jnp.int32, d.shape[0])

        def step(t: Index, rest: jax.Array) -> jax.Array:
            last = d.shape[0] - 1 - t
            value = jnp.sum(jnp.where(place == last, rest, 0.0), axis=0)
            return rest - value * self.solved["lower"][self.i, last, :]

        return jax.lax.fori_loop(0, d.shape[0], step, d)

    def _system_cotangents(self) -> Windowed:
        """Cotangents of the windowed gradients, with that of the Gram matrix plus its transpose."""
        right, sizes = (self.scratch["of_solution"][place, :][:, None] for place in range(2))
        solved = self.solved["solution"][self.i]
        found = functools.partial(equations, self.known)
        of, pullback = jax.vjp(found, self.windowed())
        (d,) = jax.vjp(lambda of: steps(of.capped, of.root, solved[:, None]), of)[1](sizes)
        (d,) = pullback(d._replace(lower=-right * solved[None, :], right=right))
        return d._replace(gram=d.gram + d.gram.T)

    def store_system_cotangents(self) -> None:
        """Cotangents of the windowed gradients, and in place of the weights' cotangents those of the tokens' own."""
        of = self._system_cotangents()
        for block in self.blocks:
            for place, x in enumerate(x for x in of[1:] if x is not None):
                self.scratch["of_columns"][place, block.place] = self.of_tokens(x, block)
        self.scratch["of_gram" if self.gates["gamma"] is None else "of_windowed"][...] = of.gram

    def store_of_gram(self) -> None:
        """Γᵀ D Γ, from D of the windowed gradients' Gram matrix."""
        gamma, windowed, of_gram, i = self.gates["gamma"], self.scratch["of_windowed"], self.scratch["of_gram"], self.i
        if gamma is None:
            return
        m, exact = gamma.shape[1], self.exact

        def columns(of: Slice, _: None) -> None:
            half = lambda at, y: y + exact(windowed[:, at], gamma[i, at, of], 1, 0)
            right = self.over_tiles(half, jnp.zeros((m, LEAST), jnp.float32), m)

            def rows(at: Slice, _: None) -> None:
                of_gram[at, of] = exact(gamma[i, :, at], right, 0, 0)

            self.over_tiles(rows, None)

        self.over_tiles(columns, None)

    def store_of_factors(self) -> None:
        """The Gram matrix's part of the cotangents of the factors of a hidden layer: a sum over the factors of all tokens."""
        for block, target in zip(self.blocks, self.scratch["of_factors"]):
            for number, other in enumerate(self.blocks if target else ()):
                if number:
                    barrier(self.settings.interpret)
                self._add_factors(block, other, target, first=number == 0)

    def _add_factors(self, block: ScratchBlock, other: ScratchBlock, target: Refs, *, first: bool) -> None:
        """The sum over the factors of `other`. first: stores and does not add."""
        dot, outer = self.step.dot, self.step.layers.outer
        pair = self.scratch["of_gram"][block.place, other.place]
        by_outer = pair * dot(block.g[...], other.g[...], 1, 1)
        by_keys = pair * dot(block.k, other.k, 1, 1)

        def tile(j: Index, _: None) -> None:
            w = self.step.load(self.before[0], self.i, j)
            h, left = self.step.gradients(other, other.g[...], w, j)
            at = slice(None), self.step.columns(j)
            found = {outer: dot(by_outer, h, 1, 0)} | {name: dot(by_keys, x, 1, 0) for name, x in left.items()}
            for name, x in found.items():
                target[name][at] = x if first else x + target[name][at]

        self.step.tiles(tile, None)

    def store_of_outer(self) -> None:
        """The Gram matrix's part of the cotangent of g: a sum over the g of all tokens."""
        for block, target in zip(self.blocks, self.scratch["of_outer"]):
            total = jnp.zeros(target.shape, jnp.float32)
            for other in self.blocks:
                hidden = self.solved["hidden"][self.i, block.place, other.place]
                pair = self.scratch["of_gram"][block.place, other.place] * hidden
                total = total + self.step.dot(pair, other.g[...], 1, 0)
            target[...] = total

    def of_outer(self, block: ScratchBlock) -> jax.Array:
        """The sums that `store_of_outer` stored."""
        return self.scratch["of_outer"][self.blocks.index(block)][...]

    def of_factor(self, block: ScratchBlock, name: str, j: Index) -> jax.Array:
        """The sums that `store_of_factors` stored for a tile of a weight's factor."""
        return self.scratch["of_factors"][self.blocks.index(block)][name][:, self.step.columns(j)]

    def columns(self, block: ScratchBlock) -> list[jax.Array]:
        """The cotangents of ⟨∇, M_0⟩ and ⟨∇, S_0⟩, in the order of `along`: columns [E_b, 1]."""
        return [self.scratch["of_columns"][place, block.place][:, None] for place in range(1, 1 + len(self.along))]

    def of_decrease(self, block: ScratchBlock, out: jax.Array) -> jax.Array:
        """The cotangent of W_outer h from that of the decrease."""
        pullback = jax.vjp(functools.partial(self.step.decrease, block), out)[1]
        return pullback(self.scratch["of_columns"][0, block.place])[0]
