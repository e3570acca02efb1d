"""The memory pass of linear rules on GPUs: the recurrence over chunks, with derivatives. XLA computes what single chunks have.

    U_i = A_i − B_i W_iᵀ        W_{i+1} = W_i Diag(γ_i) + D_i + U_iᵀ C_i

`state_pass` runs it forward and backward. A recurrence by `lax.scan` would start several kernels for each chunk, and read and write
the memory in each of them; here it stays in registers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Interpret
from pallas_kernels.delta_rule.state_pass import state_pass
from pallas_kernels.delta_rule.tiles import Chunks
from pallas_kernels.gpu import padded
from pallas_kernels.varying import vary_like

MOST_CHANNELS = 256  # for keys and values
_Restarts = tuple[jax.Array, jax.Array] | None
_Kept = tuple[Any, ...]


def memory_pass(
    written: jax.Array, removed: jax.Array | None, keys: jax.Array, added: jax.Array | None, decay: jax.Array | None,
    first: jax.Array, start: jax.Array, resets: jax.Array | None, *, interpret: Interpret = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """The memory before each chunk, U, and the last memory.

    Args:
      written: A, [chunks, batch, heads, m, value_dim], float32 or bfloat16, in which products read their inputs.
      removed, keys: B and C, [chunks, batch, heads, m, key_dim]. None for B means 0.
      added: D, [chunks, batch, heads, value_dim, key_dim]. None means 0.
      decay: γ, [chunks, batch, heads] or [chunks, batch, heads, key_dim]. None means 1.
      first: W before the first chunk, [batch, heads, value_dim, key_dim].
      start: W at the start of a segment, [heads, value_dim, key_dim].
      resets: [chunks, batch], whether a segment starts with the chunk. None means that none does.
      interpret: passed to `pallas_call`.

    Returns:
      W [chunks, batch, heads, value_dim, key_dim] and U, like `written`, in its dtype; and the last W, float32.
    """
    (count, batch, heads, m, value_dim), key_dim = written.shape, keys.shape[-1]
    dtype, size, width, depth = written.dtype, padded(m), padded(value_dim), padded(key_dim)

    def tokens(x: jax.Array | None, channels: int) -> jax.Array | None:
        """[batch, chunks · size, heads, channels], with zeros in places without a token or a channel."""
        if x is None:
            return None
        x = jnp.pad(x.astype(dtype), (*[(0, 0)] * 3, (0, size - m), (0, channels - x.shape[-1])))
        return jnp.transpose(x, (1, 0, 3, 2, 4)).reshape(batch, count * size, heads, channels)

    # One row per head and batch element: the kernel's grid.
    rows = lambda x: jnp.moveaxis(x, 0, 2).reshape(batch * heads, count, *x.shape[3:])
    pad = lambda w: jnp.pad(w, (*[(0, 0)] * (w.ndim - 2), (0, width - value_dim), (0, depth - key_dim)))
    memory = pad(first.astype(jnp.float32)).reshape(batch * heads, width, depth)
    restarts = None
    if resets is not None:
        fresh = jnp.broadcast_to(pad(start.astype(jnp.float32)), (batch, heads, width, depth)).reshape(memory.shape)
        marks = jnp.repeat(resets.T, heads, axis=0)
        # Here and not in the kernel, which then restarts only at later chunks, after it has written the memory out.
        memory = jnp.where(marks[:, :1, None], fresh, memory)
        restarts = marks.at[:, 0].set(False).astype(jnp.int32), fresh
    gamma = None
    if decay is not None:
        gamma = rows(decay.astype(jnp.float32))
        if gamma.ndim == 3:
            gamma = jnp.pad(gamma, ((0, 0), (0, 0), (0, depth - key_dim)))
    arrays = vary_like((
        tokens(written, width), tokens(removed, depth), tokens(keys, depth),
        None if added is None else pad(rows(added.astype(dtype))), gamma, memory, restarts,
    ))  # fmt: skip
    before, u, last = _pass(*arrays, Chunks(heads, size), interpret)
    before = jnp.moveaxis(before.reshape(batch, heads, count, width, depth), 2, 0)[..., :value_dim, :key_dim]
    u = jnp.transpose(u.reshape(batch, count, size, heads, width), (1, 0, 3, 2, 4))[..., :m, :value_dim]
    return before, u, last[:, :value_dim, :key_dim].reshape(first.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _pass(
    a: jax.Array, b: jax.Array | None, c: jax.Array, d: jax.Array | None, decay: jax.Array | None, first: jax.Array,
    restarts: _Restarts, chunks: Chunks, interpret: Interpret,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    return state_pass(chunks, a, b, c, d, decay, first, interpret, restarts=restarts)


def _forward(
    a: jax.Array, b: jax.Array | None, c: jax.Array, d: jax.Array | None, decay: jax.Array | None, first: jax.Array,
    restarts: _Restarts, chunks: Chunks, interpret: Interpret,
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], _Kept]:  # fmt: skip
    x, z, last = state_pass(chunks, a, b, c, d, decay, first, interpret, restarts=restarts)
    return (x, z, last), (b, c, d is None, decay, x, z, restarts)


def _backward(
    chunks: Chunks, interpret: Interpret, kept: _Kept, cotangents: tuple[jax.Array, jax.Array, jax.Array]
) -> tuple[Any, ...]:
    b, c, adds_nothing, decay, x, z, restarts = kept
    dx, dz, dlast = cotangents
    # The cotangent of the memory before a chunk that begins a segment is that of the initial memory, not of the chunk before it.
    after = None if restarts is None else jnp.pad(restarts[0][:, 1:], ((0, 0), (0, 1)))
    dafter, da, dfirst = state_pass(
        chunks, dz, c, b, dx, decay, dlast, interpret, reverse=True, restarts=None if after is None else (after, None)
    )
    drestarts = None
    if after is not None:
        begun = (after > 0)[..., None, None]
        drestarts = None, jnp.sum(jnp.where(begun, dafter, 0.0), axis=1, dtype=jnp.float32)
        # Memories before a restart get no cotangent through it.
        dafter = jnp.where(begun, 0.0, dafter).astype(dafter.dtype)
    by_chunk = lambda tokens: tokens.reshape(tokens.shape[0], -1, chunks.size, *tokens.shape[2:])
    by_head = lambda w: w.reshape(-1, chunks.heads, *w.shape[1:])
    of_states = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    db = (
        None
        if b is None
        else -of_states("bnthv,bhnvk->bnthk", by_chunk(da), by_head(x)).reshape(b.shape).astype(b.dtype)
    )
    dc = of_states("bnthv,bhnvk->bnthk", by_chunk(z), by_head(dafter)).reshape(c.shape).astype(c.dtype)
    ddecay = None
    if decay is not None:
        ddecay = jnp.sum(x.astype(jnp.float32) * dafter.astype(jnp.float32), axis=2)
        ddecay = jnp.sum(ddecay, axis=2) if decay.ndim == 2 else ddecay
    return da, db, dc, None if adds_nothing else dafter, ddecay, dfirst, drestarts


_pass.defvjp(_forward, _backward)
