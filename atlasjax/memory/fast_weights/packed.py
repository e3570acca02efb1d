"""Packed segments for the kernels: each segment on its own chunks, padded at the end of its last one."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from atlasjax.memory import grid
from atlasjax.memory.fast_weights.rule import MemoryRule
from atlasjax.memory.fast_weights.scan import window_count_of
from atlasjax.memory.fast_weights.state import MemoryParams, MemoryState
from atlasjax.memory.gates import Gates
from pallas_kernels.arguments import BEGINS, CONTINUES, EMPTY, Segments


class Packed(NamedTuple):
    """A call's tokens and gates on the grid of its segments, [batch, places, …], and what the kernels need to know of them.

    where: the places of all tokens. place: those of the tokens on the grid, the others are beyond its end.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    gates: Gates
    segments: Segments
    where: grid.Layout
    place: jax.Array

    def pick(self, y: jax.Array) -> jax.Array:
        """[batch, places, heads, dim] → [batch, time, heads, dim]. NaN for tokens without a place."""
        return grid.pick(y, self.place.shape[1], self.place)


def pack(
    rule: MemoryRule,
    params: MemoryParams,
    before: MemoryState,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: Gates,
    segment_ids: jax.Array,
    max_segments: int,
    chunk: int,
    *,
    whole: bool,
) -> Packed:
    """The grid of a call that begins at the start of a chunk, with an empty window. Arguments as in `pallas_scan`.

    chunk: tokens per chunk. whole: leaves out each row's last chunk if it is incomplete.
    """
    time = q.shape[1]
    count = window_count_of(before)
    where = grid.segmented_layout(
        segment_ids, max_segments, chunk, chunk, rule.window, jnp.zeros_like(count), count, before.segment
    )
    places, place, filled = where.num_slots * chunk, where.place, where.filled
    assert place is not None
    assert filled is not None
    assert where.resets is not None
    if whole:
        left_out = jnp.arange(time) >= time - where.position[:, None]
        place = jnp.where(left_out, places + jnp.arange(time), place)
        filled = filled & ~((jnp.arange(where.num_slots)[:, None] == last_slot(where, chunk)) & (where.position > 0))
    if gates.window_weights is not None:
        # A window ends at the start of its segment. Between its tokens there is no padding.
        t = jnp.arange(time)
        changes = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
        age = t - jax.lax.cummax(jnp.where(changes, t, 0), axis=1)
        inside = jnp.arange(gates.window_weights.shape[-1]) <= age[:, :, None, None]
        gates = gates._replace(window_weights=jnp.where(inside, gates.window_weights, 0.0))
    lay = lambda x, fill=0.0: grid.lay(x, places, place, fill)
    lay_gate = lambda x, fill=0.0: None if x is None else lay(x, fill)
    segments = Segments(
        marks=jnp.where(filled, jnp.where(where.resets, BEGINS, CONTINUES), EMPTY).astype(jnp.int32).T,
        start=rule.start(params.weights),
        real=lay(jnp.ones(segment_ids.shape, jnp.float32)),
    )
    laid = gates._replace(
        retention=lay_gate(gates.retention, 1.0),
        step_size=lay_gate(gates.step_size),
        momentum_decay=lay_gate(gates.momentum_decay, 1.0),
        window_weights=lay_gate(gates.window_weights),
    )
    return Packed(lay(q), lay(k), lay(v), laid, segments, where, place)


def last_slot(where: grid.Layout, chunk: int) -> jax.Array:
    """The chunk of each row's last token, [batch]."""
    assert where.place is not None
    return where.place[:, -1] // chunk
