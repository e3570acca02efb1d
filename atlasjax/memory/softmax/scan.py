"""`SoftmaxRule.scan`, the XLA engine: a call is laid out as blocks of chunks, with attention-like reads of the cache in between."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from atlasjax.memory import grid, meshes
from atlasjax.memory.blocks import product_dtype
from atlasjax.memory.gates import Weights
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.softmax.block import BlockTokens, Carry, Sizes
from atlasjax.memory.softmax.coefficients import (
    Transition,
    after_each,
    before_each,
    coefficients,
    since_commit,
)
from atlasjax.memory.softmax.init import empty_state
from atlasjax.memory.softmax.loop import Indices, Xs, run_blocks
from atlasjax.memory.softmax.spec import SoftmaxSpec
from atlasjax.memory.softmax.state import SoftmaxParams, SoftmaxState
from atlasjax.memory.softmax.sums import divide, partial_sums
from atlasjax.memory.softmax.tape import (
    Cache,
    Tape,
    cut_tail,
    ordered_cache,
    stored_cache,
    tail_places,
    tape_of,
)
from atlasjax.memory.tokens import Tokens

_BLOCK_TOKENS = 128  # tokens that read the cache together; never changes the result
_NOWHERE = 1 << 29  # a place beyond any tape


def plan(rule: SoftmaxSpec, time: int, dtype: jnp.dtype) -> tuple[int, int]:
    """(tokens per chunk, chunks per block) for a call of so many places; static."""
    if rule.has_constant_gradient:
        return min(_BLOCK_TOKENS, time), 1
    return rule.chunk_size, max(1, min(_BLOCK_TOKENS // rule.chunk_size, -(-time // rule.chunk_size)))


@functools.partial(jax.jit, static_argnames=("rule", "max_segments"))
def xla_scan(
    rule: SoftmaxSpec,
    params: SoftmaxParams,
    state: SoftmaxState | None,
    tokens: Tokens,
    max_segments: int | None = None,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, SoftmaxState]:
    """The recurrence over a sequence. Arguments as in `scan`, already checked.

    lengths: [batch], number of tokens in each row, only without segment_ids. y of the others is NaN. None means that all exist.
    """
    q, segment_ids = tokens.q, tokens.segment_ids
    wide = wide_dtype(q.dtype)
    batch, time, heads, _ = q.shape
    fresh = state is None
    up = lambda x: x.astype(wide) if jnp.issubdtype(x.dtype, jnp.floating) else x
    params = jax.tree.map(up, params)
    entries = time if state is None else state.keys.shape[2]
    state = empty_state(rule, params, batch, heads, 0, wide) if state is None else jax.tree.map(up, state)

    where = _places(rule, state, tokens, fresh, max_segments, lengths)
    chunk, chunks = plan(rule, where.places, q.dtype)
    sizes = Sizes(chunk, chunks, -(-where.places // (chunk * chunks)), product_dtype(q.dtype))
    # An id may occur again later; 0 is the state's segment.
    runs = None if segment_ids is None else jnp.cumsum(where.starts, axis=1, dtype=jnp.int32)
    numbered = state._replace(segment=jnp.zeros_like(state.segment))
    length = sizes.blocks * sizes.block
    tape = tape_of(rule, numbered, tokens._replace(segment_ids=runs), where.place, length, where.keep)
    ends = _ends(rule, state, where, chunk, time, lengths)
    # Where the chunk size has no effect, no chunk stays open.
    commits = jnp.ones((batch, sizes.blocks * sizes.chunks), bool)
    if rule.pending:
        commits = jnp.arange(sizes.blocks * sizes.chunks)[None] < (ends.end // chunk)[:, None]

    y, cache, carry = _run(rule, sizes, params, state, tape, commits, where.resets, segment_ids is not None)
    y = jnp.moveaxis(y.reshape(batch, heads, length, -1), 1, 2)
    place = jnp.broadcast_to(jnp.arange(time), (batch, time)) if where.place is None else where.place
    if time != y.shape[1] or segment_ids is not None or lengths is not None or not fresh:
        y = grid.pick(y, time, place)
    if rule.cache_window is None and not fresh:
        begun = jax.lax.cummax(jnp.where(where.starts, place, -1), axis=1)
        # The entry of each token: within the state's segment after the state's, in a later segment from its start.
        index = jnp.where(begun < 0, state.num_tokens[:, None] + place, place - begun)
        y = jnp.where((index < entries)[:, :, None, None], y, jnp.nan)

    entries = entries if rule.cache_window is None else rule.cache_window
    new = _state_after(rule, sizes, state, cache, carry, tape, ends, entries)
    if segment_ids is not None:
        new = new._replace(segment=segment_ids[:, -1])
    if where.overflow is not None:
        spoil = lambda x: jnp.where(where.overflow.reshape(-1, *(1,) * (x.ndim - 1)), jnp.nan, x)
        new = jax.tree.map(lambda x: spoil(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, new)
    return y.astype(q.dtype), new


class _Places(NamedTuple):
    """The places of a call's tokens on the tape.

    Attributes:
      places: number of places; static.
      place: [batch, time]. None if token t is at place t.
      starts: [batch, time], whether a segment starts with the token.
      keep: [batch], whether the state's segment goes on. None without places of segments.
      resets: [chunks, batch], whether a chunk begins a segment. None if none does.
      overflow: [batch], whether `max_segments` was too small. None without places of segments.
    """

    places: int
    place: jax.Array | None
    starts: jax.Array
    keep: jax.Array | None = None
    resets: jax.Array | None = None
    overflow: jax.Array | None = None


def _places(
    rule: SoftmaxSpec, state: SoftmaxState, tokens: Tokens, fresh: bool, max_segments: int | None, lengths: jax.Array | None
) -> _Places:  # fmt: skip
    (batch, time), segment_ids = tokens.q.shape[:2], tokens.segment_ids
    starts = jnp.zeros((batch, time), bool)
    if segment_ids is not None:
        previous = jnp.where(state.segment < 0, segment_ids[:, 0], state.segment)
        starts = jnp.concatenate([previous[:, None], segment_ids[:, :-1]], axis=1) != segment_ids
        if not rule.has_constant_gradient:
            assert max_segments is not None
            b = rule.chunk_size
            where = grid.segmented_layout(
                segment_ids, max_segments, b, b, 1, state.position, jnp.zeros_like(state.num_tokens), state.segment
            )
            return _Places(where.num_slots * b, where.place, starts, ~starts[:, 0], where.resets, where.overflow)
    place = None if fresh or not rule.pending else state.position[:, None] + jnp.arange(time)[None]
    if lengths is not None:
        assert segment_ids is None
        t = jnp.arange(time)[None]
        # They get distinct places beyond any tape, because the scatter declares its indices unique.
        place = jnp.where(t < lengths[:, None], state.position[:, None] + t, _NOWHERE + t)
    return _Places(time + (0 if fresh else rule.pending), place, starts)


class _Ends(NamedTuple):
    """How far a call gets, [batch] each: places of committed chunks, tokens in an unfinished last one, entries of the cache."""

    end: jax.Array
    position: jax.Array
    entries: jax.Array


def _ends(
    rule: SoftmaxSpec, state: SoftmaxState, where: _Places, chunk: int, time: int, lengths: jax.Array | None
) -> _Ends:
    """All chunks are committed except an unfinished last one."""
    batch = state.position.shape[0]
    place = jnp.broadcast_to(jnp.arange(time), (batch, time)) if where.place is None else where.place
    used = place[:, -1] + 1 if lengths is None else state.position + lengths
    position = used % chunk if rule.pending else jnp.zeros_like(used)
    end = used - position
    last_start = jnp.max(jnp.where(where.starts, place, -1), axis=1)
    # Entries of the last segment only; those of earlier segments are of no use.
    count = end - jnp.maximum(last_start, 0) + jnp.where(last_start < 0, state.num_tokens, 0)
    if rule.cache_window is not None:
        count = jnp.minimum(count, rule.cache_window)
    return _Ends(end, position, count)


def _state_after(
    rule: SoftmaxSpec, sizes: Sizes, state: SoftmaxState, cache: Cache, carry: Carry, tape: Tape, ends: _Ends, entries: int
) -> SoftmaxState:  # fmt: skip
    """The state after a call, whose cache has room for so many entries; with the segment before the call."""
    before = cache.decay.shape[2] - sizes.blocks * sizes.block
    kept = stored_cache(rule, cache, before + ends.end, ends.entries, entries)
    tail = cut_tail(rule, state, tape, ends.end, ends.entries, ends.position)
    if not rule.has_constant_gradient:
        real = tail_places(rule, ends.entries, ends.position)
        tail = tail._replace(preactivations=cache_reads(rule, kept, ends.entries, tail.keys, sizes.dtype, real))
    return SoftmaxState(
        keys=kept.keys,
        coefficients=kept.coefficients,
        momentum=kept.momentum,
        decay=kept.decay,
        num_tokens=ends.entries.astype(jnp.int32),
        weights=carry.weights,
        weights_momentum=carry.weights_momentum,
        tail=tail,
        position=ends.position.astype(jnp.int32),
        segment=state.segment,
    )


class _Flags(NamedTuple):
    """Flags of a call, [batch, chunks, …].

    Attributes:
      counts: [batch, chunks, b, E], whether token t's window may contain token i's gradient.
      real: [batch, chunks, b], whether a token exists.
      commits: [batch, chunks], whether a chunk changes the memory.
      indices: those of the cache's entries and of resets.
    """

    counts: jax.Array
    real: jax.Array
    commits: jax.Array
    indices: Indices


def _run(
    rule: SoftmaxSpec,
    sizes: Sizes,
    params: SoftmaxParams,
    state: SoftmaxState,
    tape: Tape,
    commits: jax.Array,
    resets: jax.Array | None,
    segmented: bool,
) -> tuple[jax.Array, Cache, Carry]:
    """y [batch, heads, blocks, block, value_dim]; every entry at the call's end, [batch, heads, N + places]; the last carry."""
    c, old = rule.window, ordered_cache(rule, state)
    # A carry has c − 1 entries, also where the state's cache has room for fewer.
    missing = max(0, c - 1 - old.decay.shape[2])
    old = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (missing, 0), *((0, 0),) * (x.ndim - 3))), old)
    flags = _flags(rule, sizes, state, tape, old.decay.shape[2], commits, resets, segmented)
    over_heads = jax.vmap(functools.partial(_run_head, rule, sizes), in_axes=(0, 0, 0, 0, 0, 1, None))
    over_batch = jax.vmap(over_heads, in_axes=(None, 0, 0, 0, 0, 0, 0))
    window = state.tail.keys[:, :, : c - 1], state.tail.values[:, :, : c - 1]
    tokens = tape[:7]  # without `real` and `segment`, which have no heads axis and are in `flags`
    y, carry, cache = over_batch(params.weights, old, state.weights, state.weights_momentum, window, tokens, flags)
    return y, cache, carry


def _flags(
    rule: SoftmaxSpec, sizes: Sizes, state: SoftmaxState, tape: Tape, before: int, commits: jax.Array,
    resets: jax.Array | None, segmented: bool,
) -> _Flags:  # fmt: skip
    """before: number of entries before the tape."""
    (batch, num_chunks), c = commits.shape, rule.window
    held = jnp.arange(before)[None] >= before - jnp.minimum(state.num_tokens, before)[:, None]
    real = jnp.concatenate([held, tape.real], axis=1)
    segment = jnp.concatenate([jnp.zeros((batch, before), jnp.int32), tape.segment], axis=1)
    reset = None
    if resets is not None:
        reset = jnp.pad(resets.T, ((0, 0), (0, num_chunks - resets.shape[0]))).reshape(batch, sizes.blocks, -1)
    indices = Indices(real, segment if segmented else None, reset)

    first, E = before - (c - 1), c - 1 + sizes.chunk  # the first chunk's window begins c − 1 entries before the tape
    rows = jnp.arange(num_chunks)[:, None] * sizes.chunk + jnp.arange(E)[None] + first
    real_chunk, segment_chunk = real[:, rows], segment[:, rows]
    counts = real_chunk[:, :, None, :] & (segment_chunk[:, :, c - 1 :, None] == segment_chunk[:, :, None, :])
    return _Flags(counts, real_chunk[:, :, c - 1 :], commits, indices)


def _run_head(
    rule: SoftmaxSpec,
    sizes: Sizes,
    initial: Weights,
    old: Cache,
    weights: Weights,
    weights_momentum: Weights | None,
    window: tuple[jax.Array, ...],
    tokens: tuple[jax.Array, ...],
    flags: _Flags,
) -> tuple[jax.Array, Carry, Cache]:
    """`_run` for one head of one batch element.

    window: keys and values of the c − 1 tokens before the tape; tokens: q, k, v and gates of the tape, as in `Tape`.
    """
    finished = old.decay.shape[0] - (rule.window - 1)  # entries that no step of the call changes
    length = sizes.blocks * sizes.block
    inputs, whole = _block_inputs(rule, sizes, finished, window, tokens, flags)
    keys = jnp.concatenate([old.keys, tokens[1].astype(old.keys.dtype)])
    # Room for the entries of every block. Their keys are known already, because steps change coefficients only.
    cache = jax.tree.map(lambda x: jnp.pad(x[:finished], ((0, length), *((0, 0),) * (x.ndim - 1))), old)
    cache = cache._replace(keys=keys[: finished + length])
    open_ = jax.tree.map(lambda x: x[finished:], old)
    carry = Carry(open_.coefficients, open_.momentum, open_.decay, weights, weights_momentum)
    operands = meshes.vary_like((initial, carry, cache, inputs, flags.indices))  # their cotangents will all vary alike
    y, carry, cache = run_blocks(rule, sizes, *operands)

    if rule.has_scaling:  # each entry is as it was at the end of its block
        each = lambda x: jnp.concatenate([jnp.broadcast_to(x[:1], (finished,)), jnp.repeat(x[1:], sizes.block)])
        cache = _scale(cache, jax.tree.map(each, after_each(whole)))
    join = lambda x, y: jnp.concatenate([x, y])
    return y, carry, Cache(
        keys,
        join(cache.coefficients, carry.coefficients),
        None if carry.momentum is None else join(cache.momentum, carry.momentum),
        join(cache.decay, carry.decay),
    )  # fmt: skip


def _block_inputs(
    rule: SoftmaxSpec, sizes: Sizes, finished: int, window: tuple[jax.Array, ...], tokens: tuple[jax.Array, ...],
    flags: _Flags,
) -> tuple[Xs, Transition]:  # fmt: skip
    """The inputs of one head's blocks, and the transition over each block, [blocks]."""
    c, (q, k, v, *gates) = rule.window, tokens
    by_chunk = lambda x: x.reshape(-1, sizes.chunk, *x.shape[1:])
    by_block = lambda x: x.reshape(sizes.blocks, -1, *x.shape[1:])
    coef = jax.vmap(lambda *x: coefficients(rule, *x))(
        *(by_chunk(x) for x in gates), flags.counts, flags.real, flags.commits
    )
    coef = jax.tree.map(by_block, coef)
    starts, whole = jax.vmap(before_each)(coef.end)
    since = None
    if rule.has_scaling:
        columns = None if rule.cache_window is None else -(-finished // sizes.block)
        since = since_commit(whole, columns)
    rows = jnp.arange(sizes.blocks)[:, None] * sizes.block + jnp.arange(c - 1 + sizes.block)[None]
    with_window = lambda first, x: jnp.concatenate([first.astype(x.dtype), x])[rows] if c > 1 else by_block(x)
    block = BlockTokens(by_block(q), with_window(window[0], k), with_window(window[1], v), coef, starts)
    return Xs(block, since), whole


def _scale(cache: Cache, by: Transition) -> Cache:
    a = by.decay[:, None] * cache.coefficients
    if cache.momentum is None or by.momentum is None or by.momentum_decay is None:
        return Cache(cache.keys, a, None, by.decay * cache.decay)
    a = a + by.momentum[:, None] * cache.momentum
    return Cache(cache.keys, a, by.momentum_decay[:, None] * cache.momentum, by.decay * cache.decay)


def cache_reads(
    rule: SoftmaxSpec, cache: Cache, count: jax.Array, x: jax.Array, dtype: jnp.dtype, real: jax.Array
) -> jax.Array:
    """h(x) from a stored cache: x [batch, heads, n, key_dim] → [batch, heads, n, width], zero where `real` [batch, n] is False."""
    entries = cache.decay.shape[2]
    held = stored_places(rule, entries, count)

    def one(cache: Cache, x: jax.Array, held: jax.Array) -> jax.Array:
        part = partial_sums(rule, x, cache._replace(momentum=None), held[None], dtype)
        return divide(part.value, part.mass if rule.normalized else None)

    h = jax.vmap(jax.vmap(one, in_axes=(0, 0, None)))(cache, x, held)
    return jnp.where(real[:, None, :, None], h, 0.0)


def stored_places(rule: SoftmaxSpec, entries: int, count: jax.Array) -> jax.Array:
    """Whether each place of a stored cache holds an entry, [batch, N]."""
    place = jnp.arange(entries)[None]
    return place < count[:, None] if rule.cache_window is None else place >= entries - count[:, None]
