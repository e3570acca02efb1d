"""Softmax attention of queries over several sets of keys and values, without positions, windows or blocks.

Every mixer with a softmax over tokens reads through it. Logits and softmax are float32.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from atlasjax.memory.products import product

_F32 = jnp.dtype(jnp.float32)
_SMALLEST_PIECE, _PIECE_BYTES = 64, 2**20  # of keys that are taken out of a larger array, in tokens and in bytes
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
    groups, few = heads // sources[0].k.shape[-2], is_few(sources[0].q) and not split_heads
    if groups > 1 and not few:  # the queries of a group are read like further tokens, so that nothing is repeated
        y = softmax_attention(*(_fold(source, groups) for source in sources), split_heads=split_heads)
        y = y.reshape(batch, groups, time, *y.shape[2:])  # [batch, group, time, kv_heads, value_dim]
        return jnp.moveaxis(y, 1, 3).reshape(batch, time, heads, -1)
    return _softmax([_read(source, few=few) for source in sources], sources[0].v.dtype)


def is_few(q: Float[Array, "batch time heads key_dim"]) -> bool:
    """Whether all heads of the queries are read in one matrix product per row."""
    return q.shape[1] * q.shape[2] <= _FEW


def attention_of_layer(
    q: Float[Array, "batch time heads key_dim"],
    keys: Float[Array, "layers batch size kv_heads*key_dim"],
    values: Float[Array, "layers batch size kv_heads*value_dim"],
    layer: Int[Array, ""] | int,
    visible: Bool[Array, "batch time size"],
    *others: Source,
) -> Float[Array, "batch time heads value_dim"]:
    """`softmax_attention` of few queries over one layer's part of the keys and values of all layers, and over other sources.

    XLA's CPU backend takes what a product reads out of a larger array first. So it is read in pieces that stay in a core's cache.

    Args:
      q: queries for which `is_few` holds.
      keys, values: the heads of a token side by side.
      layer: the layer that is read.
      visible: whether a query sees a key.
      others: further keys and values, at least one, whose shapes give kv_heads.
    """
    kv_heads = others[0].k.shape[-2]
    _, batch, size, width = keys.shape
    # Small enough for a core's cache, but not so small that the loop costs more than the reads.
    least = max(1, min(size // _SMALLEST_PIECE, size * width * keys.dtype.itemsize // _PIECE_BYTES))
    even = (n for n in range(least, 2 * least + 1) if size % n == 0)
    count = next(even, least)  # a number of pieces that leaves no remainder, if there is one
    piece, end, rows = size // count, size - size % count, jnp.arange(batch)
    starts = jnp.arange(count) * piece

    def cut(x: jax.Array, row: jax.Array, start: jax.Array | int, length: int) -> jax.Array:
        return apart(jax.lax.dynamic_slice(x, (layer, row, start, 0), (1, 1, length, x.shape[-1]))[0], kv_heads)

    def logits_of(row: jax.Array) -> jax.Array:
        """[heads, time, size]"""
        own = jax.lax.dynamic_slice_in_dim(q, row, 1)
        products = lambda start, length: _few_products(own, cut(keys, row, start, length))[0]
        whole = jax.lax.map(lambda start: products(start, piece), starts)  # [pieces, heads, time, piece]
        whole = jnp.moveaxis(whole, 0, 2).reshape(*whole.shape[1:3], end)
        return whole if end == size else jnp.concatenate([whole, products(end, size - end)], axis=-1)

    def sums_of(row: jax.Array, weights: jax.Array) -> jax.Array:
        """[time, heads, value_dim]"""

        def some(start: jax.Array | int, length: int) -> jax.Array:
            part = jax.lax.dynamic_slice_in_dim(weights, start, length, axis=-1)
            return _few_sums(part[None], cut(values, row, start, length))[0]

        add = lambda y, start: (y + some(start, piece), None)
        none = jnp.zeros((*q.shape[1:3], values.shape[-1] // kv_heads), jnp.float32)
        rest = none if end == size else some(end, size - end)
        return jax.lax.scan(add, rest, starts)[0]

    logits = jax.lax.map(logits_of, rows)
    sums = lambda weights: jax.lax.map(lambda at: sums_of(*at), (rows, weights))
    own = _Read(_masked(logits, q, visible), sums, values.dtype)
    return _softmax([own, *(_read(source, few=True) for source in others)], values.dtype)


class _Read(NamedTuple):
    """The inputs of a softmax: logits [batch, heads, time, size], and weights of that shape and dtype → sums of the values."""

    logits: jax.Array
    sums: Callable[[jax.Array], jax.Array]
    dtype: jnp.dtype


def _read(source: Source, *, few: bool) -> _Read:
    products, sums = (_few_products, _few_sums) if few else (_products, _sums)
    logits = _masked(products(source.q, source.k), source.q, source.visible)
    return _Read(logits, lambda weights: sums(weights, source.v), source.v.dtype)


def _masked(products: jax.Array, q: jax.Array, visible: jax.Array | None) -> jax.Array:
    logits = products * q.shape[-1] ** -0.5
    return logits if visible is None else jnp.where(visible[:, None], logits, _MASKED)


def _softmax(reads: Sequence[_Read], dtype: jnp.dtype) -> Float[Array, "batch time heads value_dim"]:
    largest = jnp.stack([jnp.max(read.logits, axis=-1) for read in reads]).max(axis=0)[..., None]
    # It cancels in the quotient; its derivative is zero in exact arithmetic.
    largest = jax.lax.stop_gradient(largest)
    total, y = jnp.zeros_like(largest), jnp.zeros((), jnp.float32)
    for read in reads:
        weights = jnp.exp(read.logits - largest)
        total = total + jnp.sum(weights, axis=-1, keepdims=True)
        # Unnormalized, so that all sources share one division at the end.
        y = y + read.sums(weights.astype(read.dtype))
    return (y / jnp.swapaxes(total, 1, 2)).astype(dtype)


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
    # Zero outside a query's own head: one wide product instead of many narrow ones.
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
