"""Rotary positions (Su et al. 2021)."""

import jax
import jax.numpy as jnp
import numpy as np


def rotate(x: jax.Array, position: jax.Array, theta: float | None = 1e4) -> jax.Array:
    """Rotates the pairs (x_i, x_{i + head_dim/2}) by position · θ^{−2i/head_dim}, so that q·k depends only on the distance.

    Args:
      x: [batch, time, heads, head_dim], head_dim even.
      position: integers [batch, time].
      theta: base of the wavelengths. None returns x unchanged.

    Returns:
      Like x, in x's dtype; computed in float32.
    """
    if theta is None:
        return x
    half = x.shape[-1] // 2
    # Angles are integers in units of 2⁻³² of a turn, which wrap around. A float32 product would be off by a twentieth of a radian
    # after a million tokens, differently for q and k. The rounding of the frequencies is the same for both, below 1e-9 per token.
    frequency = theta ** (-np.arange(half, dtype=np.float64) / half) / (2 * np.pi)
    step = jnp.asarray(np.round(frequency * 2.0**32).astype(np.uint32))
    phase = jax.lax.bitcast_convert_type(position.astype(jnp.uint32)[:, :, None, None] * step, jnp.int32)
    angle = phase.astype(jnp.float32) * (2 * np.pi / 2.0**32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
