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

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlasjax import check
from atlasjax.memory import Partition
from atlasjax.memory.check import check_ids, check_sizes, whole_layer
from atlasjax.memory.layerwise import after
from atlasjax.mixers import fused_attention
from atlasjax.mixers.attention_blocks import Persistent as Persistent
from atlasjax.mixers.attention_blocks import in_blocks, whole
from atlasjax.mixers.divided_attention import Tokens, divided
from atlasjax.mixers.rotary import check_rotary, rotate
from atlasjax.mixers.shapes import check_dtype, check_shapes
from atlasjax.mixers.softmax_attention import Source, apart, attention_of_layer, is_few, together

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
        return divided(in_blocks, partition, tokens, window, persistent)
    blocks = lambda heads: whole(q, heads.q, heads.k, heads.v, position, heads.segment, window, persistent)
    heads = fused_attention.Heads(rotated, k, v, segment)
    if persistent is not None or not fused:
        return blocks(heads)
    return fused_attention.attend(heads, window, blocks, partition)


def segment_positions(
    segment_ids: Int[Array, "batch time"],
) -> tuple[Int[Array, "batch time"], Int[Array, "batch time"]]:
    """[batch, time] → each token's position in its segment, and its segment's index in the row. An id may occur again later."""
    check.plain_array("segment_positions", "segment_ids", segment_ids)
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    t = jnp.arange(segment_ids.shape[1])[None]
    return t - jax.lax.cummax(jnp.where(starts, t, 0), axis=1), jnp.cumsum(starts, axis=1) - 1


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

    @property
    def window(self) -> None:  # a token sees all before it
        return None

    @property
    def heads_axis(self) -> int:  # of its arrays, for `distributed.cache_shardings`
        return 2


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

    @property
    def window(self) -> int:
        return self.keys.shape[-2]

    @property
    def heads_axis(self) -> int:  # of its arrays, for `distributed.cache_shardings`
        return 2


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
    place = () if layer is None else (layer,)
    position = cache.position[place][:, None] + jnp.arange(q.shape[1])[None]
    split = partition is not None and any(partition.mesh.shape[axis] > 1 for axis in partition.heads)
    # Keys are stored rotated, each by its own position, so that old ones need not be rotated at every token.
    keys = together(rotate(k, position, rope_theta, rope_dim).astype(cache.keys.dtype))
    rotated = rotate(q, position, rope_theta, rope_dim)
    piece = _Piece(q, rotated, keys, together(v), position, k.shape[2], persistent, split)
    # On several devices the rows are divided. XLA's CPU backend computes 16-bit floats in 32 bits, whole caches at a time.
    alone = partition is None or partition.mesh.size == 1
    if cache.window is not None and q.shape[1] > 1:
        y, new = _extend_window(piece, cache, layer)
    elif layer is not None and is_few(q) and alone and {cache.keys.dtype, cache.values.dtype} == {jnp.dtype("float32")}:
        y, new = jax.lax.platform_dependent(
            layer,
            cpu=lambda layer: _read_then_write(piece, cache, layer),
            default=lambda _: _write_then_read(piece, cache, layer),
        )
    else:
        y, new = _write_then_read(piece, cache, layer)
    if cache.window is None:
        # Such a token was not stored, so its output would be that of another text.
        y = jnp.where((position < cache.keys.shape[-2])[:, :, None, None], y, jnp.nan)
    return y, new._replace(position=cache.position.at[place].add(q.shape[1]))


class _Piece(NamedTuple):
    """The next tokens of a stream.

    Attributes:
      q, rotated: their queries, before and after rotation, [batch, time, heads, key_dim].
      k, v: their rotated keys and their values, as a cache has them, [batch, time, kv_heads · dim].
      position: [batch, time].
      kv_heads: number of heads of keys and values.
      persistent, split: as for `in_blocks`.
    """

    q: jax.Array
    rotated: jax.Array
    k: jax.Array
    v: jax.Array
    position: jax.Array
    kv_heads: int
    persistent: Persistent | None
    split: bool

    def read(self, keys: jax.Array, values: jax.Array, positions: jax.Array, window: int | None) -> jax.Array:
        """The attention of these tokens to keys and values [batch, size, kv_heads · dim] of tokens at `positions`."""
        keys, values = apart(keys, self.kv_heads), apart(values, self.kv_heads)
        return in_blocks(
            self.q, self.rotated, keys, values, self.position, positions, None, None, window, self.persistent, self.split
        )  # fmt: skip


_Cache = KVCache | WindowCache


def _newest(last: jax.Array, size: int) -> jax.Array:
    """The position [batch, size] of the token in each place after token `last` [batch, 1], negative where there is none."""
    return last - (last - jnp.arange(size)[None]) % size


def _extend_window(piece: _Piece, cache: _Cache, layer: Any) -> tuple[jax.Array, _Cache]:
    """Several tokens after a window, whose tokens are brought into their order in time, before the new ones that see them."""
    size, time = cache.keys.shape[-2], piece.position.shape[1]
    # A window is a ring: place p has the newest token with position ≡ p modulo its size.
    before = piece.position[:, :1] - size + jnp.arange(size)[None]
    rows, place = jnp.arange(len(before))[:, None], () if layer is None else (layer,)
    join = lambda x, new: jnp.concatenate([x[place][rows, before % size], new], axis=1)
    keys, values = join(cache.keys, piece.k), join(cache.values, piece.v)
    y = piece.read(keys, values, jnp.concatenate([before, piece.position], 1), size)
    # All places are written again, and not only those of the new tokens: more than `size` tokens would meet in a place.
    at = (before + time) % size
    return y, _written(cache, layer, at, keys[:, time:], values[:, time:], unique_indices=True)


def _write_then_read(piece: _Piece, cache: _Cache, layer: Any) -> tuple[jax.Array, _Cache]:
    """The tokens are written, and read all that the cache then holds."""
    new = _stored(piece, cache, layer)
    size, place = cache.keys.shape[-2], () if layer is None else (layer,)
    # A full cache has token p at place p.
    held = _newest(piece.position, size) if cache.window else jnp.broadcast_to(jnp.arange(size), (len(piece.q), size))
    return piece.read(new.keys[place], new.values[place], held, None), new


def _read_then_write(piece: _Piece, cache: _Cache, layer: jax.Array) -> tuple[jax.Array, _Cache]:
    """The tokens read the cache of those before them, and each other.

    If a token is written first, XLA's CPU backend fuses that with the read, and copies the cache of all layers.
    """
    size, time = cache.keys.shape[-2], piece.position.shape[1]
    held = _newest(piece.position[:, :1] - 1, size)[:, None]
    seen = (held >= 0) & (held > piece.position[..., None] - size)
    dtypes = cache.keys.dtype, cache.values.dtype
    own = apart(piece.k, piece.kv_heads), apart(piece.v.astype(dtypes[1]), piece.kv_heads)
    new = Source(piece.rotated, *own, jnp.tri(time, dtype=bool)[None])
    others = [] if piece.persistent is None else [piece.persistent.source(piece.q, *dtypes)]
    y = attention_of_layer(piece.rotated, cache.keys, cache.values, layer, seen, new, *others)
    return y, _stored(piece, cache, after(jnp.asarray(layer), y))  # after the read, or XLA may do it before


def _stored(piece: _Piece, cache: _Cache, layer: Any) -> _Cache:
    """The cache with the tokens of a piece in their places: of a window a single one. Tokens beyond max_length are left out."""
    if cache.window is not None:
        return _written(cache, layer, piece.position % cache.window, piece.k, piece.v)
    # Promises to the compiler, which need not order the writes then.
    how: dict[str, Any] = {"mode": "drop", "unique_indices": True, "indices_are_sorted": True}
    return _written(cache, layer, piece.position, piece.k, piece.v, **how)


def _written(cache: _Cache, layer: Any, at: jax.Array, k: jax.Array, v: jax.Array, **how: Any) -> _Cache:
    """The cache with keys and values [batch, time, kv_heads · dim] in the places `at` [batch, time] of each row."""
    return cache._replace(
        keys=_write(cache.keys, layer, at, k, **how), values=_write(cache.values, layer, at, v, **how)
    )


def _write(x: jax.Array, layer: jax.Array | int | None, at: jax.Array, new: jax.Array, **how: Any) -> jax.Array:
    """x [(layers,) batch, size, dim] with `new` [batch, time, dim] in the places `at` [batch, time] of each row."""
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
