"""The delta rule on GPUs, in three steps: the parts of all chunks that do not depend on the memory, the memory, and all reads.

In the notation of `chunk.py`, with T = (I + diag(β) (P ∘ K Kᵀ)_{t>i})⁻¹, a chunk is affine in the memory before it,

    U = T (β ⊙ V) − T (β ⊙ A ⊙ K) W_0ᵀ      W_end = A_end W_0 + Uᵀ (P[end, ·] ⊙ K)

so only this recurrence is sequential (`state_pass`). `prepare` and `read` are kernels for single chunks. For the backward pass T,
the memory before each chunk, U and the inputs of the state pass are kept. A packed segment only restarts the state pass.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import BEGINS, Interpret, Segments
from pallas_kernels.delta_rule.prepare import prepare, prepare_backward
from pallas_kernels.delta_rule.read import read, read_backward
from pallas_kernels.delta_rule.state_pass import state_pass
from pallas_kernels.delta_rule.tiles import Chunks
from pallas_kernels.gpu import padded
from pallas_kernels.varying import vary_like

# Which chunks begin with the initial memory, int32 [batch · heads, chunks], and that memory, like the first. None without segments.
_Restarts = tuple[jax.Array, jax.Array] | None
_Kept = tuple[Any, ...]  # what the backward pass needs, in the order of `_forward`

# Tokens per chunk, limited by the kernels' registers.
_MOST_TOKENS = {"bfloat16": 64, "float32": 32}


def delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, decay: jax.Array | None, initial: jax.Array,
    chunk_size: int, segments: Segments | None, interpret: Interpret,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`api.delta_rule` for checked arguments."""
    (batch, time, heads, key_dim), value_dim = q.shape, v.shape[-1]
    # 16 is the least that a product on tensor cores takes.
    size = min(max(chunk_size, 16), _MOST_TOKENS[str(q.dtype)], padded(time))
    keys, values = padded(key_dim), padded(value_dim)
    more = -time % size
    tokens = lambda x, n: jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, n - x.shape[-1])))
    gate = lambda x, fill: jnp.pad(x.astype(jnp.float32), ((0, 0), (0, more), (0, 0)), constant_values=fill)
    first = initial.astype(jnp.float32).reshape(batch * heads, value_dim, key_dim)
    pad = lambda w: jnp.pad(w, ((0, 0), (0, values - value_dim), (0, keys - key_dim)))
    first, restarts = pad(first), None
    if segments is not None:
        # A chunk of the call is one or more of the kernels' chunks, of which the first begins the segment.
        begins = segments.rows(heads) == BEGINS
        begins = jnp.repeat(begins, chunk_size // size, axis=1) & (jnp.arange(time // size) % (chunk_size // size) == 0)
        start = pad(segments.start_rows(segments.start))
        first = jnp.where(begins[:, :1, None], start, first)
        restarts = begins.at[:, 0].set(False).astype(jnp.int32), start
    arrays = vary_like((
        tokens(q, keys), tokens(k, keys), tokens(v, values),
        gate(beta, 0.0), None if decay is None else gate(decay, 1.0), first, restarts,
    ))  # fmt: skip
    y, last = _delta_rule(*arrays, Chunks(heads, size), interpret)
    return y[:, :time, :, :value_dim], last[:, :value_dim, :key_dim].reshape(initial.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, decay: jax.Array | None, first: jax.Array,
    restarts: _Restarts, chunks: Chunks, interpret: Interpret,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    return _forward(q, k, v, beta, decay, first, restarts, chunks, interpret)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, decay: jax.Array | None, first: jax.Array,
    restarts: _Restarts, chunks: Chunks, interpret: Interpret,
) -> tuple[tuple[jax.Array, jax.Array], _Kept]:  # fmt: skip
    value, removed, written, t, end = prepare(chunks, k, v, beta, decay, interpret)
    x, u, last = state_pass(chunks, value, removed, written, None, end, first, interpret, restarts=restarts)
    y = read(chunks, q, k, u, decay, x, interpret)
    return (y, last), (q, k, v, beta, decay, removed, written, t, end, x, u, restarts)


def _backward(
    chunks: Chunks, interpret: Interpret, kept: _Kept, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[Any, ...]:
    q, k, v, beta, decay, removed, written, t, end, x, u, restarts = kept
    dy, dlast = cotangents
    dq, dk, du, dx, dread = read_backward(chunks, q, k, u, decay, x, dy, interpret)
    # The cotangent of the memory before a chunk that begins a segment is that of the initial memory, not of the chunk before it.
    after = None if restarts is None else jnp.pad(restarts[0][:, 1:], ((0, 0), (0, 1)))
    dx, du, dfirst = state_pass(
        chunks, du, written, removed, dx, end, dlast, interpret, reverse=True,
        restarts=None if after is None else (after, None),
    )  # fmt: skip
    drestarts = None
    if after is not None:
        begun = (after > 0)[..., None, None]
        drestarts = None, jnp.sum(jnp.where(begun, dx, 0.0), axis=1, dtype=jnp.float32)
        # The chunk before wrote what was then replaced: no cotangent.
        dx = jnp.where(begun, 0.0, dx).astype(dx.dtype)
    dk, dv, dbeta, ddecay = prepare_backward(chunks, k, v, beta, decay, t, u, du, x, dx, dk, interpret)
    return dq, dk, dv, dbeta, None if ddecay is None or dread is None else ddecay + dread, dfirst, drestarts


_delta_rule.defvjp(_forward, _backward)
