"""Softmax attention of queries over several sets of keys and values, without positions, windows or blocks.

Every mixer with a softmax over tokens reads through it. Logits and softmax are float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from atlasjax.memory.products import product

_F32 = jnp.dtype(jnp.float32)
_FEW = 32  # as many queries times heads are read in one matrix product per row
_MASKED = -1e30  # not −∞, which would give NaN derivatives in rows of padding that see no key


class Source(NamedTuple):
    """A set of keys and values, with the queries that read it.

    Attributes:
      q: [batch, time, heads, key_dim].
      k: [batch, size, kv_heads, key_dim], or without the batch axis. kv_heads divides heads.
      v: [batch, size, kv_heads, value_dim], or without the batch axis.
      visible: boolean [batch, time, size], whether the query sees the key. None means always.
    """

    q: Float[Array, "batch time heads key_dim"]
    k: Float[Array, "*batch size kv_heads key_dim"]
    v: Float[Array, "*batch size kv_heads value_dim"]
    visible: Bool[Array, "batch time size"] | None = None


def softmax_attention(*sources: Source, split_heads: bool = False) -> Float[Array, "batch time heads value_dim"]:
    """Attention with one softmax over the keys of all sources: [batch, time, heads, value_dim], in v's dtype.

    A query that sees no key gets the mean of all values. split_heads: the heads are split over devices, so that no product may run
    over all heads.
    """
    batch, time, heads, _ = sources[0].q.shape
    groups, few = heads // sources[0].k.shape[-2], time * heads <= _FEW and not split_heads
    if groups > 1 and not few:  # the queries of a group are read like further tokens, so that nothing is repeated
        y = softmax_attention(*(_fold(source, groups) for source in sources), split_heads=split_heads)
        y = y.reshape(batch, groups, time, *y.shape[2:])  # [batch, group, time, kv_heads, value_dim]
        return jnp.moveaxis(y, 1, 3).reshape(batch, time, heads, -1)
    products, sums = (_few_products, _few_sums) if few else (_products, _sums)
    logits = []
    for q, k, _, visible in sources:
        logit = products(q, k) * q.shape[-1] ** -0.5
        logits.append(logit if visible is None else jnp.where(visible[:, None], logit, _MASKED))
    largest = jnp.stack([jnp.max(logit, axis=-1) for logit in logits]).max(axis=0)[..., None]
    largest = jax.lax.stop_gradient(largest)
    total, y = jnp.zeros_like(largest), jnp.zeros((), jnp.float32)
    for logit, (_, _, v, _) in zip(logits, sources, strict=True):
        weights = jnp.exp(logit - largest)
        total = total + jnp.sum(weights, axis=-1, keepdims=True)
        y = y + sums(weights.astype(v.dtype), v)
    return (y / jnp.swapaxes(total, 1, 2)).astype(sources[0].v.dtype)


def _products(q: jax.Array, k: jax.Array) -> jax.Array:
    """Queries [batch, time, heads, key_dim] times keys [(batch,) size, heads, key_dim]: float32 [batch, heads, time, size]."""
    return product(jnp.swapaxes(q, 1, 2), _columns(k, q.shape[0]), "nn", _F32)


def _sums(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Weights [batch, heads, time, size] times values [(batch,) size, heads, dim]: float32 [batch, time, heads, dim]."""
    return jnp.swapaxes(product(weights, _columns(v, weights.shape[0]), "nt", _F32), 1, 2)


def _columns(x: jax.Array, batch: int) -> jax.Array:
    """[(batch,) size, heads, dim] with a token for each column, [batch, heads, dim, size].

    So no product, and no derivative of one, has to transpose the logits or the weights, which XLA's CPU backend does slowly: the
    transposed factors are those of few rows.
    """
    return jnp.broadcast_to(jnp.moveaxis(x, -3, -1), (batch, *x.shape[-2:], x.shape[-3]))


def _few_products(q: jax.Array, k: jax.Array) -> jax.Array:
    """`_products` in one matrix product per row, with keys whose heads lie side by side.

    A query is as wide as all heads of keys, and zero outside its own. That multiplies by zeros, but what takes the time is to read
    the keys, and they are read once and in order. Several heads of queries may read one of keys.
    """
    batch, time, heads, _ = q.shape
    own = _own(heads, k.shape[-2]).astype(q.dtype)
    wide = together(q[:, :, :, None] * own[None, None, :, :, None]).reshape(batch, time * heads, -1)
    logits = jnp.einsum(
        f"bcx,{'bsx' if k.ndim == 4 else 'sx'}->bcs", wide, together(k), preferred_element_type=jnp.float32
    )
    return jnp.swapaxes(logits.reshape(batch, time, heads, -1), 1, 2)


def _few_sums(weights: jax.Array, v: jax.Array) -> jax.Array:
    """`_sums` as in `_few_products`: the sums over all heads of values, of which those of the query's own are taken."""
    batch, heads, time, size = weights.shape
    flat = jnp.swapaxes(weights, 1, 2).reshape(batch, time * heads, size)
    sums = jnp.einsum(
        f"bcs,{'bsx' if v.ndim == 4 else 'sx'}->bcx", flat, together(v), preferred_element_type=jnp.float32
    )
    sums = apart(sums, v.shape[-2]).reshape(batch, time, heads, *v.shape[-2:])
    return jnp.sum(sums * _own(heads, v.shape[-2])[None, None, :, :, None], axis=3)


def _own(heads: int, kv_heads: int) -> jax.Array:
    """[heads, kv_heads], 1 where a head of queries reads this head of keys and values."""
    return jnp.repeat(jnp.eye(kv_heads, dtype=jnp.float32), heads // kv_heads, axis=0)


def together(x: Float[Array, "*tokens heads head_dim"]) -> Float[Array, "*tokens heads*head_dim"]:
    """The heads of a token side by side: […, heads, head_dim] → […, heads · head_dim]."""
    return x.reshape(*x.shape[:-2], -1)


def apart(x: Float[Array, "*tokens heads*head_dim"], heads: int) -> Float[Array, "*tokens heads head_dim"]:
    """The inverse of `together`: […, heads · head_dim] → […, heads, head_dim]."""
    return x.reshape(*x.shape[:-1], heads, -1)


def _fold(source: Source, groups: int) -> Source:
    """The queries [batch, time, kv_heads · groups, key_dim] as [batch, groups · time, kv_heads, key_dim]."""
    q, k, v, visible = source
    batch, time, heads, size = q.shape
    q = jnp.moveaxis(q.reshape(batch, time, heads // groups, groups, size), 3, 1)
    visible = None if visible is None else jnp.tile(visible, (1, groups, 1))
    return Source(q.reshape(batch, groups * time, heads // groups, size), k, v, visible)
