"""Softmax attention of rotated queries and keys, block by block of queries: what `attention` and its streams compute with."""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from atlasjax.mixers.softmax_attention import Source, softmax_attention

_SMALLEST_BLOCK, _LARGEST_BLOCK = 64, 256
_PARTS = 4  # of a sequence, whose queries read the keys up to the part's end: more parts read less in vain, and compile longer


class Persistent(NamedTuple):
    """Keys and values that every token sees: [persistent, kv_heads, key_dim] and [persistent, kv_heads, value_dim]."""

    keys: Float[Array, "persistent kv_heads key_dim"]
    values: Float[Array, "persistent kv_heads value_dim"]

    def source(
        self, q: Float[Array, "batch time heads key_dim"], key_dtype: jnp.dtype, value_dtype: jnp.dtype
    ) -> Source:
        """The source that unrotated queries read."""
        return Source(q, self.keys.astype(key_dtype), self.values.astype(value_dtype))


def whole(
    q: Float[Array, "batch time heads key_dim"],
    rotated: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time kv_heads key_dim"],
    v: Float[Array, "batch time kv_heads value_dim"],
    position: Int[Array, "batch time"],
    segment: Int[Array, "batch time"] | None,
    window: int | None,
    persistent: Persistent | None,
) -> Float[Array, "batch time heads value_dim"]:
    """`attention` of rotated queries and keys in XLA's operations. Arguments as for `in_blocks`."""
    if window is None or window >= q.shape[1]:
        return _causal(q, rotated, k, v, position, segment, persistent)
    pad = lambda x, fill: jnp.pad(x, ((0, 0), (window, 0), *((0, 0),) * (x.ndim - 2)), constant_values=fill)
    k_segment = None if segment is None else pad(segment, -1)
    return in_blocks(
        q, rotated, pad(k, 0), pad(v, 0), position, pad(position, -1), segment, k_segment, window, persistent
    )


@jax.jit
def _causal(
    q: jax.Array, rotated: jax.Array, k: jax.Array, v: jax.Array, position: jax.Array, segment: jax.Array | None,
    persistent: Persistent | None,
) -> jax.Array:  # fmt: skip
    """`attention` without a window. Queries of the first part of a sequence do not read the keys of the later ones."""
    time = q.shape[1]

    def part(start: int, stop: int) -> jax.Array:
        own, before = (lambda x: x[:, start:stop]), (lambda x: x[:, :stop])
        of_segments = (None, None) if segment is None else (own(segment), before(segment))
        keys = before(k), before(v)
        return in_blocks(
            own(q), own(rotated), *keys, own(position), before(position), *of_segments, None, persistent
        )  # fmt: skip

    if time <= _LARGEST_BLOCK:
        return part(0, time)
    blocks = -(-time // _LARGEST_BLOCK)
    edges = np.linspace(0, blocks, min(blocks, _PARTS) + 1).round().astype(int) * _LARGEST_BLOCK
    pairs = itertools.pairwise(np.minimum(edges, time).tolist())
    # The gradient keeps all arrays once, not the keys and weights of each part.
    return jnp.concatenate([jax.checkpoint(functools.partial(part, *ends))() for ends in pairs], axis=1)


@functools.partial(jax.jit, static_argnames=("window", "split_heads"))
def in_blocks(
    q: Float[Array, "batch time heads key_dim"],
    rotated: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch size kv_heads key_dim"],
    v: Float[Array, "batch size kv_heads value_dim"],
    q_position: Int[Array, "_batch time"],
    k_position: Int[Array, "_batch size"],
    q_segment: Int[Array, "batch time"] | None,
    k_segment: Int[Array, "batch size"] | None,
    window: int | None,
    persistent: Persistent | None,
    split_heads: bool = False,
) -> Float[Array, "batch time heads value_dim"]:
    """Attention, one block of queries after another.

    Args:
      q, rotated: [batch, time, …].
      k, v: all keys [batch, size, …]. With a window, the `window` keys before the first query, followed by those of the queries.
      q_position, k_position: [batch, time] and [batch, size]. Queries see a key from its own position on, and never if the key's
        position is negative.
      q_segment, k_segment: segment indices of the same shapes. None for one segment.
      window, persistent: see `attention`.
      split_heads: see `softmax_attention`.
    """
    time = q.shape[1]
    block = min(time, _LARGEST_BLOCK if window is None else max(_SMALLEST_BLOCK, min(_LARGEST_BLOCK, window)))

    def run(start: jax.Array | int) -> jax.Array:
        cut = lambda x, first, size: jax.lax.dynamic_slice_in_dim(x, first, size, axis=1)
        queries = lambda x: cut(x, start, block)
        keys = (lambda x: x) if window is None else (lambda x: cut(x, start, block + window))
        t, s = queries(q_position)[:, :, None], keys(k_position)[:, None, :]
        visible = (s <= t) & (s >= 0)
        if window is not None:
            visible &= s > t - window
        if q_segment is not None and k_segment is not None:
            visible &= queries(q_segment)[:, :, None] == keys(k_segment)[:, None, :]
        sources = [Source(queries(rotated), keys(k), keys(v), visible)]
        if persistent is not None:
            sources.append(persistent.source(queries(q), k.dtype, v.dtype))
        return softmax_attention(*sources, split_heads=split_heads)

    if block == time:
        return run(0)
    count = -(-time // block)
    extra = count * block - time
    pad = lambda x: jnp.pad(x, ((0, 0), (0, extra), *((0, 0),) * (x.ndim - 2)))
    q, rotated, q_position = pad(q), pad(rotated), pad(q_position)
    q_segment = None if q_segment is None else pad(q_segment)
    if window is not None:  # the last block's slice of keys must not exceed the array
        k, v, k_position = pad(k), pad(v), jnp.pad(k_position, ((0, 0), (0, extra)), constant_values=-1)
        k_segment = None if k_segment is None else pad(k_segment)
    y = jax.lax.map(jax.checkpoint(run, prevent_cse=False), jnp.arange(count) * block)
    return jnp.moveaxis(y, 0, 1).reshape(q.shape[0], count * block, *y.shape[3:])[:, :time]
