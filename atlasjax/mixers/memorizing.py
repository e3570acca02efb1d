"""Memorizing Transformer (Wu et al. 2022, arXiv 2203.08913) in blocks, as a baseline of Elastic Memory (arXiv 2602.11212).

    local_t = softmax attention to the tokens of the block, up to t; rotary positions, local to the block
    read_t  = Σ_j softmax_j(q_t · k_j / √key_dim) v_j          over the last N tokens of the blocks before, a softmax of its own
    y_t     = (1 − σ(b_h)) local_t + σ(b_h) read_t             one b for each head; local_t alone in the first block

The memory is a queue, first in, first out, of the N last keys and values before the block; it moves after each block. It has no
positions: keys enter without rotation, and queries meet them without rotation, since a rotated query would prefer keys by its own
place in its block. Wu et al. approximate the softmax by a query's nearest neighbours, normalize keys and queries, and let no
gradient into memory. As a baseline of Elastic Memory it is dense, keys and queries are as they are, and gradients flow across the
blocks.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from atlasjax.mixers import block_memory
from atlasjax.mixers.attention import Source, softmax_attention
from atlasjax.mixers.block_memory import BlockMemoryState


class Queue(NamedTuple):
    """The last tokens before the current block, the newest last; the first places are empty until so many were read.

    Attributes:
      keys: not rotated, [batch, queue_length, heads, key_dim].
      values: [batch, queue_length, heads, value_dim].
    """

    keys: jax.Array
    values: jax.Array


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate: jax.Array,
    *,
    queue_length: int,
    block_size: int,
    rope_theta: float | None = 1e4,
    segment_ids: jax.Array | None = None,
    max_segments: int | None = None,
) -> jax.Array:
    """Block attention with a queue, over whole sequences.

    Args:
      q, k: not rotated, [batch, time, heads, key_dim], key_dim even.
      v: [batch, time, heads, value_dim].
      gate: b, [heads].
      queue_length: N ≥ 1 tokens; may be less than a block.
      block_size: L ≥ 1 tokens of a block.
      rope_theta: base of the wave lengths of the rotation; None: no rotation.
      segment_ids: integers [batch, time]; where the id changes a new document begins: memory and blocks start afresh.
      max_segments: static bound on the documents of a row; needed under jit with `segment_ids`. Tokens of further ones get NaN.

    Returns:
      [batch, time, heads, value_dim], of v's dtype. Gradients flow across the blocks.

    Raises:
      TypeError, ValueError: an argument that does not fit.
    """
    block_memory.check("memorizing.attention", q, k, v, gate, block_size)
    _check_length(queue_length)
    return block_memory.attention(
        q, k, v, gate, _empty(q.shape[0], queue_length, k, v), functools.partial(_read, block_size), _write,
        where="memorizing.attention", block_size=block_size, rope_theta=rope_theta, segment_ids=segment_ids,
        max_segments=max_segments,
    )  # fmt: skip


def init_state(
    batch_size: int, queue_length: int, block_size: int, heads: int, key_dim: int, value_dim: int, dtype: Any
) -> BlockMemoryState:
    """The state before the first token; sizes as of `attention`, dtype of keys and values.

    Raises:
      ValueError: a queue_length or block_size below one.
    """
    block_memory.check_block_size("memorizing.init_state", block_size)
    _check_length(queue_length)
    zeros = lambda dim: jnp.zeros((batch_size, queue_length, heads, dim), dtype)
    queue = Queue(zeros(key_dim), zeros(value_dim))
    return block_memory.init_state(queue, batch_size, block_size, heads, key_dim, value_dim, dtype)


def extend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate: jax.Array,
    state: BlockMemoryState,
    *,
    rope_theta: float | None = 1e4,
) -> tuple[jax.Array, BlockMemoryState]:
    """`attention` of the next tokens of a stream, any time ≥ 1. Rows may have read different numbers of tokens.

    Args:
      q, k, v, gate, rope_theta: as in `attention`.
      state: from `init_state` or the last `extend`.

    Returns:
      As `attention`; and the next state.

    Raises:
      TypeError, ValueError: an argument that does not fit.
    """
    where = "memorizing.extend"
    block_memory.check_state_type(where, state, Queue)
    size, length = state.block.keys.shape[1], state.memory.keys.shape[1]
    block_memory.check(where, q, k, v, gate, size)
    (heads, key_dim), value_dim = k.shape[2:], v.shape[-1]
    expected = lambda: init_state(q.shape[0], length, size, heads, key_dim, value_dim, k.dtype)
    block_memory.check_state(where, state, expected)
    return block_memory.extend(
        q, k, v, gate, state, functools.partial(_read, size), _write, rope_theta=rope_theta
    )  # fmt: skip


def _empty(batch: int, length: int, k: jax.Array, v: jax.Array) -> Queue:
    zeros = lambda x: jnp.zeros((batch, length, *x.shape[2:]), x.dtype)
    return Queue(zeros(k), zeros(v))


def _read(block_size: int, queue: Queue, q: jax.Array, index: jax.Array) -> jax.Array:
    length = queue.keys.shape[1]
    visible = jnp.arange(length) >= length - index[:, None, None] * block_size
    return softmax_attention(Source(q, queue.keys, queue.values, visible))


def _write(queue: Queue, k: jax.Array, v: jax.Array) -> Queue:
    join = lambda old, new: jnp.concatenate([old, new], axis=1)[:, -old.shape[1] :]
    return Queue(join(queue.keys, k), join(queue.values, v))


def _check_length(queue_length: Any) -> None:
    if not isinstance(queue_length, int) or isinstance(queue_length, bool) or queue_length < 1:
        raise ValueError(f"memorizing: queue_length must be an integer ≥ 1, got {queue_length!r}.")
