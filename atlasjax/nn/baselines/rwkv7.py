"""RWKV-7's time mixing (Peng et al. 2025): per-channel decay, with separate removal and replacement keys."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from atlasjax import memory, rules
from atlasjax.nn.attention import output_projection
from atlasjax.nn.baselines.recurrent import MatrixMixer, RecurrentState, Tokens, float32_product, with_caching
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.layers import Linear, l2_normalize, previous
from atlasjax.nn.module import Module
from atlasjax.nn.parameters import param

_NAMES = ("r", "w", "k", "v", "a", "g")
_MAX_RATE = float(np.exp(-0.5))  # decays are at least exp(−e^{−1/2}) = 0.545
_DEPTH = 0.5  # the published initial values depend on the layer's depth from 0 to 1; here all layers use the middle's


class RWKV7Rest(NamedTuple):
    """Further inputs of `output`: bonus [batch, time, heads], float32, and output gate [batch, time, heads, value_dim]."""

    bonus: jax.Array
    gate: jax.Array


class LowRank(Module):
    """activation(x W_1) W_2 + b, float32. W_2 is initially small, so that b dominates. As published, without weight decay.

    Args:
      dim: width of x.
      rank: columns of W_1.
      shape: shape of the result, (heads, size).
      bias: initial value of b, of that shape. None: no bias.
      rngs: source of the initial values.
    """

    def __init__(self, dim: int, rank: int, shape: tuple[int, int], bias: np.ndarray | None = None, *, rngs: nnx.Rngs):
        self.down = Linear((dim, rank), ("embed", None), rngs=rngs)
        self.up = Linear((rank, *shape), (None, "heads", None), scale=0.1, rngs=rngs)
        self.bias = None if bias is None else param(jnp.asarray(bias, jnp.float32).reshape(shape), "heads", None)

    def __call__(self, x: jax.Array, activation: Callable[[jax.Array], jax.Array] | None = None) -> jax.Array:
        """[..., dim] → [..., heads, size], float32."""
        low = float32_product(x, self.down)
        y = float32_product(low if activation is None else activation(low), self.up)
        return y if self.bias is None else y + jnp.broadcast_to(self.bias[...], y.shape)


class RWKV7Mixer(MatrixMixer):
    """RWKV-7's time mixing:

        x_c = x_t + μ_c ⊙ (x_{t−1} − x_t)                              token shift, for c in r, w, k, v, a, g
        r, k, v = x_r W_r, x_k W_k, x_v W_v
        v ← v + σ(x_v A_v B_v + b_v) ⊙ (v_first − v)                   if `value_residual`; v_first: of the model's first layer
        w = exp(−e^{−1/2} σ(tanh(x_w A_w) B_w + b_w))                  decay per key channel
        a = σ(x_a A_a B_a + b_a),  g = σ(x_g A_g) B_g                  removal rate, output gate
        κ̂ = k ⊙ ξ of unit length,  k̃ = k ⊙ (1 + (a − 1) ⊙ k_a)         removal and replacement key
        S_t = S_{t−1} (Diag(w_t) − κ̂_t (a_t ⊙ κ̂_t)ᵀ) + v_t k̃_tᵀ        y_t = S_t r_t
        out = ((GroupNorm(y) + (r · (ρ ⊙ k̃)) v) ⊙ g) W_out             one norm and one bonus per head

    Differences from the paper: initial values that depend on depth are those of the middle layer; projections are initially normal
    instead of orthogonal; W_out and A are not initially zero. By default there is no value residual, SwiGLU instead of channel
    mixing, RMSNorm instead of LayerNorm, and no norm of the embeddings. The published forms are `rwkv7.value_residual`,
    `ffn="channel_mixing"`, `norm="layer"` and `embedding_norm` of the config.

    Args:
      config: dim, num_heads, head_dim (of keys), value_expansion, rwkv7, num_layers (for W_out's initial scale), caching,
        dtype, memory.implementation.
      rngs: source of the initial values.

    Raises:
      ValueError: rwkv7.value_residual is set, and the first layer has another mixer.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        dim, heads, key_dim = config.dim, config.num_heads, config.resolved_head_dim
        value_dim, given = config.value_dim, config.rwkv7
        decay_rank, rate_rank, gate_rank, value_rank = config.rwkv7_ranks
        if given.value_residual and config.pattern[0] != "rwkv7":
            raise ValueError(
                f"mixer 'rwkv7': rwkv7.value_residual needs the first layer to be 'rwkv7'; mixer is {config.mixer!r}."
            )
        self.norm_eps, self.key_eps = given.norm_eps * key_dim, given.key_eps
        self.dtype = jnp.dtype(config.dtype)
        self.num_heads, self.key_dim, self.value_dim = heads, key_dim, value_dim
        self.implementation = config.memory.implementation

        channel = np.arange(dim) / dim
        powers = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
        shift = np.stack([1.0 - channel ** (powers[name] * (1.0 - _DEPTH)) for name in _NAMES])
        self.shift = param(jnp.asarray(shift, jnp.float32), None, "embed")
        self.r = Linear((dim, heads, key_dim), ("embed", "heads", None), rngs=rngs)
        self.k = Linear((dim, heads, key_dim), ("embed", "heads", None), scale=0.1, rngs=rngs)
        self.v = Linear((dim, heads, value_dim), ("embed", "heads", None), rngs=rngs)

        inner = heads * key_dim
        linear = np.linspace(-0.5, 0.5, inner)
        within = np.tile(np.linspace(-1.0, 1.0, key_dim), heads)
        zigzag = within * np.abs(within)
        decay = -6.0 + 6.0 * (linear + 0.5) ** (1.0 + _DEPTH**0.3)
        self.w = LowRank(dim, decay_rank, (heads, key_dim), decay + 0.5 + 2.5 * zigzag, rngs=rngs)
        rate = -0.19 + 0.3 * zigzag + 0.4 * linear
        self.a = LowRank(dim, rate_rank, (heads, key_dim), rate, rngs=rngs)
        self.g = LowRank(dim, gate_rank, (heads, value_dim), rngs=rngs)
        per_key = lambda x: param(jnp.asarray(x, jnp.float32).reshape(heads, key_dim), "heads", None)
        self.removal_scale = per_key(0.71 - 0.1 * linear)  # ξ
        self.replacement = per_key(np.full(inner, 1.02))  # k_a
        self.bonus = per_key(np.full(inner, -0.04))  # ρ
        self.norm_scale = param(jnp.full((heads, value_dim), _DEPTH**0.7, jnp.float32), "heads", None)
        self.norm_bias = param(jnp.zeros((heads, value_dim), jnp.float32), "heads", None)
        self.out = output_projection(config, rngs, inner=heads * value_dim)
        bias = 0.73 - 0.4 * np.linspace(-0.5, 0.5, heads * value_dim)
        value = lambda: LowRank(dim, value_rank, (heads, value_dim), bias, rngs=rngs)
        self.value = value() if given.value_residual else None
        self.rule, self.cache = with_caching(config, rules.rwkv7(), heads, key_dim, rngs)

    def first_values(
        self, x: jax.Array, state: RecurrentState | None, segment_ids: jax.Array | None
    ) -> jax.Array | None:
        """v of each token before it is mixed, [batch, time, heads, value_dim]; None without value residual.

        Args:
          x: the layer input.
          state: the state before it. None: that before the first token.
          segment_ids: as in `__call__`.
        """
        if self.value is None:
            return None
        inputs = self.start_inputs(x.shape[0], x.dtype) if state is None else state.inputs
        return self.v(self._shifted(x, inputs, segment_ids)["v"])

    def _shifted(self, x: jax.Array, inputs: jax.Array, segment_ids: jax.Array | None) -> dict[str, jax.Array]:
        delta = previous(x, inputs, segment_ids) - x
        return dict(zip(_NAMES, (x + delta * mu[None, None] for mu in self.shift[...].astype(x.dtype))))

    def start_inputs(self, batch_size, dtype):
        return jnp.zeros((batch_size, 1, self.shift[...].shape[1]), dtype)  # the last token's x

    def project(self, x, inputs, segment_ids, first=None):
        mixed = self._shifted(x, inputs, segment_ids)
        r, k, v = self.r(mixed["r"]), self.k(mixed["k"]), self.v(mixed["v"])
        if self.value is not None:
            if first is None:
                raise ValueError("mixer 'rwkv7': with value_residual it needs `first`, the values of the first layer.")
            v = v + jax.nn.sigmoid(self.value(mixed["v"])).astype(v.dtype) * (first - v)
        w = jnp.exp(-_MAX_RATE * jax.nn.sigmoid(self.w(mixed["w"], jnp.tanh)))
        a = jax.nn.sigmoid(self.a(mixed["a"]))
        g = self.g(mixed["g"], jax.nn.sigmoid).astype(x.dtype)
        wide = k.astype(jnp.float32)
        removal_key = l2_normalize(wide * self.removal_scale[None, None], self.key_eps)
        replacement = wide * (1.0 + (a - 1.0) * self.replacement[None, None])
        bonus = jnp.sum(r.astype(jnp.float32) * replacement * self.bonus[None, None], axis=-1)
        gates = memory.Gates(retention=w, removal_key=removal_key, removal=a)
        return Tokens(r, replacement.astype(x.dtype), v, gates, RWKV7Rest(bonus, g)), x[:, -1:]

    def output(self, y, tokens):
        rest = tokens.rest
        wide = y.astype(jnp.float32)
        centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(centered * centered, axis=-1, keepdims=True)
        normed = centered * jax.lax.rsqrt(variance + self.norm_eps)
        normed = normed * self.norm_scale[None, None] + self.norm_bias[None, None]
        gated = (normed + rest.bonus[..., None] * tokens.v.astype(jnp.float32)).astype(y.dtype) * rest.gate
        return self.out(gated.reshape(*y.shape[:2], -1))
