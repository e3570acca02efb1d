"""Softmax attention as pure functions: causal over all tokens or a sliding window, in parallel or streaming.

    y_t = Σ_s softmax_s(q_t · k_s / √key_dim) v_s        over the tokens s ≤ t that token t sees, and the persistent keys

q and k are rotated by position (RoPE, Su et al. 2021). Every token sees the persistent keys (Titans §3.3, and the "persistent
vectors" of Sukhbaatar et al. 2019). They have no position, so the queries that read them are not rotated. Logits and softmax are
float32. Several consecutive heads of queries may share a head of keys and values (grouped-query attention, Ainslie et al. 2023).

Queries are processed block by block, so no [time, time] array is formed. Temporary memory is [block, time], or
[block, window + block] with a window, where the arithmetic is O(time · (window + block)) as well. On request a fused
kernel of the platform is used instead, on TPUs and GPUs, where it serves the call (`fused_attention`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlasjax import check
from atlasjax.memory import Partition
from atlasjax.memory.check import check_ids, check_sizes, whole_layer
from atlasjax.mixers import fused_attention
from atlasjax.mixers.attention_blocks import Persistent as Persistent
from atlasjax.mixers.attention_blocks import in_blocks, whole
from atlasjax.mixers.attention_streams import Write, extended
from atlasjax.mixers.divided_attention import Tokens, divided
from atlasjax.mixers.rotary import check_rotary, rotate
from atlasjax.mixers.shapes import check_dtype, check_shapes

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

    def put(
        self,
        write: Write,
        k: Float[Array, "batch time kv_heads*key_dim"],
        v: Float[Array, "batch time kv_heads*value_dim"],
        position: Int[Array, "*layers batch"],
    ) -> "KVCache":  # `attention_streams.Cache`
        return KVCache(write(self.keys, k), write(self.values, v), position)

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

    def put(
        self,
        write: Write,
        k: Float[Array, "batch time kv_heads*key_dim"],
        v: Float[Array, "batch time kv_heads*value_dim"],
        position: Int[Array, "*layers batch"],
    ) -> "WindowCache":  # `attention_streams.Cache`
        return WindowCache(write(self.keys, k), write(self.values, v), position)

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
    return extended(
        q, k, v, cache, rope_theta=rope_theta, rope_dim=rope_dim, persistent=persistent, partition=partition, layer=layer
    )  # fmt: skip


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
        raise ValueError(f"{where}: rope_dim is {rope_dim}, must be even and at most key_dim={sizes['key_dim']}.")
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
