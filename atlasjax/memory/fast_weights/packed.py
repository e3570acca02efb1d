"""Calls whose tokens the kernels find on a grid of chunks: packed segments, and calls that begin inside a chunk.

Each segment has its own chunks, with padding at the end of its last one. The first tokens of a call that begins inside a chunk
(the head) are not on the grid. The XLA engine runs them, because their gradients are taken at an earlier memory than the current.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from atlasjax.memory import grid
from atlasjax.memory.fast_weights.scan import window_count_of
from atlasjax.memory.fast_weights.spec import MemorySpec
from atlasjax.memory.fast_weights.state import MemoryParams, MemoryState
from atlasjax.memory.tokens import Tokens
from pallas_kernels.arguments import BEGINS, CONTINUES, EMPTY, Segments


class Packed(NamedTuple):
    """A call's tokens on the grid, [batch, places, …], without segment ids, and what the kernels need to know of it.

    place: the places of the tokens, [batch, time]. Those of the head, and of tokens for which there is none, are beyond the end.
    """

    tokens: Tokens
    segments: Segments
    place: jax.Array

    def pick(self, y: jax.Array) -> jax.Array:
        """[batch, places, heads, dim] → [batch, time, heads, dim]. NaN for tokens without a place."""
        return grid.pick(y, self.place.shape[1], self.place)


def layout(
    rule: MemorySpec,
    before: MemoryState,
    tokens: Tokens,
    max_segments: int | None,
    chunk: int,
) -> grid.Layout:
    """The grid of a call in chunks of `chunk`. The other arguments are those of `pallas_scan`."""
    time, segment_ids = tokens.q.shape[1], tokens.segment_ids
    count = window_count_of(before)
    position = jnp.zeros_like(count) if before.position is None else before.position
    if segment_ids is None:
        return grid.streamed_layout(time, chunk, chunk, rule.window, position, count)
    assert max_segments is not None
    return grid.segmented_layout(segment_ids, max_segments, chunk, chunk, rule.window, position, count, before.segment)


def head_lengths(where: grid.Layout, chunk: int) -> jax.Array:
    """The number of tokens of each row that belong to the chunk in which the call begins, [batch], 0 at the start of a chunk."""
    assert where.place is not None
    assert where.first is not None
    return jnp.where(where.first > 0, jnp.sum(where.place < chunk, axis=1), 0)


def pack(
    rule: MemorySpec,
    params: MemoryParams,
    before: MemoryState,
    where: grid.Layout,
    tokens: Tokens,
    chunk: int,
    head: jax.Array | None = None,
) -> Packed:
    """The call on its grid `where`, without its `head`. The other arguments are those of `pallas_scan`."""
    q, k, v, gates, segment_ids = tokens
    time, places = q.shape[1], where.num_slots * chunk
    t = jnp.arange(time)
    place, filled = where.place, where.filled
    assert place is not None
    assert filled is not None
    resets = jnp.zeros_like(filled) if where.resets is None else where.resets
    marks = jnp.where(filled, jnp.where(resets, BEGINS, CONTINUES), EMPTY).astype(jnp.int32).T
    if head is not None:
        # The chunk after the head's comes first.
        shift = (head > 0)[:, None]
        # Out of range, and distinct, because the scatter declares its indices unique.
        place = jnp.where(t < head[:, None], places + t, place - shift * chunk)
        # The grid keeps its size: the head's chunk is gone, and an empty one stands at the end.
        marks = jnp.where(shift, jnp.pad(marks[:, 1:], ((0, 0), (0, 1)), constant_values=EMPTY), marks)
    if gates.window_weights is not None and segment_ids is not None:
        # A window ends at the start of its segment. Between its tokens there is no padding.
        first = jnp.where(before.segment < 0, segment_ids[:, 0], before.segment)
        begins = segment_ids != jnp.concatenate([first[:, None], segment_ids[:, :-1]], axis=1)
        start = jax.lax.cummax(
            jnp.where(begins, t, -time), axis=1
        )  # far back in the segment that goes on from the state
        inside = jnp.arange(gates.window_weights.shape[-1]) <= (t - start)[:, :, None, None]
        goes_on = (start < 0)[:, :, None, None]
        gates = gates._replace(window_weights=jnp.where(goes_on | inside, gates.window_weights, 0.0))
    lay = lambda x, fill=0.0: grid.lay(x, places, place, fill)
    lay_gate = lambda x, fill=0.0: None if x is None else lay(x, fill)
    segments = Segments(
        marks=marks,
        start=None if segment_ids is None else rule.start(params.weights),
        real=lay(jnp.ones(q.shape[:2], jnp.float32)),
    )
    laid = gates._replace(
        retention=lay_gate(gates.retention, 1.0),
        step_size=lay_gate(gates.step_size),
        momentum_decay=lay_gate(gates.momentum_decay, 1.0),
        write_size=lay_gate(gates.write_size),
        window_weights=lay_gate(gates.window_weights),
        threshold=lay_gate(gates.threshold, 1.0),
        removal_key=lay_gate(gates.removal_key),
        removal=lay_gate(gates.removal),
    )
    return Packed(Tokens(lay(q), lay(k), lay(v), laid), segments, place)


def without_last_chunk(segments: Segments, is_left_out: jax.Array) -> Segments:
    """The same segments without the last chunk of each row [batch] where `is_left_out`."""
    count = jnp.sum(segments.marks != EMPTY, axis=1, keepdims=True)
    last = jnp.arange(segments.marks.shape[1]) == count - 1
    return segments._replace(marks=jnp.where(last & is_left_out[:, None], EMPTY, segments.marks))
