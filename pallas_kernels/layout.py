"""Conversion of token sequences to chunks of each head."""

import jax
import jax.numpy as jnp


def to_chunks(x: jax.Array, size: int, fill: float = 0.0) -> jax.Array:
    """[batch, time, heads, n] → [batch · heads, chunks, size, n]. The last chunk is padded with `fill`."""
    batch, time, heads, n = x.shape
    count = -(-time // size)
    x = jnp.pad(x, ((0, 0), (0, count * size - time), (0, 0), (0, 0)), constant_values=fill)
    return jnp.moveaxis(x, 2, 1).reshape(batch * heads, count, size, n)


def gates_to_chunks(gates: list[tuple[jax.Array, float]], size: int) -> jax.Array:
    """Pairs of (gate [batch, time, heads] or [batch, time, heads, n], fill) → float32 [batch, heads, chunks, rows, size].

    Tokens are in lanes, because a column would use only one lane of 128.
    """
    wide = lambda x: x.astype(jnp.float32) if x.ndim == 4 else x.astype(jnp.float32)[..., None]
    rows = jnp.concatenate([to_chunks(wide(x), size, fill) for x, fill in gates], axis=-1).mT
    batch, _, heads = gates[0][0].shape[:3]
    return rows.reshape(batch, heads, *rows.shape[1:])


def from_chunks(y: jax.Array, batch: int, time: int) -> jax.Array:
    """[batch · heads, chunks, size, n] → [batch, time, heads, n]."""
    y = y.reshape(batch, y.shape[0] // batch, -1, y.shape[-1])
    return jnp.moveaxis(y, 1, 2)[:, :time]
