"""A recurrence over chunks as one TPU kernel. The carry stays in vector memory for the whole sequence, forward and backward.

    carry, y_i = chunk(carry, x_i)        for the chunks i of each head

The grid is batch × groups of heads × groups of chunks, and the last dimension runs in order. So the carry is a scratch buffer that
each chunk finds as the previous chunk left it. Device memory holds only the inputs, the outputs and, if gradients are needed, the
carry before each chunk, and of the chunk's own values those that it wants to keep. The backward kernel processes the chunks in
reverse: it recomputes a chunk from these, differentiates it (`jax.vjp` inside the kernel) and keeps the cotangent of the carry in
scratch.

Tokens are read and written as [batch, time, heads · dim], as projections produce them, so no layout changes around the kernel. A
program advances several neighbouring heads together (`Lanes`): their channels fill whole tiles of 128 lanes, and while the matrix
unit computes a product of one head, those of the others hide its latency. It may also advance several chunks in turn (`Unroll`):
what does not depend on the carry, such as a chunk's system, is then computed while the chunk before it ends.

With packed segments, a chunk that begins a segment finds the initial carry instead, and programs of empty chunks only are skipped.
Backward, the cotangent of the carry before such a chunk is that of the initial carry, and the previous segment's is zero.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.arguments import BEGINS, EMPTY, Arrays, Index, Interpret
from pallas_kernels.batching import rows_folded
from pallas_kernels.chunk_program import Blocks, Chunk, Lanes, Read, Shapes, Unroll, in_groups, wide
from pallas_kernels.varying import pallas_call, vary_like

# (marks of the chunks, int32 [batch, chunks]; the first arrays of the initial carry, [batch, heads, …, …]); None without segments.
Restarts = tuple[jax.Array, Arrays] | None

_VMEM = 64 * 2**20  # scoped limit; the smallest supported generation has 64 MiB


def chunk_scan(
    chunk: Chunk, carry: Arrays, tokens: Arrays, gates: jax.Array, *, together: int = 1, unroll: Unroll = Unroll(),
    interpret: Interpret = False, dtype: jax.typing.DTypeLike = jnp.float32, restarts: Restarts = None,
) -> tuple[Arrays, Arrays]:  # fmt: skip
    """Scans a chunk function over the chunks of every head.

    Args:
      chunk: the function of one chunk of one head; static. Its inputs are one matrix [m, dim] for each of `tokens`, and [n, m].
        `chunk.keeping`, if there is one, has further outputs after its own: values to keep for the backward kernel, in their own
        dtypes. `chunk.differentiated`, if there is one, is the same function for that kernel; it gets them, float32, after its
        inputs. `Shapes.stages` explains `chunk.ahead`.
      carry: the carry before the first chunk, float32 [batch, heads, …, …] each.
      tokens: [batch, time, heads, dim] each, any floating dtype; `chunk` gets float32.
      gates: [batch, heads, chunks, n, m] for chunks of m tokens, at least one chunk. They mark the padding after the last token.
      together: number of heads that one program should advance together, if the heads can be divided so. `chunk.of_heads` then
        takes arrays of several heads, or if it has none `chunk` is vmapped. 1 never vmaps it.
      unroll: number of chunks that one program should advance. Fewer if that does not divide the number of chunks.
      interpret: passed to `pallas_call`.
      dtype: dtype of the outputs.
      restarts: CONTINUES, BEGINS or EMPTY (see `arguments`) for each chunk, int32 [batch, chunks], and the first arrays of the
        carry with which segments begin, float32 [batch, heads, …, …]; the others are zeros. None means one segment without empty
        chunks.

    Returns:
      The carry after the last chunk, and the outputs [batch, time, heads, dim]. There is no forward-mode derivative.
    """
    time, heads = tokens[0].shape[1:3]
    count, size = gates.shape[2], gates.shape[-1]
    shape = lambda x: jax.ShapeDtypeStruct(x.shape[-2:], jnp.float32)
    inputs = [*(jax.ShapeDtypeStruct((size, x.shape[-1]), jnp.float32) for x in tokens), shape(gates)]
    # Sizes of the outputs are known only by calling the chunk; they decide how many heads fill whole lanes.
    _, outputs = jax.eval_shape(chunk, tuple(map(shape, carry)), tuple(inputs))
    widths, widths_out = tuple(x.shape[-1] for x in tokens), tuple(y.shape[-1] for y in outputs)
    # Outputs too: a head's results must begin at a multiple of what its lanes can be cut at.
    lanes = Lanes.of(heads, together, {*widths, *widths_out})

    def flat(x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        x = jnp.pad(x, ((0, 0), (0, count * size - time), (0, 0), (0, lanes.stride(width) - width)))
        return x.reshape(x.shape[0], count, size, -1)  # blocks of whole chunks, which may be less than a tile

    shapes = Shapes(lanes, widths, widths_out, unroll.dividing(count))
    carry, xs, restarts = vary_like((carry, (*map(flat, tokens), gates), restarts))
    final, ys = _scan(_Settings(chunk, shapes, interpret, jnp.dtype(dtype)), carry, xs, restarts)
    unflat = lambda y, width: y.reshape(y.shape[0], count * size, heads, -1)[:, :time, :, :width]
    return final, tuple(map(unflat, ys, widths_out))


class _Settings(NamedTuple):
    """The static settings: the chunk's function and its shapes, how to run the kernel, and the dtype of the outputs."""

    chunk: Chunk
    shapes: Shapes
    interpret: Interpret
    dtype: jax.typing.DTypeLike


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(settings: _Settings, carry: Arrays, xs: Arrays, restarts: Restarts) -> tuple[Arrays, Arrays]:
    """`chunk_scan` on xs = tokens [batch, chunks, m, lanes] each, and gates."""
    final, ys, _ = _forward(settings, carry, xs, restarts, keep=False)
    return final, ys


def _scan_forward(
    settings: _Settings, carry: Arrays, xs: Arrays, restarts: Restarts
) -> tuple[tuple[Arrays, Arrays], tuple[Arrays, Arrays, Restarts]]:
    final, ys, before = _forward(settings, carry, xs, restarts, keep=True)
    return (final, ys), (before, xs, restarts)


def _scan_backward(
    settings: _Settings, kept: tuple[Arrays, Arrays, Restarts], cotangents: tuple[Arrays, Arrays]
) -> tuple[Arrays, Arrays, tuple[None, Arrays] | None]:
    before, xs, restarts = kept
    dcarry, dys = cotangents
    dfirst, dxs, dstart = _backward(settings, before, xs, dcarry, dys, restarts)
    return dfirst, dxs, None if restarts is None else (None, dstart)


_scan.defvjp(_scan_forward, _scan_backward)


def _copy(to: Sequence[jax.Ref], refs: Sequence[jax.Ref]) -> None:
    for ref, value in zip(to, refs, strict=True):
        ref[...] = value[...].astype(ref.dtype)


def _zero(refs: Sequence[jax.Ref]) -> None:
    for ref in refs:
        ref[...] = jnp.zeros(ref.shape, ref.dtype)


def _store(refs: Sequence[jax.Ref], values: Sequence[jax.Array]) -> None:
    for ref, value in zip(refs, values, strict=True):
        ref[...] = value.reshape(ref.shape).astype(ref.dtype)


def _where(condition: jax.Array, of: Iterable[jax.Array], otherwise: Iterable[jax.Array]) -> Arrays:
    return tuple(jnp.where(condition, x, y) for x, y in zip(of, otherwise, strict=True))


def _zeros(arrays: Sequence[jax.Array]) -> Arrays:
    return tuple(map(jnp.zeros_like, arrays))


def _marks_of(marks: Sequence[jax.Ref], group: Index, unroll: int) -> list[jax.Array]:
    """The marks of the chunks of a program, if there are any. Between them, carries are selected: branches would keep what the
    chunks have in common from overlapping."""
    return [marks[0][0, group * unroll + c] for c in range(unroll) if marks]


def _unless_empty(marks: list[jax.Array], advance: Callable[[], None], results: Sequence[jax.Ref]) -> None:
    """`advance()`, or zeros for the results of a program whose chunks are all empty."""
    if not marks:
        advance()
        return
    empty = functools.reduce(jnp.logical_and, [mark == EMPTY for mark in marks])
    pl.when(jnp.logical_not(empty))(advance)
    pl.when(empty)(lambda: _zero(results))


def _marks(restarts: Restarts) -> tuple[jax.Array, ...]:
    """The marks as [batch, 1, chunks], if there are any."""
    return () if restarts is None else (restarts[0].astype(jnp.int32)[:, None],)


def _forward(
    settings: _Settings, carry: Arrays, xs: Arrays, restarts: Restarts, *, keep: bool
) -> tuple[Arrays, Arrays, Arrays]:
    """The final carry, the outputs and, with `keep`, the carry before each chunk and what it keeps: undefined for empty chunks."""
    shapes, dtype = settings.shapes, settings.dtype
    keeping = getattr(settings.chunk, "keeping", settings.chunk) if keep else settings.chunk
    all_marks, start = _marks(restarts), () if restarts is None else restarts[1]
    sizes = len(carry), len(xs), len(all_marks), len(start)
    kept = _kept(keeping, shapes, carry, xs[-1]) if keep else ()
    unroll = shapes.unroll.forward

    @rows_folded
    def call(*arrays: jax.Array) -> Arrays:
        carry, xs, all_marks, start = in_groups(arrays, sizes)
        batch, heads, count, _, size = xs[-1].shape
        lanes = shapes.lanes
        final = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in carry]
        ys = [jax.ShapeDtypeStruct((batch, count, size, heads * lanes.stride(n)), dtype) for n in shapes.outputs]
        # Without gradients nothing is written but the outputs and the last carry.
        before = [jax.ShapeDtypeStruct((batch, heads, count, *x.shape), x.dtype) for x in kept]

        def kernel(*refs: jax.Ref) -> None:
            groups = in_groups(refs, (*sizes, len(final), len(ys), len(before), len(carry)))
            _Forward(shapes, *shapes.stages(keeping), *groups).run(count // unroll)

        block = Blocks(shapes, size, unroll, lambda i: i)
        return tuple(
            _call(
                kernel, (batch, heads // lanes.together, count // unroll), "chunk_scan", settings.interpret, arrays,
                [*block.of_heads(carry), *block.of_tokens(shapes.inputs), *block.of_chunks(xs[-1:]),
                 *block.of_marks(all_marks), *block.of_heads(start)],
                [*final, *ys, *before],
                [*block.of_heads(final), *block.of_tokens(shapes.outputs), *block.of_chunks(before)],
                [(lanes.together, *x.shape[2:]) for x in carry],
            )
        )  # fmt: skip

    results = call(*carry, *xs, *all_marks, *start)
    final, ys, before = in_groups(results, (len(carry), len(shapes.outputs), len(kept)))
    return final, ys, before


def _kept(keeping: Chunk, shapes: Shapes, carry: Arrays, gates: jax.Array) -> Sequence[jax.ShapeDtypeStruct]:
    """The kept arrays of one chunk of one head: the carry before it and, after its outputs, its own values."""
    one = lambda x: jax.ShapeDtypeStruct(x.shape[-2:], jnp.float32)
    before = tuple(map(one, carry))
    tokens = tuple(jax.ShapeDtypeStruct((gates.shape[-1], width), jnp.float32) for width in shapes.inputs)
    _, outputs = jax.eval_shape(keeping, before, (*tokens, one(gates)))
    return *before, *outputs[len(shapes.outputs) :]


_Refs = tuple[jax.Ref, ...]


@dataclasses.dataclass(frozen=True)
class _Forward:
    """The forward kernel: references to the blocks of a program, in the order of the call. before: empty if nothing is kept."""

    shapes: Shapes
    ahead: Callable[[Read], Callable[[int], Any]]
    chunk: Callable[..., Any]
    first: _Refs
    xs: _Refs
    marks: _Refs
    start: _Refs
    final: _Refs
    ys: _Refs
    before: _Refs
    scratch: _Refs

    def run(self, steps: int) -> None:
        """One program of the `steps` that advance some heads."""
        pl.when(pl.program_id(2) == 0)(lambda: _copy(self.scratch, self.first))
        marks = _marks_of(self.marks, pl.program_id(2), self.shapes.unroll.forward)
        if marks:
            pl.when(marks[0] == BEGINS)(self.begin)
        _unless_empty(marks, lambda: self.advance(marks), self.ys)
        pl.when(pl.program_id(2) == steps - 1)(lambda: _copy(self.final, self.scratch))

    def begin(self) -> None:
        _copy(self.scratch[: len(self.start)], self.start)
        _zero(self.scratch[len(self.start) :])

    def advance(self, marks: list[jax.Array]) -> None:
        shapes = self.shapes
        state, inputs = shapes.heads(self.scratch), self.ahead(lambda c: shapes.read(self.xs, c))
        for c in range(shapes.unroll.forward):
            if marks and c:  # `begin` is for the program's first chunk
                start = shapes.heads(self.start)
                state = _where(marks[c] == BEGINS, (*start, *_zeros(state[len(start) :])), state)
            after, y = self.chunk(state, inputs(c))
            if self.before:
                _store([ref.at[:, c] for ref in self.before], (*state, *y[len(self.ys) :]))
            y = y[: len(self.ys)]
            if marks and shapes.unroll.forward > 1:  # the only chunk of a program is not empty here
                after, y = (_where(marks[c] == EMPTY, *x) for x in ((state, after), (_zeros(y), y)))
            state = after
            for ref, value in zip(self.ys, y, strict=True):
                shapes.lanes.store(ref.at[c], value)
        _store(self.scratch, state)


def _backward(
    settings: _Settings, before: Arrays, xs: Arrays, dcarry: Arrays, dys: Arrays, restarts: Restarts
) -> tuple[Arrays, Arrays, Arrays]:
    """The cotangents of the first carry, of the inputs, and of the first arrays of the carry with which segments begin."""
    shapes, chunk = settings.shapes, settings.chunk
    all_marks, num_start = _marks(restarts), 0 if restarts is None else len(restarts[1])
    sizes = len(before), len(xs), len(dcarry), len(dys), len(all_marks)
    # A chunk may have another form of itself whose derivative is faster.
    advanced, unroll = shapes.chunk(getattr(chunk, "differentiated", chunk)), shapes.unroll.backward

    @rows_folded
    def call(*arrays: jax.Array) -> Arrays:
        _, xs, dcarry, _, all_marks = in_groups(arrays, sizes)
        batch, heads, count, _, size = xs[-1].shape
        lanes, steps = shapes.lanes, count // unroll
        dfirst = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in dcarry]
        dxs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs]
        dstart = dfirst[:num_start]

        def kernel(*refs: jax.Ref) -> None:
            groups = in_groups(refs, (*sizes, len(dfirst), len(dxs), len(dstart), len(dcarry)))
            _Backward(shapes, advanced, *groups).run(steps)

        block = Blocks(shapes, size, unroll, lambda i: steps - 1 - i)
        of_inputs = [*block.of_tokens(shapes.inputs), *block.of_chunks(xs[-1:])]
        return tuple(
            _call(
                kernel, (batch, heads // lanes.together, steps), "chunk_scan_backward", settings.interpret, arrays,
                [*block.of_chunks(arrays[: len(before)]), *of_inputs, *block.of_heads(dcarry), *block.of_tokens(shapes.outputs),
                 *block.of_marks(all_marks)],
                [*dfirst, *dxs, *dstart], [*block.of_heads(dfirst), *of_inputs, *block.of_heads(dstart)],
                [(lanes.together, *x.shape[2:]) for x in dcarry],
            )
        )  # fmt: skip

    results = call(*before, *xs, *dcarry, *dys, *all_marks)
    dfirst, dxs, dstart = in_groups(results, (len(dcarry), len(xs), num_start))
    return dfirst, dxs, dstart


@dataclasses.dataclass(frozen=True)
class _Backward:
    """The backward kernel, like `_Forward`. Programs of some heads run from the last chunks to the first."""

    shapes: Shapes
    chunk: Chunk
    before: _Refs
    xs: _Refs
    dfinal: _Refs
    dys: _Refs
    marks: _Refs
    dfirst: _Refs
    dxs: _Refs
    dstart: _Refs
    scratch: _Refs

    def run(self, steps: int) -> None:
        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            _copy(self.scratch, self.dfinal)
            _zero(self.dstart)

        marks = _marks_of(self.marks, steps - 1 - pl.program_id(2), self.shapes.unroll.backward)
        _unless_empty(marks, lambda: self.advance(marks), self.dxs)
        if marks:
            pl.when(marks[0] == BEGINS)(self.begin)
        pl.when(pl.program_id(2) == steps - 1)(lambda: _copy(self.dfirst, self.scratch))

    def advance(self, marks: list[jax.Array]) -> None:
        shapes = self.shapes
        dstate = shapes.heads(self.scratch)
        for c in reversed(range(shapes.unroll.backward)):
            before = shapes.heads([ref.at[:, c] for ref in self.before])
            before, kept = before[: len(dstate)], before[len(dstate) :]
            given = lambda before, xs, kept=kept: self.chunk(before, (*xs, *kept))
            pullback = jax.vjp(given, before, shapes.read(self.xs, c))[1]
            dy = tuple(map(shapes.lanes.split, wide([ref.at[c] for ref in self.dys]), shapes.outputs))
            dbefore, dx = pullback((dstate, dy))
            if marks and shapes.unroll.backward > 1:
                dbefore, dx = (_where(marks[c] == EMPTY, *d) for d in ((dstate, dbefore), (_zeros(dx), dx)))
            if marks and c:
                begins, zeros = marks[c] == BEGINS, _zeros(dbefore)
                self.add(_where(begins, dbefore, zeros))
                dbefore = _where(begins, zeros, dbefore)
            dstate, (*dtokens, dgates) = dbefore, dx
            for ref, value in zip(self.dxs, dtokens):
                shapes.lanes.store(ref.at[c], value)
            _store([self.dxs[-1].at[:, c]], [dgates])
        _store(self.scratch, dstate)

    def add(self, dstate: Arrays) -> None:
        """Adds to the cotangents of the carry with which segments begin."""
        # The block of a group of heads stays in vector memory from step to step.
        for total, d in zip(self.dstart, dstate):
            total[...] += d.reshape(total.shape)

    def begin(self) -> None:
        self.add(wide(self.scratch))
        _zero(self.scratch)


def _call(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    name: str,
    interpret: Interpret,
    arrays: Sequence[jax.Array],
    in_specs: Sequence[pl.BlockSpec],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    out_specs: Sequence[pl.BlockSpec],
    scratch: Sequence[tuple[int, ...]],
) -> Sequence[jax.Array]:
    order = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=_VMEM)
    return pallas_call(
        kernel,
        out_shape=out_shape,
        grid=grid,
        in_specs=list(in_specs),
        out_specs=list(out_specs),
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        compiler_params=order,
        interpret=interpret,
        name=name,
    )(*arrays)
