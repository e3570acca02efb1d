"""Memory Caching from a fresh memory: all segments of a call in parallel, each reading the ones before it."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from atlasjax.memory import grid, meshes
from atlasjax.memory.caching import combine
from atlasjax.memory.caching import gates as gating
from atlasjax.memory.caching.init import empty_cache, fresh_memory
from atlasjax.memory.caching.spec import CachedSpec
from atlasjax.memory.caching.state import CachedState, CachedTokens, in_segment
from atlasjax.memory.fast_weights.chunk import Soup
from atlasjax.memory.gates import Weights
from atlasjax.memory.grid import choose
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.rule import Params


def parallel_scan(
    rule: CachedSpec[Params],
    params: Params,
    tokens: CachedTokens,
    segment_ids: jax.Array | None,
    max_segments: int | None,
) -> tuple[jax.Array, CachedState]:
    """A call from a fresh memory: writes all segments in parallel (with "carry", sequentially), then computes their reads."""
    batch, time = tokens.tokens.q.shape[:2]
    size = rule.segment_size
    where = _layout(rule, batch, time, segment_ids, max_segments)
    rows = jax.tree.map(
        lambda x: grid.lay_chunks(x, where.segments, size, where.place), tokens
    )  # [segments, batch, C, heads, …]
    lengths = where.lengths
    y, ends, starts = write_segments(rule, params, rows, lengths, where.resets)
    weights = rule.rule.cached_weights(ends)
    if rule.stop_gradient:
        weights = jax.lax.stop_gradient(weights)
    y = read_segments(rule, params, rows, y, Cached(weights, where.visible), starts)
    out = grid.pick_chunks(jnp.swapaxes(y, 2, 3), time, where.place).astype(tokens.tokens.q.dtype)
    return out, _last_state(rule, params, where, rows, ends, weights, time, segment_ids)


class _Layout(NamedTuple):
    """The segments of a call.

    place: [batch, time], each token's place in the flattened segments, None if token t is at place t. resets: [segments, batch],
    whether a document begins there. lengths: [segments, batch], tokens per segment, None if all are full. last: [batch], the
    segment of the last token. visible: [segments, batch or 1, segments], whether the reader (first axis) sees the memory (last
    axis). overflow: [batch], whether the segments did not suffice.
    """

    segments: int
    place: jax.Array | None
    resets: jax.Array | None
    lengths: jax.Array | None
    last: jax.Array | None
    visible: jax.Array
    overflow: jax.Array | None


def _layout(
    rule: CachedSpec[Params], batch: int, time: int, segment_ids: jax.Array | None, max_segments: int | None
) -> _Layout:
    size = rule.segment_size
    reach = lambda count: count if rule.capacity is None else rule.capacity
    if segment_ids is None:
        count = -(-time // size)
        s, i = jnp.arange(count)[:, None, None], jnp.arange(count)[None, None]
        lengths = None
        if time % size:
            lengths = jnp.full((count, batch), size).at[-1].set(time % size)
        return _Layout(count, None, None, lengths, None, (i < s) & (s - i <= reach(count)), None)
    assert max_segments is not None
    where = grid.document_pieces(segment_ids, max_segments, size)
    count = where.slots
    assert where.resets is not None
    s, i = jnp.arange(count)[:, None, None], jnp.arange(count)[None, None]
    begins = jax.lax.cummax(jnp.where(where.resets, jnp.arange(count)[:, None], 0), axis=0)[:, :, None]
    visible = (i < s) & (i >= begins) & (s - i <= reach(count))
    return _Layout(count, where.place, where.resets, where.lengths, where.place[:, -1] // size, visible, where.overflow)


def write_segments(
    rule: CachedSpec[Params], params: Params, rows: CachedTokens, lengths: jax.Array | None, resets: jax.Array | None
) -> tuple[jax.Array, PyTree, PyTree | None]:
    """Reads M_t(q_t) of the segments' own memories, [segments, batch, C, heads, value_dim], the states at the segments' ends, and
    those at their starts (None if all are fresh)."""
    starts = None
    count, batch, size = rows.tokens.q.shape[:3]
    if rule.start == "fresh":
        tokens = jax.tree.map(grid.as_rows, rows.tokens)
        short = None if lengths is None else grid.as_rows(lengths)
        y, ends = rule.rule.scan(params, None, *tokens, lengths=short)
        y, ends = jax.tree.map(lambda x: grid.from_rows(x, count), (y, ends))
    else:
        fresh = fresh_memory(rule, params, batch)

        def segment(
            state: PyTree, xs: tuple[CachedTokens, jax.Array | None, jax.Array | None]
        ) -> tuple[PyTree, tuple[jax.Array, PyTree, PyTree | None]]:
            row, lengths, reset = xs
            if reset is not None:
                state = choose(reset, fresh, state)
            y, after = rule.continue_segments(params, state, row.tokens, lengths)
            return after, (y, after, state if rule.mixes_weights else None)

        # The backward pass keeps the state before each segment and computes the segment again.
        run = jax.checkpoint(segment, prevent_cse=False)
        wide = wide_dtype(rows.tokens.q.dtype)
        start = jax.tree.map(lambda x: x.astype(wide) if jnp.issubdtype(x.dtype, jnp.floating) else x, fresh)
        _, (y, ends, starts) = meshes.scan(run, start, (rows, lengths, resets))
    if lengths is not None:
        real = jnp.arange(size)[None, None] < lengths[..., None]
        y = jnp.where(real[..., None, None], y, 0.0)
    return y, ends, starts


class Cached(NamedTuple):
    """The memories that segments cache, and who reads them.

    weights: θ, [segments, batch, heads, out, in]. visible: [segments, batch or 1, all], whether the reader (first axis) sees the
    memory (last axis). first, axes: if segments are divided over mesh axes, the number of this device's first one; `weights` and
    readers are then those of this device, and all are the segments of all devices in order.
    """

    weights: Weights
    visible: jax.Array
    first: jax.Array | int = 0
    axes: tuple[str, ...] = ()

    def of_all(self, x: PyTree) -> PyTree:
        """Arrays [segments, …] of all devices: [all, …]."""
        return jax.lax.all_gather(x, self.axes, tiled=True) if self.axes else x


def read_segments(
    rule: CachedSpec[Params],
    params: Params,
    rows: CachedTokens,
    y: jax.Array,
    cached: Cached,
    starts: PyTree | None = None,
) -> jax.Array:
    """The tokens' reads of all memories: [segments, batch, heads, C, value_dim].

    Args:
      y: reads of their own memories, [segments, batch, C, heads, value_dim].
      cached: the memories of the segments.
      starts: states before the segments' first tokens, None if all are fresh.
    """
    dtype = rows.tokens.q.dtype
    wide = wide_dtype(dtype)
    up = lambda x: jnp.swapaxes(x.astype(wide), 2, 3)  # [segments, batch, heads, C, …]
    q, k, own_read = up(rows.tokens.q), up(rows.tokens.k), up(y)
    count, size, total = q.shape[0], q.shape[3], cached.visible.shape[-1]
    if total == 1 and (rule.gate in ("softmax", "ones") or not rule.has_scores):
        return own_read
    params = jax.tree.map(lambda x: x.astype(wide), params)
    blend = None if rows.blend is None else up(rows.blend)
    connector = None if rows.connector is None else up(rows.connector)
    keys: jax.Array | None = None
    own = jnp.zeros(q.shape[:4], wide)
    if connector is not None and rule.connector == "age":
        own = connector[..., 0]
    elif connector is not None:
        keys = cached.of_all(gating.pool(rule, k, axis=3))
        own = gating.score(connector, gating.running_pool(rule, jnp.cumsum(k, axis=3), jnp.arange(1, size + 1)))

    def score(keys: jax.Array | None, u: jax.Array | None, number: jax.Array) -> jax.Array:
        """The tokens of segment `number` with all memories: [batch, heads, C, all]."""
        if u is None:
            return jnp.zeros((*q.shape[1:4], total), wide)
        if keys is None:
            return gating.by_age(u, jnp.broadcast_to(number - jnp.arange(total), (*q.shape[1:4], total)))
        return jnp.einsum("bhtd,ibhd->bhti", u, keys, precision=jax.lax.Precision.HIGHEST)

    numbers = cached.first + jnp.arange(count)
    if rule.aggregation == "ssc":
        scores, chosen, seen = _select(rule, score, keys, connector, numbers, cached.visible)
        gamma, mine = gating.gamma(rule, scores, own, seen, blend)
        index = jnp.where(seen, chosen, total)
        others = _read_selected(rule, params, cached.of_all(cached.weights), q, index, gamma, dtype)
        return combine.join(rule.rule, params, q, own_read, mine, others)
    scores = jax.vmap(functools.partial(score, keys))(connector, numbers)
    seen = jnp.broadcast_to(cached.visible[:, :, None, None, :], scores.shape)
    gamma, mine = gating.gamma(rule, scores, own, seen, blend)
    if rule.mixes_weights:
        return _read_soup(rule, params, rows, cached.of_all(cached.weights), gamma, mine, starts)
    reach = count if rule.capacity is None else rule.capacity
    others = combine.read_earlier(rule.rule, dtype, params, cached.weights, q, gamma, reach)
    return combine.join(rule.rule, params, q, own_read, mine, others)


def _select(
    rule: CachedSpec[Params], score: Callable[..., jax.Array], keys: jax.Array | None, connector: jax.Array | None,
    numbers: jax.Array, visible: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """The memories that each token reads: scores, indices, and whether it sees them, [segments, batch, heads, C, k].

    One segment after another, forward and backward: the scores of all tokens with all memories would be more than all else.
    """

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def of_segment(
        keys: jax.Array | None, u: jax.Array | None, number: jax.Array, visible: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        scores = score(keys, u, number)
        seen = jnp.broadcast_to(visible[:, None, None, :], scores.shape)
        chosen = gating.select(rule, scores, seen)
        pick = lambda x: jnp.take_along_axis(x, chosen, axis=-1)
        return pick(scores), chosen, pick(seen)

    return jax.lax.map(lambda xs: of_segment(keys, *xs), (connector, numbers, visible))


def _read_selected(
    rule: CachedSpec[Params], params: Params, weights: Weights, q: jax.Array, index: jax.Array, gamma: jax.Array,
    dtype: jnp.dtype,
) -> jax.Array:  # fmt: skip
    """`combine.read_selected` of [segments, batch, heads, C, …]."""
    count, batch, heads, size = q.shape[:4]
    line = lambda x: jnp.moveaxis(x, 0, 2).reshape(batch, heads, count * size, *x.shape[4:])
    others = combine.read_selected(rule.rule, dtype, params, weights, line(q), line(index), line(gamma))
    return jnp.moveaxis(others.reshape(batch, heads, count, size, -1), 2, 0)


def _read_soup(
    rule: CachedSpec[Params], params: Params, rows: CachedTokens, weights: Weights, gamma: jax.Array, mine: jax.Array,
    starts: PyTree | None,
) -> jax.Array:  # fmt: skip
    """Runs the segments again, with the cached layers mixed into every read.

    The mixed layer needs every token's own memory, which is never formed, so only the engine can apply it.
    """
    mixed = jax.tree.map(lambda w: jnp.moveaxis(w, 0, 2), weights)  # [batch, heads, segments, out, in]
    shares = jnp.concatenate([mine[..., None], gamma], axis=-1)

    def segment(row: CachedTokens, shares: jax.Array, start: PyTree | None) -> jax.Array:
        soup = Soup(mixed, jnp.swapaxes(shares, 1, 2))
        return combine.mixing(rule.rule).scan(params, start, *row.tokens, soup=soup)[0]

    # All segments see the same cached layers; γ is zero for those that they may not read.
    y = jax.vmap(segment)(rows, shares, starts)
    return jnp.swapaxes(y.astype(mine.dtype), 2, 3)


def _last_state(
    rule: CachedSpec[Params], params: Params, where: _Layout, rows: CachedTokens, ends: PyTree, weights: Weights, time: int,
    segment_ids: jax.Array | None,
) -> CachedState:  # fmt: skip
    """The state after the call: the last segment's memory, and the earlier ones of its document."""
    count, batch, size = rows.tokens.q.shape[:3]
    wide = wide_dtype(rows.tokens.q.dtype)
    last = jnp.full((batch,), count - 1) if where.last is None else jnp.minimum(where.last, count - 1)
    take = lambda x: x[last, jnp.arange(batch)]
    online = jax.tree.map(take, ends)
    if segment_ids is not None:
        online = in_segment(online, segment_ids[:, -1])
    # The last segment's memory is still being written, so it needs no place.
    places = max(1, count - 1) if rule.capacity is None else rule.capacity
    state = empty_cache(rule, params, online, places)
    visible = jnp.broadcast_to(where.visible, (count, batch, count))[last, jnp.arange(batch)]  # to the last segment
    begins = jnp.argmax(visible, axis=-1)  # the oldest memory kept
    kept = jnp.sum(visible, axis=-1)
    evicted = jnp.zeros_like(kept)
    if where.resets is None and rule.capacity is not None:
        evicted = jnp.maximum(last - kept, 0)
    elif rule.capacity is not None:
        assert where.resets is not None
        first = jax.lax.cummax(jnp.where(where.resets, jnp.arange(count)[:, None], 0), axis=0)[last, jnp.arange(batch)]
        evicted = jnp.maximum(last - first - kept, 0)
    # Memory number n of the document is stored at n mod N.
    number = jnp.arange(places)[None]
    place = (evicted[:, None] + number) % places
    source = jnp.minimum(begins[:, None] + number, count - 1)
    place = jnp.where(number < kept[:, None], place, places)
    row = jnp.arange(batch)[:, None]
    keys = jnp.swapaxes(rows.tokens.k.astype(wide), 2, 3)  # [segments, batch, heads, C, key_dim]
    pooled = gating.pool(rule, keys, axis=3)

    def put(empty: jax.Array, each: jax.Array) -> jax.Array:
        """[batch, heads, N, …] from [segments, batch, heads, …]."""
        moved = jnp.moveaxis(empty, 2, 1).astype(each.dtype).at[row, place].set(each[source, row], mode="drop")
        return jnp.moveaxis(moved, 1, 2)

    read_so_far = jnp.full((batch,), (time - 1) % size + 1) if where.lengths is None else take(where.lengths)
    state = state._replace(
        cached={name: put(x, weights[name]) for name, x in state.cached.items()},
        keys=put(state.keys, pooled),
        key_sum=jnp.sum(take(keys), axis=2),
        position=read_so_far.astype(jnp.int32),
        cached_count=(evicted + kept).astype(jnp.int32),
    )
    if where.overflow is None:
        return state
    poison = lambda x: jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return choose(where.overflow, jax.tree.map(poison, state), state)
