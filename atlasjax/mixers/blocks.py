"""Sequences split into blocks of equal size: the layout of their tokens, and attention within a block.

For layers that read block by block with a memory of the earlier blocks. Whole sequences, packed documents (each of which starts a
block) and pieces of a stream are all laid out on one grid of blocks, which is then read in the same way.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from atlasjax.memory import grid
from atlasjax.mixers.attention import segment_positions
from atlasjax.mixers.rotary import rotate
from atlasjax.mixers.softmax_attention import Source


@dataclasses.dataclass(frozen=True)
class Grid:
    """The layout of a call's tokens on a grid of blocks.

    Attributes:
      size: tokens per block.
      index: [blocks, batch], the index of each block in its document, 0 where a document starts.
      time: tokens per row.
      place: [batch, time], among the blocks · size places of the grid. None means consecutive places from the first on.
      touched: number of leading blocks that may contain these tokens.
    """

    size: int
    index: Int[Array, "blocks batch"]
    time: int
    place: Int[Array, "batch time"] | None = None
    touched: int = dataclasses.field(kw_only=True)

    def lay(
        self, x: Float[Array, "batch time ..."], held: Float[Array, "batch size ..."] | None = None
    ) -> Float[Array, "blocks batch size ..."]:
        """[batch, time, …] → [blocks, batch, size, …], zero in empty places.

        held: [batch, size, …], the previous content of the first block in a stream, which the tokens overwrite.
        """
        return grid.lay_chunks(x, self.index.shape[0], self.size, self.place, held=held)

    def pick(self, y: Float[Array, "_blocks batch size ..."]) -> Float[Array, "batch time ..."]:
        """The inverse of `lay`: [blocks, batch, size, …], for all blocks or only those touched → [batch, time, …].

        NaN for a token without a place.
        """
        return grid.pick_chunks(y, self.time, self.place)


def whole(batch: int, time: int, size: int) -> Grid:
    """The grid of whole sequences: ⌈time / size⌉ blocks, of which the last may not be full. A single one has only `time` places."""
    count = -(-time // size)
    index = jnp.broadcast_to(jnp.arange(count)[:, None], (count, batch))
    return Grid(min(size, time), index, time, touched=count)


def documents(segment_ids: Int[Array, "batch time"], max_segments: int, size: int) -> Grid:
    """The grid of packed documents. A new document, and with it a new block, begins where the id changes.

    Args:
      segment_ids: integers [batch, time].
      max_segments: static bound on the number of documents in a row. Tokens of documents beyond the bound have no place.
      size: tokens per block.
    """
    time = segment_ids.shape[1]
    position, segment = segment_positions(segment_ids)
    block = jnp.cumsum(position % size == 0, axis=1) - 1
    count = min((time + max_segments * (size - 1)) // size, time)  # a document's last block may be partly empty
    index = grid.scattered(position // size, count, block, 0).T
    # They get distinct places beyond the last one, because the scatter declares its indices unique.
    place = jnp.where(segment < max_segments, block * size + position % size, count * size + jnp.arange(time)[None])
    return Grid(size, index, time, place, touched=count)


def continued(position: Int[Array, " batch"], time: int, size: int) -> Grid:
    """The grid of the next `time` tokens of a stream after `position` [batch] tokens, starting inside the current block.

    It has one block for each block that may be full afterwards, and one more: see `unfinished`. Its blocks hold keys and values.
    For the queries see `continued_queries`.
    """
    count = (size - 1 + time) // size + 1
    place = (position % size)[:, None] + jnp.arange(time)[None]
    index = (position // size)[None] + jnp.arange(count)[:, None]
    return Grid(size, index, time, place, touched=(2 * size - 2 + time) // size)


def continued_queries(
    position: Int[Array, " batch"], time: int, size: int
) -> tuple[Grid, Int[Array, "blocks batch width"]]:
    """The grid of the queries of `continued`: its touched blocks, with places for the new tokens only.

    A piece that is shorter than a block has at most `time` queries in each of the blocks it touches, so the blocks have as many
    places, which are filled from the first on.

    Returns:
      The grid, and the position of each place in its block of `size` tokens. Places beyond the last position repeat it; they are
      empty.
    """
    keys, width = continued(position, time, size), min(size, time)
    assert keys.place is not None
    index = keys.index[: keys.touched]
    first = jnp.where(jnp.arange(keys.touched)[:, None] == 0, position % size, 0)
    block, offset = keys.place // size, keys.place % size
    place = block * width + jnp.where(block == 0, offset - position[:, None] % size, offset)
    places = jnp.minimum(first[:, :, None] + jnp.arange(width)[None, None], size - 1)
    return Grid(width, index, time, place, touched=keys.touched), places


def unfinished(position: Int[Array, " batch"], time: int, size: int) -> Int[Array, " batch"]:
    """[batch], the block of `continued` that is current after its tokens. All blocks before it are full."""
    return (position % size + time) // size


def block_source(
    q: Float[Array, "batch queries heads key_dim"],
    place: Int[Array, "batch queries"] | None,
    k: Float[Array, "batch size heads key_dim"],
    v: Float[Array, "batch size heads value_dim"],
    rope_theta: float | None,
) -> Source:
    """The source of causal attention within a block. Rotary positions are local to the block.

    Args:
      q: before rotation, [batch, queries, heads, key_dim].
      place: position of each query in the block, [batch, queries]. None: they are those of all tokens of the block.
      k, v: all tokens of the block, before rotation, [batch, size, heads, dim].
      rope_theta: base of the rotary wavelengths. None means no rotation.
    """
    places = jnp.arange(k.shape[1])[None]
    q = rotate(q, places if place is None else place, rope_theta)
    return Source(q, rotate(k, places, rope_theta), v, causal(place, k.shape[1]))


def causal(place: Int[Array, "batch queries"] | None, size: int) -> Bool[Array, "_batch queries size"]:
    """Which tokens of a block of `size` the queries at these positions see. None: those of all its tokens."""
    places = jnp.arange(size)[None]
    return places[None] <= (places if place is None else place)[:, :, None]
