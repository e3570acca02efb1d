"""Newton–Schulz for TPUs (Mosaic): a program holds a few matrices and all intermediates of their steps in vector memory.

Device memory holds only S and NS(S), or in the backward pass S and both cotangents. Intermediates are not stored: the backward
pass recomputes the steps. The matrices of one program advance together, step by step, so that a matrix unit, whose results have a
long latency, can always start the product of another matrix.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.arguments import Interpret
from pallas_kernels.newton_schulz import forms
from pallas_kernels.newton_schulz.reference import Triple
from pallas_kernels.varying import pallas_call

# Matrices per program, forward and backward. With a single bfloat16 pass the next product must come from another matrix. Six passes
# keep a matrix unit busy by themselves, and more matrices only take longer to compile.
_MOST_TOGETHER = {jax.lax.Precision.DEFAULT: (8, 8), jax.lax.Precision.HIGH: (4, 2), jax.lax.Precision.HIGHEST: (2, 1)}
_VMEM = 64 * 2**20  # scoped limit; the smallest supported generation has 64 MiB
_BUDGET = 24 * 2**20  # bytes of float32 blocks and intermediates, which limit the number of matrices per program


def _forward_kernel(
    s_ref: jax.Ref, y_ref: jax.Ref, *, triples: Sequence[Triple], form: str, precision: jax.lax.Precision
) -> None:
    matrices = [s_ref[i].astype(jnp.float32) for i in range(s_ref.shape[0])]
    for i, y in enumerate(forms.forward(matrices, triples, form, precision)):
        y_ref[i] = y


def _backward_kernel(
    s_ref: jax.Ref,
    dy_ref: jax.Ref,
    ds_ref: jax.Ref,
    *,
    triples: Sequence[Triple],
    form: str,
    precision: jax.lax.Precision,
) -> None:
    load = lambda ref: [ref[i].astype(jnp.float32) for i in range(ref.shape[0])]
    for i, d in enumerate(forms.backward(load(s_ref), load(dy_ref), triples, form, precision)):
        ds_ref[i] = d


def together(rows: int, columns: int, steps: int, form: str, precision: jax.lax.Precision, *, backward: bool) -> int:
    """Number of matrices per program: a power of two, limited by the budget of vector memory."""
    # Bytes of whole tiles of 8 rows and 128 lanes, which is what a smaller matrix takes too.
    tiles = lambda r, c: 4 * (-(-r // 8) * 8) * (-(-c // 128) * 128)
    large, small = tiles(rows, columns), tiles(rows, rows)
    kept = (steps if form == "direct" else 1) * large if backward else large
    per_matrix = 2 * (3 if backward else 2) * large + kept + (4 * steps if backward and form == "gram" else 4) * small
    count = _MOST_TOGETHER[precision][backward]
    while count > 1 and count * per_matrix > _BUDGET:
        count //= 2
    return count


def _call(
    kernel: Callable[..., None], inputs: Sequence[jax.Array], cost: pl.CostEstimate, count: int, interpret: Interpret
) -> jax.Array:
    number, rows, columns = inputs[0].shape
    # Zeros in place of missing matrices: NS of zero is zero, not NaN.
    padded = -(-number // count) * count
    block = pl.BlockSpec((count, rows, columns), lambda i: (i, 0, 0))
    (y,) = pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((padded, rows, columns), jnp.float32)],
        grid=(padded // count,),
        in_specs=[block] * len(inputs),
        out_specs=[block],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=_VMEM),
        cost_estimate=cost,
        interpret=interpret,
        name=f"newton_schulz_{rows}x{columns}",
    )(*(jnp.pad(x, ((0, padded - number), (0, 0), (0, 0))) for x in inputs))
    return y[:number]


def forward(
    s: jax.Array, *, triples: tuple[Triple, ...], form: str, precision: jax.lax.Precision, interpret: Interpret = False
) -> jax.Array:
    """NS of matrices [number, rows ≤ columns, columns], float32."""
    number, rows, columns = s.shape
    kernel = functools.partial(_forward_kernel, triples=triples, form=form, precision=precision)
    cost = pl.CostEstimate(
        flops=number * forms.operations(rows, columns, len(triples), form, backward=False),
        bytes_accessed=number * rows * columns * (s.dtype.itemsize + 4),
        transcendentals=number,
    )
    return _call(kernel, (s,), cost, together(rows, columns, len(triples), form, precision, backward=False), interpret)


def backward(
    s: jax.Array,
    dy: jax.Array,
    *,
    triples: tuple[Triple, ...],
    form: str,
    precision: jax.lax.Precision,
    interpret: Interpret = False,
) -> jax.Array:
    """The cotangent of S from that of NS(S), float32 [number, rows, columns]."""
    number, rows, columns = s.shape
    kernel = functools.partial(_backward_kernel, triples=triples, form=form, precision=precision)
    cost = pl.CostEstimate(
        flops=number * forms.operations(rows, columns, len(triples), form, backward=True),
        bytes_accessed=number * rows * columns * (s.dtype.itemsize + dy.dtype.itemsize + 4),
        transcendentals=number,
    )
    return _call(
        kernel, (s, dy), cost, together(rows, columns, len(triples), form, precision, backward=True), interpret
    )
