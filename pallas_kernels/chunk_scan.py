"""A recurrence over chunks as one TPU kernel. The carry stays in vector memory for the whole sequence, forward and backward.

    carry, y_i = chunk(carry, x_i)        for the chunks i of each row

The grid is rows × chunks, and the second dimension runs in order. So the carry is a scratch buffer that each chunk finds as the
previous chunk left it. Device memory holds only the inputs, the outputs and, if gradients are needed, the carry before each chunk.
The backward kernel processes the chunks in reverse: it recomputes a chunk from the carry before it, differentiates it (`jax.vjp`
inside the kernel) and keeps the cotangent of the carry in scratch.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.arguments import Arrays, Index, Interpret
from pallas_kernels.batching import rows_folded

# (carry, inputs) → (carry, outputs), all float32 matrices. Hashable, and restricted to operations that Mosaic compiles.
Chunk = Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]

Item = TypeVar("Item")

_VMEM = 64 * 2**20  # scoped limit; the smallest supported generation has 64 MiB


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def chunk_scan(
    chunk: Chunk, carry: Arrays, xs: Arrays, interpret: Interpret = False, dtype: jax.typing.DTypeLike = jnp.float32
) -> tuple[Arrays, Arrays]:
    """Scans a chunk function over the chunks of many rows.

    Args:
      chunk: the function of one chunk of one row; static.
      carry: the carry before the first chunk, float32 [rows, …, …] each.
      xs: [rows, chunks, …, …] each, with at least one chunk. Any floating dtype; `chunk` gets float32.
      interpret: passed to `pallas_call`.
      dtype: dtype of the outputs.

    Returns:
      The carry after the last chunk, and the outputs [rows, chunks, …, …]. There is no forward-mode derivative.
    """
    final, ys, _ = _forward(chunk, carry, xs, interpret, dtype, keep=False)
    return final, ys


def _chunk_scan_forward(
    chunk: Chunk, carry: Arrays, xs: Arrays, interpret: Interpret, dtype: jax.typing.DTypeLike
) -> tuple[tuple[Arrays, Arrays], tuple[Arrays, Arrays]]:
    final, ys, before = _forward(chunk, carry, xs, interpret, dtype, keep=True)
    return (final, ys), (before, xs)


def _chunk_scan_backward(
    chunk: Chunk,
    interpret: Interpret,
    dtype: jax.typing.DTypeLike,
    kept: tuple[Arrays, Arrays],
    cotangents: tuple[Arrays, Arrays],
) -> tuple[Arrays, Arrays]:
    before, xs = kept
    dcarry, dys = cotangents
    return _backward(chunk, before, xs, dcarry, dys, interpret)


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


def _outputs(chunk: Chunk, carry: Arrays, xs: Arrays) -> list[jax.ShapeDtypeStruct]:
    """Shapes of one chunk's outputs."""
    shape = lambda x: jax.ShapeDtypeStruct(x.shape[-2:], jnp.float32)
    _, ys = jax.eval_shape(chunk, tuple(map(shape, carry)), tuple(map(shape, xs)))
    return list(ys)


def _forward(
    chunk: Chunk, carry: Arrays, xs: Arrays, interpret: Interpret, dtype: jax.typing.DTypeLike, *, keep: bool
) -> tuple[Arrays, Arrays, Arrays]:
    """The final carry, the outputs and, with `keep`, the carry before each chunk."""
    sizes = len(carry), len(xs)

    @rows_folded
    def call(*arrays: jax.Array) -> Arrays:
        carry, xs = arrays[: sizes[0]], arrays[sizes[0] :]
        rows, count = xs[0].shape[:2]
        outputs = _outputs(chunk, carry, xs)
        of_chunks = lambda shapes, dtype: [jax.ShapeDtypeStruct((rows, count, *x.shape[-2:]), dtype) for x in shapes]
        final = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in carry]
        ys, before = of_chunks(outputs, dtype), of_chunks(carry, jnp.float32) if keep else []

        def kernel(*refs: jax.Ref) -> None:
            groups = _groups(refs, (sizes[0], sizes[1], len(final), len(ys), len(before), len(carry)))
            first_refs, x_refs, final_refs, y_refs, before_refs, scratch = groups

            @pl.when(pl.program_id(1) == 0)
            def _() -> None:
                _store(scratch, _wide(first_refs))

            state = _wide(scratch)
            if keep:
                _store(before_refs, state)
            state, y = chunk(state, _wide(x_refs))
            _store(scratch, state)
            _store(y_refs, y)

            @pl.when(pl.program_id(1) == count - 1)
            def _() -> None:
                _store(final_refs, state)

        forward = lambda i: i
        return tuple(
            _call(
                kernel, (rows, count), "chunk_scan", interpret,
                arrays, _specs(carry, None) + _specs(xs, forward),
                [*final, *ys, *before], _specs(final, None) + _specs([*ys, *before], forward), carry,
            )
        )  # fmt: skip

    results = call(*carry, *xs)
    outputs = len(results) - sizes[0] * (2 if keep else 1)
    final, ys, before = _groups(results, (sizes[0], outputs, sizes[0] if keep else 0))
    return final, ys, before


def _backward(
    chunk: Chunk, before: Arrays, xs: Arrays, dcarry: Arrays, dys: Arrays, interpret: Interpret
) -> tuple[Arrays, Arrays]:
    """The cotangents of the first carry and of the inputs."""
    sizes = len(before), len(xs), len(dcarry), len(dys)

    @rows_folded
    def call(*arrays: jax.Array) -> Arrays:
        before, xs, dcarry, dys = _groups(arrays, sizes)
        rows, count = xs[0].shape[:2]
        dfirst = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in dcarry]
        dxs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs]

        def kernel(*refs: jax.Ref) -> None:
            groups = _groups(refs, (*sizes, len(dfirst), len(dxs), len(dcarry)))
            before_refs, x_refs, dfinal_refs, dy_refs, dfirst_refs, dx_refs, scratch = groups

            @pl.when(pl.program_id(1) == 0)
            def _() -> None:
                _store(scratch, _wide(dfinal_refs))

            pullback = jax.vjp(chunk, _wide(before_refs), _wide(x_refs))[1]
            dstate, dx = pullback((_wide(scratch), _wide(dy_refs)))
            _store(scratch, dstate)
            _store(dx_refs, dx)

            @pl.when(pl.program_id(1) == count - 1)
            def _() -> None:
                _store(dfirst_refs, dstate)

        reverse = lambda i: count - 1 - i
        return tuple(
            _call(
                kernel, (rows, count), "chunk_scan_backward", interpret,
                arrays, _specs([*before, *xs], reverse) + _specs(dcarry, None) + _specs(dys, reverse),
                [*dfirst, *dxs], _specs(dfirst, None) + _specs(dxs, reverse), dcarry,
            )
        )  # fmt: skip

    results = call(*before, *xs, *dcarry, *dys)
    dfirst, dxs = _groups(results, (len(dcarry), len(xs)))
    return dfirst, dxs


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
