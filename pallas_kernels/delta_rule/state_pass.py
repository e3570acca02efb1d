"""The recurrence of the delta rule's memory over chunks as one GPU kernel, forward and backward.

    Z_i = A_i − B_i X_iᵀ        X_{i+1} = γ_i X_i + D_i + Z_iᵀ C_i

With cotangents E_i of X_i, F_i of Z_i and G_n of the last X, the same recurrence runs backwards,

    dZ_i = F_i + C_i G_{i+1}ᵀ   G_i = γ_i G_{i+1} + E_i − dZ_iᵀ B_i

and the cotangents of the inputs are products within single chunks: dA = dZ, dB = −dZ X, dC = Z G_{i+1}, dγ = ⟨X, G_{i+1}⟩. A
program processes all chunks of a head with a block of X's rows in registers, and does not need the other rows.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import gpu
from pallas_kernels.arguments import Interpret
from pallas_kernels.batching import rows_folded
from pallas_kernels.delta_rule.tiles import Chunks, given, wide


def state_pass(
    chunks: Chunks, a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array | None, decay: jax.Array | None, first: jax.Array,
    interpret: Interpret, *, reverse: bool = False, restarts: tuple[jax.Array, jax.Array | None] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """X before each step, Z of each chunk and the last X.

    Args:
      chunks: the chunks of the tokens. Sizes of chunks and channels are powers of two ≥ 16.
      a: A, [batch, time, heads, value_dim], float32 or bfloat16.
      b, c: B and C, [batch, time, heads, key_dim], in a's dtype.
      d: D, [batch · heads, chunks, value_dim, key_dim], in a's dtype. None means 0.
      decay: γ, float32 [batch · heads, chunks]. None means 1.
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
    dtype, m = a.dtype, chunks.size
    product = gpu.products(dtype, interpret)
    sign = -1.0 if reverse else 1.0

    @rows_folded
    def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        a, b, _, first = arrays[:4]
        (_, time, heads, value_dim), key_dim = a.shape, b.shape[-1]
        rows, count = first.shape[0], time // m
        block, columns, warps = _block(key_dim, value_dim, dtype)
        parts = [pl.ds(start, columns) for start in range(0, key_dim, columns)]

        def kernel(a_ref: jax.Ref, b_ref: jax.Ref, c_ref: jax.Ref, first_ref: jax.Ref, *refs: jax.Ref) -> None:
            *inputs, x_ref, z_ref, last_ref = refs
            restart_ref = start_ref = None
            if restarts is not None:
                *inputs, restart_ref = inputs
                if restarts[1] is not None:
                    *inputs, start_ref = inputs
            d_ref = None if d is None else inputs[0]
            decay_ref = None if decay is None else inputs[-1]

            def replaced(begins: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                fill = [jnp.zeros_like(x) for x in x] if start_ref is None else [start_ref[:, part] for part in parts]
                return tuple(jnp.where(begins, a, b) for a, b in zip(fill, x))

            def step(i: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                i = count - 1 - i if reverse else i
                tokens = pl.ds(i * m, m)
                z = wide(a_ref[tokens, :])
                written = x
                if restart_ref is not None:
                    x = replaced(restart_ref[i] > 0, x)
                    written = written if reverse else x
                for part, x_part, kept in zip(parts, x, written):
                    x_ref[i, :, part] = kept.astype(dtype)
                    z -= sign * product(b_ref[tokens, part], x_part, 1, 1)
                z_ref[tokens, :] = z.astype(dtype)
                after = []
                for part, x_part in zip(parts, x):
                    x_part = x_part if decay_ref is None else decay_ref[i] * x_part
                    x_part = x_part if d_ref is None else x_part + wide(d_ref[i, :, part])
                    after.append(x_part + sign * product(z, c_ref[tokens, part], 0, 0))
                return tuple(after)

            last = jax.lax.fori_loop(0, count, step, tuple(first_ref[:, part] for part in parts))
            for part, x_part in zip(parts, last):
                last_ref[:, part] = x_part

        of_keys = pl.BlockSpec((None, time, None, key_dim), lambda row, j: (row // heads, 0, row % heads, 0))
        of_values = pl.BlockSpec((None, time, None, block), lambda row, j: (row // heads, 0, row % heads, j))
        states = pl.BlockSpec((None, count, block, key_dim), lambda row, j: (row, 0, j, 0))
        state = pl.BlockSpec((None, block, key_dim), lambda row, j: (row, j, 0))
        decays = pl.BlockSpec((None, count), lambda row, j: (row, 0))
        more_specs = [*[states] * (d is not None), *[decays] * (decay is not None)]
        if restarts is not None:
            more_specs += [*[state] * (restarts[1] is not None), decays]
        return tuple(
            gpu.call(
                kernel, warps=warps, stages=2, interpret=interpret, name="state_pass" + "_backward" * reverse,
                out_shape=[
                    jax.ShapeDtypeStruct((rows, count, value_dim, key_dim), dtype),
                    jax.ShapeDtypeStruct(a.shape, dtype),
                    jax.ShapeDtypeStruct(first.shape, jnp.float32),
                ],
                grid=(rows, value_dim // block),
                in_specs=[of_values, of_keys, of_keys, state, *more_specs],
                out_specs=[states, of_values, state],
            )(*arrays)
        )  # fmt: skip

    x, z, last = call(a, b, c, first, *given(d, decay), *given(*(restarts or ())[::-1]))
    return x, z, last


def _block(key_dim: int, value_dim: int, dtype: jax.typing.DTypeLike) -> tuple[int, int, int]:
    """Rows of X per program, its columns per product, and warps per program, chosen so that no register spills on sm_90a."""
    rows, columns = (32, 64) if dtype == jnp.bfloat16 else (16, 32)
    return min(value_dim, rows), min(key_dim, columns), 4
