"""The recurrence over chunks of a matrix memory that a delta rule or linear attention writes, as one GPU kernel.

    Z_i = A_i − B_i X_iᵀ        X_{i+1} = γ_i X_i + D_i + Z_iᵀ C_i

With cotangents E_i of X_i, F_i of Z_i and G_n of the last X, the same recurrence runs backwards,

    dZ_i = F_i + C_i G_{i+1}ᵀ   G_i = γ_i G_{i+1} + E_i − dZ_iᵀ B_i

and the cotangents of the inputs are products within single chunks: dA = dZ, dB = −dZ X, dC = Z G_{i+1}, dγ = ⟨X, G_{i+1}⟩. A
program processes all chunks of a head with a block of X's rows in registers, and does not need the other rows.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import gpu
from pallas_kernels.arguments import Arrays, Index, Interpret, Product, Slice
from pallas_kernels.batching import rows_folded
from pallas_kernels.delta_rule.tiles import Chunks, given, wide


def state_pass(
    chunks: Chunks, a: jax.Array, b: jax.Array | None, c: jax.Array | None, d: jax.Array | None,
    decay: jax.Array | None, first: jax.Array, interpret: Interpret, *, reverse: bool = False,
    restarts: tuple[jax.Array, jax.Array | None] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """X before each step, Z of each chunk and the last X.

    Args:
      chunks: the chunks of the tokens. Sizes of chunks and channels are powers of two ≥ 16.
      a: A, [batch, time, heads, value_dim], float32 or bfloat16.
      b, c: B and C, [batch, time, heads, key_dim], in a's dtype. None means 0.
      d: D, [batch · heads, chunks, value_dim, key_dim], in a's dtype. None means 0.
      decay: γ, float32 [batch · heads, chunks], or [batch · heads, chunks, key_dim] for one per column of X. None means 1.
      first: X before the first step, float32 [batch · heads, value_dim, key_dim].
      interpret: passed to `pallas_call`.
      reverse: processes the chunks in reverse with −B and −C. With (F, C, B, E, γ, G_n) for (a, b, c, d, decay, first) this gives
        G_{i+1}, dZ and dX_0.
      restarts: for each chunk, 1 to replace X before its step, int32 [batch · heads, chunks], and the replacement, like first, or
        None for zero. X is written out after a replacement, or before it if reverse. None means that none is replaced.

    Returns:
      X [batch · heads, chunks, value_dim, key_dim] and Z (like a), in a's dtype, in which products read them; the last X, like
      first.
    """
    optional = (b, c, d, decay, None if restarts is None else restarts[1], None if restarts is None else restarts[0])
    present = [True] * 2 + [x is not None for x in optional] + [True] * 3

    @rows_folded
    def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        a, first = arrays[:2]
        (_, time, heads, value_dim), (rows, _, key_dim) = a.shape, first.shape
        count = time // chunks.size
        block, columns, warps = _block(key_dim, value_dim, a.dtype)
        parts = tuple(pl.ds(start, columns) for start in range(0, key_dim, columns))

        def kernel(*refs: jax.Ref) -> None:
            # Pallas passes only the references of arrays that there are.
            found = iter(refs)
            refs_or_none: list[Any] = [next(found) if is_present else None for is_present in present]
            _Pass(gpu.products(a.dtype, interpret), chunks.size, count, parts, reverse, *refs_or_none).run()

        of_keys = pl.BlockSpec((None, time, None, key_dim), lambda row, j: (row // heads, 0, row % heads, 0))
        of_values = pl.BlockSpec((None, time, None, block), lambda row, j: (row // heads, 0, row % heads, j))
        states = pl.BlockSpec((None, count, block, key_dim), lambda row, j: (row, 0, j, 0))
        state = pl.BlockSpec((None, block, key_dim), lambda row, j: (row, j, 0))
        marks = pl.BlockSpec((None, count), lambda row, j: (row, 0))
        channels = pl.BlockSpec((None, count, key_dim), lambda row, j: (row, 0, 0))
        decays = channels if decay is not None and decay.ndim == 3 else marks
        specs = [of_values, state, of_keys, of_keys, states, decays, state, marks]
        return tuple(
            gpu.call(
                kernel, warps=warps, stages=2, interpret=interpret, name="state_pass" + "_backward" * reverse,
                out_shape=[
                    jax.ShapeDtypeStruct((rows, count, value_dim, key_dim), a.dtype),
                    jax.ShapeDtypeStruct(a.shape, a.dtype),
                    jax.ShapeDtypeStruct(first.shape, jnp.float32),
                ],
                grid=(rows, value_dim // block),
                in_specs=[spec for spec, is_present in zip(specs, present) if is_present],
                out_specs=[states, of_values, state],
            )(*arrays)
        )  # fmt: skip

    x, z, last = call(a, first, *given(*optional))
    return x, z, last


@dataclasses.dataclass(frozen=True)
class _Pass:
    """The kernel of some rows of X of one head.

    Attributes:
      product: for the tokens' dtype.
      size, count: of the chunks.
      parts: X's columns in parts, one product each: wider ones would spill registers.
      reverse: as in `state_pass`.
      a, first, b, c, d, decay, start, restarts: references to the inputs, or None; `start` replaces X where `restarts` is 1.
      x, z, last: references to the outputs.
    """

    product: Product
    size: int
    count: int
    parts: tuple[Slice, ...]
    reverse: bool
    a: jax.Ref
    first: jax.Ref
    b: jax.Ref | None
    c: jax.Ref | None
    d: jax.Ref | None
    decay: jax.Ref | None
    start: jax.Ref | None
    restarts: jax.Ref | None
    x: jax.Ref
    z: jax.Ref
    last: jax.Ref

    def run(self) -> None:
        first = tuple(self.first[:, part] for part in self.parts)
        last = jax.lax.fori_loop(0, self.count, self.step, first)
        for part, x_part in zip(self.parts, last):
            self.last[:, part] = x_part

    def step(self, i: Index, x: Arrays) -> Arrays:
        """X after one chunk, from its parts before it."""
        i, sign = (self.count - 1 - i, -1.0) if self.reverse else (i, 1.0)
        tokens, dtype = pl.ds(i * self.size, self.size), self.x.dtype
        # Sums in float32, whatever the dtype of the tokens.
        z = wide(self.a[tokens, :])
        written = x
        if self.restarts is not None:
            x = self.replaced(self.restarts[i] > 0, x)
            # The backward pass needs G as it was before the restart, for the cotangent of the initial memory.
            written = written if self.reverse else x
        for part, x_part, kept in zip(self.parts, x, written):
            self.x[i, :, part] = kept.astype(dtype)
            if self.b is not None:
                z -= sign * self.product(self.b[tokens, part], x_part, 1, 1)
        self.z[tokens, :] = z.astype(dtype)
        after = []
        for part, x_part in zip(self.parts, x):
            if self.decay is not None:
                # The reference says which of both kinds of decay it is; the kernel is traced for each.
                by_column = len(self.decay.shape) == 2
                x_part = (self.decay[i, part][None, :] if by_column else self.decay[i]) * x_part
            x_part = x_part if self.d is None else x_part + wide(self.d[i, :, part])
            if self.c is not None:
                x_part += sign * self.product(z, self.c[tokens, part], 0, 0)
            after.append(x_part)
        return tuple(after)

    def replaced(self, begins: jax.Array, x: Arrays) -> Arrays:
        start = self.start
        fill = [jnp.zeros_like(x) for x in x] if start is None else [start[:, part] for part in self.parts]
        return tuple(jnp.where(begins, a, b) for a, b in zip(fill, x))


def _block(key_dim: int, value_dim: int, dtype: jax.typing.DTypeLike) -> tuple[int, int, int]:
    """Rows of X per program, its columns per product, and warps per program, chosen so that no register spills on sm_90a."""
    rows, columns = (32, 64) if dtype == jnp.bfloat16 else (16, 32)
    return min(value_dim, rows), min(key_dim, columns), 4
