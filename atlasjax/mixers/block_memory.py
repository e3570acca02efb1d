"""Attention within blocks, gated for each head with the read of a memory of the earlier blocks.

    y_t = (1 − σ(b_h)) · local_t + σ(b_h) · read(memory, q_t)        only local_t in a document's first block: the memory is empty
    memory ← write(memory, k, v of the block)                        once, after the block

`memorizing` and `infini` share this code. A memory is a pytree of arrays with the batch axis first, and is empty if all are zero.

    read:  (memory, q [batch, time, heads, key_dim], index of the block in its document [batch]) → [batch, time, heads, value_dim]
    write: (memory, k, v [batch, block_size, heads, dim] of a full block) → memory

`read` is a pytree (`jax.tree_util.Partial`), and `write` a function of a module: calls with equal ones share a compiled program.
Both take queries and keys without rotation, as in the two papers.
"""

import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlasjax import check
from atlasjax.memory.check import check_segments
from atlasjax.memory.grid import choose
from atlasjax.mixers.blocks import block_source, continued, continued_queries, documents, unfinished, whole
from atlasjax.mixers.rotary import check_rotary
from atlasjax.mixers.shapes import check_shapes
from atlasjax.mixers.softmax_attention import softmax_attention

_AXES = {
    "q": "batch time heads key_dim",
    "k": "batch time heads key_dim",
    "v": "batch time heads value_dim",
    "gate": "heads",
    "state.block.keys": "batch block_size heads key_dim",
    "state.block.values": "batch block_size heads value_dim",
    "state.block.position": "batch",
}

Memory = TypeVar("Memory")
Read = Callable[[Memory, jax.Array, jax.Array], jax.Array]
Write = Callable[[Memory, jax.Array, jax.Array], Memory]


class CurrentBlock(NamedTuple):
    """The current block of a stream.

    Attributes:
      keys: unrotated keys by position in the block, [batch, block_size, heads, key_dim]. Positions not yet reached still hold the
        previous block's.
      values: [batch, block_size, heads, value_dim].
      position: number of tokens read, [batch].
    """

    keys: Float[Array, "batch block_size heads key_dim"]
    values: Float[Array, "batch block_size heads value_dim"]
    position: Int[Array, " batch"]

    @property
    def heads_axis(self) -> int:  # of its arrays, for `distributed.cache_shardings`
        return 2


class BlockMemoryState(NamedTuple, Generic[Memory]):
    """The streaming state. Its size does not depend on the number of tokens read.

    Attributes:
      memory: the memory of all blocks before the current one.
      block: the current block.
    """

    memory: Memory
    block: CurrentBlock


def attention(
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time heads key_dim"],
    v: Float[Array, "batch time heads value_dim"],
    gate: Float[Array, " heads"],
    empty: Memory,
    read: Read[Memory],
    write: Write[Memory],
    *,
    where: str,
    block_size: int,
    rope_theta: float | None,
    segment_ids: Int[Array, "batch time"] | None,
    max_segments: int | None,
) -> Float[Array, "batch time heads value_dim"]:
    """Attention over whole sequences, see `memorizing.attention`. `empty` is the memory before the first block."""
    most = check_segments(segment_ids, max_segments, q, where)
    return _whole(q, k, v, gate, empty, read, segment_ids, write, block_size, rope_theta, most)


@functools.partial(jax.jit, static_argnames=("write", "block_size", "rope_theta", "max_segments"))
def _whole(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate: jax.Array,
    empty: Memory,
    read: Read[Memory],
    segment_ids: jax.Array | None,
    write: Write[Memory],
    block_size: int,
    rope_theta: float | None,
    max_segments: int | None,
) -> jax.Array:
    batch, time = q.shape[:2]
    if segment_ids is None:
        grid = whole(batch, time, block_size)
        if grid.touched == 1:  # a single block has no memory to read
            return softmax_attention(block_source(q, None, k, v, rope_theta))
    else:
        assert max_segments is not None
        grid = documents(segment_ids, max_segments, block_size)
    blocks = (grid.lay(q), None, grid.lay(k), grid.lay(v), grid.index, None)
    y, _ = _read_blocks(blocks, gate, empty, read, write, rope_theta)
    return grid.pick(y)


def init_state(
    memory: Memory,
    batch_size: int,
    block_size: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    dtype: jax.typing.DTypeLike,
) -> BlockMemoryState[Memory]:
    """The state before the first token, with an empty memory."""
    zeros = lambda dim: jnp.zeros((batch_size, block_size, heads, dim), dtype)
    return BlockMemoryState(memory, CurrentBlock(zeros(key_dim), zeros(value_dim), jnp.zeros(batch_size, jnp.int32)))


@functools.partial(jax.jit, static_argnames=("write", "rope_theta"))
def extend(
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time heads key_dim"],
    v: Float[Array, "batch time heads value_dim"],
    gate: Float[Array, " heads"],
    state: BlockMemoryState[Memory],
    read: Read[Memory],
    write: Write[Memory],
    *,
    rope_theta: float | None,
) -> tuple[Float[Array, "batch time heads value_dim"], BlockMemoryState[Memory]]:
    """Attention for the next tokens of a stream, any time ≥ 1. Rows may have read different numbers of tokens."""
    memory, (keys, values, position) = state
    size, (batch, time) = keys.shape[1], q.shape[:2]
    rows = jnp.arange(batch)
    if time > 1:
        grid, last = continued(position, time, size), unfinished(position, time, size)
        queries, places = continued_queries(position, time, size)
        kb, vb = grid.lay(k, keys), grid.lay(v, values)
        full = jnp.arange(grid.touched)[:, None] < last[None]
        blocks = (queries.lay(q), places, kb[: grid.touched], vb[: grid.touched], queries.index, full)
        y, memory = _read_blocks(blocks, gate, memory, read, write, rope_theta)
        return queries.pick(y), BlockMemoryState(memory, CurrentBlock(kb[last, rows], vb[last, rows], position + time))
    place = position % size
    keys, values = keys.at[rows, place].set(k[:, 0]), values.at[rows, place].set(v[:, 0])
    y = _mix(q, place[:, None], keys, values, memory, position // size, gate, read, rope_theta)
    memory = _write_full(write, memory, keys, values, place == size - 1)
    return y, BlockMemoryState(memory, CurrentBlock(keys, values, position + 1))


def _write_full(write: Write[Memory], memory: Memory, k: jax.Array, v: jax.Array, full: jax.Array) -> Memory:
    """The memory after a block that is written only in the rows where it is full, boolean [batch]."""
    store = lambda memory: choose(full, write(memory, k, v), memory)
    return jax.lax.cond(jnp.any(full), store, lambda memory: memory, memory)


def _read_blocks(
    blocks: tuple[Any, ...],
    gate: jax.Array,
    memory: Memory,
    read: Read[Memory],
    write: Write[Memory],
    rope_theta: float | None,
) -> tuple[jax.Array, Memory]:
    """Reads the blocks one after another.

    blocks: q [blocks, batch, queries, …] and their places in the blocks, [blocks, batch, queries], or None for all places; k, v
    [blocks, batch, size, …]; the index of each block in its document, [blocks, batch]; and which blocks are full and are written to
    the memory, boolean [blocks, batch]. None writes all of them: a block that is not full is the last of its document or of the
    row, so nothing reads its write.
    """

    def block(memory: Memory, xs: tuple[Any, ...]) -> tuple[Memory, jax.Array]:
        q, place, k, v, index, full = xs
        memory = choose(index > 0, memory, jax.tree.map(jnp.zeros_like, memory))
        y = _mix(q, place, k, v, memory, index, gate, read, rope_theta)
        return write(memory, k, v) if full is None else _write_full(write, memory, k, v, full), y

    # The backward pass keeps the memory before each block and computes the scores of the block again.
    memory, y = jax.lax.scan(jax.checkpoint(block, prevent_cse=False), memory, blocks)
    return y, memory


def _mix(
    q: jax.Array,
    place: jax.Array | None,
    k: jax.Array,
    v: jax.Array,
    memory: Memory,
    index: jax.Array,
    gate: jax.Array,
    read: Read[Memory],
    rope_theta: float | None,
) -> jax.Array:
    """Attention of queries at positions `place` of one block, as for `block_source`, with keys and values k, v [batch, size, …]."""
    local = softmax_attention(block_source(q, place, k, v, rope_theta)).astype(jnp.float32)
    past = read(memory, q, index).astype(jnp.float32)
    share = jnp.where(index[:, None] > 0, jax.nn.sigmoid(gate.astype(jnp.float32)), 0.0)[:, None, :, None]
    return (local + share * (past - local)).astype(v.dtype)


def check_call(where: str, q: object, k: object, v: object, gate: object, block_size: int, rope_theta: object) -> None:
    """Raises TypeError or ValueError for invalid arguments of an attention over whole sequences."""
    sizes = check_shapes(where, _AXES, q=q, k=k, v=v, gate=gate)
    check_rotary(where, rope_theta, sizes["key_dim"])
    check.integer(where, "block_size", block_size)


def check_extend(
    where: str,
    q: object,
    k: object,
    v: object,
    gate: object,
    state: object,
    rope_theta: object,
    memory: type,
    axes: dict[str, str],
) -> dict[str, int]:
    """The sizes by axis name. Raises TypeError or ValueError for invalid arguments of an extend.

    memory: the type of the state's memory. axes: its arrays → their axes, as for `check_shapes`.
    """
    if not isinstance(state, BlockMemoryState) or not isinstance(state.memory, memory):
        raise TypeError(f"{where}: state must be the result of its own init_state or extend, got {state!r:.200}.")
    sizes = check_shapes(
        where, _AXES | axes, integers=("state.block.position",), q=q, k=k, v=v, gate=gate, state=state
    )  # fmt: skip
    check_rotary(where, rope_theta, sizes["key_dim"])
    return sizes
