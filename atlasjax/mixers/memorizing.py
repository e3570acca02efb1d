"""Memorizing Transformer (Wu et al. 2022, arXiv 2203.08913) in blocks, as a baseline of Elastic Memory (arXiv 2602.11212).

    local_t = softmax attention to the tokens of the block, up to t; rotary positions, local to the block
    read_t  = Σ_j softmax_j(q_t · k_j / √key_dim) v_j          over the last N tokens before the block, with a separate softmax
    y_t     = (1 − σ(b_h)) local_t + σ(b_h) read_t             one b for each head; only local_t in the first block

The memory is a first-in, first-out queue of the last N keys and values before the block, updated after each block. It has no
positions: neither its keys nor the queries that read it are rotated, because a rotated query would prefer keys depending on its own
position in its block. Wu et al. approximate the softmax by a query's nearest neighbours, normalize keys and queries, and stop
gradients at the memory. As a baseline of Elastic Memory (§3.1) the attention is dense. Keys and queries are not normalized, and
gradients flow across blocks.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Float, Int

from atlasjax import check
from atlasjax.memory.check import check_sizes
from atlasjax.mixers import block_memory
from atlasjax.mixers.block_memory import BlockMemoryState
from atlasjax.mixers.shapes import check_dtype
from atlasjax.mixers.softmax_attention import Source, softmax_attention

_AXES = {
    "state.memory.keys": "batch queue_length heads key_dim",
    "state.memory.values": "batch queue_length heads value_dim",
}


@dataclasses.dataclass(frozen=True)
class MemorizingConfig:
    """Memorizing Transformer in blocks.

    Attributes:
      queue_length: N ≥ 1 tokens of the queue.
      block_size: L ≥ 1 tokens of a block.

    Raises:
      ValueError: a field out of its range.
    """

    queue_length: int = 540
    block_size: int = 1024

    def __post_init__(self) -> None:
        check.integers(self, {"queue_length": 1, "block_size": 1})


class Queue(NamedTuple):
    """The last tokens before the current block, newest last. The first places are empty until enough tokens were read.

    Attributes:
      keys: unrotated, [batch, queue_length, heads, key_dim].
      values: [batch, queue_length, heads, value_dim].
    """

    keys: Float[Array, "batch queue_length heads key_dim"]
    values: Float[Array, "batch queue_length heads value_dim"]

    @property
    def heads_axis(self) -> int:  # of its arrays, for `distributed.cache_shardings`
        return 2


def attention(
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time heads key_dim"],
    v: Float[Array, "batch time heads value_dim"],
    gate: Float[Array, " heads"],
    *,
    queue_length: int,
    block_size: int,
    rope_theta: float | None = 1e4,
    segment_ids: Int[Array, "batch time"] | None = None,
    max_segments: int | None = None,
) -> Float[Array, "batch time heads value_dim"]:
    """Block attention with a queue, over whole sequences.

    Args:
      q, k: before rotation, [batch, time, heads, key_dim], key_dim even.
      v: [batch, time, heads, value_dim].
      gate: b, [heads].
      queue_length: N ≥ 1 tokens; may be shorter than a block.
      block_size: L ≥ 1 tokens per block.
      rope_theta: base of the rotary wavelengths. None means no rotation.
      segment_ids: integers [batch, time]. A new document begins where the id changes; memory and blocks are reset there.
      max_segments: static bound on the number of documents in a row. Required under jit with `segment_ids`. Tokens of documents
        beyond the bound get NaN.

    Returns:
      [batch, time, heads, value_dim], in v's dtype. Gradients flow across blocks.

    Raises:
      TypeError, ValueError: invalid arguments.
    """
    where = "memorizing.attention"
    block_memory.check_call(where, q, k, v, gate, block_size, rope_theta)
    check.integer(where, "queue_length", queue_length)
    return block_memory.attention(
        q, k, v, gate, _empty(q.shape[0], queue_length, k, v), Partial(_read, block_size), _write,
        where=where, block_size=block_size, rope_theta=rope_theta, segment_ids=segment_ids,
        max_segments=max_segments,
    )  # fmt: skip


def init_state(
    batch_size: int,
    queue_length: int,
    block_size: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    dtype: jax.typing.DTypeLike,
) -> BlockMemoryState[Queue]:
    """The state before the first token. Sizes as in `attention`; `dtype` is that of keys and values.

    Raises:
      TypeError, ValueError: a size is not an integer ≥ 1, or dtype is not one of floating point.
    """
    where = "memorizing.init_state"
    check_sizes(
        where, batch_size=batch_size, queue_length=queue_length, block_size=block_size, heads=heads, key_dim=key_dim,
        value_dim=value_dim,
    )  # fmt: skip
    check_dtype(where, dtype)
    zeros = lambda dim: jnp.zeros((batch_size, queue_length, heads, dim), dtype)
    queue = Queue(zeros(key_dim), zeros(value_dim))
    return block_memory.init_state(queue, batch_size, block_size, heads, key_dim, value_dim, dtype)


def extend(
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time heads key_dim"],
    v: Float[Array, "batch time heads value_dim"],
    gate: Float[Array, " heads"],
    state: BlockMemoryState[Queue],
    *,
    rope_theta: float | None = 1e4,
) -> tuple[Float[Array, "batch time heads value_dim"], BlockMemoryState[Queue]]:
    """`attention` for the next tokens of a stream, any time ≥ 1. Rows may have read different numbers of tokens.

    Args:
      q, k, v, gate, rope_theta: as in `attention`.
      state: from `init_state` or the previous `extend`.

    Returns:
      The output of `attention`, and the next state.

    Raises:
      TypeError, ValueError: invalid arguments.
    """
    sizes = block_memory.check_extend("memorizing.extend", q, k, v, gate, state, rope_theta, Queue, _AXES)
    read = Partial(_read, sizes["block_size"])
    return block_memory.extend(q, k, v, gate, state, read, _write, rope_theta=rope_theta)


def _empty(batch: int, length: int, k: jax.Array, v: jax.Array) -> Queue:
    zeros = lambda x: jnp.zeros((batch, length, *x.shape[2:]), x.dtype)
    return Queue(zeros(k), zeros(v))


def _read(block_size: int, queue: Queue, q: jax.Array, index: jax.Array) -> jax.Array:
    length = queue.keys.shape[1]
    # The newest token is last. Before `index` blocks were written the places in front are empty.
    visible = jnp.arange(length)[None, None] >= length - index[:, None, None] * block_size
    return softmax_attention(Source(q, queue.keys, queue.values, visible))


def _write(queue: Queue, k: jax.Array, v: jax.Array) -> Queue:
    # A block longer than the queue leaves its last tokens.
    join = lambda old, new: jnp.concatenate([old, new], axis=1)[:, -old.shape[1] :]
    return Queue(join(queue.keys, k), join(queue.values, v))
