"""Sequences cut into blocks of equal size: where their tokens lie, and what they see of their own block.

For layers that read block by block with a memory of the blocks before. Whole sequences, packed documents, each of which starts a
block, and pieces of a stream all become one grid of blocks, which is then read the same way.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from atlasjax.memory.check import check_segments
from atlasjax.mixers.attention import Source, segment_positions
from atlasjax.mixers.rotary import rotate


@dataclasses.dataclass(frozen=True)
class Grid:
    """Where the tokens of a call lie.

    Attributes:
      size: tokens of a block.
      index: [blocks, batch], the number of each block in its document: 0 where a document starts.
      time: tokens of a row.
      place: [batch, time], where each token lies among the blocks · size places; None: one after another from the first place on.
      touched: number of blocks, the first ones, in which these tokens may lie.
    """

    size: int
    index: jax.Array
    time: int
    place: jax.Array | None = None
    touched: int = dataclasses.field(kw_only=True)

    def lay(self, x: jax.Array, held: jax.Array | None = None) -> jax.Array:
        """[batch, time, …] → [blocks, batch, size, …], zero where no token lies.

        held: [batch, size, …], what the first block has already, of a stream; tokens are laid over it.
        """
        length, rest = self.index.shape[0] * self.size, x.shape[2:]
        pad = lambda x: jnp.pad(x, ((0, 0), (0, length - x.shape[1]), *((0, 0),) * len(rest)))
        if self.place is None:
            x = pad(x)
        else:
            rows = jnp.arange(x.shape[0])[:, None]
            start = jnp.zeros((x.shape[0], length, *rest), x.dtype) if held is None else pad(held)
            x = start.at[rows, self.place].set(x, mode="drop", unique_indices=True)
        return jnp.moveaxis(x.reshape(x.shape[0], -1, self.size, *rest), 1, 0)

    def pick(self, y: jax.Array) -> jax.Array:
        """The way back: [blocks, batch, size, …], of all blocks or those touched → [batch, time, …].

        NaN for a token without a place.
        """
        y = jnp.moveaxis(y, 0, 1)
        y = y.reshape(y.shape[0], -1, *y.shape[3:])
        if self.place is None:
            return y[:, : self.time]
        return y.at[jnp.arange(y.shape[0])[:, None], self.place].get(mode="fill", fill_value=jnp.nan)


def whole(batch: int, time: int, size: int) -> Grid:
    """Whole sequences: ⌈time / size⌉ blocks, the last one not always full."""
    count = -(-time // size)
    index = jnp.broadcast_to(jnp.arange(count)[:, None], (count, batch))
    return Grid(size, index, time, touched=count)


def documents(segment_ids: jax.Array, max_segments: int | None, x: jax.Array, size: int, where: str) -> Grid:
    """Packed documents: where the id changes a new one begins, and with it a new block.

    Args:
      segment_ids: integers [batch, time].
      max_segments: static bound on the documents of a row; needed under jit. Tokens of further ones may have no place.
      x: the tokens [batch, time, …].
      size: tokens of a block.
      where: the function, for messages.

    Raises:
      TypeError, ValueError: segment_ids or max_segments that do not fit.
    """
    most = check_segments(segment_ids, max_segments, x, where)
    assert most is not None
    batch, time = segment_ids.shape
    position, _ = segment_positions(segment_ids)
    slot = jnp.cumsum(position % size == 0, axis=1) - 1
    count = min((time + most * (size - 1)) // size, time)  # documents end their last blocks early
    rows = jnp.arange(batch)[:, None]
    index = jnp.zeros((batch, count), jnp.int32).at[rows, slot].set(position // size, mode="drop").T
    return Grid(size, index, time, slot * size + position % size, touched=count)


def continued(position: jax.Array, time: int, size: int) -> Grid:
    """The next `time` tokens of a stream of which `position`, [batch], were read: behind those that the current block has.

    There is a block for each that can be full afterwards, and one more: see `unfinished`.
    """
    count = (size - 1 + time) // size + 1
    place = (position % size)[:, None] + jnp.arange(time)
    index = position // size + jnp.arange(count)[:, None]
    return Grid(size, index, time, place, touched=(2 * size - 2 + time) // size)


def unfinished(position: jax.Array, time: int, size: int) -> jax.Array:
    """[batch], which block of `continued` is the current one after its tokens; all before it are full."""
    return (position % size + time) // size


def block_source(q: jax.Array, place: jax.Array, k: jax.Array, v: jax.Array, rope_theta: float | None) -> Source:
    """What queries see of their own block: its tokens up to their own places. Positions are local to the block.

    Args:
      q: not rotated, [batch, queries, heads, key_dim].
      place: of each query in the block, [batch, queries].
      k, v: all tokens of the block, not rotated, [batch, size, heads, dim].
      rope_theta: base of the wave lengths of the rotation; None: no rotation.
    """
    places = jnp.arange(k.shape[1])[None]
    visible = places[:, None] <= place[:, :, None]
    return Source(rotate(q, place, rope_theta), rotate(k, places, rope_theta), v, visible)


def check_block_size(where: str, block_size: Any) -> None:
    """Raise ValueError unless it is an integer ≥ 1."""
    if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1:
        raise ValueError(f"{where}: block_size must be an integer ≥ 1, got {block_size!r}.")
