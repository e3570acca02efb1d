"""Kernels for the reads of a chunk of the delta rule: Y = A ⊙ Q W_0ᵀ + (P ∘ Q Kᵀ)_{t≥i} U, in the notation of `chunk.py`."""

import jax
import jax.numpy as jnp

from pallas_kernels import gpu
from pallas_kernels.arguments import Interpret, Slice
from pallas_kernels.blocks import iota
from pallas_kernels.delta_rule.tiles import Chunks, decays, from_ends, from_products, given, parts, wide


def read(
    chunks: Chunks,
    q: jax.Array,
    k: jax.Array,
    u: jax.Array,
    decay: jax.Array | None,
    x: jax.Array,
    interpret: Interpret,
) -> jax.Array:
    """Y [batch, time, heads, value_dim] from q, k, U and α of tokens, and the memory x before each chunk."""
    dtype, m, keys, values = q.dtype, chunks.size, parts(q.shape[-1], q.dtype), parts(u.shape[-1], q.dtype)
    product = gpu.products(dtype, interpret)
    gated = decay is not None

    def kernel(q_ref: jax.Ref, k_ref: jax.Ref, u_ref: jax.Ref, *refs: jax.Ref) -> None:
        *alpha_refs, x_ref, y_ref = refs
        d = decays(alpha_refs[0][...]) if gated else None
        scores = keys.total(lambda c: product(q_ref[:, c], k_ref[:, c], 1, 1), m, m)
        scores = jnp.where(iota(m, 0) >= iota(m, 1), scores, 0.0) if d is None else scores * d.products

        def of_values(part: Slice, _: None) -> None:
            width = min(values.channels, values.size)
            y = keys.total(lambda c: product(q_ref[:, c], x_ref[part, c], 1, 1), m, width)
            y = y if d is None else d.start[:, None] * y
            y_ref[:, part] = (y + product(scores, u_ref[:, part], 1, 0)).astype(dtype)

        values.each(of_values)

    (y,) = chunks.call(
        kernel, given(q, k, u, decay), [x], [(u.shape[-1], dtype)], [],
        warps=4, interpret=interpret, name="delta_rule_read",
    )  # fmt: skip
    return y


def read_backward(
    chunks: Chunks, q: jax.Array, k: jax.Array, u: jax.Array, decay: jax.Array | None, x: jax.Array, dy: jax.Array,
    interpret: Interpret,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:  # fmt: skip
    """Cotangents of q, k, U, x and α."""
    dtype, m, keys, values = q.dtype, chunks.size, parts(q.shape[-1], q.dtype), parts(u.shape[-1], q.dtype)
    product = gpu.products(dtype, interpret)
    gated = decay is not None

    def kernel(q_ref: jax.Ref, k_ref: jax.Ref, u_ref: jax.Ref, dy_ref: jax.Ref, *refs: jax.Ref) -> None:
        row, column = iota(m, 0), iota(m, 1)
        alpha_refs, refs = refs[:gated], refs[gated:]
        x_ref, dq_ref, dk_ref, du_ref, *dalpha_refs, dx_ref = refs
        d = decays(alpha_refs[0][...]) if gated else None
        scores = keys.total(lambda c: product(q_ref[:, c], k_ref[:, c], 1, 1), m, m)
        dscores = values.total(lambda c: product(dy_ref[:, c], u_ref[:, c], 1, 1), m, m)
        dscores = jnp.where(row >= column, dscores, 0.0)
        dproducts = dscores * scores
        if d is None:
            scores = jnp.where(row >= column, scores, 0.0)
        else:
            scores, dscores = scores * d.products, dscores * d.products

        def of_values(part: Slice, _: None) -> None:
            dy = wide(dy_ref[:, part])
            du_ref[:, part] = product(scores, dy, 0, 0).astype(dtype)
            dy = dy if d is None else d.start[:, None] * dy

            def of_state(c: Slice, _: None) -> None:
                dx_ref[part, c] = product(dy, q_ref[:, c], 0, 0).astype(dtype)

            keys.each(of_state)

        def of_keys(part: Slice, dstart: jax.Array) -> jax.Array:
            width = min(keys.channels, keys.size)
            dread = values.total(lambda c: product(dy_ref[:, c], x_ref[c, part], 1, 0), m, width)
            if d is not None:
                dstart += jnp.sum(wide(q_ref[:, part]) * dread, axis=1)
                dread = d.start[:, None] * dread
            dq_ref[:, part] = (dread + product(dscores, k_ref[:, part], 1, 0)).astype(dtype)
            dk_ref[:, part] = product(dscores, q_ref[:, part], 0, 0).astype(dtype)
            return dstart

        values.each(of_values)
        dstart = keys.each(of_keys, jnp.zeros((m,), jnp.float32))
        if d is not None:
            d = decays(alpha_refs[0][...])  # recomputed, because keeping them from the start would spill registers
            dalpha_refs[0][...] = from_products(d, dproducts, product) + from_ends(d, dstart, None)

    found = chunks.call(
        kernel, given(q, k, u, dy, decay), [x],
        [*[(q.shape[-1], dtype)] * 2, (u.shape[-1], dtype), *[(None, jnp.float32)] * gated], [(x.shape[2:], dtype)],
        warps=8, interpret=interpret, name="delta_rule_read_backward",
    )  # fmt: skip
    dq, dk, du, *dalpha, dx = found
    return dq, dk, du, dx, dalpha[0] if gated else None
