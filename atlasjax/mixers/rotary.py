"""Rotary positions (Su et al. 2021)."""

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, position: jax.Array, theta: float = 1e4) -> jax.Array:
    """Rotate the pairs (x_i, x_{i + head_dim/2}) by position · θ^{−2i/head_dim}, so that q·k depends on the distance only.

    Args:
      x: [batch, time, heads, head_dim], head_dim even.
      position: integers [batch, time].
      theta: base of the wave lengths.

    Returns:
      Like x, of x's dtype; computed in float32.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = position[:, :, None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
