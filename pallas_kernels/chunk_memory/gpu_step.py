"""The work of both GPU kernels of the chunkwise memory on a chunk's tokens, tile by tile of the hidden width."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels import gpu
from pallas_kernels.arguments import Arrays, Index, Interpret, Slice
from pallas_kernels.batching import rows_folded
from pallas_kernels.chunk_memory.chunk import MemoryChunk, Objective, Structure

Refs = dict[str, jax.Ref]  # of the weights, or of the momenta, by name
Matrices = dict[str, jax.Array]
X = TypeVar("X")
Y = TypeVar("Y")
B = TypeVar("B", bound="Block")


class Tokens(TypedDict):
    """Inputs of the kernels for each chunk.

    Attributes:
      blocks: k and v [rows, chunks, E_b, dim] of each block of tokens, E = Σ E_b of the chunk and then of the window before it.
      weights: of the gradients of each block in the next W and S, [rows, chunks, 1 or 2, E_b]. With bounded steps none: `states`
        finds them.
      scales: a chunk's coefficients of W in W, of S in W and of S in S, [rows, chunks, 3].
      thresholds: of the objective, for each block, [rows, chunks, E_b]; empty if it has none.
      step_gates: what bounded steps take from the gates; None without a bound.
    """

    blocks: list[tuple[jax.Array, jax.Array]]
    weights: list[jax.Array]
    scales: jax.Array
    thresholds: list[jax.Array]
    step_gates: "StepGates | None"


class StepGates(TypedDict):
    """The part of the gates that bounded step sizes take, for each chunk of m tokens.

    Attributes:
      columns: the columns of `bound.System` in its order, then the weights at the chunk's end of windowed gradients in W and S for
        steps of −1, [rows, chunks, n, m].
      across: as in `bound.System`, [rows, chunks, m, m].
      gamma: Γ, [rows, chunks, m, E]; None without a window.
    """

    columns: jax.Array
    across: jax.Array
    gamma: jax.Array | None


_TOGETHER = 80 * 64  # numbers in the sums of one loop over tiles, which are held in registers
_TILE = 16  # of the hidden width: with bfloat16 products at d = 64 hardly a register spills; wider tiles spill hundreds of bytes


@dataclasses.dataclass(frozen=True)
class Layers:
    """A memory of at most one hidden layer: M(x) = readout(x, W_outer hidden(W_inner x, …)), or readout(x, W_outer x) without one.

    Determined by calling `structure.apply`. `hidden` acts on each hidden channel separately.
    """

    structure: Structure
    outer: str
    inner: tuple[str, ...]

    @classmethod
    def of(cls, structure: Structure) -> "Layers | None":
        """The layers of a structure, or None if there are more."""
        # Traced once with arrays of one entry, only to see which weights are applied to what.
        calls = []
        x = jnp.zeros((1, 1), jnp.float32)

        def linear(name: str, h: jax.Array) -> jax.Array:
            calls.append((name, h is x))
            return jnp.zeros((1, 1), jnp.float32)

        structure.apply(linear, x, x, None)
        *inner, (outer, reads_input) = calls
        # An outer weight that reads the input beside hidden layers, or a hidden layer on another one, has no place in these
        # loops.
        if reads_input != (not inner) or not all(first for _, first in inner):
            return None
        return cls(structure, outer, tuple(name for name, _ in inner))

    def hidden(self, z: Matrices) -> jax.Array:
        found = []

        def linear(name: str, h: jax.Array) -> jax.Array:
            if name in z:
                return z[name]
            found.append(h)
            return h

        x = next(iter(z.values()))
        self.structure.apply(linear, x, x, None)
        return found[0]

    def readout(self, x: jax.Array, out: jax.Array) -> jax.Array:
        return self.structure.apply(lambda name, h: out if name == self.outer else h, x, x, None)


def rows_call(
    kernel: Callable[[Any, Any], None], inputs: Any, outputs: Any, name: str, *, warps: int, interpret: Interpret
) -> Any:
    """A kernel with one program per row. inputs: a tree of [rows, …]; outputs: the tree of shapes of one row."""
    leaves, tree = jax.tree.flatten(inputs)
    shapes, out_tree = jax.tree.flatten(outputs)

    def body(*refs: jax.Ref) -> None:
        kernel(jax.tree.unflatten(tree, refs[: len(leaves)]), jax.tree.unflatten(out_tree, refs[len(leaves) :]))

    def spec(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda row: (row, *[0] * len(shape)))

    @rows_folded
    def run(*arrays: jax.Array) -> Arrays:
        rows = arrays[0].shape[0]
        return tuple(
            gpu.call(
                body,
                warps=warps,
                interpret=interpret,
                grid=(rows,),
                in_specs=[spec(x.shape[1:]) for x in arrays],
                out_specs=[spec(x.shape) for x in shapes],
                out_shape=[jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for x in shapes],
                name=name,
            )(*arrays)
        )

    return jax.tree.unflatten(out_tree, run(*leaves))


@dataclasses.dataclass(frozen=True)
class Step:
    """Operations of both kernels on a chunk's tokens."""

    layers: Layers
    objective: Objective
    dot: gpu.Product
    count: int  # tiles
    limits: dict[str, float] | None  # limits on ‖W‖_F of each weight and momentum before a chunk

    def part(self, ref: jax.Ref, i: Index, name: str, j: Index) -> jax.Ref:
        """Index of tile j of a weight [chunks, out, in] before chunk i in its reference."""
        tile = self.columns(j)
        return ref.at[(i, slice(None), tile) if name == self.layers.outer else (i, tile, slice(None))]

    def columns(self, j: Index) -> Slice:
        """Tile j of the hidden width."""
        return pl.ds(j * _TILE, _TILE)

    def load(self, refs: Refs, i: Index, j: Index) -> Matrices:
        return {name: self.part(ref, i, name, j)[...] for name, ref in refs.items()}

    def store_all(self, refs: list[Refs], i: Index, j: Index, values: list[Matrices]) -> None:
        for part, of_part in zip(refs, values):
            for name, x in of_part.items():
                self.part(part[name], i, name, j)[...] = x

    def tiles(self, body: Callable[[Index, Y], Y], init: Y) -> Y:
        return jax.lax.fori_loop(0, self.count, body, init)

    def inner(self, x: list[Refs], at: Index, y: list[Refs], to: Index) -> list[Matrices]:
        """⟨x, y⟩ for each weight and momentum at places `at` and `to`, divided by the squares of their limits."""
        assert self.limits is not None
        limits = self.limits

        def add(j: Index, sums: list[Matrices]) -> list[Matrices]:
            tiles = [(self.load(a, at, j), self.load(b, to, j)) for a, b in zip(x, y)]
            # Divided first: the squares of huge weights would overflow.
            inner = lambda a, b, most: jnp.sum(jnp.sum((a / most) * (b / most), axis=1), axis=0)
            return [
                {name: total + inner(a[name], b[name], limits[name]) for name, total in part.items()}
                for part, (a, b) in zip(sums, tiles)
            ]

        return self.tiles(add, [{name: jnp.zeros((), jnp.float32) for name in part} for part in x])

    def change(self, refs: list[Refs], i: Index, new: Callable[[int, str, jax.Array, Index], jax.Array]) -> None:
        """Replaces each tile x of each weight and momentum at place i by new(part, name, x, j)."""

        def tile(j: Index, _: None) -> None:
            old = [self.load(part, i, j) for part in refs]
            self.store_all(refs, i, j, [{k: new(n, k, x, j) for k, x in part.items()} for n, part in enumerate(old)])

        self.tiles(tile, None)

    @property
    def width(self) -> int:
        """Hidden channels."""
        return self.count * _TILE

    def projections(self, block: "Block", w: Matrices) -> Matrices:
        return {name: self.dot(block.k, w[name], 1, 1) for name in self.layers.inner}

    def hidden(self, block: "Block", z: Matrices, j: Index) -> jax.Array:
        if z:
            return self.layers.hidden(z)
        return block.key_tile(self.columns(j))

    def gradients(self, block: "Block", g: jax.Array, w: Matrices, j: Index) -> tuple[jax.Array, Matrices]:
        """For a tile: h, the input of the outer weight, and the left factors of the gradients of the inner ones.

        g: the outer weight's left factor, [E, value_dim]."""
        if not self.layers.inner:
            return self.hidden(block, {}, j), {}
        return self.factors(self.projections(block, w), self.dot(g, w[self.layers.outer], 1, 0))

    def factors(self, z: Matrices, u: jax.Array) -> tuple[jax.Array, Matrices]:
        """h, and the gradient of each projection from u, the gradient of h."""
        h, pullback = jax.vjp(self.layers.hidden, z)
        return h, pullback(u)[0]

    def sums(self, blocks: Sequence[B], term: Callable[[B, Index], jax.Array]) -> list[jax.Array]:
        """Σ_j term(block, j) [E, value_dim] over tiles j for each block, in one loop, or one per block if there are many."""
        zeros = [jnp.zeros(block.refs[1].shape[1:], jnp.float32) for block in blocks]
        groups = (
            # One loop loads each tile once for all blocks, as long as their sums fit in registers.
            [list(range(len(blocks)))] if sum(x.size for x in zeros) <= _TOGETHER else [[n] for n in range(len(blocks))]
        )
        totals: list[jax.Array] = []
        for group in groups:
            add = lambda j, sums, group=group: tuple(x + term(blocks[n], j) for n, x in zip(group, sums))
            totals += self.tiles(add, tuple(zeros[n] for n in group))
        return totals

    def outs(self, blocks: Sequence["Block"], weights: Refs, i: Index) -> list[jax.Array]:
        """W_outer h of each block."""

        def term(block: "Block", j: Index) -> jax.Array:
            w = self.load(weights, i, j)
            return self.dot(self.hidden(block, self.projections(block, w), j), w[self.layers.outer], 1, 1)

        return self.sums(blocks, term)

    def gradient(self, block: "Block", out: jax.Array) -> jax.Array:
        """∇ℓ of W_outer h."""
        return jax.grad(lambda out: self._loss(block, self._readout(block, out)))(out)

    def decrease(self, block: "Block", out: jax.Array) -> jax.Array:
        """First-order decrease of each token's loss down to its target, [E], from W_outer h."""
        value = self._readout(block, out)
        slope = jax.grad(functools.partial(self._loss, block))(value)
        return jnp.maximum(jnp.sum(slope * (value - block.v), axis=1), 0.0)

    def _readout(self, block: "Block", out: jax.Array) -> jax.Array:
        return self.layers.readout(block.k.astype(jnp.float32), out)

    def _loss(self, block: "Block", value: jax.Array) -> jax.Array:
        return jnp.sum(self.objective.loss(value, block.v, block.threshold))


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """The E tokens of a step. Each use reloads them, because holding them through the loops over tiles would fill the registers.

    Attributes:
      refs: k, v [chunks, E_b, dim].
      of_gradients: the weights of their gradients in the next W and S, [chunks, 1 or 2, E_b].
      thresholds: [chunks, E_b], or None.
      i: the chunk.
    """

    refs: tuple[jax.Ref, jax.Ref]
    of_gradients: jax.Ref
    thresholds: jax.Ref | None
    i: Index

    @property
    def k(self) -> jax.Array:
        return self.refs[0][self.i]

    @property
    def v(self) -> jax.Array:
        return self.refs[1][self.i].astype(jnp.float32)

    @property
    def threshold(self) -> jax.Array | None:
        return None if self.thresholds is None else self.thresholds[self.i]

    def key_tile(self, which: Slice) -> jax.Array:
        return self.refs[0][self.i, :, which].astype(jnp.float32)

    @property
    def weights(self) -> tuple[jax.Array, ...]:
        """Columns [E_b, 1]."""
        return tuple(self.of_gradients[self.i, part, :][:, None] for part in range(self.of_gradients.shape[1]))


@dataclasses.dataclass(frozen=True, eq=False)
class ScratchBlock(Block):
    """g, d: [E_b, value_dim], scratch for the kernel's results on these tokens. place: theirs among the E tokens."""

    g: jax.Ref
    d: jax.Ref
    place: pl.Slice


def thresholds(tokens: Tokens) -> Sequence[Any]:
    """The thresholds of each block, or None."""
    return tokens["thresholds"] or [None] * len(tokens["blocks"])


def places(blocks: Sequence[tuple[jax.Array, jax.Array]]) -> list[pl.Slice]:
    """Where the tokens of each block are among those of all, from k and v of each [..., E_b, dim]."""
    sizes = [k.shape[-2] for k, _ in blocks]
    return [pl.Slice(start, size) for start, size in zip(itertools.accumulate([0, *sizes]), sizes)]


def block_tokens(channels: int, dtype: jax.typing.DTypeLike) -> int:
    """Tokens per block, chosen so that a step spills almost nothing at d = 64 and 128 with bfloat16 products."""
    return 64 if narrow(channels, dtype) else 32


def num_warps(tokens: Tokens, *, backward: bool) -> int:
    """Number of warps: four, so that a multiprocessor can hold two programs, unless eight spill less."""
    k, v = tokens["blocks"][0]
    many = backward and tokens["step_gates"] is not None
    return 4 if narrow(max(k.shape[-1], v.shape[-1]), k.dtype) and not many else 8


def narrow(channels: int, dtype: jax.typing.DTypeLike) -> bool:
    """Whether blocks of 64 tokens leave registers for a step."""
    return channels <= 64 and jnp.dtype(dtype) == jnp.bfloat16


class Settings(NamedTuple):
    """The static settings of both kernels.

    Attributes:
      chunk, limits, interpret: as in `gpu.memory_scan`.
      dtype: dtype of the tokens, which determines the precision of products.
    """

    chunk: MemoryChunk
    limits: tuple[float, ...] | None
    interpret: Interpret
    dtype: jax.typing.DTypeLike

    def step(self, carry: Arrays) -> Step:
        """The operations for a carry, of which the arrays' last axes count."""
        layers = Layers.of(self.chunk.structure)
        assert layers is not None
        width = carry[self.chunk.names.index(layers.outer)].shape[-1]
        limits = None if self.limits is None else dict(zip(self.chunk.names, self.limits))
        dot = gpu.products(self.dtype, self.interpret)
        return Step(layers, self.chunk.objective, dot, width // _TILE, limits)

    def named(self, carry: Sequence[X]) -> list[dict[str, X]]:
        """A carry's arrays by name: the weights, then the momenta if there are any."""
        names = self.chunk.names
        return [dict(zip(names, carry[at : at + len(names)])) for at in range(0, len(carry), len(names))]

    def flat(self, parts: Sequence[dict[str, X]]) -> tuple[X, ...]:
        """The inverse of `named`."""
        return tuple(part[name] for part in parts for name in self.chunk.names)


def copy(step: Step, source: Refs, at: Index, target: Refs, to: Index) -> None:
    """Copies the matrices at place `at` to place `to` of others."""

    def tile(j: Index, _: None) -> None:
        step.store_all([target], to, j, [step.load(source, at, j)])

    step.tiles(tile, None)


def zero(step: Step, targets: list[Refs], to: Index) -> None:
    """Fills place `to` with zeros."""
    step.change(targets, to, lambda n, name, x, j: jnp.zeros_like(x))


def barrier(interpret: Interpret) -> None:
    """Waits until all threads of a program have written their part of a state, before others read it."""
    if not interpret:
        triton.debug_barrier()
