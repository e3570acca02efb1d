"""The second GPU kernel of the chunkwise memory: the cotangents of the states before each chunk (`gpu_states`), in reverse."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.arguments import BEGINS, Arrays, Index
from pallas_kernels.chunk_memory.gpu_bound import Solved
from pallas_kernels.chunk_memory.gpu_bound_cotangents import StepCotangents, scratch_of_steps
from pallas_kernels.chunk_memory.gpu_step import (
    Matrices,
    Refs,
    ScratchBlock,
    Settings,
    Step,
    Tokens,
    barrier,
    copy,
    num_warps,
    places,
    rows_call,
    thresholds,
    zero,
)


class _Given(NamedTuple):
    """Inputs, as of `state_cotangents`. last: one place each."""

    states: Any
    kept: Any
    of_steps: Any
    ext: Any
    last: Any
    tokens: Any
    marks: Any


class _Found(NamedTuple):
    """Results: G after each chunk and, in the last place, before the first, and the cotangent of `start`.

    scratch: g = ∇ℓ of W_outer h and d = ∂g/∂outᵀ dg of each block; more: arrays of bounded steps.
    """

    after: Any
    start: Any
    scratch: Any
    more: Any


def state_cotangents(
    settings: Settings,
    before: Arrays,
    kept: jax.Array | None,
    of_steps: Solved | None,
    tokens: Tokens,
    ext: Arrays,
    last: Arrays,
    marks: jax.Array | None,
) -> tuple[Arrays, Arrays]:
    """G_i = ext_i + (∂ state_{i+1} / ∂ state_i)ᵀ G_{i+1}: G after each chunk and, in the last place, before the first.

    Shapes as in `states`. With marks, also the cotangents of the weights with which segments begin. Nothing passes from a segment
    to the one before.

    Args:
      settings, tokens: as in `gpu_states.states`.
      before, kept, of_steps: the results of `gpu_states.states`: the carries, with limits the factors after each chunk, and with
        bounded steps its other results.
      ext: cotangents of the carry before each chunk from everything except the next carry.
      last: cotangents of the carry after the last chunk.
      marks: those of the chunks, as in `gpu.memory_scan`, or None.
    """
    chunk, named, step = settings.chunk, settings.named, settings.step(before)
    chunks = tokens["scales"].shape[1]

    def kernel(given: Any, found: Any) -> None:
        _Cotangents(settings, step, given, found).run()

    shapes = lambda count: named([jax.ShapeDtypeStruct((count, *x.shape[2:]), jnp.float32) for x in ext])
    scratch = [(jax.ShapeDtypeStruct(v.shape[2:], jnp.float32),) * 2 for _, v in tokens["blocks"]]
    more = None if of_steps is None else scratch_of_steps(chunk, tokens, step.width)
    # Only limits and bounded steps read the momenta before a chunk: its write is linear in them.
    needed = before[: len(chunk.names)] if settings.limits is None and of_steps is None else before
    given = _Given(
        named(needed), kept, of_steps, named(ext), named([x[:, None] for x in last]), tokens, marks
    )  # fmt: skip
    found = _Found(shapes(chunks + 1), {} if marks is None else shapes(1)[0], scratch, more)
    warps = num_warps(tokens, backward=True)
    found = rows_call(kernel, given, found, "chunk_memory_cotangents", warps=warps, interpret=settings.interpret)
    return settings.flat(found.after), tuple(found.start[name][:, 0] for name in chunk.names if found.start)


@dataclasses.dataclass(frozen=True)
class _Cotangents:
    """The kernel for one row."""

    settings: Settings
    step: Step
    given: _Given
    found: _Found

    @property
    def chunks(self) -> int:
        return self.given.tokens["scales"].shape[0]

    def wait(self) -> None:
        barrier(self.settings.interpret)

    def run(self) -> None:
        if self.given.marks is not None:
            zero(self.step, [self.found.start], 0)
        for source, target in zip(self.given.last, self.found.after):
            copy(self.step, source, 0, target, self.chunks - 1)
        self.wait()
        jax.lax.fori_loop(0, self.chunks, self.advance, None)

    def advance(self, t: Index, _: None) -> None:
        i, step = self.chunks - 1 - t, self.step
        of_chunk, outs = self.begun(i)
        of_chunk.store_d(outs)
        self.wait()
        # One after the other, although both need the same factors, because together they spill.
        outer, inner = step.layers.outer, step.layers.inner
        for names in ((outer,), inner) if inner else ((outer,),):
            step.tiles(functools.partial(self.write, of_chunk, names), None)
        self.wait()
        if step.limits is not None:
            pl.when(i > 0)(functools.partial(self.through_limit, i, i - 1))
            self.wait()
        if self.given.marks is not None:
            self.begin_segment(i)
            self.wait()

    def begun(self, i: Index) -> tuple["_OfChunk", list[jax.Array]]:
        """Chunk i with g of its blocks and the cotangents of its step sizes stored, and W_outer h of each block."""
        tokens, of_steps, step = self.given.tokens, self.given.of_steps, self.step
        # g and d pass through memory, because they would spill if held in registers.
        of_gradients = tokens["weights"] if of_steps is None else of_steps["weights"]
        parts = zip(tokens["blocks"], of_gradients, thresholds(tokens))
        with_scratch = zip(parts, self.found.scratch, places(tokens["blocks"]))
        blocks = [ScratchBlock(*refs, i, g, d, place) for refs, (g, d), place in with_scratch]
        scales = tuple(tokens["scales"][i, place] for place in range(3))
        outs = step.outs(blocks, self.given.states[0], i)
        for block, out in zip(blocks, outs):
            block.g[...] = step.gradient(block, out)
        self.wait()
        bounded: StepCotangents | None = None
        if of_steps is not None:
            gates, states = tokens["step_gates"], self.given.states
            bounded = StepCotangents(self.settings, step, blocks, states, gates, of_steps, i, self.found.more)
            bounded.store_all(self.found.after)
            self.wait()
        return _OfChunk(step, i, blocks, scales, self.given.states[0], self.found.after, bounded), outs

    def write(self, of_chunk: "_OfChunk", names: tuple[str, ...], j: Index, _: None) -> None:
        """Tile j of G before a chunk, for some of the weights and their momenta."""
        step, i = self.step, of_chunk.i
        w, later = of_chunk.load(j)
        new = [{name: step.part(part[name], i, name, j)[...] for name in names} for part in self.given.ext]
        a, s, beta = of_chunk.scales
        for name in names:
            new[0][name] += a * later[0][name]
            if len(self.found.after) > 1:
                new[1][name] += s * later[0][name] + beta * later[1][name]
        for block in of_chunk.blocks:
            of_chunk.add(new, names, block, w, later, j)
        before = jax.lax.rem(i + self.chunks, self.chunks + 1)  # place i − 1, or the last
        step.store_all(self.found.after, before, j, new)

    def through_limit(self, i: Index, at: Index) -> None:
        """The transpose of `limit` in `gpu_states`: removes a cotangent's component along a state that was scaled to its limit."""
        step, states, after, names = self.step, self.given.states, self.found.after, self.settings.chunk.names
        flat = [self.given.kept[at, place] for place in range(len(states) * len(names))]
        scales = [dict(zip(names, flat[start:])) for start in range(0, len(flat), len(names))]

        def project() -> None:
            along = step.inner(states, i, after, at)

            def new(n: int, name: str, x: jax.Array, j: Index) -> jax.Array:
                state = step.part(states[n][name], i, name, j)[...]
                return jnp.where(scales[n][name] < 1.0, scales[n][name] * (x - along[n][name] * state), x)

            step.change(after, at, new)

        pl.when(functools.reduce(jnp.minimum, flat) < 1.0)(project)

    def begin_segment(self, i: Index) -> None:
        """Moves G before chunk i to that of `start` if the chunk begins a segment."""
        step, after, start = self.step, self.found.after, self.found.start

        @pl.when((i > 0) & (self.given.marks[i] == BEGINS))
        def _() -> None:
            step.change([start], 0, lambda n, name, x, j: x + step.part(after[0][name], i - 1, name, j)[...])
            zero(step, after, i - 1)


@dataclasses.dataclass(frozen=True)
class _OfChunk:
    """The kernel's work on the tokens of one chunk.

    Attributes:
      step: the operations on tokens.
      i: the chunk.
      blocks: its tokens.
      scales: a, s and β at its end (`Tokens.scales`).
      weights: W before each chunk.
      after: G after each chunk.
      bounded: the cotangents of its step sizes, or None without a bound.
    """

    step: Step
    i: Index
    blocks: Sequence[ScratchBlock]
    scales: Arrays
    weights: Refs
    after: Sequence[Refs]
    bounded: StepCotangents | None

    def load(self, j: Index) -> tuple[Matrices, list[Matrices]]:
        """W, and the matrices whose inner products with the gradients have cotangents: of the next W and S, and W and S."""
        along = [] if self.bounded is None else self.bounded.along
        return self.step.load(self.weights, self.i, j), [
            self.step.load(part, self.i, j) for part in (*self.after, *along)
        ]

    def weighted(self, block: ScratchBlock, later: list[Matrices], name: str, x: jax.Array, axis: int) -> jax.Array:
        """Applies the matrices of `load` to one factor x of a weight's gradients."""
        columns = [*block.weights, *([] if self.bounded is None else self.bounded.columns(block))]
        parts = [weight * self.step.dot(x, part[name], 1, axis) for part, weight in zip(later, columns, strict=True)]
        return functools.reduce(jnp.add, parts)

    def through(
        self, block: ScratchBlock, w: Matrices, later: list[Matrices], j: Index
    ) -> tuple[tuple[Any, Callable[..., Any]], Matrices]:
        """(h, gradients of the projections) with their transpose, and the cotangents of these gradients."""
        step, inner = self.step, self.step.layers.inner
        projections, u = step.projections(block, w), step.dot(block.g[...], w[step.layers.outer], 1, 0)
        primal = jax.vjp(step.factors, projections, u)
        dleft = {name: self.weighted(block, later, name, block.k, 1) for name in inner}
        if self.bounded is not None:
            dleft = {name: x + self.bounded.of_factor(block, name, j) for name, x in dleft.items()}
        return primal, dleft

    def store_d(self, outs: Sequence[jax.Array]) -> None:
        """d of each block, from W_outer h."""
        for block, out, x in zip(self.blocks, outs, self.step.sums(self.blocks, self._of_g)):
            total = x if self.bounded is None else x + self.bounded.of_outer(block)
            (d,) = jax.vjp(functools.partial(self.step.gradient, block), out)[1](total)
            block.d[...] = d if self.bounded is None else d + self.bounded.of_decrease(block, out)

    def _of_g(self, block: ScratchBlock, j: Index) -> jax.Array:
        """Tile j's part of the cotangent of g."""
        step, outer = self.step, self.step.layers.outer
        w, later = self.load(j)
        if not step.layers.inner:
            return self.weighted(block, later, outer, step.hidden(block, {}, j), 1)
        ((h, _), pullback), dleft = self.through(block, w, later, j)
        of_left = step.dot(pullback((jnp.zeros_like(h), dleft))[1], w[outer], 1, 1)
        return of_left + self.weighted(block, later, outer, h, 1)

    def add(
        self, new: list[Matrices], names: tuple[str, ...], block: ScratchBlock, w: Matrices, later: list[Matrices],
        j: Index,
    ) -> None:  # fmt: skip
        """Adds what a block's gradients have of W, and of S with bounded steps, to a tile of the weights in `names`."""
        step, outer, dot, bounded = self.step, self.step.layers.outer, self.step.dot, self.bounded
        dz: Matrices = {}
        if step.layers.inner:
            ((h, left), pullback), dleft = self.through(block, w, later, j)
            dh = self.weighted(block, later, outer, block.g[...], 0) + dot(block.d[...], w[outer], 1, 0)
            if bounded is not None:
                dh = dh + bounded.of_factor(block, outer, j)
            dz, du = pullback((dh, dleft))
        else:
            h, left = step.hidden(block, {}, j), {}
        for name in names:
            if bounded is not None:  # its inner products with W and S
                x, inputs = (left[name], block.k) if name in left else (block.g[...], h)
                for part, weight in zip(bounded.along_parts, bounded.columns(block), strict=True):
                    new[part][name] += dot(x * weight, inputs, 0, 0)
            if name in dz:
                new[0][name] += dot(dz[name], block.k, 0, 0)
                continue
            new[0][name] += dot(block.d[...], h, 0, 0)
            if step.layers.inner:
                new[0][name] += dot(block.g[...], du, 0, 0)
