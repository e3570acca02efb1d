"""Softmax attention as a layer: over all tokens (Transformer++) or over a sliding window."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax.mixers import attention
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.layers import Linear
from atlasjax.nn.parameters import normal, param


class AttentionHeads(nnx.Module):
    """Attention up to the heads' outputs, without the output projection. Used by the mixers below and by hybrids.

        q, k, v = x W (+ b);  y = `mixers.attention.attention`(q, k, v), RoPE on q and k

    Args:
      config: dim, num_heads, head_dim (even), value_expansion, dtype, attention (rope_theta, persistent_tokens, bias).
      window: a token sees itself and the window − 1 tokens before it. None: itself and all tokens before it.
      rngs: source of the initial values.

    Raises:
      ValueError: head_dim is odd.
    """

    def __init__(self, config: ModelConfig, window: int | None, *, rngs: nnx.Rngs):
        heads, key_dim, expansion = config.num_heads, config.resolved_head_dim, config.value_expansion
        if key_dim % 2:
            raise ValueError(f"ModelConfig: head_dim={key_dim} must be even for rotary positions in attention.")
        self.heads, self.key_dim, self.value_dim = heads, key_dim, config.value_dim
        self.window, self.theta = window, config.attention.rope_theta
        self.dtype = jnp.dtype(config.dtype)
        shape = (config.dim, heads, (2 + expansion) * key_dim)
        self.inputs = Linear(shape, ("embed", "heads", None), bias=config.attention.bias, rngs=rngs)
        size = (config.attention.persistent_tokens, heads)
        learned = lambda dim: param(normal(rngs, (*size, dim), 1.0), None, "heads", None) if size[0] else None
        self.persistent_keys, self.persistent_values = learned(key_dim), learned(self.value_dim)

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[batch, time, dim] → q, k: [batch, time, heads, key_dim] and v: [batch, time, heads, value_dim]."""
        q, k, v = jnp.split(self.inputs(x), (self.key_dim, 2 * self.key_dim), axis=-1)
        return q, k, v

    def persistent(self) -> attention.Persistent | None:
        """The learned keys and values that every token sees, or None."""
        if self.persistent_keys is None or self.persistent_values is None:
            return None
        return attention.Persistent(self.persistent_keys[...], self.persistent_values[...])

    def __call__(self, x: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """Whole sequences: [batch, time, dim] → [batch, time, heads, value_dim]."""
        return attention.attention(
            *self.project(x), window=self.window, rope_theta=self.theta, persistent=self.persistent(),
            segment_ids=segment_ids,
        )  # fmt: skip

    def init_state(self, batch_size: int, max_length: int | None = None) -> attention.KVCache | attention.WindowCache:
        """An empty cache for `max_length` tokens, or for the window.

        Raises:
          ValueError: max_length is None and there is no window.
        """
        sizes = (self.heads, self.key_dim, self.value_dim, self.dtype)
        if self.window is not None:
            return attention.init_window(batch_size, self.window, *sizes)
        if max_length is None:
            raise ValueError(
                "mixer 'attention' keeps the keys and values of every token: max_length is None, should be the maximum "
                "number of tokens."
            )
        return attention.init_cache(batch_size, max_length, *sizes)

    def extend(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Like `__call__`, for the next piece of a sequence. Also returns the next cache."""
        return attention.extend(*self.project(x), state, rope_theta=self.theta, persistent=self.persistent())


class AttentionMixer(nnx.Module):
    """Causal softmax attention over all tokens, as in Transformer++ (Touvron et al. 2023): RoPE, no biases.

        out = attention(x) W_out (+ b)        `AttentionHeads`

    Decoding keeps the keys and values of all tokens: state size and time per token grow with the number of tokens read.

    Args:
      config: as for `AttentionHeads`, and output_scale.
      rngs: source of the initial values.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attention = AttentionHeads(config, self._window(config), rngs=rngs)
        self.out = output_projection(config, rngs, bias=config.attention.bias)

    @staticmethod
    def _window(config: ModelConfig) -> int | None:
        return None

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, max_segments: int | None = None
    ) -> jax.Array:
        """Whole sequences: [batch, time, dim] → [batch, time, dim]. `max_segments` has no effect."""
        return self._output(self.attention(x, segment_ids))

    def init_state(self, batch_size: int, max_length: int | None = None) -> attention.KVCache | attention.WindowCache:
        """An empty cache. See `AttentionHeads.init_state`."""
        return self.attention.init_state(batch_size, max_length)

    def extend(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """The output for the next piece of a sequence (time ≥ 1) and the next state. Outputs beyond max_length are NaN."""
        y, state = self.attention.extend(x, state)
        return self._output(y), state

    def _output(self, y: jax.Array) -> jax.Array:
        return self.out(y.reshape(*y.shape[:2], -1))


class SlidingWindowMixer(AttentionMixer):
    """`AttentionMixer` with a sliding window: a token sees itself and `attention.window` − 1 tokens before it. Bounded state."""

    @staticmethod
    def _window(config: ModelConfig) -> int | None:
        return required_window(config, "swa")


def required_window(config: ModelConfig, mixer: str) -> int:
    """`config.attention.window`. Raises ValueError if it is None."""
    if config.attention.window is None:
        raise ValueError(f"mixer {mixer!r} needs a window: attention.window is None, it should be an integer ≥ 1.")
    return config.attention.window


def output_projection(config: ModelConfig, rngs: nnx.Rngs, *, inner: int | None = None, bias: bool = False) -> Linear:
    """The projection from the heads' values (or `inner` channels) to the residual stream, with scale `config.output_scale`."""
    inner = config.num_heads * config.value_dim if inner is None else inner
    return Linear((inner, config.dim), ("heads", "embed"), scale=config.output_scale, bias=bias, rngs=rngs)
