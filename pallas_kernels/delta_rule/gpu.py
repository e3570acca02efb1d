"""The delta rule on GPUs: only what is sequential over chunks is a kernel, the rest batched products that XLA runs for all at once.

In the terms of `chunk.py`, with T = (I + diag(β) (P ∘ K Kᵀ)_{t>i})⁻¹ the system of each chunk is affine in the memory before it,

    U = T (β ⊙ V) − T (β ⊙ A ⊙ K) W_0ᵀ      W_end = A_end W_0 + Uᵀ (P[end, ·] ⊙ K)

which is the recurrence of `state_pass`; all reads follow at once, Y = A ⊙ Q W_0ᵀ + (P ∘ Q Kᵀ)_{t≥i} U.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.blocks import decay_products, iota
from pallas_kernels.delta_rule.chunk import inverse
from pallas_kernels.delta_rule.state_pass import KEPT, state_pass
from pallas_kernels.layout import from_chunks, to_chunks

_INVERSE = "delta_rule_inverse"


def delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, decay: jax.Array | None, initial: jax.Array,
    chunk_size: int, interpret: Any,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """As `api.delta_rule`, of checked arguments."""
    batch, time, heads, key_dim = q.shape
    value_dim = v.shape[-1]
    size = _chunk(chunk_size, time)
    keys, values = _padded(key_dim), _padded(value_dim)
    widened = lambda x, n: jnp.pad(x, ((0, 0),) * 3 + ((0, n - x.shape[-1]),))
    q, k, v = (to_chunks(widened(x, n), size) for x, n in ((q, keys), (k, keys), (v, values)))
    gate = lambda x, fill: to_chunks(x.astype(jnp.float32)[..., None], size, fill)
    first = initial.astype(jnp.float32).reshape(batch * heads, value_dim, key_dim)
    first = jnp.pad(first, ((0, 0), (0, values - value_dim), (0, keys - key_dim)))
    # Not computed again: T, the memory before each chunk and U.
    policy = jax.checkpoint_policies.save_only_these_names(_INVERSE, KEPT)
    scan = jax.checkpoint(functools.partial(_scan, interpret=interpret), policy=policy)
    y, last = scan(q, k, v, gate(beta, 0.0), None if decay is None else gate(decay, 1.0), first)
    return from_chunks(y[..., :value_dim], batch, time), last[:, :value_dim, :key_dim].reshape(initial.shape)


def _padded(channels: int) -> int:
    """Sizes of a kernel's matrices: powers of two ≥ 16. Channels of zeros stay zero."""
    return max(16, 1 << (channels - 1).bit_length())


def _chunk(chunk_size: int, time: int) -> int:
    return min(max(chunk_size, 16), 64, _padded(time))


def _scan(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, decay: jax.Array | None, first: jax.Array, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """Tokens and gates as rows of chunks, [rows, chunks, tokens, channels or 1]."""
    dtype, size = q.dtype, q.shape[2]
    row, column = iota(size, 0), iota(size, 1)
    product = functools.partial(_product, dtype=dtype)
    system, scores = beta * product("nctk,ncik->ncti", k, k), product("nctk,ncik->ncti", q, k)
    removed, written, end = beta * k, k, None
    if decay is not None:
        p = _of_chunks(decay_products)(decay)
        start = decay[:, :, :1] * p[..., :1]  # A
        system, scores = system * p, scores * p
        removed, written, end = start * removed, p[:, :, -1, :, None] * k, start[:, :, -1, 0]
    t = checkpoint_name(_of_chunks(inverse)(jnp.where(row > column, system, 0.0)), _INVERSE)
    solved = lambda x: product("ncti,nciv->nctv", t, x).astype(dtype)
    x, u, last = state_pass(solved(beta * v), solved(removed), written.astype(dtype), end, first, interpret)
    read = product("nctk,ncvk->nctv", q, x)
    inside = product("ncti,nciv->nctv", jnp.where(row >= column, scores, 0.0), u)
    return ((read if decay is None else start * read) + inside).astype(dtype), last


def _of_chunks(function: Any) -> Any:
    """A function of one chunk's matrix for [rows, chunks, …]."""
    return jax.vmap(jax.vmap(function))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _product(subscripts: str, x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
    """einsum of two arrays read in a dtype, accumulated in float32; its derivatives in the same way.

    The derivative of a plain einsum would read bfloat16 as float32, because its cotangent is.
    """
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    x, y = x.astype(dtype), y.astype(dtype)
    return jnp.einsum(subscripts, x, y, precision=precision, preferred_element_type=jnp.float32)


def _product_forward(subscripts: str, x: jax.Array, y: jax.Array, dtype: Any) -> tuple[jax.Array, Any]:
    return _product(subscripts, x, y, dtype), (x, y)


def _product_backward(subscripts: str, dtype: Any, kept: Any, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, y = kept
    inputs, out = subscripts.split("->")
    left, right = inputs.split(",")
    dx = _product(f"{out},{right}->{left}", d, y, dtype)
    dy = _product(f"{left},{out}->{right}", x, d, dtype)
    return dx.astype(x.dtype), dy.astype(y.dtype)


_product.defvjp(_product_forward, _product_backward)
