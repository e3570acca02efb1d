"""Softmax attention as pure functions: causal over all tokens or a sliding window, in parallel or streaming.

    y_t = Σ_s softmax_s(q_t · k_s / √key_dim) v_s        over the tokens s ≤ t that token t sees, and the persistent keys

q and k are rotated by position (RoPE, Su et al. 2021). Every token sees the persistent keys (Titans §3.3, and the "persistent
vectors" of Sukhbaatar et al. 2019). They have no position, so the queries that read them are not rotated. Logits and softmax are
float32. Several consecutive heads of queries may share a head of keys and values (grouped-query attention, Ainslie et al. 2023).

Queries are processed block by block, so no [time, time] array is formed. Temporary memory is [block, time], or
[block, window + block] with a window, where the arithmetic is O(time · (window + block)) as well. On request a fused
kernel of the platform is used instead, on TPUs and GPUs, where it serves the call (`fused_attention`).

A cache stores the heads of a token side by side: [batch, size, heads · dim]. With the heads on an axis of their own, TPUs pad the
last axis to 128 lanes and copy the whole cache into another layout for the products. Few queries, as when tokens are sampled, read
it as it lies.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from atlasjax import check
from atlasjax.memory import Partition
from atlasjax.memory.check import check_ids, check_sizes, whole_layer
from atlasjax.mixers import fused_attention
from atlasjax.mixers.divided_attention import Tokens, divided
from atlasjax.mixers.rotary import check_rotary, rotate
from atlasjax.mixers.shapes import check_dtype, check_shapes
from atlasjax.mixers.softmax_attention import Source, apart, softmax_attention, together

_AXES = {
    "q": "batch time heads key_dim",
    "k": "batch time kv_heads key_dim",
    "v": "batch time kv_heads value_dim",
    "persistent.keys": "persistent kv_heads key_dim",
    "persistent.values": "persistent kv_heads value_dim",
}
_CACHE_AXES = {
    "cache.keys": "batch size kv_heads·key_dim",
    "cache.values": "batch size kv_heads·value_dim",
    "cache.position": "batch",
}
_SMALLEST_BLOCK, _LARGEST_BLOCK = 64, 256
_PARTS = 4  # of a sequence, whose queries read the keys up to the part's end: more parts read less in vain, and compile longer


class Persistent(NamedTuple):
    """Keys and values that every token sees: [persistent, kv_heads, key_dim] and [persistent, kv_heads, value_dim]."""

    keys: Float[Array, "persistent kv_heads key_dim"]
    values: Float[Array, "persistent kv_heads value_dim"]


def attention(
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time kv_heads key_dim"],
    v: Float[Array, "batch time kv_heads value_dim"],
    *,
    window: int | None = None,
    rope_theta: float | None = 1e4,
    rope_dim: int | None = None,
    persistent: Persistent | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
    fused: bool = False,
    partition: Partition | None = None,
) -> Float[Array, "batch time heads value_dim"]:
    """Causal self-attention over whole sequences.

    Args:
      q: before rotation, [batch, time, heads, key_dim].
      k: before rotation, [batch, time, kv_heads, key_dim]. kv_heads divides heads; so many consecutive heads of q share one of k.
      v: [batch, time, kv_heads, value_dim].
      window: a token sees itself and the window − 1 tokens before it. None means all tokens before it.
      rope_theta: base of the rotary wavelengths. None means no rotation.
      rope_dim: number of channels of q and k that are rotated, even. None means all.
      persistent: keys and values that every token sees.
      segment_ids: integers [batch, time]. A new segment begins where the id changes. It sees nothing before it, and its
        positions start at 0.
      fused: whether a kernel of the platform may be used (`fused_attention`), where it serves the call. None has persistent keys.
      partition: the mesh and its axes that split batch and kv_heads, for a kernel. XLA splits its own operations without it, unless
        its axes split time too: then no kernel is used.

    Returns:
      [batch, time, heads, value_dim], in v's dtype.

    Raises:
      TypeError, ValueError: invalid arguments.
    """
    check_attention("attention", q, k, v, window, rope_theta, rope_dim, persistent, partition)
    check.boolean("attention", "fused", fused)
    batch, time = q.shape[:2]
    if segment_ids is None:
        position, segment = jnp.broadcast_to(jnp.arange(time), (batch, time)), None
    else:
        check_ids(segment_ids, (batch, time), "attention")
        position, segment = segment_positions(segment_ids)
    rotated = rotate(q, position, rope_theta, rope_dim)
    k = rotate(k, position, rope_theta, rope_dim)
    if partition is not None and partition.time:
        tokens = Tokens(q, rotated, k, v, position, segment)
        return divided(_in_blocks, partition, tokens, window, persistent)
    blocks = lambda heads: _whole(q, heads.q, heads.k, heads.v, position, heads.segment, window, persistent)
    heads = fused_attention.Heads(rotated, k, v, segment)
    if persistent is not None or not fused:
        return blocks(heads)
    return fused_attention.attend(heads, window, blocks, partition)


def _whole(
    q: jax.Array, rotated: jax.Array, k: jax.Array, v: jax.Array, position: jax.Array, segment: jax.Array | None,
    window: int | None, persistent: Persistent | None,
) -> jax.Array:  # fmt: skip
    """`attention` of rotated queries and keys in XLA's operations."""
    if window is None or window >= q.shape[1]:
        return _causal(q, rotated, k, v, position, segment, persistent)
    pad = lambda x, fill: jnp.pad(x, ((0, 0), (window, 0), *((0, 0),) * (x.ndim - 2)), constant_values=fill)
    k_segment = None if segment is None else pad(segment, -1)
    return _in_blocks(
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
        return _in_blocks(
            own(q), own(rotated), *keys, own(position), before(position), *of_segments, None, persistent
        )  # fmt: skip

    if time <= _LARGEST_BLOCK:
        return part(0, time)
    blocks = -(-time // _LARGEST_BLOCK)
    edges = np.linspace(0, blocks, min(blocks, _PARTS) + 1).round().astype(int) * _LARGEST_BLOCK
    pairs = itertools.pairwise(np.minimum(edges, time).tolist())
    # What is kept for the gradient is all arrays once, not the keys and weights of each part.
    return jnp.concatenate([jax.checkpoint(functools.partial(part, *ends))() for ends in pairs], axis=1)


def segment_positions(
    segment_ids: Int[Array, "batch time"],
) -> tuple[Int[Array, "batch time"], Int[Array, "batch time"]]:
    """[batch, time] → each token's position in its segment, and its segment's index in the row. An id may occur again later."""
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    t = jnp.arange(segment_ids.shape[1])[None]
    return t - jax.lax.cummax(jnp.where(starts, t, 0), axis=1), jnp.cumsum(starts, axis=1) - 1


@functools.partial(jax.jit, static_argnames=("window", "split_heads"))
def _in_blocks(
    q: jax.Array,
    rotated: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_position: jax.Array,
    k_position: jax.Array,
    q_segment: jax.Array | None,
    k_segment: jax.Array | None,
    window: int | None,
    persistent: Persistent | None,
    split_heads: bool = False,
) -> jax.Array:
    """Attention, one block of queries after another.

    Args:
      q, rotated: [batch, time, …].
      k, v: all keys [batch, keys, …]. With a window, the `window` keys before the first query, followed by those of the queries.
      q_position, k_position: [batch, time] and [batch, keys]. Queries see a key from its own position on, and never if the key's
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
            sources.append(Source(queries(q), persistent.keys.astype(k.dtype), persistent.values.astype(v.dtype)))
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


class KVCache(NamedTuple):
    """Rotated keys and values of the tokens read, stored by position.

    Attributes:
      keys: [batch, max_length, kv_heads · key_dim].
      values: [batch, max_length, kv_heads · value_dim].
      position: number of tokens read, which is the position of the next one, [batch].
    """

    keys: Float[Array, "batch max_length kv_heads*key_dim"]
    values: Float[Array, "batch max_length kv_heads*value_dim"]
    position: Int[Array, " batch"]


class WindowCache(NamedTuple):
    """Rotated keys and values of the last `window` tokens, stored at their position modulo the window.

    Attributes:
      keys: [batch, window, kv_heads · key_dim].
      values: [batch, window, kv_heads · value_dim].
      position: number of tokens read, which is the position of the next one, [batch].
    """

    keys: Float[Array, "batch window kv_heads*key_dim"]
    values: Float[Array, "batch window kv_heads*value_dim"]
    position: Int[Array, " batch"]


def init_cache(
    batch_size: int, max_length: int, kv_heads: int, key_dim: int, value_dim: int, dtype: jax.typing.DTypeLike
) -> KVCache:
    """An empty cache for at most `max_length` tokens. `dtype` is that of keys and values.

    Raises:
      TypeError, ValueError: a size is not an integer ≥ 1, or dtype is not one of floating point.
    """
    where = "attention.init_cache"
    check_sizes(
        where, batch_size=batch_size, max_length=max_length, kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim
    )
    check_dtype(where, dtype)
    return KVCache(*_empty(batch_size, max_length, kv_heads, key_dim, value_dim, dtype))


def init_window(
    batch_size: int, window: int, kv_heads: int, key_dim: int, value_dim: int, dtype: jax.typing.DTypeLike
) -> WindowCache:
    """An empty cache for the last `window` tokens. `dtype` is that of keys and values.

    Raises:
      TypeError, ValueError: a size is not an integer ≥ 1, or dtype is not one of floating point.
    """
    where = "attention.init_window"
    check_sizes(where, batch_size=batch_size, window=window, kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim)
    check_dtype(where, dtype)
    return WindowCache(*_empty(batch_size, window, kv_heads, key_dim, value_dim, dtype))


def _empty(
    batch: int, size: int, heads: int, key_dim: int, value_dim: int, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    zeros = lambda dim: jnp.zeros((batch, size, heads * dim), dtype)
    return zeros(key_dim), zeros(value_dim), jnp.zeros(batch, jnp.int32)


def extend(
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time kv_heads key_dim"],
    v: Float[Array, "batch time kv_heads value_dim"],
    cache: KVCache | WindowCache,
    *,
    rope_theta: float | None = 1e4,
    rope_dim: int | None = None,
    persistent: Persistent | None = None,
    partition: Partition | None = None,
    layer: Int[Array, ""] | int | None = None,
) -> tuple[Float[Array, "batch time heads value_dim"], KVCache | WindowCache]:
    """`attention` for the next tokens of a stream. A `WindowCache` determines the window.

    Args:
      q, k, v, rope_theta, rope_dim, persistent: as in `attention`, any time ≥ 1.
      cache: keys and values of the tokens so far.
      partition: the mesh and its axes that split batch and kv_heads. Where an axis splits the heads, each device keeps to its own.
      layer: the cache is that of all layers, [layers, batch, …], of which this one is read and written, in place where XLA can.

    Returns:
      The output of `attention`, NaN for tokens beyond a `KVCache`'s max_length, and the next cache.

    Raises:
      TypeError, ValueError: invalid arguments.
    """
    where = "attention.extend"
    sizes = check_attention(where, q, k, v, None, rope_theta, rope_dim, persistent, partition)
    _check_cache(where, cache, layer, sizes)
    cache = jax.tree.map(jnp.asarray, cache)  # a restored one may be of NumPy arrays
    time, place = q.shape[1], () if layer is None else (layer,)
    count = cache.position[place]
    position = count[:, None] + jnp.arange(time)[None]
    rotated = rotate(q, position, rope_theta, rope_dim)
    split = partition is not None and any(partition.mesh.shape[axis] > 1 for axis in partition.heads)
    heads, k, v = k.shape[2], together(rotate(k, position, rope_theta, rope_dim).astype(cache.keys.dtype)), together(v)
    size = cache.keys.shape[-2]
    slots = jnp.broadcast_to(jnp.arange(size), (q.shape[0], size))

    def read(keys: jax.Array, values: jax.Array, positions: jax.Array, window: int | None) -> jax.Array:
        keys, values = apart(keys, heads), apart(values, heads)
        return _in_blocks(q, rotated, keys, values, position, positions, None, None, window, persistent, split)

    def written(at: jax.Array, k: jax.Array, v: jax.Array, **how: Any) -> KVCache | WindowCache:
        """The cache with new keys and values in the slots `at` [batch, time] of each row."""
        after = cache.position.at[place].set(count + time)
        return type(cache)(_write(cache.keys, layer, at, k, **how), _write(cache.values, layer, at, v, **how), after)

    if isinstance(cache, KVCache):
        cache = written(position, k, v, mode="drop", unique_indices=True, indices_are_sorted=True)
        y = read(cache.keys[place], cache.values[place], slots, None)
        return jnp.where((position < size)[:, :, None, None], y, jnp.nan), cache
    if time == 1:
        cache = written(position % size, k, v)
        held = position - (position - slots) % size  # the newest position stored in each slot; negative if none yet
        return read(cache.keys[place], cache.values[place], held, None), cache
    before = count[:, None] - size + slots  # positions in temporal order
    rows = jnp.arange(q.shape[0])[:, None]
    join = lambda x, new: jnp.concatenate([x[place][rows, before % size], new], axis=1)
    keys, values = join(cache.keys, k), join(cache.values, v)
    y = read(keys, values, jnp.concatenate([before, position], 1), size)
    return y, written((before + time) % size, keys[:, time:], values[:, time:], unique_indices=True)


def _write(x: jax.Array, layer: jax.Array | int | None, at: jax.Array, new: jax.Array, **how: Any) -> jax.Array:
    """x [(layers,) batch, size, dim] with `new` [batch, time, dim] in the slots `at` [batch, time] of each row."""
    # With an axis of the batch, which XLA can divide over devices. `x.at` under `vmap` would move that axis to the front.
    axis = 0 if layer is None else 1
    index = at[..., None] if layer is None else jnp.stack([jnp.full_like(at, layer), at], axis=-1)
    dims = (1,) if layer is None else (0, 2)
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(2,), inserted_window_dims=dims, scatter_dims_to_operand_dims=dims, operand_batching_dims=(axis,),
        scatter_indices_batching_dims=(0,),
    )  # fmt: skip
    return jax.lax.scatter(x, index, new.astype(x.dtype), numbers, **how)


def check_attention(
    where: str,
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time kv_heads key_dim"],
    v: Float[Array, "batch time kv_heads value_dim"],
    window: int | None,
    rope_theta: float | None,
    rope_dim: int | None,
    persistent: Persistent | None,
    partition: Partition | None,
) -> dict[str, int]:
    """The sizes by axis name. Raises TypeError or ValueError for invalid arguments of `attention`."""
    check.instance(where, "persistent", persistent, Persistent, optional=True)
    check.instance(where, "partition", partition, Partition, optional=True)
    sizes = check_shapes(where, _AXES, optional=("persistent",), q=q, k=k, v=v, persistent=persistent)
    if sizes["heads"] % sizes["kv_heads"]:
        raise ValueError(f"{where}: k has {sizes['kv_heads']} heads, which should divide the {sizes['heads']} of q.")
    check.integer(where, "rope_dim", rope_dim, optional=True)
    if rope_dim is not None and (rope_dim % 2 or rope_dim > sizes["key_dim"]):
        raise ValueError(f"{where}: rope_dim is {rope_dim}, should be even and at most key_dim={sizes['key_dim']}.")
    check_rotary(where, rope_theta, sizes["key_dim"] if rope_dim is None else rope_dim)
    check.integer(where, "window", window, optional=True)
    return sizes


def _check_cache(where: str, cache: object, layer: jax.Array | int | None, sizes: dict[str, int]) -> None:
    """Raises TypeError or ValueError unless it is a cache for tokens of these sizes, of all layers if `layer` is given."""
    if not isinstance(cache, KVCache | WindowCache):
        raise TypeError(f"{where}: cache must be a KVCache or a WindowCache, got {type(cache).__name__}.")
    axes = _CACHE_AXES if layer is None else {name: f"layers {of_one}" for name, of_one in _CACHE_AXES.items()}
    dims = {f"kv_heads·{dim}": sizes["kv_heads"] * sizes[dim] for dim in ("key_dim", "value_dim")}
    check_shapes(where, axes, integers=("cache.position",), known=sizes | dims, cache=cache)
    if layer is not None:
        whole_layer(layer, cache, where)
