"""A recurrence over chunks as one TPU kernel. The carry stays in vector memory for the whole sequence, forward and backward.

    carry, y_i = chunk(carry, x_i)        for the chunks i of each head

The grid is batch × groups of heads × chunks, and the last dimension runs in order. So the carry is a scratch buffer that each chunk
finds as the previous chunk left it. Device memory holds only the inputs, the outputs and, if gradients are needed, the carry before
each chunk. The backward kernel processes the chunks in reverse: it recomputes a chunk from the carry before it, differentiates it
(`jax.vjp` inside the kernel) and keeps the cotangent of the carry in scratch.

Tokens are read and written as [batch, time, heads · dim], as projections produce them, so no layout changes around the kernel. A
program advances several neighbouring heads together (`Lanes`): their channels fill whole tiles of 128 lanes, and while the matrix
unit computes a product of one head, those of the others hide its latency.

With packed segments, a chunk that begins a segment finds the initial carry instead, and empty chunks are skipped. Backward, the
cotangent of the carry before such a chunk is that of the initial carry, and the previous segment's is zero.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.arguments import BEGINS, EMPTY, Arrays, Index, Interpret
from pallas_kernels.batching import rows_folded
from pallas_kernels.layout import LANES
from pallas_kernels.varying import pallas_call, vary_like

# (carry, inputs) → (carry, outputs), all float32 matrices. Hashable, and restricted to operations that Mosaic compiles.
Chunk = Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]

Item = TypeVar("Item")

# (marks of the chunks, int32 [batch, chunks]; the first arrays of the initial carry, [batch, heads, …, …]); None without segments.
Restarts = tuple[jax.Array, Arrays] | None

_VMEM = 64 * 2**20  # scoped limit; the smallest supported generation has 64 MiB


def chunk_scan(
    chunk: Chunk, carry: Arrays, tokens: Arrays, gates: jax.Array, *, together: int = 1, interpret: Interpret = False,
    dtype: jax.typing.DTypeLike = jnp.float32, restarts: Restarts = None,
) -> tuple[Arrays, Arrays]:  # fmt: skip
    """Scans a chunk function over the chunks of every head.

    Args:
      chunk: the function of one chunk of one head; static. Its inputs are one matrix [m, dim] for each of `tokens`, and [n, m].
      carry: the carry before the first chunk, float32 [batch, heads, …, …] each.
      tokens: [batch, time, heads, dim] each, any floating dtype; `chunk` gets float32.
      gates: [batch, heads, chunks, n, m] for chunks of m tokens, at least one chunk. They mark the padding after the last token.
      together: number of heads that one program should advance together, if the heads can be divided so. `chunk.of_heads` then
        takes arrays of several heads, or if it has none `chunk` is vmapped. 1 never vmaps it.
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
    _, outputs = jax.eval_shape(chunk, tuple(map(shape, carry)), tuple(inputs))
    widths, widths_out = tuple(x.shape[-1] for x in tokens), tuple(y.shape[-1] for y in outputs)
    lanes = Lanes.of(heads, together, {*widths, *widths_out})

    def flat(x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        x = jnp.pad(x, ((0, 0), (0, count * size - time), (0, 0), (0, lanes.stride(width) - width)))
        return x.reshape(x.shape[0], count, size, -1)  # blocks of whole chunks, which may be less than a tile

    shapes = Shapes(lanes, widths, widths_out)
    carry, xs, restarts = vary_like((carry, (*map(flat, tokens), gates), restarts))
    final, ys = _scan(chunk, shapes, carry, xs, interpret, jnp.dtype(dtype), restarts)
    unflat = lambda y, width: y.reshape(y.shape[0], count * size, heads, -1)[:, :time, :, :width]
    return final, tuple(map(unflat, ys, widths_out))


class Lanes(NamedTuple):
    """How the channels of heads lie in the lanes of a program.

    Attributes:
      together: number of heads in one program.
      padded: whether each head begins a tile of 128 lanes. Otherwise heads follow each other without space.
    """

    together: int
    padded: bool

    @classmethod
    def of(cls, heads: int, wanted: int, widths: set[int]) -> "Lanes":
        """The largest division of the heads into groups of at most `wanted`, without padding if one fills whole tiles.

        A block has whole tiles or all channels. Without vmap (`wanted` = 1) a program has one head.
        """
        sizes = [size for size in range(1, heads + 1) if heads % size == 0]
        fills = lambda size: all(size * width % LANES == 0 for width in widths)
        whole = [size for size in sizes if size == heads or fills(size)]
        fitting = [size for size in whole if size <= wanted]
        # More than wanted may be needed: of one tile, to fill whole tiles twice as many (heads of 96 or 48), to have all channels
        # half as many again (11 heads of 64), because vector memory has no space for 13 where 8 are wanted.
        few = lambda size: size * max(widths) <= LANES or size <= (2 * wanted if fills(size) else wanted * 3 // 2)
        narrow = [size for size in whole if few(size)] if wanted > 1 else []
        if fitting or narrow:
            return cls(max([*fitting, *narrow[:1]]), padded=False)
        return cls(max(size for size in sizes if size <= wanted), padded=True)

    def stride(self, width: int) -> int:
        """Lanes from one head to the next."""
        return -(-width // LANES) * LANES if self.padded else width

    def split(self, x: jax.Array, width: int) -> jax.Array:
        """[m, lanes] → [together, m, width], or [m, width] for one head."""
        if self.together == 1:
            return x[:, :width]
        stride = self.stride(width)
        return jnp.stack([x[:, i * stride : i * stride + width] for i in range(self.together)])

    def store(self, ref: jax.Ref, y: jax.Array) -> None:
        """The inverse of `split`, into a block."""
        width = y.shape[-1]
        stride = self.stride(width)
        y = y.astype(ref.dtype)
        if stride == width:
            ref[...] = y if self.together == 1 else jnp.concatenate(list(y), axis=1)
        else:
            for i in range(self.together):
                ref[:, i * stride : i * stride + width] = y if self.together == 1 else y[i]


class Shapes(NamedTuple):
    """Where heads lie in lanes, and the channels of one head of each input and output that has tokens."""

    lanes: Lanes
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def chunk(self, chunk: Chunk) -> Chunk:
        """`chunk` for all heads of a program, by its own `of_heads` if it has one."""
        return chunk if self.lanes.together == 1 else getattr(chunk, "of_heads", None) or jax.vmap(chunk)

    def read(self, refs: Sequence[jax.Ref]) -> Arrays:
        """Inputs of a chunk: those with tokens, then gates."""
        *tokens, gates = _wide(refs)
        return (*map(self.lanes.split, tokens, self.inputs), self.heads(gates))

    def heads(self, x: jax.Array) -> jax.Array:
        """A block [together, …, …] as the chunk takes it."""
        return x[0] if self.lanes.together == 1 else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 4, 5))
def _scan(
    chunk: Chunk,
    shapes: Shapes,
    carry: Arrays,
    xs: Arrays,
    interpret: Interpret,
    dtype: jax.typing.DTypeLike,
    restarts: Restarts,
) -> tuple[Arrays, Arrays]:
    """`chunk_scan` on xs = tokens [batch, chunks, m, lanes] each, and gates."""
    final, ys, _ = _forward(chunk, shapes, carry, xs, interpret, dtype, restarts, keep=False)
    return final, ys


def _scan_forward(
    chunk: Chunk,
    shapes: Shapes,
    carry: Arrays,
    xs: Arrays,
    interpret: Interpret,
    dtype: jax.typing.DTypeLike,
    restarts: Restarts,
) -> tuple[tuple[Arrays, Arrays], tuple[Arrays, Arrays, Restarts]]:
    final, ys, before = _forward(chunk, shapes, carry, xs, interpret, dtype, restarts, keep=True)
    return (final, ys), (before, xs, restarts)


def _scan_backward(
    chunk: Chunk,
    shapes: Shapes,
    interpret: Interpret,
    dtype: jax.typing.DTypeLike,
    kept: tuple[Arrays, Arrays, Restarts],
    cotangents: tuple[Arrays, Arrays],
) -> tuple[Arrays, Arrays, tuple[None, Arrays] | None]:
    before, xs, restarts = kept
    dcarry, dys = cotangents
    dfirst, dxs, dstart = _backward(chunk, shapes, before, xs, dcarry, dys, interpret, restarts)
    return dfirst, dxs, None if restarts is None else (None, dstart)


_scan.defvjp(_scan_forward, _scan_backward)


def _wide(refs: Sequence[jax.Ref]) -> Arrays:
    return tuple(ref[...].astype(jnp.float32) for ref in refs)


def _copy(to: Sequence[jax.Ref], refs: Sequence[jax.Ref]) -> None:
    for ref, value in zip(to, refs, strict=True):
        ref[...] = value[...].astype(ref.dtype)


def _zero(refs: Sequence[jax.Ref]) -> None:
    for ref in refs:
        ref[...] = jnp.zeros(ref.shape, ref.dtype)


class _Blocks(NamedTuple):
    """Block specs on the grid batch × groups of heads × chunks. `chunk`: grid step → chunk."""

    shapes: Shapes
    size: int
    chunk: Callable[[Index], Index]

    def of_heads(self, arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> list[pl.BlockSpec]:
        """Arrays [batch, heads, …, …]."""
        shape = lambda x: (None, self.shapes.lanes.together, *x.shape[2:])
        return [pl.BlockSpec(shape(x), lambda row, group, i: (row, group, 0, 0)) for x in arrays]

    def of_chunks(self, arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> list[pl.BlockSpec]:
        """Arrays [batch, heads, chunks, …, …]."""
        shape = lambda x: (None, self.shapes.lanes.together, None, *x.shape[3:])
        return [pl.BlockSpec(shape(x), lambda row, group, i: (row, group, self.chunk(i), 0, 0)) for x in arrays]

    def of_tokens(self, widths: Sequence[int]) -> list[pl.BlockSpec]:
        """Arrays [batch, chunks, m, lanes]."""
        lanes = self.shapes.lanes
        shape = lambda width: (None, None, self.size, lanes.together * lanes.stride(width))
        return [pl.BlockSpec(shape(width), lambda row, group, i: (row, self.chunk(i), 0, group)) for width in widths]

    def of_marks(self, marks: Sequence[jax.Array]) -> list[pl.BlockSpec]:
        """Marks [batch, 1, chunks], in scalar memory."""
        return [
            pl.BlockSpec((None, *x.shape[1:]), lambda row, group, i: (row, 0, 0), memory_space=pltpu.SMEM)
            for x in marks
        ]


def _marks(restarts: Restarts) -> tuple[jax.Array, ...]:
    """The marks as [batch, 1, chunks], if there are any."""
    return () if restarts is None else (restarts[0].astype(jnp.int32)[:, None],)


def _forward(
    chunk: Chunk, shapes: Shapes, carry: Arrays, xs: Arrays, interpret: Interpret, dtype: jax.typing.DTypeLike,
    restarts: Restarts, *, keep: bool,
) -> tuple[Arrays, Arrays, Arrays]:  # fmt: skip
    """The final carry, the outputs and, with `keep`, the carry before each chunk, which is undefined for empty chunks."""
    marks, start = _marks(restarts), () if restarts is None else restarts[1]
    sizes = len(carry), len(xs), len(marks), len(start)
    advanced = shapes.chunk(chunk)

    @rows_folded
    def call(*arrays: jax.Array) -> Arrays:
        carry, xs, marks, start = _groups(arrays, sizes)
        batch, heads, count, _, size = xs[-1].shape
        lanes = shapes.lanes
        final = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in carry]
        ys = [jax.ShapeDtypeStruct((batch, count, size, heads * lanes.stride(n)), dtype) for n in shapes.outputs]
        before = [jax.ShapeDtypeStruct((batch, heads, count, *x.shape[2:]), jnp.float32) for x in carry if keep]

        def kernel(*refs: jax.Ref) -> None:
            groups = _groups(refs, (*sizes, len(final), len(ys), len(before), len(carry)))
            first_refs, x_refs, mark_refs, start_refs, final_refs, y_refs, before_refs, scratch = groups

            @pl.when(pl.program_id(2) == 0)
            def _() -> None:
                _copy(scratch, first_refs)

            def advance() -> None:
                if keep:
                    _copy(before_refs, scratch)
                state, y = advanced(tuple(map(shapes.heads, _wide(scratch))), shapes.read(x_refs))
                for ref, value in zip(scratch, state, strict=True):
                    ref[...] = value.reshape(ref.shape)
                for ref, value in zip(y_refs, y, strict=True):
                    lanes.store(ref, value)

            def begin() -> None:
                _copy(scratch[: len(start_refs)], start_refs)
                _zero(scratch[len(start_refs) :])

            if mark_refs:
                mark = mark_refs[0][0, pl.program_id(2)]
                pl.when(mark == BEGINS)(begin)
                pl.when(mark != EMPTY)(advance)
                pl.when(mark == EMPTY)(lambda: _zero(y_refs))
            else:
                advance()

            @pl.when(pl.program_id(2) == count - 1)
            def _() -> None:
                _copy(final_refs, scratch)

        block = _Blocks(shapes, size, lambda i: i)
        return tuple(
            _call(
                kernel, (batch, heads // lanes.together, count), "chunk_scan", interpret, arrays,
                [*block.of_heads(carry), *block.of_tokens(shapes.inputs), *block.of_chunks(xs[-1:]),
                 *block.of_marks(marks), *block.of_heads(start)],
                [*final, *ys, *before],
                [*block.of_heads(final), *block.of_tokens(shapes.outputs), *block.of_chunks(before)],
                [(lanes.together, *x.shape[2:]) for x in carry],
            )
        )  # fmt: skip

    results = call(*carry, *xs, *marks, *start)
    final, ys, before = _groups(results, (len(carry), len(shapes.outputs), len(carry) if keep else 0))
    return final, ys, before


def _backward(
    chunk: Chunk, shapes: Shapes, before: Arrays, xs: Arrays, dcarry: Arrays, dys: Arrays, interpret: Interpret,
    restarts: Restarts,
) -> tuple[Arrays, Arrays, Arrays]:  # fmt: skip
    """The cotangents of the first carry, of the inputs, and of the first arrays of the carry with which segments begin."""
    marks, num_start = _marks(restarts), 0 if restarts is None else len(restarts[1])
    sizes = len(before), len(xs), len(dcarry), len(dys), len(marks)
    advanced = shapes.chunk(chunk)

    @rows_folded
    def call(*arrays: jax.Array) -> Arrays:
        _, xs, dcarry, _, marks = _groups(arrays, sizes)
        batch, heads, count, _, size = xs[-1].shape
        lanes = shapes.lanes
        dfirst = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in dcarry]
        dxs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs]
        dstart = dfirst[:num_start]

        def kernel(*refs: jax.Ref) -> None:
            groups = _groups(refs, (*sizes, len(dfirst), len(dxs), len(dstart), len(dcarry)))
            before_refs, x_refs, dfinal_refs, dy_refs, mark_refs, dfirst_refs, dx_refs, dstart_refs, scratch = groups

            @pl.when(pl.program_id(2) == 0)
            def _() -> None:
                _copy(scratch, dfinal_refs)
                _zero(dstart_refs)

            def advance() -> None:
                pullback = jax.vjp(advanced, tuple(map(shapes.heads, _wide(before_refs))), shapes.read(x_refs))[1]
                dy = tuple(map(lanes.split, _wide(dy_refs), shapes.outputs))
                dstate, (*dtokens, dgates) = pullback((tuple(map(shapes.heads, _wide(scratch))), dy))
                for ref, value in zip(scratch, dstate, strict=True):
                    ref[...] = value.reshape(ref.shape)
                for ref, value in zip(dx_refs, dtokens):
                    lanes.store(ref, value)
                dx_refs[-1][...] = dgates.reshape(dx_refs[-1].shape).astype(dx_refs[-1].dtype)

            def begin() -> None:
                # The block of a group of heads stays in vector memory from step to step.
                for total, ref in zip(dstart_refs, scratch):
                    total[...] += ref[...]
                _zero(scratch)

            if mark_refs:
                mark = mark_refs[0][0, reverse(pl.program_id(2))]
                pl.when(mark != EMPTY)(advance)
                pl.when(mark == EMPTY)(lambda: _zero(dx_refs))
                pl.when(mark == BEGINS)(begin)
            else:
                advance()

            @pl.when(pl.program_id(2) == count - 1)
            def _() -> None:
                _copy(dfirst_refs, scratch)

        reverse = lambda i: count - 1 - i
        block = _Blocks(shapes, size, reverse)
        of_inputs = [*block.of_tokens(shapes.inputs), *block.of_chunks(xs[-1:])]
        return tuple(
            _call(
                kernel, (batch, heads // lanes.together, count), "chunk_scan_backward", interpret, arrays,
                [*block.of_chunks(arrays[: len(before)]), *of_inputs, *block.of_heads(dcarry), *block.of_tokens(shapes.outputs),
                 *block.of_marks(marks)],
                [*dfirst, *dxs, *dstart], [*block.of_heads(dfirst), *of_inputs, *block.of_heads(dstart)],
                [(lanes.together, *x.shape[2:]) for x in dcarry],
            )
        )  # fmt: skip

    results = call(*before, *xs, *dcarry, *dys, *marks)
    dfirst, dxs, dstart = _groups(results, (len(dcarry), len(xs), num_start))
    return dfirst, dxs, dstart


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


def _groups(items: Sequence[Item], sizes: Sequence[int]) -> list[tuple[Item, ...]]:
    """Consecutive groups of items with the given sizes."""
    parts, start = [], 0
    for size in sizes:
        parts.append(tuple(items[start : start + size]))
        start += size
    assert start == len(items), (start, len(items))
    return parts
