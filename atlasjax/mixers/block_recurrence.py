"""Attention with block recurrence (Transformer-XL, arXiv 1901.02860, §3.1) as pure functions, in parallel or streaming.

A sequence is read in blocks of L tokens. A token sees its own block up to itself, and the whole previous block:

    y_t = Σ_s softmax_s(q_t · k_s / √key_dim) v_s        over max(0, (⌊t / L⌋ − 1) L) ≤ s ≤ t

q and k are rotated by position (RoPE) instead of Transformer-XL's relative positions. Both depend only on t − s, so keys of the
previous block can be reused. With n layers the context of a token reaches back n blocks before its own.

Elastic Memory (arXiv 2602.11212, §4) discusses two kinds of block recurrence. This module has the recurrence of keys and values,
not the recurrent state vectors of Block-Recurrent Transformers (arXiv 2203.07852). Gradients flow into the previous block, as
they do across the blocks of Elastic Memory; Transformer-XL stops them (`stop_gradient`).

Logits and softmax are float32. State size and time per token do not depend on the number of tokens read.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlasjax import check
from atlasjax.memory.check import check_segments, check_sizes
from atlasjax.mixers.blocks import causal, continued, continued_queries, documents, unfinished, whole
from atlasjax.mixers.rotary import check_rotary, rotate
from atlasjax.mixers.shapes import check_dtype, check_shapes
from atlasjax.mixers.softmax_attention import Source, softmax_attention

_AXES = {
    "q": "batch time heads key_dim",
    "k": "batch time heads key_dim",
    "v": "batch time heads value_dim",
    "state.keys": "batch 2 block_size heads key_dim",
    "state.values": "batch 2 block_size heads value_dim",
    "state.position": "batch",
}


@dataclasses.dataclass(frozen=True)
class BlockRecurrenceConfig:
    """Attention with block recurrence.

    Attributes:
      block_size: L ≥ 1 tokens of a block, which sees itself and the one before.

    Raises:
      ValueError: a field out of its range.
    """

    block_size: int = 1024

    def __post_init__(self) -> None:
        check.integers(self, {"block_size": 1})


class BlockRecurrenceState(NamedTuple):
    """Rotated keys and values of the current and the previous block.

    Attributes:
      keys: [batch, 2, block_size, heads, key_dim]. Block m is stored at m modulo 2, replacing block m − 2.
      values: [batch, 2, block_size, heads, value_dim].
      position: number of tokens read, which is the position of the next one, [batch].
    """

    keys: Float[Array, "batch 2 block_size heads key_dim"]
    values: Float[Array, "batch 2 block_size heads value_dim"]
    position: Int[Array, " batch"]

    @property
    def heads_axis(self) -> int:  # of its arrays, for `distributed.cache_shardings`
        return 3


def attention(
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time heads key_dim"],
    v: Float[Array, "batch time heads value_dim"],
    *,
    block_size: int,
    rope_theta: float | None = 1e4,
    stop_gradient: bool = False,
    segment_ids: Int[Array, "batch time"] | None = None,
    max_segments: int | None = None,
) -> Float[Array, "batch time heads value_dim"]:
    """Attention to the current and the previous block, over whole sequences.

    Args:
      q, k: before rotation, [batch, time, heads, key_dim], key_dim even.
      v: [batch, time, heads, value_dim].
      block_size: L ≥ 1 tokens.
      rope_theta: base of the rotary wavelengths. None means no rotation.
      stop_gradient: whether gradients stop at the previous block's keys and values, as in Transformer-XL.
      segment_ids: integers [batch, time]. A new document, and with it a first block, begins where the id changes.
      max_segments: static bound on the number of documents in a row. Required under jit with `segment_ids`. Tokens of documents
        beyond the bound get NaN.

    Returns:
      [batch, time, heads, value_dim], in v's dtype.

    Raises:
      TypeError, ValueError: invalid arguments.
    """
    where = "block_recurrence.attention"
    check.integer(where, "block_size", block_size)
    check.boolean(where, "stop_gradient", stop_gradient)
    check_rotary(where, rope_theta, check_shapes(where, _AXES, q=q, k=k, v=v)["key_dim"])
    most = check_segments(segment_ids, max_segments, q, where)
    return _whole(q, k, v, segment_ids, block_size, rope_theta, stop_gradient, most)


@functools.partial(jax.jit, static_argnames=("block_size", "rope_theta", "stop_gradient", "max_segments"))
def _whole(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    block_size: int,
    rope_theta: float | None,
    stop_gradient: bool,
    max_segments: int | None,
) -> jax.Array:
    batch, time = q.shape[:2]
    if segment_ids is None:
        grid = whole(batch, time, block_size)
        position = jnp.broadcast_to(jnp.arange(time), (batch, time))
        if grid.touched == 1:  # there is no previous block
            q, k = rotate(q, position, rope_theta), rotate(k, position, rope_theta)
            return softmax_attention(Source(q, k, v, causal(None, time)))
    else:
        assert max_segments is not None
        grid = documents(segment_ids, max_segments, block_size)
        assert grid.place is not None
        position = grid.place  # the blocks of a document are contiguous, and only differences of positions matter
    kb, vb = grid.lay(rotate(k, position, rope_theta)), grid.lay(v)
    before = lambda x: jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]])
    pk, pv = before(kb), before(vb)
    if stop_gradient:
        pk, pv = jax.lax.stop_gradient((pk, pv))
    q = grid.lay(rotate(q, position, rope_theta))
    return grid.pick(_attend_blocks(q, None, kb, vb, pk, pv, grid.index))


def init_state(
    batch_size: int, block_size: int, heads: int, key_dim: int, value_dim: int, dtype: jax.typing.DTypeLike
) -> BlockRecurrenceState:
    """The state before the first token. Sizes as in `attention`; `dtype` is that of keys and values.

    Raises:
      TypeError, ValueError: a size is not an integer ≥ 1, or dtype is not one of floating point.
    """
    where = "block_recurrence.init_state"
    check_sizes(where, batch_size=batch_size, block_size=block_size, heads=heads, key_dim=key_dim, value_dim=value_dim)
    check_dtype(where, dtype)
    zeros = lambda dim: jnp.zeros((batch_size, 2, block_size, heads, dim), dtype)
    return BlockRecurrenceState(zeros(key_dim), zeros(value_dim), jnp.zeros(batch_size, jnp.int32))


def extend(
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time heads key_dim"],
    v: Float[Array, "batch time heads value_dim"],
    state: BlockRecurrenceState,
    *,
    rope_theta: float | None = 1e4,
) -> tuple[Float[Array, "batch time heads value_dim"], BlockRecurrenceState]:
    """`attention` for the next tokens of a stream, any time ≥ 1. Rows may have read different numbers of tokens.

    Args:
      q, k, v, rope_theta: as in `attention`.
      state: from `init_state` or the previous `extend`. It determines the block size.

    Returns:
      The output of `attention`, and the next state.

    Raises:
      TypeError, ValueError: invalid arguments.
    """
    where = "block_recurrence.extend"
    check.instance(where, "state", state, BlockRecurrenceState)
    sizes = check_shapes(where, _AXES, integers=("state.position",), q=q, k=k, v=v, state=state)
    check_rotary(where, rope_theta, sizes["key_dim"])
    return _extend(q, k, v, state, rope_theta)


@functools.partial(jax.jit, static_argnames=("rope_theta",))
def _extend(
    q: jax.Array, k: jax.Array, v: jax.Array, state: BlockRecurrenceState, rope_theta: float | None
) -> tuple[jax.Array, BlockRecurrenceState]:
    position = state.position[:, None] + jnp.arange(q.shape[1])[None]
    q, k = rotate(q, position, rope_theta), rotate(k, position, rope_theta)
    k, v = k.astype(state.keys.dtype), v.astype(state.values.dtype)
    return (_one_token if q.shape[1] == 1 else _piece)(q, k, v, state)


def _one_token(
    q: jax.Array, k: jax.Array, v: jax.Array, state: BlockRecurrenceState
) -> tuple[jax.Array, BlockRecurrenceState]:
    batch, _, size = state.keys.shape[:3]
    index, place, rows = state.position // size, state.position % size, jnp.arange(batch)
    write = lambda x, new: x.at[rows, index % 2, place].set(new[:, 0])
    keys, values = write(state.keys, k), write(state.values, v)
    own = jnp.arange(2)[None] == (index % 2)[:, None]
    seen = jnp.where(own[:, :, None], jnp.arange(size)[None, None] <= place[:, None, None], (index > 0)[:, None, None])
    flat = lambda x: x.reshape(batch, 2 * size, *x.shape[3:])
    y = softmax_attention(Source(q, flat(keys), flat(values), flat(seen)[:, None]))
    return y, BlockRecurrenceState(keys, values, state.position + 1)


def _piece(
    q: jax.Array, k: jax.Array, v: jax.Array, state: BlockRecurrenceState
) -> tuple[jax.Array, BlockRecurrenceState]:
    """Places the new tokens on the block grid after those of the current block, then computes as for a whole sequence."""
    (batch, time), size = q.shape[:2], state.keys.shape[2]
    grid, rows, half = continued(state.position, time, size), jnp.arange(batch), state.position // size % 2
    queries, places = continued_queries(state.position, time, size)
    lay = lambda x, held: grid.lay(x, held[rows, half])
    kb, vb = lay(k, state.keys), lay(v, state.values)
    before = lambda x, held: jnp.concatenate([held[rows, 1 - half][None], x[:-1]])
    pk, pv = before(kb, state.keys), before(vb, state.values)
    touched = (x[: grid.touched] for x in (kb, vb, pk, pv, grid.index))
    y = queries.pick(_attend_blocks(queries.lay(q), places, *touched))
    last = unfinished(state.position, time, size)
    even = ((half + last) % 2 == 0)[:, None, None, None]

    def pair(current: jax.Array, previous: jax.Array) -> jax.Array:
        current, previous = current[last, rows], previous[last, rows]
        return jnp.stack([jnp.where(even, current, previous), jnp.where(even, previous, current)], axis=1)

    return y, BlockRecurrenceState(pair(kb, pk), pair(vb, pv), state.position + time)


def _attend_blocks(
    q: jax.Array,
    place: jax.Array | None,
    k: jax.Array,
    v: jax.Array,
    before_k: jax.Array,
    before_v: jax.Array,
    index: jax.Array,
) -> jax.Array:
    """Attention block by block.

    Args:
      q: rotated, [blocks, batch, queries, heads, dim].
      place: position of each query in its block, [blocks, batch, queries]. None: they are those of all tokens of the blocks.
      k, v: the blocks' rotated keys, and their values, [blocks, batch, L, heads, dim].
      before_k, before_v: those of the previous blocks.
      index: each block's in its document, [blocks, batch].
    """

    def block(xs: tuple[Any, ...]) -> jax.Array:
        q, place, k, v, before_k, before_v, m = xs
        own = Source(q, k, v, causal(place, k.shape[1]))
        return softmax_attention(own, Source(q, before_k, before_v, (m > 0)[:, None, None]))

    xs = (q, place, k, v, before_k, before_v, index)
    return jax.lax.map(functools.partial(jax.checkpoint, prevent_cse=False)(block), xs)
