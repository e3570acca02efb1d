"""Where each token of a call lies on the grid of chunks.

A call may begin in the middle of a chunk, and packed segments restart the grid, so tokens are laid into slots: one slot is
one chunk (padded to whole blocks), a token's offset in its slot is its place in its chunk, and the rest is no-op padding.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Layout(NamedTuple):
    """Slots of a call.

    Attributes:
      num_slots: static.
      place: [batch, time], of each token in the flattened slots; None if token t lies in slot t // chunk (a fresh call).
      first: [batch], offset of the first token in slot 0; None for 0.
      resets: [slots, batch], whether the slot begins a new segment; None if none does.
      filled: [slots, batch], whether the slot has any token; None if all have.
      window_count: [slots, batch], how many tokens before the slot belong to its segment, at most c − 1.
      overflow: [batch], whether there were more slots than `num_slots` (`max_segments` was too small).
      position: [batch], place in its chunk of the token that would come next.
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
    """A call that begins at the start of a chunk: token t lies in slot t // chunk."""
    num_slots = -(-time // chunk)
    starts = jnp.arange(num_slots)[:, None] * chunk
    return Layout(
        num_slots=num_slots,
        place=None,
        first=None,
        resets=None,
        filled=None,
        window_count=jnp.minimum(starts + count, window - 1),
        overflow=None,
        position=jnp.full((batch,), time % chunk, jnp.int32),
        last_count=jnp.minimum(count + time, window - 1),
    )


def streamed_layout(
    time: int,
    chunk: int,
    width: int,
    window: int,
    position: jax.Array,
    count: jax.Array,
    lengths: jax.Array | None = None,
) -> Layout:
    """A call that begins `position` tokens into a chunk (traced, one for each batch element).

    lengths: [batch], how many tokens of each row there are; the others find no slot. None: all.
    """
    num_slots = (time + chunk - 1 + chunk - 1) // chunk
    token = position[:, None] + jnp.arange(time)
    slots = jnp.arange(num_slots)[:, None]
    before = jnp.maximum(slots * chunk - position, 0) + count
    place = token // chunk * width + token % chunk
    if lengths is not None:
        # Beyond the last slot, each in a place of its own: scattering promises that no two are the same.
        place = jnp.where(jnp.arange(time) < lengths[:, None], place, num_slots * width + jnp.arange(time))
    end = time if lengths is None else lengths
    return Layout(
        num_slots=num_slots,
        place=place,
        first=position,
        resets=None,
        filled=slots * chunk < position + end,
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
    """Packed segments: every segment has its own grid of chunks, as if it were alone.

    The first segment goes on from the state if its id is the state's (or the state has seen none).
    """
    batch, time = segment_ids.shape
    num_slots = min(time, (time + (chunk - 1) * (max_segments + 1)) // chunk)
    previous = jnp.concatenate([jnp.where(segment < 0, segment_ids[:, 0], segment)[:, None], segment_ids[:, :-1]], 1)
    starts = segment_ids != previous
    t = jnp.arange(time)
    last_start = jax.lax.cummax(jnp.where(starts, t, -1), axis=1)
    carried = last_start < 0
    place = jnp.where(carried, position[:, None] + t, t - last_start)  # since the start of the segment's chunk grid
    offset = place % chunk
    opens = (offset == 0) | (t == 0)
    slot = jnp.cumsum(opens, axis=1) - 1
    seen = jnp.where(carried, count[:, None] + t, t - last_start)  # tokens of the segment before this one

    rows = jnp.arange(batch)[:, None]
    # Only slot-opening tokens write; the others are sent out of range and dropped.
    target = jnp.where(opens, slot, num_slots)
    scatter = lambda x, fill: jnp.full((batch, num_slots), fill, x.dtype).at[rows, target].set(x, mode="drop").T
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
