"""Rotary positions (Su et al. 2021)."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from atlasjax import check
from atlasjax.memory.check import check_floating, check_shape


def check_rotary(where: str, theta: object, channels: int, name: str = "key_dim") -> None:
    """Raises ValueError unless `rope_theta` is None, or a number > 0 and the number of rotated channels, called `name`, even."""
    check.number(where, "rope_theta", theta, above=0, optional=True)
    if theta is not None and channels % 2:
        raise ValueError(f"{where}: {name} is {channels}, must be even for rotary positions.")


def rotate(
    x: Float[Array, "batch time heads key_dim"],
    position: Int[Array, "batch time"],
    theta: float | None = 1e4,
    channels: int | None = None,
) -> Float[Array, "batch time heads key_dim"]:
    """Rotates pairs of channels by their position, so that q·k depends only on the distance of two tokens.

    The pairs are (x_i, x_{i + n/2}) of the first n channels, and the angles position · θ^{−2i/n}.

    Args:
      x: [batch, time, heads, head_dim].
      position: integers [batch, time].
      theta: base of the wavelengths. None returns x unchanged.
      channels: n, even. None: head_dim. The other channels are not rotated.

    Returns:
      Like x, in x's dtype; computed in float32.

    Raises:
      TypeError, ValueError: x or position is not an array of its rank and kind.
    """
    check_floating("x", check_shape("x", x, ("batch", "time", "heads", "key_dim"), "rotate"), "rotate")
    if not jnp.issubdtype(check_shape("position", position, ("batch", "time"), "rotate").dtype, jnp.integer):
        raise TypeError(f"rotate: position must be integers, got {position.dtype}.")
    if theta is None:
        return x
    size = x.shape[-1] if channels is None else channels
    half = size // 2
    # Angles are integers in units of 2⁻³² of a turn, which wrap around. A float32 product would be off by a twentieth of a radian
    # after a million tokens, differently for q and k. The rounding of the frequencies is the same for both, below 1e-9 per token.
    frequency = theta ** (-np.arange(half, dtype=np.float64) / half) / (2 * np.pi)
    step = jnp.asarray(np.round(frequency * 2.0**32).astype(np.uint32))
    phase = jax.lax.bitcast_convert_type(
        position.astype(jnp.uint32)[:, :, None, None] * step[None, None, None], jnp.int32
    )
    angle = phase.astype(jnp.float32) * (2 * np.pi / 2.0**32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x[..., :size].astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return rotated if size == x.shape[-1] else jnp.concatenate([rotated, x[..., size:]], axis=-1)
