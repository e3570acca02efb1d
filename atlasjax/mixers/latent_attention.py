"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434) as pure functions: softmax attention whose cache is a latent.

    k_s^h = [U_k^h c_s ; κ_s],  v_s^h = U_v^h c_s,  y_t^h = Σ_s softmax_s(q_t^h · k_s^h / √(n + r)) v_s^h        over s ≤ t

c_s is the latent of a token, from which all heads get their keys and values, and κ_s a key that they share. The last r channels of
a query read κ. Those, and κ, are rotated by position; without rotation (NoPE), as in Kimi-Linear, κ is one more part of the keys.

Whole sequences expand the keys and values. A stream keeps c and κ alone, c + r numbers for a token. A few tokens read them as one
head of keys and values which all heads of queries share, with U_k in the query and U_v after the read (the absorbed form):

    q · U_k c = (U_kᵀ q) · c,  Σ_s w_s U_v c_s = U_v Σ_s w_s c_s

Many tokens expand the keys and values of the whole cache instead: their heads are narrower than the latent, and the expansion costs
as much as it saves for `c (n + value_dim) / (2 c − n − value_dim)` tokens, 171 with the sizes of DeepSeek-V2.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlasjax import check
from atlasjax.memory import Partition
from atlasjax.memory.check import check_ids, check_sizes, whole_layer
from atlasjax.memory.products import dense
from atlasjax.mixers import attention as softmax
from atlasjax.mixers.attention_streams import Write, extended, read_stored
from atlasjax.mixers.rotary import check_rotary, rotate
from atlasjax.mixers.shapes import check_dtype, check_shapes

_AXES = {
    "q": "batch time heads key_dim",
    "latent": "batch time latent_dim",
    "key": "batch time shared_dim",
    "up": "latent_dim heads columns",
}
_CACHE_AXES = {"cache.latents": "batch size latent_dim+shared_dim", "cache.position": "batch"}


class LatentCache(NamedTuple):
    """The latents and rotated shared keys of the tokens read, stored by position. All heads read them: no axis is theirs.

    Attributes:
      latents: [batch, max_length, latent_dim + shared_dim].
      position: number of tokens read, which is the position of the next one, [batch].
    """

    latents: Float[Array, "batch max_length latent_dim+shared_dim"]
    position: Int[Array, " batch"]

    @property
    def keys(self) -> Float[Array, "batch max_length latent_dim+shared_dim"]:
        return self.latents

    @property
    def values(self) -> Float[Array, "batch max_length latent_dim+shared_dim"]:
        # Whole rows, of which the shared keys are dropped after the read: a part would be copied.
        return self.latents

    @property
    def window(self) -> None:  # a token sees all before it
        return None

    def put(
        self,
        write: Write,
        k: Float[Array, "batch time kv_heads*key_dim"],
        v: Float[Array, "batch time kv_heads*value_dim"],
        position: Int[Array, "*layers batch"],
    ) -> "LatentCache":
        """See `attention_streams.Cache`."""
        return LatentCache(write(self.latents, k), position)


def latent_attention(
    q: Float[Array, "batch time heads key_dim"],
    latent: Float[Array, "batch time latent_dim"],
    key: Float[Array, "batch time shared_dim"],
    up: Float[Array, "latent_dim heads columns"],
    *,
    rope_theta: float | None = 1e4,
    segment_ids: Int[Array, "batch time"] | None = None,
    partition: Partition | None = None,
) -> Float[Array, "batch time heads value_dim"]:
    """Causal multi-head latent attention over whole sequences.

    Args:
      q: before rotation, [batch, time, heads, key_dim], key_dim = n + r. The first n channels read the expanded keys.
      latent: c, normalized, [batch, time, latent_dim].
      key: κ, before rotation, [batch, time, r].
      up: U_k and U_v of each head, one after the other, [latent_dim, heads, n + value_dim].
      rope_theta: base of the rotary wavelengths. None means no rotation.
      segment_ids, partition: as for `attention.attention`, with as many heads of keys as of queries.

    Returns:
      [batch, time, heads, value_dim], in latent's dtype.

    Raises:
      TypeError, ValueError: invalid arguments.
    """
    where = "latent_attention"
    sizes = _check(where, q, latent, key, up, rope_theta, partition)
    batch, time = q.shape[:2]
    own = sizes["own"]
    position = jnp.broadcast_to(jnp.arange(time), (batch, time))
    if segment_ids is not None:
        check_ids(segment_ids, (batch, time), where)
        position, _ = softmax.segment_positions(segment_ids)
    k, v = _expanded(latent, rotate(key[:, :, None], position, rope_theta), up, own)
    return softmax.attention(
        _rotated(q, own, position, rope_theta), k, v, rope_theta=None, segment_ids=segment_ids, partition=partition
    )


def init_cache(
    batch_size: int, max_length: int, latent_dim: int, shared_dim: int, dtype: jax.typing.DTypeLike
) -> LatentCache:
    """An empty cache for at most `max_length` tokens.

    Raises:
      TypeError, ValueError: a size is not an integer ≥ 1, or dtype is not one of floating point.
    """
    where = "latent_attention.init_cache"
    check_sizes(where, batch_size=batch_size, max_length=max_length, latent_dim=latent_dim, shared_dim=shared_dim)
    check_dtype(where, dtype)
    zeros = jnp.zeros((batch_size, max_length, latent_dim + shared_dim), dtype)
    return LatentCache(zeros, jnp.zeros(batch_size, jnp.int32))


def extend(
    q: Float[Array, "batch time heads key_dim"],
    latent: Float[Array, "batch time latent_dim"],
    key: Float[Array, "batch time shared_dim"],
    up: Float[Array, "latent_dim heads columns"],
    cache: LatentCache,
    *,
    rope_theta: float | None = 1e4,
    partition: Partition | None = None,
    layer: Int[Array, ""] | int | None = None,
) -> tuple[Float[Array, "batch time heads value_dim"], LatentCache]:
    """`latent_attention` for the next tokens of a stream.

    Args:
      q, latent, key, up, rope_theta: as in `latent_attention`, any time ≥ 1.
      cache: what is kept of the tokens so far.
      partition: the mesh and its axes that split batch and heads.
      layer: the cache is that of all layers, [layers, batch, …], of which this one is read and written, in place where XLA can.

    Returns:
      The output of `latent_attention`, NaN for tokens beyond max_length, and the next cache.

    Raises:
      TypeError, ValueError: invalid arguments.
    """
    where = "latent_attention.extend"
    sizes = _check(where, q, latent, key, up, rope_theta, partition)
    if not isinstance(cache, LatentCache):
        raise TypeError(f"{where}: cache must be a LatentCache, got {type(cache).__name__}.")
    axes = _CACHE_AXES if layer is None else {name: f"layers {of_one}" for name, of_one in _CACHE_AXES.items()}
    width = latent.shape[-1] + key.shape[-1]
    known = {"batch": q.shape[0], "latent_dim+shared_dim": width}
    check_shapes(where, axes, integers=("cache.position",), known=known, cache=cache)
    if layer is not None:
        whole_layer(layer, cache, where)
    own, latent_dim = sizes["own"], sizes["latent_dim"]
    cache = jax.tree.map(jnp.asarray, cache)  # a restored one may be of NumPy arrays
    before = cache.position if layer is None else cache.position[layer]
    position = before[:, None] + jnp.arange(q.shape[1])[None]
    q = _rotated(q, own, position, rope_theta)
    stored = jnp.concatenate(
        [latent[:, :, None], rotate(key[:, :, None], position, rope_theta).astype(latent.dtype)], -1
    )
    narrow = sizes["columns"]  # of a head's keys and values, beside r
    if q.shape[1] * (2 * latent_dim - narrow) > latent_dim * narrow:
        expand = lambda rows: _expanded(rows[..., :latent_dim], rows[:, :, None, latent_dim:], up, own)
        return read_stored(q, stored, cache, expand, partition=partition, layer=layer)
    absorbed = _per_head("bthn,chn->bthc", q[..., :own], up[..., :own])
    # The read divides the scores by the square root of its own width.
    wide = jnp.concatenate([absorbed, q[..., own:].astype(jnp.float32)], axis=-1) * (width / q.shape[-1]) ** 0.5
    y, cache = extended(
        wide.astype(q.dtype), stored, stored, cache, rope_theta=None, rope_dim=None, partition=partition, layer=layer
    )
    return _per_head("bthc,chv->bthv", y[..., :latent_dim], up[..., own:]).astype(latent.dtype), cache


def _expanded(latent: jax.Array, shared: jax.Array, up: jax.Array, own: int) -> tuple[jax.Array, jax.Array]:
    """The keys and values of each head, from latents [batch, size, c] and rotated shared keys [batch, size, 1, r]."""
    both = dense(latent, up, latent.dtype)
    shared = jnp.broadcast_to(shared, (*both.shape[:3], shared.shape[-1])).astype(latent.dtype)
    return jnp.concatenate([both[..., :own], shared], axis=-1), both[..., own:]


def _rotated(q: jax.Array, own: int, position: jax.Array, theta: float | None) -> jax.Array:
    """Queries whose channels from `own` on are rotated."""
    if theta is None:
        return q
    return jnp.concatenate([q[..., :own], rotate(q[..., own:], position, theta)], axis=-1)


def _per_head(axes: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A product for each head, float32."""
    return jnp.einsum(axes, x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)


def _check(
    where: str, q: jax.Array, latent: jax.Array, key: jax.Array, up: jax.Array, theta: float | None, partition: object
) -> dict[str, int]:
    """The sizes by axis name, and n as "own". Raises TypeError or ValueError for invalid arguments."""
    check.instance(where, "partition", partition, Partition, optional=True)
    sizes = check_shapes(where, _AXES, q=q, latent=latent, key=key, up=up)
    own = sizes["key_dim"] - sizes["shared_dim"]
    if not 1 <= own < sizes["columns"]:
        raise ValueError(
            f"{where}: q has {sizes['key_dim']} channels and key {sizes['shared_dim']}; up should have the difference, at least 1, "
            f"and those of the values; it has {sizes['columns']}."
        )
    check_rotary(where, theta, sizes["shared_dim"], "shared_dim")
    return sizes | {"own": own}
