"""Basic layers: norms, linear projection, feed-forward networks, causal convolution, dropout.

Parameters are float32. Computation is in the input's dtype unless stated otherwise.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax.memory.check import check_floating
from atlasjax.memory.products import dense
from atlasjax.mixers.convolution import causal_convolution
from atlasjax.nn.module import Module
from atlasjax.nn.parameters import normal, param


def rms_normalize(x: jax.Array, eps: float) -> jax.Array:
    """x / √(mean(x²) + eps) over the last axis, float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def l2_normalize(x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """x / √(‖x‖² + eps) over the last axis, float32: at most unit length, and zero with a finite derivative at x = 0."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """factor · x in x's dtype. A factor of 1 adds no operation."""
    return x if factor == 1 else x * factor


class RMSNorm(Module):
    """Root-mean-square norm over the last axis with a learned scale (Zhang & Sennrich 2019), computed in float32.

    Args:
      shape: shape of the scale: [dim], or [heads, head_dim] for a separate scale per head.
      axes: logical names of those axes.
      eps: added to the mean square.
      groups: number of equal parts of the last axis, each with its own mean square.
      plus_one: whether to multiply by 1 + scale, with an initial scale of zero, as Gemma and Qwen3.5 do.
    """

    def __init__(
        self, shape: tuple[int, ...], axes: tuple[str | None, ...], eps: float, groups: int = 1, plus_one: bool = False
    ):
        self.scale = param(jnp.full(shape, 0.0 if plus_one else 1.0, jnp.float32), *axes)
        self.eps, self.groups, self.plus_one = eps, groups, plus_one

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., *shape] → the same shape and dtype."""
        check_floating("x", x, "RMSNorm")
        parts = x if self.groups == 1 else x.reshape(*x.shape[:-1], self.groups, -1)
        scale = 1.0 + self.scale[...] if self.plus_one else self.scale[...]
        return (rms_normalize(parts, self.eps).reshape(x.shape) * jnp.broadcast_to(scale, x.shape)).astype(x.dtype)


class LayerNorm(Module):
    """(x − mean) / √(variance + eps) over the last axis, with a learned scale and bias (Ba et al. 2016), computed in float32.

    Args:
      shape, axes, eps: as for `RMSNorm`; eps is added to the variance.
    """

    def __init__(self, shape: tuple[int, ...], axes: tuple[str | None, ...], eps: float):
        self.scale = param(jnp.ones(shape, jnp.float32), *axes)
        self.bias = param(jnp.zeros(shape, jnp.float32), *axes)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., *shape] → the same shape and dtype."""
        check_floating("x", x, "LayerNorm")
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)  # centered first: no difference of large squares
        scale, bias = (jnp.broadcast_to(z[...], x.shape) for z in (self.scale, self.bias))
        return (rms_normalize(y, self.eps) * scale + bias).astype(x.dtype)


class Linear(Module):
    """x @ kernel (+ bias), with kernel [fan_in, *out] initially normal with standard deviation scale / √fan_in.

    Args:
      shape: (fan_in, *out).
      axes: logical names of the kernel's axes.
      scale: relative to fan-in initialization.
      bias: whether to add a learned bias [*out], initially zero.
      rngs: source of the initial values.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        *,
        scale: float = 1.0,
        bias: bool = False,
        rngs: nnx.Rngs,
    ):
        self.kernel = param(normal(rngs, shape, scale / shape[0] ** 0.5), *axes)
        self.bias = param(jnp.zeros(shape[1:], jnp.float32), *axes[1:]) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., fan_in] → [..., *out], in x's dtype."""
        check_floating("x", x, "Linear")
        y = dense(x, self.kernel[...], x.dtype)
        return y if self.bias is None else y + jnp.broadcast_to(self.bias[...].astype(x.dtype), y.shape)


class SwiGLU(Module):
    """(SiLU(a x W_gate) ⊙ x W_wide) W_out b (Shazeer 2020), without biases, with constants a and b.

    Args:
      dim: width of input and output.
      hidden: hidden width.
      out_scale: initial scale of W_out relative to fan-in.
      factors: a and b (`MultiplierConfig.mlp_gate`, `mlp_out`).
      rngs: source of the initial values.
    """

    takes_factors = True

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        out_scale: float = 1.0,
        factors: tuple[float, float] = (1.0, 1.0),
        rngs: nnx.Rngs,
    ):
        self.factors = factors
        self.gate_and_wide = Linear((dim, 2, hidden), ("embed", None, "mlp"), rngs=rngs)  # one matmul instead of two
        self.out = Linear((hidden, dim), ("mlp", "embed"), scale=out_scale, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., dim] → [..., dim], dtype of x."""
        h = self.gate_and_wide(x)
        return scaled(self.out(jax.nn.silu(scaled(h[..., 0, :], self.factors[0])) * h[..., 1, :]), self.factors[1])


class _TwoMatrices(Module):
    """activation(x W) W_out. A subclass says which activation, and whether with biases."""

    takes_factors = False
    has_biases = False

    def __init__(self, dim: int, hidden: int, *, out_scale: float = 1.0, rngs: nnx.Rngs):
        self.wide = Linear((dim, hidden), ("embed", "mlp"), bias=self.has_biases, rngs=rngs)
        self.out = Linear((hidden, dim), ("mlp", "embed"), scale=out_scale, bias=self.has_biases, rngs=rngs)


class GELU(_TwoMatrices):
    """gelu(x W + b) W_out + b_out, with the exact GELU (error function).

    Args:
      dim: width of input and output.
      hidden: hidden width.
      out_scale: initial scale of W_out relative to fan-in.
      rngs: source of the initial values.
    """

    has_biases = True

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., dim] → [..., dim], dtype of x."""
        return self.out(jax.nn.gelu(self.wide(x), approximate=False))


class _SquaredReLU(_TwoMatrices):
    """relu(x W)² W_out."""

    def _apply(self, x: jax.Array) -> jax.Array:
        return self.out(jnp.square(jax.nn.relu(self.wide(x))))


class ReLU2(_SquaredReLU):
    """relu(x W)² W_out (So et al. 2021), without biases.

    Args:
      dim: width of input and output.
      hidden: hidden width.
      out_scale: initial scale of W_out relative to fan-in.
      rngs: source of the initial values.
    """

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., dim] → [..., dim], dtype of x."""
        return self._apply(x)


class ChannelMixing(_SquaredReLU):
    """RWKV-7's feed-forward network (Peng et al. 2025), relu(x' W)² W_out without biases, whose input is shifted:

        x'_t = x_t + μ ⊙ (x_{t−1} − x_t)

    Initially μ is that of the middle layer of the published ones: 1 − (channel / dim)^{1/16}.

    Args:
      dim: width of input and output.
      hidden: hidden width.
      out_scale: initial scale of W_out relative to fan-in.
      rngs: source of the initial values.
    """

    def __init__(self, dim: int, hidden: int, *, out_scale: float = 1.0, rngs: nnx.Rngs):
        super().__init__(dim, hidden, out_scale=out_scale, rngs=rngs)
        self.shift = param(1.0 - (jnp.arange(dim, dtype=jnp.float32) / dim) ** 0.5**4, "embed")

    def init_state(self, batch_size: int, dtype: jnp.dtype) -> jax.Array:
        """The input before the first token: zeros [batch, 1, dim]."""
        return jnp.zeros((batch_size, 1, self.shift[...].shape[0]), dtype)

    def __call__(
        self, x: jax.Array, state: jax.Array, segment_ids: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """[batch, time, dim] → [batch, time, dim], dtype of x, and the next state, which is the last token's x."""
        shifted = x + (previous(x, state, segment_ids) - x) * self.shift[None, None].astype(x.dtype)
        return self._apply(shifted), x[:, -1:]


def previous(x: jax.Array, first: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """The token before each one: x_{t−1}, and `first` [batch, 1, dim] at the start; zeros where another segment starts."""
    # A pad, not a concatenation, of which XLA would exchange whole parts of tokens that are divided over devices.
    before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    before = jnp.where((jnp.arange(x.shape[1]) == 0)[:, None], first, before)
    return before if segment_ids is None else jnp.where(segment_starts(segment_ids)[..., None], 0.0, before)


def segment_starts(segment_ids: jax.Array) -> jax.Array:
    """[batch, time] → boolean: where a segment starts, except the first one of a row, which continues from the state."""
    return jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))


def dropout(x: jax.Array, rate: float, keys: jax.Array | None) -> jax.Array:
    """Sets each element to zero with probability `rate` and divides the others by 1 − rate (Srivastava et al. 2014).

    Args:
      x: [batch, ...].
      rate: in [0, 1).
      keys: typed PRNG keys [batch]. With None, or a rate of 0, x is returned unchanged. Each row has its own key, so the elements
        that it drops do not depend on the other rows, nor on how the batch is split into microbatches or over devices.

    Returns:
      An array of x's shape and dtype.
    """
    if keys is None or rate == 0:
        return x
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(keys)
    return jnp.where(kept, x / (1 - rate), jnp.zeros((), x.dtype))


class CausalConv(Module):
    """Depthwise causal convolution over time: y_t = Σ_j kernel[j] ⊙ x_{t − (width − 1) + j}, without a bias.

    Args:
      width: number of taps, ≥ 1.
      channels: shape of one token's features.
      axes: logical names of those axes.
      rngs: source of the initial values.
    """

    def __init__(self, width: int, channels: tuple[int, ...], axes: tuple[str | None, ...], *, rngs: nnx.Rngs):
        self.kernel = param(normal(rngs, (width, *channels), width**-0.5), "conv", *axes)

    def init_state(self, batch_size: int, dtype: jnp.dtype) -> jax.Array:
        """The last width − 1 inputs before the first token: zeros [batch, width − 1, *channels]."""
        width, *channels = self.kernel[...].shape
        return jnp.zeros((batch_size, width - 1, *channels), dtype)

    def __call__(
        self, x: jax.Array, state: jax.Array, segment_ids: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Convolves a piece of a sequence.

        Args:
          x: [batch, time, *channels], any time ≥ 1.
          state: the width − 1 inputs before it, [batch, width − 1, *channels].
          segment_ids: integers [batch, time]. No tap reads across a change of the id. The first segment continues from `state`.

        Returns:
          y, float32, with the shape of x; and the next state.
        """
        return causal_convolution(x, self.kernel[...], state, segment_ids=segment_ids)
