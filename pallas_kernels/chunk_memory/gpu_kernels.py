"""The two GPU kernels of the chunkwise memory: the states before each chunk, and their cotangents."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels import gpu
from pallas_kernels.arguments import BEGINS, EMPTY, Arrays, Index, Interpret, Slice
from pallas_kernels.batching import rows_folded
from pallas_kernels.chunk_memory.chunk import MemoryChunk, Objective, Structure
from pallas_kernels.chunk_scan import Restarts

Refs = dict[str, jax.Ref]  # of the weights, or of the momenta, by name
Matrices = dict[str, jax.Array]
X = TypeVar("X")
Y = TypeVar("Y")
B = TypeVar("B", bound="_Block")


class Tokens(TypedDict):
    """Inputs of the kernels for each chunk.

    Attributes:
      blocks: for each block of E tokens, k and v [rows, chunks, E, dim], and the weights of their gradients in the next W and S,
        [rows, chunks, 1 or 2, E].
      scales: a chunk's coefficients of W in W, of S in W and of S in S, [rows, chunks, 3].
    """

    blocks: list[tuple[jax.Array, jax.Array, jax.Array]]
    scales: jax.Array


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
        calls = []
        x = jnp.zeros((1, 1), jnp.float32)

        def linear(name: str, h: jax.Array) -> jax.Array:
            calls.append((name, h is x))
            return jnp.zeros((1, 1), jnp.float32)

        structure.apply(linear, x, x, None)
        *inner, (outer, reads_input) = calls
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


def _rows(kernel: Callable[[Any, Any], None], inputs: Any, outputs: Any, *, warps: int, interpret: Interpret) -> Any:
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
                name=kernel.__name__,
            )(*arrays)
        )

    return jax.tree.unflatten(out_tree, run(*leaves))


@dataclasses.dataclass(frozen=True)
class _Step:
    """Operations of both kernels on a chunk's tokens."""

    layers: Layers
    objective: Objective
    dot: gpu.Product
    count: int  # tiles
    limits: dict[str, float] | None  # limits on ‖W‖_F of each weight and momentum before a chunk

    def part(self, ref: jax.Ref, i: Index, name: str, j: Index) -> jax.Ref:
        """Index of tile j of a weight [chunks, out, in] before chunk i in its reference."""
        columns = pl.ds(j * _TILE, _TILE)
        return ref.at[(i, slice(None), columns) if name == self.layers.outer else (i, columns, slice(None))]

    def load(self, refs: Refs, i: Index, j: Index) -> Matrices:
        return {name: self.part(ref, i, name, j)[...] for name, ref in refs.items()}

    def store_all(self, refs: list[Refs], i: Index, j: Index, values: list[Matrices]) -> None:
        for part, of_part in zip(refs, values):
            for name, x in of_part.items():
                self.part(part[name], i, name, j)[...] = x

    def tiles(self, body: Callable[[Index, Y], Y], init: Y) -> Y:
        return jax.lax.fori_loop(0, self.count, body, init)

    def inner(self, x: list[Refs], at: Index, y: list[Refs], to: Index) -> list[Matrices]:
        """⟨x, y⟩ for each weight and momentum at slots `at` and `to`, divided by the squares of their limits."""
        assert self.limits is not None
        limits = self.limits

        def add(j: Index, sums: list[Matrices]) -> list[Matrices]:
            tiles = [(self.load(a, at, j), self.load(b, to, j)) for a, b in zip(x, y)]
            inner = lambda a, b, most: jnp.sum(jnp.sum((a / most) * (b / most), axis=1), axis=0)
            return [
                {name: total + inner(a[name], b[name], limits[name]) for name, total in part.items()}
                for part, (a, b) in zip(sums, tiles)
            ]

        return self.tiles(add, [{name: jnp.zeros((), jnp.float32) for name in part} for part in x])

    def change(self, refs: list[Refs], i: Index, new: Callable[[int, str, jax.Array, Index], jax.Array]) -> None:
        """Replaces each tile x of each weight and momentum at slot i by new(part, name, x, j)."""

        def tile(j: Index, _: None) -> None:
            old = [self.load(part, i, j) for part in refs]
            self.store_all(refs, i, j, [{k: new(n, k, x, j) for k, x in part.items()} for n, part in enumerate(old)])

        self.tiles(tile, None)

    def projections(self, block: "_Block", w: Matrices) -> Matrices:
        return {name: self.dot(block.k, w[name], 1, 1) for name in self.layers.inner}

    def hidden(self, block: "_Block", z: Matrices, j: Index) -> jax.Array:
        if z:
            return self.layers.hidden(z)
        return block.key_tile(pl.ds(j * _TILE, _TILE))

    def factors(self, z: Matrices, u: jax.Array) -> tuple[jax.Array, Matrices]:
        """h, and the gradient of each projection from u, the gradient of h."""
        h, pullback = jax.vjp(self.layers.hidden, z)
        return h, pullback(u)[0]

    def sums(self, blocks: Sequence[B], term: Callable[[B, Index], jax.Array]) -> list[jax.Array]:
        """Σ_j term(block, j) [E, value_dim] over tiles j for each block, in one loop, or one per block if there are many."""
        zeros = [jnp.zeros(block.refs[1].shape[1:], jnp.float32) for block in blocks]
        groups = (
            [list(range(len(blocks)))] if sum(x.size for x in zeros) <= _TOGETHER else [[n] for n in range(len(blocks))]
        )
        totals: list[jax.Array] = []
        for group in groups:
            add = lambda j, sums, group=group: tuple(x + term(blocks[n], j) for n, x in zip(group, sums))
            totals += self.tiles(add, tuple(zeros[n] for n in group))
        return totals

    def outs(self, blocks: Sequence["_Block"], weights: Refs, i: Index) -> list[jax.Array]:
        """W_outer h of each block."""

        def term(block: "_Block", j: Index) -> jax.Array:
            w = self.load(weights, i, j)
            return self.dot(self.hidden(block, self.projections(block, w), j), w[self.layers.outer], 1, 1)

        return self.sums(blocks, term)

    def gradient(self, block: "_Block", out: jax.Array) -> jax.Array:
        """∇ℓ of W_outer h."""
        loss = lambda out: jnp.sum(
            self.objective.loss(self.layers.readout(block.k.astype(jnp.float32), out), block.v, None)
        )
        return jax.grad(loss)(out)


@dataclasses.dataclass(frozen=True)
class _Block:
    """The E tokens of a step. Each use reloads them, because holding them through the loops over tiles would fill the registers.

    Attributes:
      refs: k, v [chunks, E, dim] and the weights of their gradients in the next W and S [chunks, 1 or 2, E].
      i: the chunk.
    """

    refs: tuple[jax.Ref, jax.Ref, jax.Ref]
    i: Index

    @property
    def k(self) -> jax.Array:
        return self.refs[0][self.i]

    @property
    def v(self) -> jax.Array:
        return self.refs[1][self.i].astype(jnp.float32)

    def key_tile(self, which: Slice) -> jax.Array:
        return self.refs[0][self.i, :, which].astype(jnp.float32)

    @property
    def weights(self) -> tuple[jax.Array, ...]:
        """Columns [E, 1]."""
        return tuple(self.refs[2][self.i, place, :][:, None] for place in range(self.refs[2].shape[1]))


@dataclasses.dataclass(frozen=True)
class _ScratchBlock(_Block):
    """g, d: [E, value_dim], scratch for the kernel's results on these tokens."""

    g: jax.Ref
    d: jax.Ref


def block_tokens(channels: int, dtype: jax.typing.DTypeLike) -> int:
    """Tokens per block, chosen so that a step spills almost nothing at d = 64 and 128 with bfloat16 products."""
    return 64 if _narrow(channels, dtype) else 32


def _warps(tokens: Tokens) -> int:
    """Number of warps: four, so that a multiprocessor can hold two programs, unless eight spill less."""
    k, v, _ = tokens["blocks"][0]
    return 4 if _narrow(max(k.shape[-1], v.shape[-1]), k.dtype) else 8


def _narrow(channels: int, dtype: jax.typing.DTypeLike) -> bool:
    return channels <= 64 and jnp.dtype(dtype) == jnp.bfloat16


def _settings(
    chunk: MemoryChunk,
    limits: tuple[float, ...] | None,
    carry: Arrays,
    dtype: jax.typing.DTypeLike,
    interpret: Interpret,
) -> tuple[_Step, Callable[[Sequence[X]], list[dict[str, X]]]]:
    layers = Layers.of(chunk.structure)
    assert layers is not None
    width = carry[chunk.names.index(layers.outer)].shape[-1]
    by_name = None if limits is None else dict(zip(chunk.names, limits))
    step = _Step(layers, chunk.objective, gpu.products(dtype, interpret), width // _TILE, by_name)
    size = len(chunk.names)
    named = lambda carry: [dict(zip(chunk.names, carry[at : at + size])) for at in range(0, len(carry), size)]
    return step, named


def _copy(step: _Step, source: Refs, at: Index, target: Refs, to: Index) -> None:
    def tile(j: Index, _: None) -> None:
        step.store_all([target], to, j, [step.load(source, at, j)])

    step.tiles(tile, None)


def _zero(step: _Step, targets: list[Refs], to: Index) -> None:
    step.change(targets, to, lambda n, name, x, j: jnp.zeros_like(x))


def _barrier(interpret: Interpret) -> None:
    """Waits until all threads of a program have written their part of a state, before others read it."""
    if not interpret:
        triton.debug_barrier()


def states(
    chunk: MemoryChunk,
    limits: tuple[float, ...] | None,
    interpret: Interpret,
    carry: Arrays,
    tokens: Tokens,
    restarts: Restarts,
    dtype: jax.typing.DTypeLike,
) -> tuple[Arrays, Arrays, jax.Array | None]:
    """The carry before each chunk, [rows, chunks, out, in] each, and after the last, [rows, out, in]. With limits, also the factors
    [rows, chunks, len(carry)] by which the carry was scaled after each chunk so that the next begins within the limits.

    Args:
      chunk, limits, interpret, carry, restarts: as in `gpu.memory_scan`.
      tokens: the tokens of all chunks.
      dtype: dtype of the tokens, which determines the precision of products.
    """
    step, named = _settings(chunk, limits, carry, dtype, interpret)
    outer, inner, dot = step.layers.outer, step.layers.inner, step.dot
    chunks = tokens["scales"].shape[1]

    def limit(before: list[Refs], at: Index, kept: jax.Ref, i: Index, marks: jax.Ref | None) -> None:
        """Scales the state at slot `at` to its limits, and stores the factors of chunk i. An empty chunk has no limits."""
        # A square that overflows exceeds any limit.
        scale = lambda x: jnp.where(x > 1.0, jax.lax.rsqrt(jnp.clip(x, 1.0, 3e38)), 1.0)
        scales = jax.tree.map(scale, step.inner(before, at, before, at))
        if marks is not None:
            scales = jax.tree.map(lambda x: jnp.where(marks[at] == EMPTY, 1.0, x), scales)
        flat = [part[name] for part in scales for name in chunk.names]
        for place, x in enumerate(flat):
            kept[i, place] = x
        over = functools.reduce(jnp.minimum, flat) < 1.0
        pl.when(over)(functools.partial(step.change, before, at, lambda n, name, x, j: scales[n][name] * x))

    def chunk_memory_states(refs: Any, results: Any) -> None:
        first, tokens, marks, start = refs
        before, last, kept = results
        for source, target in zip(first, before):
            _copy(step, source, 0, target, 0)
        _barrier(interpret)

        def advance(i: Index, _: None) -> None:
            blocks = [_Block(refs, i) for refs in tokens["blocks"]]
            a, s, beta = (tokens["scales"][i, place] for place in range(3))
            outs = step.outs(blocks, before[0], i)
            gradients = [step.gradient(block, out) for block, out in zip(blocks, outs)]

            def write(j: Index, _: None) -> None:
                old = [step.load(part, i, j) for part in before]
                w = old[0]
                new = [{name: a * x for name, x in w.items()}]
                if len(old) > 1:
                    new[0] = {name: x + s * old[1][name] for name, x in new[0].items()}
                    new.append({name: beta * x for name, x in old[1].items()})
                for block, g in zip(blocks, gradients):
                    left = {outer: g}
                    if inner:
                        h, of_projections = step.factors(step.projections(block, w), dot(g, w[outer], 1, 0))
                        left |= of_projections
                    else:
                        h = step.hidden(block, {}, j)
                    for part, weight in zip(new, block.weights):
                        for name in (outer, *inner):
                            part[name] += dot(left[name] * weight, h if name == outer else block.k, 0, 0)
                put = functools.partial(step.store_all, j=j, values=new)
                pl.when(i + 1 < chunks)(functools.partial(put, before, i + 1))
                pl.when(i + 1 == chunks)(functools.partial(put, last, 0))

            step.tiles(write, None)
            _barrier(interpret)
            if marks is not None:

                @pl.when((i + 1 < chunks) & (marks[jnp.minimum(i + 1, chunks - 1)] == BEGINS))
                def _() -> None:
                    _copy(step, start, 0, before[0], i + 1)
                    _zero(step, before[1:], i + 1)

                _barrier(interpret)
            if step.limits is not None:
                pl.when(i + 1 < chunks)(functools.partial(limit, before, i + 1, kept, i, marks))
                _barrier(interpret)

        jax.lax.fori_loop(0, chunks, advance, None)

    shapes = lambda count: named([jax.ShapeDtypeStruct((count, *x.shape[1:]), jnp.float32) for x in carry])
    marks, start = (None, ()) if restarts is None else restarts
    inputs = (named([x[:, None] for x in carry]), tokens, marks, dict(zip(chunk.names, (x[:, None] for x in start))))
    kept = None if limits is None else jax.ShapeDtypeStruct((chunks, len(carry)), jnp.float32)
    outputs = (shapes(chunks), shapes(1), kept)
    *results, kept = _rows(chunk_memory_states, inputs, outputs, warps=_warps(tokens), interpret=interpret)
    before, last = (tuple(part[name] for part in parts for name in chunk.names) for parts in results)
    return before, tuple(x[:, 0] for x in last), kept


def state_cotangents(
    chunk: MemoryChunk,
    limits: tuple[float, ...] | None,
    interpret: Interpret,
    before: Arrays,
    kept: jax.Array | None,
    tokens: Tokens,
    ext: Arrays,
    last: Arrays,
    marks: jax.Array | None,
    dtype: jax.typing.DTypeLike,
) -> tuple[Arrays, Arrays, Arrays]:
    """G_i = ext_i + (∂ state_{i+1} / ∂ state_i)ᵀ G_{i+1}: G after each chunk, and before the first. Shapes as in `states`.

    With marks, also the cotangents of the weights with which segments begin. Nothing passes from a segment to the one before.

    Args:
      chunk, limits, interpret, tokens, dtype: as in `states`.
      before, kept: the results of `states`: the carry before each chunk, and with limits the factors after each chunk.
      ext: cotangents of the carry before each chunk from everything except the next carry.
      last: cotangents of the carry after the last chunk.
      marks: those of the chunks, as in `gpu.memory_scan`, or None.
    """
    step, named = _settings(chunk, limits, before, dtype, interpret)
    outer, inner, dot = step.layers.outer, step.layers.inner, step.dot
    chunks = tokens["scales"].shape[1]

    def through_limit(states: list[Refs], i: Index, after: list[Refs], at: Index, kept: jax.Ref) -> None:
        """The transpose of `limit`: removes the cotangent's component along a state that was scaled to its limit."""
        flat = [kept[at, place] for place in range(len(states) * len(chunk.names))]
        scales = [dict(zip(chunk.names, flat[start:])) for start in range(0, len(flat), len(chunk.names))]

        def project() -> None:
            along = step.inner(states, i, after, at)

            def new(n: int, name: str, x: jax.Array, j: Index) -> jax.Array:
                state = step.part(states[n][name], i, name, j)[...]
                return jnp.where(scales[n][name] < 1.0, scales[n][name] * (x - along[n][name] * state), x)

            step.change(after, at, new)

        pl.when(functools.reduce(jnp.minimum, flat) < 1.0)(project)

    def chunk_memory_cotangents(refs: Any, outputs: Any) -> None:
        states, kept, ext, last, tokens, marks = refs
        after, first, start, scratch = outputs
        weights = states[0]
        if marks is not None:
            _zero(step, [start], 0)
        for source, target in zip(last, after):
            _copy(step, source, 0, target, chunks - 1)
        _barrier(interpret)

        def advance(t: Index, _: None) -> None:
            i = chunks - 1 - t
            # g = ∇ℓ of W_outer h and d = ∂g/∂out ᵀ dg pass through memory, because they would spill if held in registers.
            blocks = [_ScratchBlock(refs, i, *kept) for refs, kept in zip(tokens["blocks"], scratch)]
            a, s, beta = (tokens["scales"][i, place] for place in range(3))
            outs = step.outs(blocks, weights, i)
            for block, out in zip(blocks, outs):
                block.g[...] = step.gradient(block, out)
            _barrier(interpret)

            def load(j: Index) -> tuple[Matrices, list[Matrices]]:
                return step.load(weights, i, j), [step.load(part, i, j) for part in after]

            def weighted(block: _Block, later: list[Matrices], name: str, x: jax.Array, axis: int) -> jax.Array:
                """Applies the cotangents of the next W and S to one factor x of a weight's gradients."""
                parts = [weight * dot(x, part[name], 1, axis) for part, weight in zip(later, block.weights)]
                return functools.reduce(jnp.add, parts)

            def through(block: _ScratchBlock, w: Matrices, later: list[Matrices]) -> tuple[Any, Matrices]:
                """(h, gradients of the projections) with their transpose, and the cotangents of these gradients."""
                primal = jax.vjp(step.factors, step.projections(block, w), dot(block.g[...], w[outer], 1, 0))
                return primal, {name: weighted(block, later, name, block.k, 1) for name in inner}

            def term(block: _ScratchBlock, j: Index) -> jax.Array:
                w, later = load(j)
                if not inner:
                    return weighted(block, later, outer, step.hidden(block, {}, j), 1)
                ((h, _), pullback), dleft = through(block, w, later)
                of_left = dot(pullback((jnp.zeros_like(h), dleft))[1], w[outer], 1, 1)
                return of_left + weighted(block, later, outer, h, 1)

            dg = step.sums(blocks, term)
            for block, out, x in zip(blocks, outs, dg):
                block.d[...] = jax.vjp(functools.partial(step.gradient, block), out)[1](x)[0]
            _barrier(interpret)

            def write(names: tuple[str, ...], j: Index, _: None) -> None:
                w, later = load(j)
                new = [{name: step.part(part[name], i, name, j)[...] for name in names} for part in ext]
                for name in names:
                    new[0][name] += a * later[0][name]
                    if len(later) > 1:
                        new[1][name] += s * later[0][name] + beta * later[1][name]
                for block in blocks:
                    left: Matrices = {}
                    if inner:
                        ((h, _), pullback), dleft = through(block, w, later)
                        dh = weighted(block, later, outer, block.g[...], 0) + dot(block.d[...], w[outer], 1, 0)
                        left, du = pullback((dh, dleft))
                    else:
                        h = step.hidden(block, {}, j)
                    for name in names:
                        if name in left:
                            new[0][name] += dot(left[name], block.k, 0, 0)
                            continue
                        new[0][name] += dot(block.d[...], h, 0, 0)
                        if inner:
                            new[0][name] += dot(block.g[...], du, 0, 0)
                put = functools.partial(step.store_all, j=j, values=new)
                pl.when(i > 0)(functools.partial(put, after, i - 1))
                pl.when(i == 0)(functools.partial(put, first, 0))

            # One after the other, although both need the same factors, because together they spill.
            for names in ((outer,), inner) if inner else ((outer,),):
                step.tiles(functools.partial(write, names), None)
            _barrier(interpret)
            if step.limits is not None:
                pl.when(i > 0)(functools.partial(through_limit, states, i, after, i - 1, kept))
                _barrier(interpret)
            if marks is not None:

                @pl.when((i > 0) & (marks[i] == BEGINS))
                def _() -> None:
                    step.change([start], 0, lambda n, name, x, j: x + step.part(after[0][name], i - 1, name, j)[...])
                    _zero(step, after, i - 1)

                _barrier(interpret)

        jax.lax.fori_loop(0, chunks, advance, None)

    shapes = lambda count: named([jax.ShapeDtypeStruct((count, *x.shape[2:]), jnp.float32) for x in ext])
    scratch = [(jax.ShapeDtypeStruct(v.shape[2:], jnp.float32),) * 2 for _, v, _ in tokens["blocks"]]
    needed = before if limits is not None else before[: len(chunk.names)]
    inputs = (named(needed), kept, named(ext), named([x[:, None] for x in last]), tokens, marks)
    outputs = (shapes(chunks), shapes(1), {} if marks is None else shapes(1)[0], scratch)
    *results, start, _ = _rows(chunk_memory_cotangents, inputs, outputs, warps=_warps(tokens), interpret=interpret)
    after, first = (tuple(part[name] for part in parts for name in chunk.names) for parts in results)
    return after, tuple(x[:, 0] for x in first), tuple(start[name][:, 0] for name in chunk.names if start)
