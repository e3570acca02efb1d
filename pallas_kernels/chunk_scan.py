"""A recurrence over chunks as one TPU kernel. The carry stays in vector memory for the whole sequence, forward and backward.

    carry, y_i = chunk(carry, x_i)        for the chunks i of each row

The grid is rows × chunks, and the second dimension runs in order. So the carry is a scratch buffer that each chunk finds as the
previous chunk left it. Device memory holds only the inputs, the outputs and, if gradients are needed, the carry before each chunk.
The backward kernel processes the chunks in reverse: it recomputes a chunk from the carry before it, differentiates it (`jax.vjp`
inside the kernel) and keeps the cotangent of the carry in scratch.

With packed segments, a chunk that begins a segment finds the initial carry instead, and empty chunks are skipped. Backward, the
cotangent of the carry before such a chunk is that of the initial carry, and the previous segment's is zero.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.arguments import BEGINS, EMPTY, Arrays, Index, Interpret
from pallas_kernels.batching import rows_folded

# (carry, inputs) → (carry, outputs), all float32 matrices. Hashable, and restricted to operations that Mosaic compiles.
Chunk = Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]

Item = TypeVar("Item")

# (marks of the chunks, int32 [rows, chunks]; the first arrays of the initial carry, [rows, …, …]), or None without segments.
Restarts = tuple[jax.Array, Arrays] | None

_VMEM = 64 * 2**20  # scoped limit; the smallest supported generation has 64 MiB


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def chunk_scan(
    chunk: Chunk, carry: Arrays, xs: Arrays, interpret: Interpret = False, dtype: jax.typing.DTypeLike = jnp.float32,
    restarts: Restarts = None,
) -> tuple[Arrays, Arrays]:  # fmt: skip
    """Scans a chunk function over the chunks of many rows.

    Args:
      chunk: the function of one chunk of one row; static.
      carry: the carry before the first chunk, float32 [rows, …, …] each.
      xs: [rows, chunks, …, …] each, with at least one chunk. Any floating dtype; `chunk` gets float32.
      interpret: passed to `pallas_call`.
      dtype: dtype of the outputs.
      restarts: CONTINUES, BEGINS or EMPTY (see `arguments`) for each chunk, int32 [rows, chunks], and the first arrays of the carry
        with which segments begin, float32 [rows, …, …]; the others are zeros. None means one segment without empty chunks.

    Returns:
      The carry after the last chunk, and the outputs [rows, chunks, …, …]. There is no forward-mode derivative.
    """
    final, ys, _ = _forward(chunk, carry, xs, interpret, dtype, restarts, keep=False)
    return final, ys


def _chunk_scan_forward(
    chunk: Chunk, carry: Arrays, xs: Arrays, interpret: Interpret, dtype: jax.typing.DTypeLike, restarts: Restarts
) -> tuple[tuple[Arrays, Arrays], tuple[Arrays, Arrays, Restarts]]:
    final, ys, before = _forward(chunk, carry, xs, interpret, dtype, restarts, keep=True)
    return (final, ys), (before, xs, restarts)


def _chunk_scan_backward(
    chunk: Chunk,
    interpret: Interpret,
    dtype: jax.typing.DTypeLike,
    kept: tuple[Arrays, Arrays, Restarts],
    cotangents: tuple[Arrays, Arrays],
) -> tuple[Arrays, Arrays, tuple[None, Arrays] | None]:
    before, xs, restarts = kept
    dcarry, dys = cotangents
    dfirst, dxs, dstart = _backward(chunk, before, xs, dcarry, dys, interpret, restarts)
    return dfirst, dxs, None if restarts is None else (None, dstart)


chunk_scan.defvjp(_chunk_scan_forward, _chunk_scan_backward)


def _wide(refs: Sequence[jax.Ref]) -> Arrays:
    return tuple(ref[...].astype(jnp.float32) for ref in refs)


def _store(refs: Sequence[jax.Ref], values: Sequence[jax.Array]) -> None:
    for ref, value in zip(refs, values, strict=True):
        ref[...] = value.astype(ref.dtype)


def _specs(
    arrays: Sequence[jax.Array | jax.ShapeDtypeStruct], index: Callable[[Index], Index] | None
) -> list[pl.BlockSpec]:
    """Block specs of arrays with one matrix per chunk (`index`: grid step → chunk), or per row."""
    if index is None:
        return [pl.BlockSpec((None, *x.shape[1:]), lambda row, i: (row, 0, 0)) for x in arrays]
    return [pl.BlockSpec((None, None, *x.shape[2:]), lambda row, i: (row, index(i), 0, 0)) for x in arrays]


def _marks(restarts: Restarts) -> tuple[jax.Array, ...]:
    """The marks as [rows, 1, chunks], if there are any."""
    return () if restarts is None else (restarts[0][:, None],)


def _mark_specs(marks: Sequence[jax.Array]) -> list[pl.BlockSpec]:
    """A row's marks in scalar memory."""
    return [pl.BlockSpec((None, *x.shape[1:]), lambda row, i: (row, 0, 0), memory_space=pltpu.SMEM) for x in marks]


def _zero(refs: Sequence[jax.Ref]) -> None:
    for ref in refs:
        ref[...] = jnp.zeros(ref.shape, ref.dtype)


def _outputs(chunk: Chunk, carry: Arrays, xs: Arrays) -> list[jax.ShapeDtypeStruct]:
    """Shapes of one chunk's outputs."""
    shape = lambda x: jax.ShapeDtypeStruct(x.shape[-2:], jnp.float32)
    _, ys = jax.eval_shape(chunk, tuple(map(shape, carry)), tuple(map(shape, xs)))
    return list(ys)


def _forward(
    chunk: Chunk, carry: Arrays, xs: Arrays, interpret: Interpret, dtype: jax.typing.DTypeLike, restarts: Restarts, *,
    keep: bool,
) -> tuple[Arrays, Arrays, Arrays]:  # fmt: skip
    """The final carry, the outputs and, with `keep`, the carry before each chunk, which is undefined for empty chunks."""
    marks, start = _marks(restarts), () if restarts is None else restarts[1]
    sizes = len(carry), len(xs), len(marks), len(start)

    @rows_folded
    def call(*arrays: jax.Array) -> Arrays:
        carry, xs, marks, start = _groups(arrays, sizes)
        rows, count = xs[0].shape[:2]
        outputs = _outputs(chunk, carry, xs)
        of_chunks = lambda shapes, dtype: [jax.ShapeDtypeStruct((rows, count, *x.shape[-2:]), dtype) for x in shapes]
        final = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in carry]
        ys, before = of_chunks(outputs, dtype), of_chunks(carry, jnp.float32) if keep else []

        def kernel(*refs: jax.Ref) -> None:
            groups = _groups(refs, (*sizes, len(final), len(ys), len(before), len(carry)))
            first_refs, x_refs, mark_refs, start_refs, final_refs, y_refs, before_refs, scratch = groups

            @pl.when(pl.program_id(1) == 0)
            def _() -> None:
                _store(scratch, _wide(first_refs))

            def advance() -> Arrays:
                state = _wide(scratch)
                if keep:
                    _store(before_refs, state)
                state, y = chunk(state, _wide(x_refs))
                _store(scratch, state)
                _store(y_refs, y)
                return state

            def begin() -> None:
                _store(scratch[: len(start_refs)], _wide(start_refs))
                _zero(scratch[len(start_refs) :])

            if mark_refs:
                mark = mark_refs[0][0, pl.program_id(1)]
                pl.when(mark == BEGINS)(begin)

                @pl.when(mark != EMPTY)
                def _() -> None:
                    advance()

                pl.when(mark == EMPTY)(lambda: _zero(y_refs))
            else:
                state = advance()

            @pl.when(pl.program_id(1) == count - 1)
            def _() -> None:
                _store(final_refs, _wide(scratch) if mark_refs else state)

        forward = lambda i: i
        return tuple(
            _call(
                kernel, (rows, count), "chunk_scan", interpret,
                arrays, _specs(carry, None) + _specs(xs, forward) + _mark_specs(marks) + _specs(start, None),
                [*final, *ys, *before], _specs(final, None) + _specs([*ys, *before], forward), carry,
            )
        )  # fmt: skip

    results = call(*carry, *xs, *marks, *start)
    outputs = len(results) - sizes[0] * (2 if keep else 1)
    final, ys, before = _groups(results, (sizes[0], outputs, sizes[0] if keep else 0))
    return final, ys, before


def _backward(
    chunk: Chunk, before: Arrays, xs: Arrays, dcarry: Arrays, dys: Arrays, interpret: Interpret, restarts: Restarts
) -> tuple[Arrays, Arrays, Arrays]:
    """The cotangents of the first carry, of the inputs, and of the first arrays of the carry with which segments begin."""
    marks, num_start = _marks(restarts), 0 if restarts is None else len(restarts[1])
    sizes = len(before), len(xs), len(dcarry), len(dys), len(marks)

    @rows_folded
    def call(*arrays: jax.Array) -> Arrays:
        before, xs, dcarry, dys, marks = _groups(arrays, sizes)
        rows, count = xs[0].shape[:2]
        dfirst = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in dcarry]
        dxs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs]
        dstart = dfirst[:num_start]

        def kernel(*refs: jax.Ref) -> None:
            groups = _groups(refs, (*sizes, len(dfirst), len(dxs), len(dstart), len(dcarry)))
            before_refs, x_refs, dfinal_refs, dy_refs, mark_refs, dfirst_refs, dx_refs, dstart_refs, scratch = groups

            @pl.when(pl.program_id(1) == 0)
            def _() -> None:
                _store(scratch, _wide(dfinal_refs))
                _zero(dstart_refs)

            def advance() -> Arrays:
                pullback = jax.vjp(chunk, _wide(before_refs), _wide(x_refs))[1]
                dstate, dx = pullback((_wide(scratch), _wide(dy_refs)))
                _store(scratch, dstate)
                _store(dx_refs, dx)
                return dstate

            def begin() -> None:
                # The block of a row stays in vector memory from step to step.
                for total, ref in zip(dstart_refs, scratch):
                    total[...] += ref[...]
                _zero(scratch)

            if mark_refs:
                mark = mark_refs[0][0, reverse(pl.program_id(1))]

                @pl.when(mark != EMPTY)
                def _() -> None:
                    advance()

                pl.when(mark == EMPTY)(lambda: _zero(dx_refs))
                pl.when(mark == BEGINS)(begin)
            else:
                dstate = advance()

            @pl.when(pl.program_id(1) == count - 1)
            def _() -> None:
                _store(dfirst_refs, _wide(scratch) if mark_refs else dstate)

        reverse = lambda i: count - 1 - i
        return tuple(
            _call(
                kernel, (rows, count), "chunk_scan_backward", interpret,
                arrays, _specs([*before, *xs], reverse) + _specs(dcarry, None) + _specs(dys, reverse) + _mark_specs(marks),
                [*dfirst, *dxs, *dstart], _specs(dfirst, None) + _specs(dxs, reverse) + _specs(dstart, None), dcarry,
            )
        )  # fmt: skip

    results = call(*before, *xs, *dcarry, *dys, *marks)
    dfirst, dxs, dstart = _groups(results, (len(dcarry), len(xs), num_start))
    return dfirst, dxs, dstart


def _call(
    kernel: Callable[..., None],
    grid: tuple[int, int],
    name: str,
    interpret: Interpret,
    arrays: Sequence[jax.Array],
    in_specs: Sequence[pl.BlockSpec],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    out_specs: Sequence[pl.BlockSpec],
    carry: Sequence[jax.Array],
) -> Sequence[jax.Array]:
    return pl.pallas_call(
        kernel,
        out_shape=list(out_shape),
        grid=grid,
        in_specs=list(in_specs),
        out_specs=list(out_specs),
        scratch_shapes=[pltpu.VMEM(x.shape[1:], jnp.float32) for x in carry],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM),
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
