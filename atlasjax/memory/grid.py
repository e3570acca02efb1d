"""Layout of a call's tokens on a grid of chunks (or of segments, blocks, slots), and the conversion to and from it.

A call may begin in the middle of a chunk, and packed segments restart the grid, so tokens are placed in slots. A slot is one chunk
(padded to whole blocks). A token's offset in its slot is its position in its chunk, and the rest is padding without effect.
`aligned_layout`, `streamed_layout` and `segmented_layout` assign the places; `lay` moves tokens there, and `pick` moves them back.
"""

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from atlasjax.memory.products import wide_dtype

Tree = TypeVar("Tree")  # of arrays
MaybeArray = TypeVar("MaybeArray", jax.Array, jax.Array | None)


class Layout(NamedTuple):
    """The slots of a call.

    Attributes:
      num_slots: number of slots, static.
      place: [batch, time], index of each token in the flattened slots. None if token t is in slot t // chunk (a fresh call).
      first: [batch], offset of the first token in slot 0. None means 0.
      resets: [slots, batch], whether the slot begins a new segment. None if none does.
      filled: [slots, batch], whether the slot has any token. None if all have.
      window_count: [slots, batch], number of tokens before the slot that belong to its segment, at most c − 1.
      overflow: [batch], whether more than `num_slots` slots were needed (`max_segments` was too small).
      position: [batch], position in its chunk of the next token.
      last_count: [batch], the window count after the call.
    """

    num_slots: int
    place: jax.Array | None
    first: jax.Array | None
    resets: jax.Array | None
    filled: jax.Array | None
    window_count: jax.Array
    overflow: jax.Array | None
    position: jax.Array
    last_count: jax.Array


def aligned_layout(batch: int, time: int, chunk: int, window: int, count: jax.Array) -> Layout:
    """Layout of a call that begins at the start of a chunk: token t is in slot t // chunk."""
    num_slots = -(-time // chunk)
    starts = jnp.arange(num_slots)[:, None] * chunk
    return Layout(
        num_slots=num_slots,
        place=None,
        first=None,
        resets=None,
        filled=None,
        window_count=jnp.minimum(starts + count[None], window - 1),
        overflow=None,
        position=jnp.full((batch,), time % chunk, jnp.int32),
        last_count=jnp.minimum(count + time, window - 1),
    )


def streamed_layout(
    time: int,
    chunk: int,
    width: int,
    window: int,
    position: jax.Array | None,
    count: jax.Array,
    lengths: jax.Array | None = None,
) -> Layout:
    """Layout of a call that begins `position` tokens into a chunk (traced, one value per batch element).

    position: None means at the start of one, which takes no further slot. lengths: [batch], number of tokens in each row; the
    others get no slot. None means that all exist.
    """
    first = position
    num_slots = -(-time // chunk)
    if position is None:
        position = jnp.zeros_like(count)
    else:
        num_slots = (time + chunk - 1 + chunk - 1) // chunk
    t = jnp.arange(time)[None]
    token = position[:, None] + t
    slots = jnp.arange(num_slots)[:, None]
    before = jnp.maximum(slots * chunk - position[None], 0) + count[None]
    place = token // chunk * width + token % chunk
    if lengths is not None:
        # They get distinct indices beyond the last slot, because the scatter declares its indices unique.
        place = jnp.where(t < lengths[:, None], place, num_slots * width + t)
    end = time if lengths is None else lengths
    return Layout(
        num_slots=num_slots,
        place=place,
        first=first,
        resets=None,
        filled=slots * chunk < (position + end)[None],
        window_count=jnp.minimum(before, window - 1),
        overflow=None,
        position=(position + end) % chunk,
        last_count=jnp.minimum(count + end, window - 1),
    )


def segmented_layout(
    segment_ids: jax.Array,
    max_segments: int,
    chunk: int,
    width: int,
    window: int,
    position: jax.Array,
    count: jax.Array,
    segment: jax.Array,
) -> Layout:
    """Layout of packed segments: every segment has its own grid of chunks, as if it were alone.

    The first segment continues from the state if its id equals the state's, or if the state has no id: it is fresh, or has
    read only calls without ids.
    """
    time = segment_ids.shape[1]
    num_slots = min(time, (time + (chunk - 1) * (max_segments + 1)) // chunk)
    previous = jnp.concatenate([jnp.where(segment < 0, segment_ids[:, 0], segment)[:, None], segment_ids[:, :-1]], 1)
    starts = segment_ids != previous
    t = jnp.arange(time)[None]
    last_start = jax.lax.cummax(jnp.where(starts, t, -1), axis=1)
    carried = last_start < 0
    place = jnp.where(carried, position[:, None] + t, t - last_start)  # position in the segment's chunk grid
    offset = place % chunk
    opens = (offset == 0) | (t == 0)
    slot = jnp.cumsum(opens, axis=1) - 1
    seen = jnp.where(carried, count[:, None] + t, t - last_start)  # tokens of the segment before this one

    # Only tokens that open a slot write. The others are sent out of range and dropped.
    target = jnp.where(opens, slot, num_slots)
    scatter = lambda x, fill: scattered(x, num_slots, target, fill).T
    return Layout(
        num_slots=num_slots,
        place=slot * width + offset,
        first=jnp.where(starts[:, 0], 0, position),
        resets=scatter(starts, False),
        filled=scatter(opens, False),
        window_count=jnp.minimum(scatter(seen, 0), window - 1),
        overflow=slot[:, -1] >= num_slots,
        position=(place[:, -1] + 1) % chunk,
        last_count=jnp.minimum(seen[:, -1] + 1, window - 1),
    )


class Pieces(NamedTuple):
    """The segments of a call, at most one piece of a segment in each slot, with its tokens at the front.

    Attributes:
      slots: their number, static.
      width: places of a slot, static.
      place: [batch, time], index of each token in the flattened slots.
      lengths: [slots, batch], number of tokens in the slot.
      resets: [slots, batch], whether a document begins in the slot. None if none does.
      overflow: [batch], whether there were more slots than `max_segments` allows. None without documents.
    """

    slots: int
    width: int
    place: jax.Array
    lengths: jax.Array
    resets: jax.Array | None = None
    overflow: jax.Array | None = None


def continued_pieces(time: int, size: int, position: jax.Array) -> Pieces:
    """The segments of a call that begins `position` [batch] tokens into a segment of `size` tokens."""
    count, width = (time + size - 1) // size + 1, min(size, time)
    token = position[:, None] + jnp.arange(time)[None]
    segment = token // size
    offset = token - jnp.where(segment == 0, position[:, None], segment * size)
    slot, first = jnp.arange(count)[:, None], position[None]
    start = jnp.where(slot == 0, first, slot * size)
    lengths = jnp.clip(first + time - start, 0, jnp.where(slot == 0, size - first, size))
    return Pieces(count, width, segment * width + offset, lengths)


def document_pieces(segment_ids: jax.Array, max_segments: int, size: int) -> Pieces:
    """The segments of packed documents, each of which begins a segment."""
    zeros = jnp.zeros(segment_ids.shape[0], jnp.int32)
    where = segmented_layout(segment_ids, max_segments, size, size, 1, zeros, zeros, zeros - 1)
    assert where.place is not None
    count = lambda slots: jnp.zeros(where.num_slots, jnp.int32).at[slots].add(1, mode="drop")
    lengths = jax.vmap(count)(where.place // size).T
    return Pieces(where.num_slots, size, where.place, lengths, where.resets, where.overflow)


def scattered(x: jax.Array, count: int, slot: jax.Array, fill: jax.typing.ArrayLike) -> jax.Array:
    """[batch, time] → [batch, count], with each x in its slot [batch, time] and `fill` elsewhere. Slots out of range are left out.

    Tokens may share a slot if their x is the same; `lay` is for places that are all distinct. Mapped over the batch, as there.
    """
    return jax.vmap(lambda x, slot: jnp.full(count, fill, x.dtype).at[slot].set(x, mode="drop"))(x, slot)


def lay(
    x: jax.Array,
    places: int,
    place: jax.Array | None = None,
    fill: jax.typing.ArrayLike = 0.0,
    held: jax.Array | None = None,
) -> jax.Array:
    """Puts tokens in their places: [batch, time, …] → [batch, places, …].

    Args:
      x: the tokens.
      places: number of places, static.
      place: [batch, time], the place of each token, all distinct. A token beyond the last place is dropped. None puts token t in
        place t, by padding instead of a scatter.
      fill: value of empty places.
      held: [batch, n, …], previous contents of the first n places, which tokens overwrite; only with `place`.
    """
    time, rest = x.shape[1], x.shape[2:]
    pad = lambda x: jnp.pad(x, ((0, 0), (0, places - x.shape[1]), *((0, 0),) * len(rest)), constant_values=fill)
    if place is None:
        return pad(x) if places > time else x
    start = (
        jnp.full((x.shape[0], places, *rest), fill, x.dtype) if held is None else pad(held[:, :places].astype(x.dtype))
    )
    # Mapped over the batch, because XLA keeps a mapped axis divided over devices. It gathers all rows for an axis of indices.
    put = lambda start, place, x: start.at[place].set(x, mode="drop", unique_indices=True)
    return jax.vmap(put)(start, place, x)


def pick(y: jax.Array, time: int, place: jax.Array | None = None) -> jax.Array:
    """The inverse of `lay`: [batch, places, …] → [batch, time, …]. NaN for a token that was dropped."""
    if place is None:
        return y[:, :time]
    return jax.vmap(lambda y, place: y.at[place].get(mode="fill", fill_value=jnp.nan))(y, place)


def lay_chunks(
    x: jax.Array,
    count: int,
    size: int,
    place: jax.Array | None = None,
    fill: jax.typing.ArrayLike = 0.0,
    held: jax.Array | None = None,
) -> jax.Array:
    """`lay` for `count` chunks of `size` places: [batch, time, …] → [count, batch, size, …]."""
    y = lay(x, count * size, place, fill, held)
    return jnp.moveaxis(y.reshape(y.shape[0], count, size, *y.shape[2:]), 1, 0)


def pick_chunks(y: jax.Array, time: int, place: jax.Array | None = None) -> jax.Array:
    """The inverse of `lay_chunks`, from all chunks or the first ones: [chunks, batch, size, …] → [batch, time, …]."""
    y = jnp.moveaxis(y, 0, 1)
    return pick(y.reshape(y.shape[0], -1, *y.shape[3:]), time, place)


def as_rows(x: jax.Array) -> jax.Array:
    """[pieces, batch, …] → [batch · pieces, …], for a call that takes each piece as a sequence of its own.

    The batch is the outer axis, because XLA can keep only the outer axis of the two divided over devices. With the batch inside,
    every device would compute the pieces of all devices.
    """
    return jnp.swapaxes(x, 0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def from_rows(x: jax.Array, pieces: int) -> jax.Array:
    """The inverse of `as_rows`: [batch · pieces, …] → [pieces, batch, …]."""
    return jnp.swapaxes(x.reshape(x.shape[0] // pieces, pieces, *x.shape[1:]), 0, 1)


def widened(tree: Tree, dtype: jnp.dtype) -> Tree:
    """The same arrays, where those of floating point are at least as wide as `dtype`: float32 states of float64 tokens."""
    widen = lambda x: x.astype(wide_dtype(x.dtype, dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return jax.tree.map(widen, tree)


def choose(condition: jax.Array, a: Tree, b: Tree) -> Tree:
    """For each batch element, the leaves of `a` where the condition [batch] holds, otherwise those of `b`."""
    expand = lambda x: condition.reshape(-1, *(1,) * (x.ndim - 1))
    return jax.tree.map(lambda x, y: jnp.where(expand(y), x, y), a, b)
