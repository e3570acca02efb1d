"""Kernels for the parts of a chunk of the delta rule that do not depend on the memory: U = V̂ − K̂ W_0ᵀ, W_end = γ W_0 + Uᵀ C.

    T = (I + L)⁻¹,  L = diag(β) (P ∘ K Kᵀ)_{t>i}      V̂ = T (β ⊙ V)   K̂ = T (β ⊙ A ⊙ K)   C = P[end, ·] ⊙ K   γ = A_end

in the notation of `chunk.py`. Without decay C is K and γ is 1. T is computed in blocks of 16 tokens: recursively within a block,
and as T_ij = −T_ii Σ_k L_ik T_kj between blocks.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels import gpu
from pallas_kernels.arguments import Interpret, Slice
from pallas_kernels.blocks import iota
from pallas_kernels.delta_rule.tiles import Chunks, decays, from_ends, from_products, given, last, parts, wide

_BLOCK = 16  # smallest size of a product


def prepare(
    chunks: Chunks, k: jax.Array, v: jax.Array, beta: jax.Array, decay: jax.Array | None, interpret: Interpret
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """V̂, K̂ and C [batch, time, heads, …], T and γ [batch · heads, chunks, …], from k, v and gates. γ is None without decay."""
    dtype, m, keys, values = k.dtype, chunks.size, parts(k.shape[-1], k.dtype), parts(v.shape[-1], k.dtype)
    product, exact = gpu.products(dtype, interpret), gpu.products(jnp.float32, interpret)
    gated = decay is not None

    def kernel(k_ref: jax.Ref, v_ref: jax.Ref, beta_ref: jax.Ref, *refs: jax.Ref) -> None:
        outputs = refs[1:] if gated else refs
        value_ref, removed_ref, t_ref = outputs[0], outputs[1], outputs[3 if gated else 2]
        beta, p = beta_ref[...], None
        scale = beta
        if gated:
            d = decays(refs[0][...])
            p, scale = d.products, beta * d.start
            written_ref, end_ref = outputs[2], outputs[4]
            end_ref[...] = last(d.start)

            def write(part: Slice, _: None) -> None:
                written_ref[:, part] = (d.end[:, None] * wide(k_ref[:, part])).astype(dtype)

            keys.each(write)
        t_ref[...] = _lower(beta, keys.total(lambda part: product(k_ref[:, part], k_ref[:, part], 1, 1), m, m), p)
        _invert(t_ref, exact, interpret)
        t = t_ref[...]

        def of_values(part: Slice, _: None) -> None:
            value_ref[:, part] = product(t, beta[:, None] * wide(v_ref[:, part]), 1, 0).astype(dtype)

        def of_keys(part: Slice, _: None) -> None:
            removed_ref[:, part] = product(t, scale[:, None] * wide(k_ref[:, part]), 1, 0).astype(dtype)

        values.each(of_values)
        keys.each(of_keys)

    found = chunks.call(
        kernel, given(k, v, beta, decay), [],
        [(v.shape[-1], dtype), (k.shape[-1], dtype), *[(k.shape[-1], dtype)] * gated],
        [((m, m), jnp.float32), *[((), jnp.float32)] * gated],
        warps=4, interpret=interpret, name="delta_rule_prepare",
    )  # fmt: skip
    if gated:
        value, removed, written, t, end = found
        return value, removed, written, t, end
    value, removed, t = found
    return value, removed, k, t, None


def prepare_backward(
    chunks: Chunks, k: jax.Array, v: jax.Array, beta: jax.Array, decay: jax.Array | None, t: jax.Array,
    u: jax.Array, du: jax.Array, x: jax.Array, dx: jax.Array, dk: jax.Array, interpret: Interpret,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:  # fmt: skip
    """Cotangents of k, v, β and α.

    Args:
      k, v, beta, decay, t: inputs and T of `prepare`.
      u, du: U and its cotangent, which is also that of V̂.
      x, dx: the memory before a chunk and the cotangent of the memory after it. The cotangents of K̂, C and γ are −dU X, U dX and
        ⟨X, dX⟩.
      dk: contribution to k's cotangent from elsewhere.
    """
    dtype, m, gated = k.dtype, chunks.size, decay is not None
    keys, values = (parts(x.shape[-1], dtype, narrow=gated) for x in (k, v))
    product, exact = gpu.products(dtype, interpret), gpu.products(jnp.float32, interpret)

    def kernel(
        k_ref: jax.Ref,
        v_ref: jax.Ref,
        beta_ref: jax.Ref,
        u_ref: jax.Ref,
        du_ref: jax.Ref,
        more_ref: jax.Ref,
        *refs: jax.Ref,
    ) -> None:
        row, column = iota(m, 0), iota(m, 1)
        alpha_refs, refs = refs[:gated], refs[gated:]
        t_ref, x_ref, dx_ref, dk_ref, dv_ref, dbeta_ref, *dalpha_refs = refs
        beta = beta_ref[...]
        # Computed where they are used, because registers would spill otherwise.
        again = lambda: decays(alpha_refs[0][...]) if gated else None
        d = again()
        scale, start, end = (beta, None, None) if d is None else (beta * d.start, d.start, d.end)
        width = min(keys.channels, keys.size)
        # dU X, which is −dK̂, and U dX, which is dC, for some of the key channels.
        removed = lambda part: values.total(lambda c: product(du_ref[:, c], x_ref[c, part], 1, 0), m, width)
        written = lambda part: values.total(lambda c: product(u_ref[:, c], dx_ref[c, part], 1, 0), m, width)

        def of_values(part: Slice, dbeta: jax.Array) -> jax.Array:
            solved = product(t_ref[...], du_ref[:, part], 0, 0)
            dv_ref[:, part] = (beta[:, None] * solved).astype(dtype)
            return dbeta + jnp.sum(solved * wide(v_ref[:, part]), axis=1)

        dbeta = values.each(of_values, jnp.zeros((m,), jnp.float32))
        dt = values.total(lambda c: product(du_ref[:, c], beta[:, None] * wide(v_ref[:, c]), 1, 1), m, m)
        dt -= keys.total(lambda c: product(removed(c), scale[:, None] * wide(k_ref[:, c]), 1, 1), m, m)
        t = t_ref[...]
        dlower = jnp.where(row > column, -exact(exact(t, dt, 0, 0), t, 1, 1), 0.0)  # −Tᵀ dT Tᵀ
        similarity = keys.total(lambda part: product(k_ref[:, part], k_ref[:, part], 1, 1), m, m)
        dalpha = jnp.zeros((m,), jnp.float32)
        if (d := again()) is not None:
            dalpha = from_products(d, beta[:, None] * dlower * similarity, product)
            dlower = dlower * d.products
        dbeta += jnp.sum(dlower * similarity, axis=1)
        dsimilarity = beta[:, None] * dlower

        def of_keys(part: Slice, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            dscale, dend = sums
            key, solved, dwritten = wide(k_ref[:, part]), product(t_ref[...], removed(part), 0, 0), written(part)
            dscale -= jnp.sum(solved * key, axis=1)
            dkey = wide(more_ref[:, part]) - scale[:, None] * solved
            if end is not None:
                dend += jnp.sum(dwritten * key, axis=1)
                dwritten = end[:, None] * dwritten
            dkey += product(dsimilarity, key, 1, 0) + product(dsimilarity, key, 0, 0)
            dk_ref[:, part] = (dkey + dwritten).astype(dtype)
            return dscale, dend

        dscale, dend = keys.each(of_keys, (jnp.zeros((m,), jnp.float32), jnp.zeros((m,), jnp.float32)))
        dbeta_ref[...] = dbeta + (dscale if start is None else start * dscale)
        if (d := again()) is None:
            return
        both = lambda c, part: jnp.sum(wide(x_ref[c, part]) * wide(dx_ref[c, part]))
        dlast = keys.total(lambda part: values.total(lambda c: both(c, part)))
        place = jax.lax.broadcasted_iota(jnp.int32, (m,), 0)
        dstart = beta * dscale + jnp.where(place == m - 1, dlast, 0.0)
        dalpha_refs[0][...] = dalpha + from_ends(d, dstart, dend)

    found = chunks.call(
        kernel, given(k, v, beta, u, du, dk, decay), [t, x, dx],
        [(k.shape[-1], dtype), (v.shape[-1], dtype), *[(None, jnp.float32)] * (1 + gated)], [],
        warps=8, interpret=interpret, name="delta_rule_prepare_backward",
    )  # fmt: skip
    dk, dv, dbeta, *dalpha = found
    return dk, dv, dbeta, dalpha[0] if gated else None


def _lower(beta: jax.Array, similarity: jax.Array, p: jax.Array | None) -> jax.Array:
    """L."""
    m = beta.shape[0]
    system = beta[:, None] * similarity
    return jnp.where(iota(m, 0) > iota(m, 1), system if p is None else system * p, 0.0)


def _invert(ref: jax.Ref, exact: gpu.Product, interpret: Interpret) -> None:
    """Replaces L in memory by T. Blocks are read from memory, because values cannot be sliced."""
    # All warps of the program must see what one wrote before they read or overwrite it.
    barrier = (lambda: None) if interpret else triton.debug_barrier
    size = ref.shape[0]
    rows = lambda i: pl.ds(pl.multiple_of(i * _BLOCK, _BLOCK), _BLOCK)
    block = lambda axis: jax.lax.broadcasted_iota(jnp.int32, (_BLOCK, size), axis) // _BLOCK

    def diagonal(i: jax.Array, _: None) -> None:
        lower = ref[rows(i), rows(i)]
        barrier()
        ref[rows(i), rows(i)] = _inverse_by_halves(lower, exact)

    def below(i: jax.Array, _: None) -> None:
        barrier()
        found = jnp.where(iota(size, 0) // _BLOCK < i, ref[...], 0.0)
        lower, t = ref[rows(i), :], ref[rows(i), rows(i)]
        before = exact(jnp.where(block(1) < i, lower, 0.0), found, 1, 0)
        new = jnp.where(block(1) < i, -exact(t, before, 1, 0), lower)
        barrier()
        ref[rows(i), :] = new

    barrier()
    jax.lax.fori_loop(0, size // _BLOCK, diagonal, None)
    jax.lax.fori_loop(1, size // _BLOCK, below, None)
    barrier()


def _inverse_by_halves(lower: jax.Array, exact: gpu.Product) -> jax.Array:
    """The algorithm of `triangular.unit_lower_inverse`."""
    size = lower.shape[0]
    row, column = iota(size, 0), iota(size, 1)

    def step(level: jax.Array, x: jax.Array) -> jax.Array:
        between = ((row >> (level + 1)) == (column >> (level + 1))) & ((row >> level) > (column >> level))
        part = jnp.where(between, lower, 0.0)
        return x - exact(x, exact(part, x, 1, 0), 1, 0)

    return jax.lax.fori_loop(0, size.bit_length() - 1, step, (row == column).astype(jnp.float32))
