"""The recurrence of the delta rule's memory over chunks as one GPU kernel, forward and backward.

    Z_i = A_i − B_i X_iᵀ        X_{i+1} = γ_i X_i + Z_iᵀ C_i

With cotangents E_i of X_i, F_i of Z_i and G_n of the last X, the same recurrence runs backwards,

    dZ_i = F_i + C_i G_{i+1}ᵀ   G_i = γ_i G_{i+1} + E_i − dZ_iᵀ B_i

and the cotangents of the inputs are products of single chunks: dA = dZ, dB = −dZ X, dC = Z G_{i+1}, dγ = ⟨X, G_{i+1}⟩. A program
walks all chunks of a row with a block of X's rows in registers; no other is needed for it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from pallas_kernels import gpu
from pallas_kernels.batching import rows_folded

KEPT = "state_pass"  # the name of X and Z for `jax.checkpoint`


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def state_pass(
    a: jax.Array, b: jax.Array, c: jax.Array, decay: jax.Array | None, first: jax.Array, interpret: Any = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """X before each chunk, Z of each chunk and the last X.

    Args:
      a: A, [rows, chunks, tokens, value_dim], float32 or bfloat16; sizes from tokens on are powers of two ≥ 16.
      b, c: B and C, [rows, chunks, tokens, key_dim], of a's dtype.
      decay: γ, float32 [rows, chunks]; None: 1.
      first: X before the first chunk, float32 [rows, value_dim, key_dim].
      interpret: as `pallas_call` takes it.

    Returns:
      X [rows, chunks, value_dim, key_dim] and Z [rows, chunks, tokens, value_dim] in a's dtype, in which products read them; the
      last X [rows, value_dim, key_dim], float32, as it is kept from chunk to chunk. There is no forward-mode derivative.
    """
    return _walk(a, b, c, None, decay, first, interpret, reverse=False)


def _forward(a: Any, b: Any, c: Any, decay: Any, first: Any, interpret: Any) -> tuple[Any, Any]:
    x, z, last = _walk(a, b, c, None, decay, first, interpret, reverse=False)
    x, z = (checkpoint_name(y, KEPT) for y in (x, z))
    return (x, z, last), (b, c, decay, x, z)


def _backward(interpret: Any, kept: Any, cotangents: Any) -> tuple[Any, ...]:
    b, c, decay, x, z = kept
    dx, dz, dlast = cotangents
    # Backwards, what lies "before" a chunk is the cotangent of X after it.
    after, dz, dfirst = _walk(dz, c, b, dx, decay, dlast, interpret, reverse=True)
    precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dot = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    db = -dot("nctv,ncvk->nctk", dz, x)
    dc = dot("nctv,ncvk->nctk", z, after)
    wide = lambda x: x.astype(jnp.float32)
    ddecay = None if decay is None else jnp.sum(wide(x) * wide(after), axis=(2, 3))
    return dz, db.astype(b.dtype), dc.astype(c.dtype), ddecay, dfirst


state_pass.defvjp(_forward, _backward)


def _walk(
    a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array | None, decay: jax.Array | None, first: jax.Array,
    interpret: Any, *, reverse: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Z_i = A_i ∓ B_i Xᵀ and X ← γ_i X + D_i ± Z_iᵀ C_i, the upper signs forwards; X before each step, Z and the last X."""
    dtype = a.dtype
    product = gpu.products(dtype, interpret)
    sign = -1.0 if reverse else 1.0
    optional = [x for x in (d, decay) if x is not None]

    @rows_folded
    def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        a, b, _, first = arrays[:4]
        rows, chunks, tokens, value_dim = a.shape
        key_dim = b.shape[-1]
        block, keys, warps = _block(key_dim, value_dim, dtype)
        parts = [pl.ds(start, keys) for start in range(0, key_dim, keys)]

        def kernel(a_ref: Any, b_ref: Any, c_ref: Any, first_ref: Any, *refs: Any) -> None:
            *inputs, x_ref, z_ref, last_ref = refs
            d_ref = None if d is None else inputs[0]
            decay_ref = None if decay is None else inputs[-1]

            def step(i: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                i = chunks - 1 - i if reverse else i
                z = a_ref[i].astype(jnp.float32)
                for part, x_part in zip(parts, x):
                    x_ref[i, :, part] = x_part.astype(dtype)
                    z -= sign * product(b_ref[i, :, part], x_part, 1, 1)
                z_ref[i] = z.astype(dtype)
                after = []
                for part, x_part in zip(parts, x):
                    x_part = x_part if decay_ref is None else decay_ref[i] * x_part
                    x_part = x_part if d_ref is None else x_part + d_ref[i, :, part].astype(jnp.float32)
                    after.append(x_part + sign * product(z, c_ref[i, :, part], 0, 0))
                return tuple(after)

            last = jax.lax.fori_loop(0, chunks, step, tuple(first_ref[:, part] for part in parts))
            for part, x_part in zip(parts, last):
                last_ref[:, part] = x_part

        of_keys = pl.BlockSpec((None, chunks, tokens, key_dim), lambda row, j: (row, 0, 0, 0))
        of_values = pl.BlockSpec((None, chunks, tokens, block), lambda row, j: (row, 0, 0, j))
        states = pl.BlockSpec((None, chunks, block, key_dim), lambda row, j: (row, 0, j, 0))
        state = pl.BlockSpec((None, block, key_dim), lambda row, j: (row, j, 0))
        decays = pl.BlockSpec((None, chunks), lambda row, j: (row, 0))
        return tuple(
            gpu.call(
                kernel, warps=warps, stages=2, interpret=interpret, name="state_pass" + "_backward" * reverse,
                out_shape=[
                    jax.ShapeDtypeStruct((rows, chunks, value_dim, key_dim), dtype),
                    jax.ShapeDtypeStruct(a.shape, dtype),
                    jax.ShapeDtypeStruct(first.shape, jnp.float32),
                ],
                grid=(rows, value_dim // block),
                in_specs=[of_values, of_keys, of_keys, state, *[states] * (d is not None), *[decays] * (decay is not None)],
                out_specs=[states, of_values, state],
            )(*arrays)
        )  # fmt: skip

    x, z, last = call(a, b, c, first, *optional)
    return x, z, last


def _block(key_dim: int, value_dim: int, dtype: Any) -> tuple[int, int, int]:
    """Rows of X in one program, its columns in one product, and the program's warps: no spilled register on sm_90a."""
    rows, columns = (32, 64) if dtype == jnp.bfloat16 else (16, 32)
    return min(value_dim, rows), min(key_dim, columns), 4
