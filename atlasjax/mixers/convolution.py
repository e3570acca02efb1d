"""Depthwise causal convolution as a pure function: y_t = bias + Σ_j kernel[j] ⊙ x_{t − (width − 1) + j}."""

import functools
import operator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlasjax.memory.check import check_floating, check_ids, check_shape
from atlasjax.mixers.shapes import check_series


def causal_convolution(
    x: Float[Array, "batch time *channels"],
    kernel: Float[Array, " width *channels"],
    state: Float[Array, "batch past *channels"],
    bias: Float[Array, "*channels"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
) -> tuple[Float[Array, "batch time *channels"], Float[Array, "batch past *channels"]]:
    """Convolves a sequence, or a piece of one.

    Args:
      x: [batch, time, *channels], any time ≥ 1.
      kernel: [width, *channels]; the last tap is applied to the token itself.
      state: the width − 1 inputs before x, [batch, width − 1, *channels]; zeros before the first token.
      bias: [*channels], or None for no bias.
      segment_ids: integers [batch, time]. No tap reaches across a change of the id. The first segment continues from `state`.

    Returns:
      y, float32, with the shape of x, and the next state, in the dtype of `state` concatenated with x.

    Raises:
      TypeError, ValueError: invalid arguments.
    """
    where = "causal_convolution"
    check_series(where, "x", x, "[batch, time, …]")
    (batch, time), channels = x.shape[:2], x.shape[2:]
    check_shape("kernel", kernel, ("width", *channels), where)
    width = kernel.shape[0]
    check_shape("state", state, (batch, width - 1, *channels), where)
    check_floating("kernel", kernel, where)
    check_floating("state", state, where)
    if bias is not None:
        check_floating("bias", check_shape("bias", bias, channels, where), where)
    if segment_ids is not None:
        check_ids(segment_ids, (batch, time), where)
    inputs = jnp.concatenate([state, x], axis=1)
    index = None
    if segment_ids is not None:
        # Number the segments, because an id that occurs again later in the row is a new segment, as for the memory.
        changes = segment_ids[:, 1:] != segment_ids[:, :-1]
        index = jnp.pad(jnp.cumsum(changes, axis=1, dtype=jnp.int32), ((0, 0), (width, 0)))
        token = index[:, width - 1 :]
    if time == 1 and index is None:
        # The larger of two equal sums, so that XLA's CPU backend computes it once, and not again for each weight of a memory that y
        # writes. It would hand one sum over an axis to a library, whose call takes 60 µs.
        taps = kernel[None] * inputs.astype(jnp.float32)
        y = functools.reduce(operator.add, (taps[:, j : j + 1] for j in range(width)))
        y = jnp.max(jnp.concatenate([y, y], axis=1), axis=1, keepdims=True)
        return (y if bias is None else y + bias[None, None]), inputs[:, time:]
    kernel = _own_rows(kernel)
    # Sums of bfloat16 inputs in float32.
    y = jnp.zeros(x.shape, jnp.float32)
    for j in range(width):
        tap = inputs[:, j : j + time].astype(jnp.float32)
        if index is not None:
            same = index[:, j : j + time] == token
            tap = jnp.where(same.reshape(*same.shape, *(1,) * (x.ndim - 2)), tap, 0.0)
        y = y + kernel[j][None, None] * tap
    return (y if bias is None else y + bias[None, None]), inputs[:, time:]


def _own_rows(kernel: jax.Array) -> jax.Array:
    """The kernel again, each row computed as a sum over all rows, of which the others count zero times.

    Under a scan over layers, the kernel is a slice at an index that the program computes. XLA's CPU backend would read each row as
    a slice of that slice, anew for every element, and not vectorize the loop. With a SiLU after it, the convolution would take 7
    times as long. A sum is computed before the loop.
    """
    width = kernel.shape[0]
    same = jnp.eye(width, dtype=kernel.dtype).reshape(width, width, *(1,) * (kernel.ndim - 1))
    return jnp.sum(same * kernel[None], axis=1)
