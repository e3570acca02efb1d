"""Softmax attention as a layer: over all tokens (Transformer++) or over a sliding window."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax.memory.layerwise import put_layer, take_layer
from atlasjax.mixers import attention
from atlasjax.mixers.rotary import rotate
from atlasjax.nn.attention_config import AttentionSizes
from atlasjax.nn.config import AttentionConfig, ModelConfig
from atlasjax.nn.layers import CausalConv, Linear, RMSNorm, scaled
from atlasjax.nn.module import LayerwiseModule, Module
from atlasjax.nn.parameters import normal, param
from atlasjax.nn.partition import mesh_partition


class ConvolvedCache(NamedTuple):
    """The streaming state of an attention with a short convolution.

    Attributes:
      conv: the last conv_width − 1 queries, keys and values before it, [batch, conv_width − 1, kv_heads, channels], in the model's
        dtype.
      cache: the keys and values after it.
    """

    conv: jax.Array
    cache: attention.KVCache | attention.WindowCache

    @property
    def heads_axis(self) -> int:  # of its arrays, for `distributed.cache_shardings`
        return 2


class AttentionHeads(Module):
    """Attention up to the heads' outputs, without the output projection. Used by the mixers below and by hybrids.

        q, k, v, z = x W (+ b);  q, k, v = conv(q, k, v);  q, k = RMSNorm(q), RMSNorm(k)      conv, norms and z only if the config
                                                                                              has them
        y = `mixers.attention.attention`(q, k, v) (⊙ σ(z)),         RoPE on q and k

    Args:
      config: dim, dtype, norm_eps, norm (of which only "rms_plus_one" matters), attention (its sizes, rope_theta, rope_dim,
        persistent_tokens, bias, qk_norm, scale, gate, conv_width) and, where it has no sizes of its own, num_heads, head_dim and
        value_expansion.
      window: a token sees itself and the window − 1 tokens before it. None: itself and all tokens before it.
      rngs: source of the initial values.

    Raises:
      ValueError: sizes that do not fit each other, or that cannot be rotated.
    """

    def __init__(self, config: ModelConfig, window: int | None, *, rngs: nnx.Rngs):
        given, sizes = config.attention, config.attention_sizes
        self.heads, self.kv_heads, self.key_dim, self.value_dim = sizes
        _check_sizes(given, sizes)
        self.window, self.theta, self.rope_dim = window, given.rope_theta, given.rope_dim
        self.dtype = jnp.dtype(config.dtype)
        self.has_gate, self.fused = given.gate, given.fused
        # Attention divides its scores by √key_dim; another scale is a factor of the queries.
        self.query_factor = 1.0 if given.scale is None else given.scale * self.key_dim**0.5
        # For each head of keys: its queries, each followed by its gate, then the keys and the values.
        self.groups = self.heads // self.kv_heads
        self.query_dim = self.key_dim + (self.value_dim if given.gate else 0)
        shape = (config.dim, self.kv_heads, self.groups * self.query_dim + self.key_dim + self.value_dim)
        self.inputs = Linear(shape, ("embed", "heads", None), bias=given.bias, rngs=rngs)
        channels = self.kv_heads, (self.groups + 1) * self.key_dim + self.value_dim
        width = given.conv_width
        self.conv = None if width is None else CausalConv(width, channels, ("heads", None), rngs=rngs)
        self.q_norm, self.k_norm = (_qk_norm(config, heads) for heads in (self.heads, self.kv_heads))
        size = (given.persistent_tokens, self.kv_heads)
        learned = lambda dim: param(normal(rngs, (*size, dim), 1.0), None, "heads", None) if size[0] else None
        self.persistent_keys, self.persistent_values = learned(self.key_dim), learned(self.value_dim)

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[batch, time, dim] → q: [batch, time, heads, key_dim], k: [batch, time, kv_heads, key_dim], v: [batch, time, kv_heads,
        value_dim]."""
        return self._project(x, None)[:3]

    def _project(
        self, x: jax.Array, conv_state: jax.Array | None, segment_ids: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
        """`project`; the gate's logits [batch, time, heads, value_dim], or None without a gate; the convolution's next state."""
        queries = self.groups * self.query_dim
        q, k, v = jnp.split(self.inputs(x), (queries, queries + self.key_dim), axis=-1)
        q, z = q.reshape(*x.shape[:2], self.heads, self.query_dim), None
        if self.has_gate:
            q, z = jnp.split(q, (self.key_dim,), axis=-1)
        if self.conv is not None:
            state = self.conv.init_state(x.shape[0], x.dtype) if conv_state is None else conv_state
            mixed = jnp.concatenate([q.reshape(*k.shape[:3], -1), k, v], axis=-1)
            mixed, conv_state = self.conv(mixed, state, segment_ids)
            width = self.groups * self.key_dim
            found, k, v = jnp.split(mixed.astype(x.dtype), (width, width + self.key_dim), axis=-1)
            q = found.reshape(q.shape)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = _normalized(self.q_norm, q), _normalized(self.k_norm, k)
        return scaled(q, self.query_factor), k, v, z, conv_state

    def rotate(self, x: jax.Array, position: jax.Array) -> jax.Array:
        """Queries or keys [batch, time, …] rotated by their position [batch, time]."""
        return rotate(x, position, self.theta, self.rope_dim)

    def persistent(self) -> attention.Persistent | None:
        """The learned keys and values that every token sees, or None."""
        if self.persistent_keys is None or self.persistent_values is None:
            return None
        return attention.Persistent(self.persistent_keys[...], self.persistent_values[...])

    def __call__(self, x: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """Whole sequences: [batch, time, dim] → [batch, time, heads, value_dim]."""
        q, k, v, z, _ = self._project(x, None, segment_ids)
        return _gated(self.attend(q, k, v, segment_ids), z)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """The attention of whole sequences, from the results of `project`."""
        return attention.attention(
            q, k, v, window=self.window, rope_theta=self.theta, rope_dim=self.rope_dim, persistent=self.persistent(),
            segment_ids=segment_ids, fused=self.fused, partition=mesh_partition(q.shape[0], self.kv_heads, q.shape[1]),
        )  # fmt: skip

    def init_state(
        self, batch_size: int, max_length: int | None = None
    ) -> attention.KVCache | attention.WindowCache | ConvolvedCache:
        """An empty cache for `max_length` tokens, or for the window.

        Raises:
          ValueError: max_length is None and there is no window.
        """
        cache = self.init_cache(batch_size, max_length)
        return cache if self.conv is None else ConvolvedCache(self.conv.init_state(batch_size, self.dtype), cache)

    def init_cache(self, batch_size: int, max_length: int | None = None) -> attention.KVCache | attention.WindowCache:
        """`init_state` without the convolution's."""
        sizes = (self.kv_heads, self.key_dim, self.value_dim, self.dtype)
        if self.window is not None:
            return attention.init_window(batch_size, self.window, *sizes)
        if max_length is None:
            raise ValueError(
                "mixer 'attention' keeps the keys and values of every token: max_length is None, must be the maximum "
                "number of tokens."
            )
        return attention.init_cache(batch_size, max_length, *sizes)

    def extend(self, x: jax.Array, state: Any, layer: jax.Array | None = None) -> tuple[jax.Array, Any]:
        """Like `__call__`, for the next piece of a sequence. Also returns the next cache. layer: see `mixers.attention.extend`."""
        if self.conv is None:
            q, k, v, z, _ = self._project(x, None)
            y, state = self.attend_from(q, k, v, state, layer)
            return _gated(y, z), state
        q, k, v, z, conv = self._project(x, take_layer(state.conv, layer))
        y, cache = self.attend_from(q, k, v, state.cache, layer)
        return _gated(y, z), ConvolvedCache(put_layer(state.conv, conv, layer, y), cache)

    def attend_from(
        self, q: jax.Array, k: jax.Array, v: jax.Array, state: Any, layer: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """`attend` for the next piece of a sequence. Also returns the next cache."""
        return attention.extend(
            q, k, v, state, rope_theta=self.theta, rope_dim=self.rope_dim, persistent=self.persistent(),
            partition=mesh_partition(q.shape[0], self.kv_heads, q.shape[1]), layer=layer,
        )  # fmt: skip


def _check_sizes(given: AttentionConfig, sizes: AttentionSizes) -> None:
    if sizes.heads % sizes.kv_heads:
        raise ValueError(f"AttentionConfig: kv_heads={sizes.kv_heads} must divide the {sizes.heads} heads of queries.")
    if given.rope_theta is not None and given.rope_dim is None and sizes.key_dim % 2:
        raise ValueError(f"ModelConfig: head_dim={sizes.key_dim} must be even for rotary positions in attention.")
    if given.rope_dim is not None and (given.rope_dim % 2 or given.rope_dim > sizes.key_dim):
        raise ValueError(
            f"AttentionConfig: rope_dim={given.rope_dim} must be even and at most head_dim={sizes.key_dim}."
        )


def _qk_norm(config: ModelConfig, heads: int) -> RMSNorm | None:
    """The norm of queries or keys, whose heads are those of one axis or flattened into it."""
    key_dim, plus_one = config.attention_sizes.key_dim, config.norm == "rms_plus_one"
    match config.attention.qk_norm:
        case "head":
            return RMSNorm((key_dim,), (None,), config.norm_eps, plus_one=plus_one)
        case "all":
            return RMSNorm((heads * key_dim,), ("heads",), config.norm_eps, plus_one=plus_one)
        case _:
            return None


def _normalized(norm: RMSNorm, x: jax.Array) -> jax.Array:
    """x [batch, time, heads, key_dim], normalized over as many channels as the norm has."""
    return norm(x.reshape(*x.shape[:2], -1, *norm.scale[...].shape)).reshape(x.shape)


def _gated(y: jax.Array, z: jax.Array | None) -> jax.Array:
    return y if z is None else y * jax.nn.sigmoid(z)


class AttentionMixer(LayerwiseModule):
    """Causal softmax attention over all tokens: by default that of Transformer++ (Touvron et al. 2023), with RoPE and no biases.

        out = attention(x) W_out (+ b)        `AttentionHeads`

    Decoding keeps the keys and values of all tokens: state size and time per token grow with the number of tokens read.

    Args:
      config: as for `AttentionHeads`, output_scale and multipliers.attention_out.
      rngs: source of the initial values.
    """

    undivided: ClassVar[str | None] = None  # see `mixers.check_divided`

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attention = AttentionHeads(config, self._window(config), rngs=rngs)
        inner, bias = self.attention.heads * self.attention.value_dim, config.attention.bias
        self.out = output_projection(config, rngs, inner=inner, bias=bias and config.attention.output_bias)
        self.out_factor = config.multipliers.attention_out

    @staticmethod
    def _window(config: ModelConfig) -> int | None:
        return None

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, max_segments: int | None = None
    ) -> jax.Array:
        """Whole sequences: [batch, time, dim] → [batch, time, dim]. `max_segments` has no effect."""
        return self._output(self.attention(x, segment_ids))

    def init_state(
        self, batch_size: int, max_length: int | None = None
    ) -> attention.KVCache | attention.WindowCache | ConvolvedCache:
        """An empty cache. See `AttentionHeads.init_state`."""
        return self.attention.init_state(batch_size, max_length)

    def extend_layer(self, x: jax.Array, states: Any, layer: jax.Array | None) -> tuple[jax.Array, Any]:
        """`extend` in the cache of all layers. See `mixers.LayerwiseMixer`."""
        y, states = self.attention.extend(x, states, layer)
        return self._output(y), states

    def _output(self, y: jax.Array) -> jax.Array:
        return scaled(self.out(y.reshape(*y.shape[:2], -1)), self.out_factor)


class SlidingWindowMixer(AttentionMixer):
    """`AttentionMixer` with a sliding window: a token sees itself and `attention.window` − 1 tokens before it. Bounded state."""

    extend_layer = AttentionMixer.extend_layer

    @staticmethod
    def _window(config: ModelConfig) -> int | None:
        return required_window(config, "swa")


def required_window(config: ModelConfig, mixer: str) -> int:
    """`config.attention.window`. Raises ValueError if it is None."""
    if config.attention.window is None:
        raise ValueError(f"mixer {mixer!r} needs a window: attention.window is None, it must be an integer ≥ 1.")
    return config.attention.window


_OF_HEADS = ("num_heads", "kv_heads", "head_dim", "value_dim", "scale", "gate", "conv_width")


def require_shared_heads(config: ModelConfig, mixer: str) -> None:
    """Raises ValueError if the attention has a gate, or sizes of its own: that of a hybrid has the heads of the memory."""
    _require_defaults(config, mixer, _OF_HEADS, "the attention has the heads of the memory, and no convolution")


def require_plain_attention(config: ModelConfig, mixer: str) -> None:
    """Raises ValueError if the attention has a form that neither a mixer within blocks nor any other of the model takes."""
    if not any(":" in name or name in _WITH_ATTENTION for name in config.mixers):
        fields = ("persistent_tokens", "bias", "output_bias", "rope_dim", "qk_norm", "fused", *_OF_HEADS)
        _require_defaults(config, mixer, fields, "attention within blocks takes only attention.rope_theta")


def _require_defaults(config: ModelConfig, mixer: str, fields: Sequence[str], why: str) -> None:
    given, plain = config.attention, AttentionConfig()
    for name in fields:
        if getattr(given, name) != getattr(plain, name):
            raise ValueError(
                f"mixer {mixer!r}: attention.{name} is {getattr(given, name)!r}; it must be {getattr(plain, name)!r}, because "
                f"{why}."
            )


_WITH_ATTENTION = ("attention", "swa", "mac", "mag", "mal", "lact")  # mixers of which a model may set more


def output_projection(config: ModelConfig, rngs: nnx.Rngs, *, inner: int | None = None, bias: bool = False) -> Linear:
    """The projection from the heads' values (or `inner` channels) to the residual stream, with scale `config.output_scale`."""
    inner = config.num_heads * config.value_dim if inner is None else inner
    return Linear((inner, config.dim), ("heads", "embed"), scale=config.output_scale, bias=bias, rngs=rngs)
