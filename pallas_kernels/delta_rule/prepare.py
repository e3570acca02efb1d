"""Kernels for the parts of a chunk of the delta rule that do not depend on the memory: U = V̂ − K̂ W_0ᵀ, W_end = γ W_0 + Uᵀ C.

    T = (I + L)⁻¹,  L = diag(β) (P ∘ K Kᵀ)_{t>i}      V̂ = T (β ⊙ V)   K̂ = T (β ⊙ A ⊙ K)   C = P[end, ·] ⊙ K   γ = A_end

in the notation of `chunk.py`. Without decay C is K and γ is 1. T is computed in blocks of 16 tokens: recursively within a block,
and as T_ij = −T_ii Σ_k L_ik T_kj between blocks.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels import gpu
from pallas_kernels.arguments import Interpret, Slice
from pallas_kernels.blocks import iota
from pallas_kernels.delta_rule.tiles import (
    Chunks,
    Decays,
    Parts,
    decays,
    from_ends,
    from_products,
    given,
    last,
    parts,
    wide,
)

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
        # T is inverted in its own output: another [m, m] matrix would not fit in registers.
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
    # Without decay C is K itself, which need not be written again.
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
    dtype, gated = k.dtype, decay is not None
    keys, values = (parts(x.shape[-1], dtype, narrow=gated) for x in (k, v))
    product, exact = gpu.products(dtype, interpret), gpu.products(jnp.float32, interpret)

    def kernel(*refs: jax.Ref) -> None:
        inputs, (*outputs,) = refs[: 9 + gated], refs[9 + gated :]
        *tokens, t, x, dx = inputs
        alpha, dalpha = (tokens.pop(), outputs.pop()) if gated else (None, None)
        _Backward(keys, values, product, exact, alpha, dalpha, *[*tokens, t, x, dx, *outputs]).run()

    found = chunks.call(
        kernel, given(k, v, beta, u, du, dk, decay), [t, x, dx],
        [(k.shape[-1], dtype), (v.shape[-1], dtype), *[(None, jnp.float32)] * (1 + gated)], [],
        warps=8, interpret=interpret, name="delta_rule_prepare_backward",
    )  # fmt: skip
    dk, dv, dbeta, *dalpha = found
    return dk, dv, dbeta, dalpha[0] if gated else None


@dataclasses.dataclass(frozen=True)
class _Backward:
    """The kernel of `prepare_backward` for one chunk, and references to its arrays. alpha, dalpha: None without decay.

    Decays, dU X and U dX are computed where they are used, and again where they are used again: registers would spill otherwise.
    """

    keys: Parts
    values: Parts
    product: gpu.Product
    exact: gpu.Product
    alpha: jax.Ref | None
    dalpha: jax.Ref | None
    k: jax.Ref
    v: jax.Ref
    beta: jax.Ref
    u: jax.Ref
    du: jax.Ref
    more: jax.Ref
    t: jax.Ref
    x: jax.Ref
    dx: jax.Ref
    dk: jax.Ref
    dv: jax.Ref
    dbeta: jax.Ref

    def decays(self) -> Decays | None:
        return None if self.alpha is None else decays(self.alpha[...])

    def removed(self, part: Slice) -> jax.Array:
        """dU X, which is −dK̂, for some of the key channels."""
        return self._over_values(lambda c: self.product(self.du[:, c], self.x[c, part], 1, 0))

    def written(self, part: Slice) -> jax.Array:
        """U dX, which is dC, for some of the key channels."""
        return self._over_values(lambda c: self.product(self.u[:, c], self.dx[c, part], 1, 0))

    def _over_values(self, term: Callable[[Slice], jax.Array]) -> jax.Array:
        return self.values.total(term, self.k.shape[0], min(self.keys.channels, self.keys.size))

    def run(self) -> None:
        # Made first: made where they are used, they spill three registers at 128 channels on an H200.
        rows = iota(self.beta.shape[0], 0), iota(self.beta.shape[0], 1)
        beta, d = self.beta[...], self.decays()
        scale = beta if d is None else beta * d.start
        dbeta = self.values.each(
            lambda part, dbeta: self.of_values(part, dbeta, beta), jnp.zeros(beta.shape, jnp.float32)
        )
        dbeta, dalpha, dsimilarity = self.of_system(rows, beta, scale, dbeta)
        zeros = (jnp.zeros(beta.shape, jnp.float32), jnp.zeros(beta.shape, jnp.float32))
        end = None if d is None else d.end
        dscale, dend = self.keys.each(
            lambda part, sums: self.of_keys(part, sums, scale, end, dsimilarity), zeros
        )  # fmt: skip
        self.dbeta[...] = dbeta + (dscale if d is None else d.start * dscale)
        if (d := self.decays()) is not None and self.dalpha is not None:
            self.dalpha[...] = dalpha + self.of_start_and_end(d, beta, dscale, dend)

    def of_values(self, part: Slice, dbeta: jax.Array, beta: jax.Array) -> jax.Array:
        """dV, and dβ with what V has of it."""
        solved = self.product(self.t[...], self.du[:, part], 0, 0)
        self.dv[:, part] = (beta[:, None] * solved).astype(self.dv.dtype)
        return dbeta + jnp.sum(solved * wide(self.v[:, part]), axis=1)

    def of_system(
        self, rows: tuple[jax.Array, jax.Array], beta: jax.Array, scale: jax.Array, dbeta: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """dβ with what L has of it, dα of P in L, and the cotangent of K Kᵀ. rows: row and column of each of L's entries."""
        (row, column), m, product, exact = rows, beta.shape[0], self.product, self.exact
        dt = self.values.total(lambda c: product(self.du[:, c], beta[:, None] * wide(self.v[:, c]), 1, 1), m, m)
        dt -= self.keys.total(lambda c: product(self.removed(c), scale[:, None] * wide(self.k[:, c]), 1, 1), m, m)
        t = self.t[...]
        dlower = jnp.where(row > column, -exact(exact(t, dt, 0, 0), t, 1, 1), 0.0)  # −Tᵀ dT Tᵀ
        similarity = self.keys.total(lambda part: product(self.k[:, part], self.k[:, part], 1, 1), m, m)
        dalpha = jnp.zeros((m,), jnp.float32)
        if (d := self.decays()) is not None:
            dalpha = from_products(d, beta[:, None] * dlower * similarity, product)
            dlower = dlower * d.products
        return dbeta + jnp.sum(dlower * similarity, axis=1), dalpha, beta[:, None] * dlower

    def of_keys(
        self, part: Slice, sums: tuple[jax.Array, jax.Array], scale: jax.Array, end: jax.Array | None,
        dsimilarity: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        """dK, and the cotangents of `scale` and `end` with what K has of them."""
        (dscale, dend), product = sums, self.product
        key, solved, dwritten = (
            wide(self.k[:, part]),
            product(self.t[...], self.removed(part), 0, 0),
            self.written(part),
        )
        dscale -= jnp.sum(solved * key, axis=1)
        dkey = wide(self.more[:, part]) - scale[:, None] * solved
        if end is not None:
            dend += jnp.sum(dwritten * key, axis=1)
            dwritten = end[:, None] * dwritten
        dkey += product(dsimilarity, key, 1, 0) + product(dsimilarity, key, 0, 0)
        self.dk[:, part] = (dkey + dwritten).astype(self.dk.dtype)
        return dscale, dend

    def of_start_and_end(self, d: Decays, beta: jax.Array, dscale: jax.Array, dend: jax.Array) -> jax.Array:
        """dα of A, P[end, ·] and γ."""
        both = lambda c, part: jnp.sum(wide(self.x[c, part]) * wide(self.dx[c, part]))
        dlast = self.keys.total(lambda part: self.values.total(lambda c: both(c, part)))
        place = jax.lax.broadcasted_iota(jnp.int32, beta.shape, 0)
        dstart = beta * dscale + jnp.where(place == beta.shape[0] - 1, dlast, 0.0)
        return from_ends(d, dstart, dend)


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
