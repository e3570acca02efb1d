"""Hierarchical memories over a sequence. The global memory is one call of its rule. So are the local ones, with every shard as a
row of the batch; those of packed documents, whose shards begin anywhere, with every shard as a segment."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from atlasjax.memory import grid
from atlasjax.memory.caching.state import in_segment
from atlasjax.memory.grid import Tree, choose
from atlasjax.memory.hierarchical.init import restarted
from atlasjax.memory.hierarchical.projection import project
from atlasjax.memory.hierarchical.spec import HierarchicalSpec
from atlasjax.memory.hierarchical.state import HierarchicalParams, HierarchicalState
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.tokens import Tokens


class _Local(NamedTuple):
    """The local memories, and P (None if not `projected`)."""

    memories: tuple[PyTree, ...]
    projection: jax.Array | None


@functools.partial(jax.jit, static_argnames=("rule", "max_segments"))
def xla_scan(
    rule: HierarchicalSpec,
    params: HierarchicalParams,
    state: HierarchicalState | None,
    tokens: Tokens,
    max_segments: int | None = None,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, HierarchicalState]:
    """`Rule.scan`."""
    if lengths is not None:
        raise TypeError("HierarchicalRule.scan: lengths is only for the rule inside another one.")
    (batch, time), dtype, ids = tokens.q.shape[:2], tokens.q.dtype, tokens.segment_ids
    gates = rule.split_gates(tokens.gates, tokens.q.shape[-1], tokens.v.shape[-1])[0]
    before = None if state is None else state.global_memory
    y, after = rule.global_rule.scan(params.global_memory, before, *tokens._replace(gates=gates), max_segments)
    if ids is not None:
        assert max_segments is not None
        local_y, local, position = _packed(rule, params, state, tokens, max_segments)
    elif state is None:
        local_y, local = _fresh(rule, params, tokens)
        position = jnp.full(batch, (time - 1) % rule.restart + 1, jnp.int32)
    else:
        local_y, local, position = _continued(rule, params, state, tokens)
    wide = wide_dtype(dtype)
    # Summed wide, or the result would depend on how many local memories round.
    y = (y.astype(wide) + local_y.astype(wide)).astype(dtype)
    if ids is not None:
        segment = ids[:, -1].astype(jnp.int32)
    else:
        segment = jnp.full(batch, -1, jnp.int32) if state is None else state.segment
    return y, HierarchicalState(after, *local, position.astype(jnp.int32), segment)


def _read_locals(
    rule: HierarchicalSpec,
    params: HierarchicalParams,
    start: _Local | None,
    tokens: Tokens,
    max_segments: int | None = None,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, _Local]:
    """The sum of the local reads, and the memories after the call, without restarts. Segments begin with fresh memories.

    start: None is a fresh start. lengths: as in `Rule.scan`; the outputs of other tokens are not used.
    """
    (q, k, v, gates, ids), projection = tokens, None
    if rule.projected:
        q, projection = project(
            None if start is None else start.projection,
            q,
            k,
            segment_ids=ids,
            max_segments=max_segments,
            lengths=lengths,
        )
    memories = (None,) * len(rule.local_chunks) if start is None else start.memories
    own_gates = rule.split_gates(gates, k.shape[-1], v.shape[-1])[1:]
    total, after = jnp.zeros((), wide_dtype(q.dtype)), []
    for one, own, memory, own_gate in zip(rule.local_rules, params.local_memories, memories, own_gates, strict=True):
        scan = one.scan if lengths is None else functools.partial(one.scan, lengths=lengths)
        y, memory = scan(own, memory, q, k, v, own_gate, ids, max_segments)
        total = total + y.astype(total.dtype)
        after.append(memory)
    return total, _Local(tuple(after), projection)


def _fresh(rule: HierarchicalSpec, params: HierarchicalParams, tokens: Tokens) -> tuple[jax.Array, _Local]:
    """A call from fresh memories: shards are rows, the last one with fewer tokens."""
    (batch, time), size = tokens.q.shape[:2], rule.restart
    if time <= size:
        return _read_locals(rule, params, None, tokens)
    count, left = -(-time // size), time % size
    rows = jax.tree.map(lambda x: grid.as_rows(grid.lay_chunks(x, count, size)), tokens)
    # The last shard is unfinished: its memories must not take padding for tokens.
    lengths = grid.as_rows(jnp.full((count, batch), size).at[-1].set(left)) if left else None
    y, ends = _read_locals(rule, params, None, rows, lengths=lengths)
    y, ends = jax.tree.map(lambda x: grid.from_rows(x, count), (y, ends))
    # Only the last shard's memories go on; those of earlier shards end with them.
    return grid.pick_chunks(y, time), jax.tree.map(lambda x: x[-1], ends)


def _start(
    rule: HierarchicalSpec, params: HierarchicalParams, state: HierarchicalState, begins: jax.Array
) -> tuple[_Local, _Local]:
    """The local memories with which a call begins, and fresh ones. begins [batch]: whether its first token begins a shard."""
    held = _Local(state.local_memories, state.projection)
    fresh = _Local(
        restarted(rule, params, state), None if state.projection is None else jnp.zeros_like(state.projection)
    )
    return choose(begins, fresh, held), fresh


def _continued(
    rule: HierarchicalSpec, params: HierarchicalParams, state: HierarchicalState, tokens: Tokens
) -> tuple[jax.Array, _Local, jax.Array]:
    """A call from a state anywhere in a shard. The rest of this shard and the shards after it are rows, as in `_fresh`."""
    time = tokens.q.shape[1]
    position = state.position % rule.restart
    start, fresh = _start(rule, params, state, position == 0)
    where = grid.continued_pieces(time, rule.restart, position)
    rows = jax.tree.map(lambda x: grid.as_rows(grid.lay_chunks(x, where.slots, where.width, where.place)), tokens)
    # The first row goes on with the shard that the state is in, the others begin.
    starts = jax.tree.map(lambda a, b: grid.as_rows(jnp.stack([a, *[b] * (where.slots - 1)])), start, fresh)
    y, ends = _read_locals(rule, params, starts, rows, lengths=grid.as_rows(where.lengths))
    y, ends = jax.tree.map(lambda x: grid.from_rows(x, where.slots), (y, ends))
    last = position + time - 1
    of_row = lambda x: jax.vmap(lambda pieces, i: pieces[i], in_axes=(1, 0))(x, last // rule.restart)
    return grid.pick_chunks(y, time, where.place), jax.tree.map(of_row, ends), last % rule.restart + 1


def _packed(
    rule: HierarchicalSpec,
    params: HierarchicalParams,
    state: HierarchicalState | None,
    tokens: Tokens,
    max_segments: int,
) -> tuple[jax.Array, _Local, jax.Array]:
    """A call with packed documents. Each shard of a document is a segment of the local memories.

    Rows of `restart` places, as in `_continued`, would be mostly empty: one for every document that a row of the batch may have.
    """
    ids, (batch, time) = tokens.segment_ids, tokens.q.shape[:2]
    assert ids is not None
    t = jnp.arange(time)[None]
    before = jnp.full(batch, -1, ids.dtype) if state is None else state.segment.astype(ids.dtype)
    position = jnp.zeros(batch, jnp.int32) if state is None else state.position
    previous = jnp.concatenate([jnp.where(before < 0, ids[:, 0], before)[:, None], ids[:, :-1]], axis=1)
    last_start = jax.lax.cummax(jnp.where(ids != previous, t, -1), axis=1)
    place = jnp.where(last_start < 0, position[:, None] % rule.restart + t, t - last_start) % rule.restart
    # A new number at every restart, and so at every document: place is 0 there.
    shards = jnp.cumsum(place == 0, axis=1)
    # A document of L tokens has at most L // restart shards and one, and that which a call continues has one more.
    most = min(time, max_segments + time // rule.restart + (state is not None))
    start = None
    if state is not None:
        start, _ = _start(rule, params, state, place[:, 0] == 0)
        # A state without an id is continued by the first segment, whatever its id.
        start = start._replace(memories=_without_segment(start.memories, batch))
    y, end = _read_locals(rule, params, start, tokens._replace(segment_ids=shards), most)
    return y, end._replace(memories=_without_segment(end.memories, batch)), place[:, -1] + 1


def _without_segment(memories: tuple[Tree, ...], batch: int) -> tuple[Tree, ...]:
    """States that say of no segment id: those of shards are not those of the caller's documents."""
    return tuple(in_segment(memory, jnp.full(batch, -1, jnp.int32)) for memory in memories)
