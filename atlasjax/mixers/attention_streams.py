"""Streams of softmax attention: the next tokens read what a cache holds, and are stored in it.

A cache stores the heads of a token side by side: [batch, size, heads · dim]. With the heads on an axis of their own, TPUs pad the
last axis to 128 lanes and copy the whole cache into another layout for the products. Few queries, as when tokens are sampled, read
it as it lies.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlasjax.memory import Partition
from atlasjax.memory.layerwise import after
from atlasjax.mixers.attention_blocks import Persistent, in_blocks
from atlasjax.mixers.rotary import rotate
from atlasjax.mixers.softmax_attention import Source, apart, attention_of_layer, is_few, together

C = TypeVar("C", bound="Cache")
Write = Callable[[jax.Array, jax.Array], jax.Array]
"""(an array of a cache, the tokens to store) → the array with the tokens in it."""
Expand = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


class Cache(Protocol):
    """Rotated keys, and values, of tokens that were read: a named tuple."""

    @property
    def keys(self) -> Float[Array, "*layers batch size kv_heads*key_dim"]: ...

    @property
    def values(self) -> Float[Array, "*layers batch size kv_heads*value_dim"]: ...

    @property
    def position(self) -> Int[Array, "*layers batch"]:
        """Number of tokens read, which is the position of the next one."""

    @property
    def window(self) -> int | None:
        """How many tokens a token sees; the cache is a ring of this size. None: all tokens, each stored at its position."""

    def put(
        self: C,
        write: Write,
        k: Float[Array, "batch time kv_heads*key_dim"],
        v: Float[Array, "batch time kv_heads*value_dim"],
        position: Int[Array, "*layers batch"],
    ) -> C:
        """The cache with `write` of its keys and the new ones, k, of its values and v, and with another position."""


def extended(
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time kv_heads key_dim"],
    v: Float[Array, "batch time kv_heads value_dim"],
    cache: C,
    *,
    rope_theta: float | None,
    rope_dim: int | None,
    persistent: Persistent | None = None,
    partition: Partition | None = None,
    layer: Int[Array, ""] | int | None = None,
) -> tuple[Float[Array, "batch time heads value_dim"], C]:
    """`attention.extend` with any cache, and without checks."""
    cache = jax.tree.map(jnp.asarray, cache)  # a restored one may be of NumPy arrays
    position = cache.position[_place(layer)][:, None] + jnp.arange(q.shape[1])[None]
    # Keys are stored rotated, each by its own position, so that old ones need not be rotated at every token.
    rotate_all = lambda x: rotate(x, position, rope_theta, rope_dim)
    piece = _piece(q, rotate_all(q), rotate_all(k), v, cache, position, persistent, partition, layer)
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
    return _within(y, piece, cache), new


def read_stored(
    q: Float[Array, "batch time heads key_dim"],
    stored: Float[Array, "batch time kv_heads latent_dim+shared_dim"],
    cache: C,
    expand: Expand,
    *,
    partition: Partition | None = None,
    layer: Int[Array, ""] | int | None = None,
) -> tuple[Float[Array, "batch time heads value_dim"], C]:
    """`extended` without a window for keys and values that are stored as one array, from which they are computed to be read.

    q, stored: rotated. expand: what is stored [batch, size, latent_dim + shared_dim] → keys and values [batch, size, heads, …].
    """
    position = cache.position[_place(layer)][:, None] + jnp.arange(q.shape[1])[None]
    piece = _piece(q, q, stored, stored, cache, position, None, partition, layer)
    new = _stored(piece, cache, layer)
    rows = new.keys[_place(layer)]
    held = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape[:2])
    y = in_blocks(q, q, *expand(rows), position, held, None, None, None, None, piece.split)
    return _within(y, piece, cache), new


def _place(layer: Any) -> tuple[Any, ...]:
    """The index of a layer in the cache of all."""
    return () if layer is None else (layer,)


def _within(y: jax.Array, piece: "_Piece", cache: Cache) -> jax.Array:
    """y, NaN for tokens beyond a full cache: such a token was not stored, so its output would be that of another text."""
    if cache.window is not None:
        return y
    return jnp.where((piece.position < cache.keys.shape[-2])[:, :, None, None], y, jnp.nan)


def _piece(
    q: jax.Array, rotated: jax.Array, k: jax.Array, v: jax.Array, cache: Cache, position: jax.Array,
    persistent: Persistent | None, partition: Partition | None, layer: Any,
) -> "_Piece":  # fmt: skip
    split = partition is not None and any(partition.mesh.shape[axis] > 1 for axis in partition.heads)
    keys, after_them = together(k.astype(cache.keys.dtype)), cache.position.at[_place(layer)].add(q.shape[1])
    return _Piece(q, rotated, keys, together(v), position, after_them, k.shape[2], persistent, split)


class _Piece(NamedTuple):
    """The next tokens of a stream.

    Attributes:
      q, rotated: their queries, before and after rotation, [batch, time, heads, key_dim].
      k, v: their rotated keys and their values, as a cache has them, [batch, time, kv_heads · dim].
      position: [batch, time].
      next_position: the cache's position after them.
      kv_heads: number of heads of keys and values.
      persistent, split: as for `in_blocks`.
    """

    q: jax.Array
    rotated: jax.Array
    k: jax.Array
    v: jax.Array
    position: jax.Array
    next_position: jax.Array
    kv_heads: int
    persistent: Persistent | None
    split: bool

    def read(self, keys: jax.Array, values: jax.Array, positions: jax.Array, window: int | None) -> jax.Array:
        """The attention of these tokens to keys and values [batch, size, kv_heads · dim] of tokens at `positions`."""
        keys, values = apart(keys, self.kv_heads), apart(values, self.kv_heads)
        return in_blocks(
            self.q, self.rotated, keys, values, self.position, positions, None, None, window, self.persistent, self.split
        )  # fmt: skip


def _newest(last: jax.Array, size: int) -> jax.Array:
    """The position [batch, size] of the token in each place after token `last` [batch, 1], negative where there is none."""
    return last - (last - jnp.arange(size)[None]) % size


def _extend_window(piece: _Piece, cache: C, layer: Any) -> tuple[jax.Array, C]:
    """Several tokens after a window, whose tokens are brought into their order in time, before the new ones that see them."""
    size, time = cache.keys.shape[-2], piece.position.shape[1]
    # A window is a ring: place p has the newest token with position ≡ p modulo its size.
    before = piece.position[:, :1] - size + jnp.arange(size)[None]
    rows, place = jnp.arange(len(before))[:, None], _place(layer)
    join = lambda x, new: jnp.concatenate([x[place][rows, before % size], new], axis=1)
    keys, values = join(cache.keys, piece.k), join(cache.values, piece.v)
    y = piece.read(keys, values, jnp.concatenate([before, piece.position], 1), size)
    # All places are written again, and not only those of the new tokens: more than `size` tokens would meet in a place.
    at = (before + time) % size
    return y, _written(piece, cache, layer, at, keys[:, time:], values[:, time:], unique_indices=True)


def _write_then_read(piece: _Piece, cache: C, layer: Any) -> tuple[jax.Array, C]:
    """The tokens are written, and read all that the cache then holds."""
    new = _stored(piece, cache, layer)
    size, place = cache.keys.shape[-2], _place(layer)
    # A full cache has token p at place p.
    held = _newest(piece.position, size) if cache.window else jnp.broadcast_to(jnp.arange(size), (len(piece.q), size))
    return piece.read(new.keys[place], new.values[place], held, None), new


def _read_then_write(piece: _Piece, cache: C, layer: jax.Array) -> tuple[jax.Array, C]:
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


def _stored(piece: _Piece, cache: C, layer: Any) -> C:
    """The cache with the tokens of a piece in their places: of a window a single one. Tokens beyond max_length are left out."""
    if cache.window is not None:
        return _written(piece, cache, layer, piece.position % cache.window, piece.k, piece.v)
    # Promises to the compiler, which need not order the writes then.
    how: dict[str, Any] = {"mode": "drop", "unique_indices": True, "indices_are_sorted": True}
    return _written(piece, cache, layer, piece.position, piece.k, piece.v, **how)


def _written(piece: _Piece, cache: C, layer: Any, at: jax.Array, k: jax.Array, v: jax.Array, **how: Any) -> C:
    """The cache after the piece, with tokens [batch, time, kv_heads · dim] in the places `at` [batch, time] of each row."""
    return cache.put(lambda x, new: _write(x, layer, at, new, **how), k, v, piece.next_position)


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
