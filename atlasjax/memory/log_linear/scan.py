"""Log-linear memories over a sequence: from a fresh memory with all segments of a level in parallel, otherwise one segment after
another."""

import functools

import jax
import jax.numpy as jnp

from atlasjax.memory import grid, meshes
from atlasjax.memory.caching import combine
from atlasjax.memory.caching.state import in_segment
from atlasjax.memory.gates import Weights
from atlasjax.memory.grid import Tree, choose
from atlasjax.memory.log_linear import state as states
from atlasjax.memory.log_linear.init import init_state
from atlasjax.memory.log_linear.levels import begin_segment, own_tokens, read_levels
from atlasjax.memory.log_linear.spec import LogLinearSpec
from atlasjax.memory.log_linear.state import LogLinearState
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.rule import Params, State
from atlasjax.memory.tokens import Tokens


@functools.partial(jax.jit, static_argnames=("rule", "max_segments"))
def xla_scan(
    rule: LogLinearSpec[Params],
    params: Params,
    state: LogLinearState | None,
    tokens: Tokens,
    max_segments: int | None = None,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, LogLinearState]:
    """`Rule.scan`. The state that comes back from a fresh memory has the levels of this call only: to continue a
    sequence, start with `init_state`."""
    if lengths is not None:
        raise TypeError("LogLinearRule.scan: lengths is only for the rule inside a CachedRule.")
    tokens, weights = own_tokens(tokens)
    segment_ids, (batch, time) = tokens.segment_ids, tokens.q.shape[:2]
    tokens = tokens._replace(segment_ids=None)  # those of the inner rule: every segment starts its memories itself
    if segment_ids is None and state is None:
        return _parallel(rule, params, tokens, weights)
    if segment_ids is None:
        assert state is not None
        where = grid.continued_pieces(time, rule.segment_size, state.position % rule.segment_size)
        return _sequential(rule, params, state, tokens, weights, where)
    assert max_segments is not None
    where = grid.document_pieces(segment_ids, max_segments, rule.segment_size)
    y, state = _sequential(
        rule, params, init_state(rule, params, batch_size=batch, max_length=time), tokens, weights, where
    )
    state = state._replace(own=in_segment(state.own, segment_ids[:, -1]))
    assert where.overflow is not None
    poison = lambda x: jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return y, choose(where.overflow, jax.tree.map(poison, state), state)


def _sequential(
    rule: LogLinearSpec[Params],
    params: Params,
    state: LogLinearState,
    tokens: Tokens,
    weights: jax.Array,
    where: grid.Pieces,
) -> tuple[jax.Array, LogLinearState]:
    """A call that continues from a state anywhere in a segment, or has packed documents."""
    time, dtype = tokens.q.shape[1], tokens.q.dtype
    wide = wide_dtype(dtype)
    up_params = jax.tree.map(lambda x: x.astype(wide), params)
    # The own memory and all levels are rows of one batch: one call of the inner rule writes them all.
    copies = states.count_writers(state)
    resets = jnp.zeros_like(where.lengths, bool) if where.resets is None else where.resets

    def piece(
        state: LogLinearState, xs: tuple[tuple[Tokens, jax.Array], jax.Array, jax.Array]
    ) -> tuple[LogLinearState, jax.Array]:
        (row, weights), length, reset = xs
        state = state._replace(position=jnp.where(reset, 0, state.position))
        begins = (length > 0) & (state.position % rule.segment_size == 0)
        state, number = begin_segment(rule, params, state, begins)
        repeated, lengths = jax.tree.map(lambda x: jnp.repeat(x, copies, axis=0), (row, length))
        # A level that this segment does not write takes no token.
        lengths = jnp.where(states.written(number, state), lengths, 0)
        before = states.writers(state)
        y, after = rule.rule.scan(params, before, *repeated, lengths=lengths)
        # The inner rule may return a wider state than the carry holds.
        after = jax.tree.map(lambda x, like: x.astype(like.dtype), after, before)
        state = states.with_written(state, after)
        up = lambda x: jnp.swapaxes(x.astype(wide), 1, 2)
        real = (jnp.arange(where.width)[None] < length[:, None])[..., None, None]
        # Row 0 of each group is the own memory. Outputs of padding are NaN, which sums would spread.
        own = up(jnp.where(real, y[::copies], 0.0))
        y = read_levels(rule, up_params, state, number, up(row.q), own, up(weights), dtype)
        state = state._replace(position=state.position + length.astype(jnp.int32))
        return state, jnp.swapaxes(y, 1, 2)

    # Writes and sums of the whole call are kept wide; a loop cannot change the dtype of its carry.
    state = jax.tree.map(lambda x: x.astype(wide) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)
    rows = jax.tree.map(lambda x: grid.lay_chunks(x, where.slots, where.width, where.place), (tokens, weights))
    # The backward pass keeps the state before each piece and computes the piece again.
    run = jax.checkpoint(piece, prevent_cse=False)
    state, y = meshes.scan(run, state, (rows, where.lengths, resets))
    return grid.pick_chunks(y, time, where.place).astype(dtype), state


def _parallel(
    rule: LogLinearSpec[Params], params: Params, tokens: Tokens, weights: jax.Array
) -> tuple[jax.Array, LogLinearState]:
    """A call from a fresh memory. The memories of level j continue those of level j − 1, whose segments are their first half."""
    batch, time = tokens.q.shape[:2]
    size, dtype = rule.segment_size, tokens.q.dtype
    wide = wide_dtype(dtype)
    up_params = jax.tree.map(lambda x: x.astype(wide), params)
    count, last = -(-time // size), (time - 1) // size
    rows = jax.tree.map(lambda x: grid.as_rows(grid.lay_chunks(x, count, size)), tokens)
    lengths = None
    if time % size:
        lengths = grid.as_rows(jnp.full((count, batch), size).at[-1].set(time - last * size))
    y, ends = rule.rule.scan(params, None, *rows, lengths=lengths)
    y, ends = jax.tree.map(lambda x: grid.from_rows(x, count), (y, ends))
    own_read = grid.pick_chunks(y, time)
    up = lambda x: jnp.swapaxes(x.astype(wide), 1, 2)
    q, own_read, weights = up(tokens.q), up(own_read), up(weights)

    others = jnp.zeros_like(own_read)
    finished, levels = ends, []
    for j in range(rule.count_levels(time)):
        span = size << j
        pairs = ((time - 1) // span + 1) // 2  # of a memory of this level and the `span` tokens that read it
        memories = _at(finished, slice(0, 2 * pairs, 2))
        if j:
            memories = _continued(rule, params, memories, tokens, pairs, span)
        level = _at(memories, -1)
        # Its first half is complete, its second is being written; the pairs above hold complete memories only.
        if j and not last >> j & 1 and last >> (j - 1) & 1:  # the last segment writes this level
            rest = _from(tokens, (last >> (j - 1) << (j - 1)) * size)
            _, level = rule.continue_segments(params, _at(finished, -1), rest)
        levels.append(level)
        finished = memories
        read = jax.checkpoint(functools.partial(_read_level, rule, dtype, pairs, span), prevent_cse=False)
        others = others + weights[..., 1 + j, None] * read(up_params, rule.rule.cached_weights(memories), q)
    y = combine.join(rule.rule, up_params, q, own_read, weights[..., 0], others)
    state = LogLinearState(_at(ends, -1), tuple(levels), jnp.full(batch, time, jnp.int32))
    return jnp.swapaxes(y, 1, 2).astype(dtype), state


def _at(tree: Tree, index: int | slice) -> Tree:
    return jax.tree.map(lambda x: x[index], tree)


def _from(tokens: Tree, begin: int) -> Tree:
    return jax.tree.map(lambda x: x[:, begin:], tokens)


def _continued(
    rule: LogLinearSpec[Params], params: Params, starts: State, tokens: Tokens, pairs: int, span: int
) -> State:
    """The memories [pairs, batch, …] of `span` tokens each, from those of their first halves."""
    second = lambda x: grid.as_rows(_pairs(x, 1, pairs, span)[:, :, span // 2 : span].swapaxes(0, 1))
    _, ends = rule.continue_segments(params, jax.tree.map(grid.as_rows, starts), jax.tree.map(second, tokens))
    return jax.tree.map(lambda x: grid.from_rows(x, pairs), ends)


def _pairs(x: jax.Array, axis: int, pairs: int, span: int) -> jax.Array:
    """The time axis as [pairs, 2 · span], cut or padded with zeros at the end."""
    total = pairs * 2 * span
    x = jax.lax.slice_in_dim(x, 0, min(total, x.shape[axis]), axis=axis)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, total - x.shape[axis])
    return jnp.pad(x, padding).reshape(*x.shape[:axis], pairs, 2 * span, *x.shape[axis + 1 :])


def _read_level(
    rule: LogLinearSpec[Params],
    dtype: jnp.dtype,
    pairs: int,
    span: int,
    params: Params,
    memories: Weights,
    q: jax.Array,
) -> jax.Array:
    """The reads of one level, zero for tokens that do not read it: [batch, heads, time, value_dim].

    memories: [pairs, batch, heads, …]. q: [batch, heads, time, key_dim].
    """
    time = q.shape[2]
    readers = jnp.moveaxis(_pairs(q, 2, pairs, span)[:, :, :, span:], 2, 0)  # [pairs, batch, heads, span, key_dim]
    y = jax.vmap(combine.over_heads(rule.rule, dtype), in_axes=(None, 0, 0))(params, memories, readers)
    # The first half of each pair wrote the memory and does not read it at this level.
    y = jnp.moveaxis(jnp.stack([jnp.zeros_like(y), y], axis=3), 0, 2)  # [batch, heads, pairs, 2, span, value_dim]
    y = y.reshape(*y.shape[:2], -1, y.shape[-1])[:, :, :time]
    return jnp.pad(y, ((0, 0), (0, 0), (0, time - y.shape[2]), (0, 0)))
