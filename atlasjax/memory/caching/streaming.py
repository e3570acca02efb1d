"""Memory Caching from a state: a call that continues anywhere in a segment, one token, or a read without a write."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from atlasjax.memory import grid, meshes
from atlasjax.memory.caching import combine
from atlasjax.memory.caching import gates as gating
from atlasjax.memory.caching.rule import CachedRule
from atlasjax.memory.caching.state import CachedState, Tokens, fresh_memory, in_segment
from atlasjax.memory.fast_weights.chunk import Soup
from atlasjax.memory.grid import choose


def _push(rule: CachedRule, params: Any, state: CachedState, full: jax.Array) -> CachedState:
    """Where `full` [batch] is True, moves the segment's memory to the cache and begins a new segment."""
    places = state.keys.shape[2]
    row, place = jnp.arange(full.shape[0]), state.cached_count % places
    weights = rule.rule.cached_weights(state.online)
    if rule.stop_gradient:
        weights = jax.lax.stop_gradient(weights)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        at = old[row, :, place]
        return old.at[row, :, place].set(jnp.where(full.reshape(-1, *(1,) * (new.ndim - 1)), new.astype(old.dtype), at))

    keys = gating.running_pool(rule, state.key_sum, state.position[:, None])
    online = state.online
    if rule.start == "fresh":
        fresh = fresh_memory(rule, params, full.shape[0])
        fresh = jax.tree.map(lambda x, like: x.astype(like.dtype), fresh, online)
        online = choose(full, in_segment(fresh, getattr(online, "segment", None)), online)
    return CachedState(
        online=online,
        cached={name: put(old, weights[name]) for name, old in state.cached.items()},
        keys=put(state.keys, keys),
        key_sum=choose(full, jnp.zeros_like(state.key_sum), state.key_sum),
        position=jnp.where(full, 0, state.position),
        cached_count=state.cached_count + full.astype(jnp.int32),
    )


def _by_age(state: CachedState) -> tuple[jax.Array, jax.Array]:
    """Slots of the cache from the oldest memory to the newest, [batch, N], and whether each holds a memory."""
    places = state.keys.shape[2]
    n = jnp.arange(places)
    order = (jnp.where(state.cached_count > places, state.cached_count % places, 0)[:, None] + n) % places
    return order, n < jnp.minimum(state.cached_count, places)[:, None]


def _read_cache(
    rule: CachedRule, params: Any, state: CachedState, q: jax.Array, u: jax.Array | None, own_keys: jax.Array,
    own_read: Any, dtype: Any,
) -> jax.Array:  # fmt: skip
    """The tokens' reads of the cache and of their own memory.

    Args:
      q, u: [batch, heads, tokens, key_dim].
      own_keys: p of the current segment for each token, like q.
      own_read: function that reads their own memory, given the soup to mix in or None: [batch, heads, tokens, value_dim].
    """
    batch, heads, tokens = q.shape[:3]
    order, there = _by_age(state)
    row = jnp.arange(batch)[:, None]
    keys = jnp.moveaxis(state.keys, 2, 1)[row, order]  # [batch, N, heads, key_dim]
    if u is None:
        scores, own = jnp.zeros((batch, heads, tokens, keys.shape[1]), q.dtype), jnp.zeros(q.shape[:3], q.dtype)
    else:
        scores = jnp.einsum("bhtd,bnhd->bhtn", u, keys, precision=jax.lax.Precision.HIGHEST)
        own = gating.score(u, own_keys)
    seen = jnp.broadcast_to(there[:, None, None], scores.shape)
    if rule.aggregation == "ssc":
        chosen = gating.select(rule, scores, seen)
        pick = lambda x: jnp.take_along_axis(x, chosen, axis=-1)
        gamma, mine = gating.gamma(rule, pick(scores), own, pick(seen))
        place = jnp.take_along_axis(jnp.broadcast_to(order[:, None, None], scores.shape), chosen, axis=-1)
        index = jnp.where(pick(seen), place, keys.shape[1])
        by_memory = jax.tree.map(lambda w: jnp.moveaxis(w, 2, 0), state.cached)
        if tokens == 1:
            at = lambda w: w[
                jnp.arange(batch)[:, None, None],
                jnp.arange(heads)[:, None],
                jnp.minimum(place[:, :, 0], keys.shape[1] - 1),
            ]
            others = combine.read_all(rule.rule, dtype, params, jax.tree.map(at, state.cached), q, gamma)
        else:
            others = combine.read_selected(rule.rule, dtype, params, by_memory, q, index, gamma)
        return combine.join(rule.rule, params, q, own_read(None), mine, others)
    gamma, mine = gating.gamma(rule, scores, own, seen)
    # Back to the order of the slots.
    back = jnp.argsort(order, axis=-1)
    gamma = jnp.take_along_axis(gamma, jnp.broadcast_to(back[:, None, None], gamma.shape), axis=-1)
    if rule.mixes_weights:
        shares = jnp.concatenate([mine[..., None], gamma], axis=-1)
        return own_read(Soup(state.cached, jnp.swapaxes(shares, 1, 2)))
    return combine.join(
        rule.rule, params, q, own_read(None), mine, combine.read_all(rule.rule, dtype, params, state.cached, q, gamma)
    )


def _overfull(rule: CachedRule, state: CachedState) -> jax.Array:
    """Whether more memories were cached than the cache has slots although none may be evicted."""
    if rule.capacity is not None:
        return jnp.zeros(state.cached_count.shape, bool)
    return state.cached_count > state.keys.shape[2]


def streamed_scan(rule: CachedRule, params: Any, state: CachedState, tokens: Tokens) -> tuple[jax.Array, CachedState]:
    """A call that continues from a state anywhere in a segment, one segment after another."""
    time = tokens.q.shape[1]
    size, dtype = rule.segment_size, tokens.q.dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    count = (time + size - 1) // size + 1
    begin = state.position
    place = begin[:, None] + jnp.arange(time)
    segment = place // size
    offset = place - jnp.where(segment == 0, begin[:, None], segment * size)
    width = min(size, time)
    front = segment * width + offset  # each segment's tokens are at its front

    def one(state: CachedState, xs: Any) -> tuple[CachedState, jax.Array]:
        row, s = xs
        start = jnp.where(s == 0, begin, s * size)
        length = jnp.clip(begin + time - start, 0, jnp.where(s == 0, size - begin, size))
        state = _push(rule, params, state, (length > 0) & (state.position == size))
        up = lambda x: jnp.swapaxes(x.astype(wide), 1, 2)
        q, k = up(row.q), up(row.k)
        real = jnp.arange(width) < length[:, None]
        k = jnp.where(real[:, None, :, None], k, 0.0)
        sums = state.key_sum[:, :, None] + jnp.cumsum(k, axis=2)
        seen = state.position[:, None, None] + jnp.arange(1, width + 1)
        own_keys = gating.running_pool(rule, sums, jnp.broadcast_to(seen, sums.shape[:-1]))
        end = {}

        def own_read(soup: Soup | None) -> jax.Array:
            options: dict[str, Any] = {} if soup is None else {"soup": soup}
            y, end["state"] = rule.rule.scan(
                params, state.online, row.q, row.k, row.v, row.gates, lengths=length, **options
            )
            return up(jnp.where(real[..., None, None], y, 0.0))

        u = None if row.connector is None else up(row.connector)
        y = _read_cache(rule, up_params, state, q, u, own_keys, own_read, dtype)
        y = jnp.where(_overfull(rule, state)[:, None, None, None], jnp.nan, y)
        online = jax.tree.map(lambda x, like: x.astype(like.dtype), end["state"], state.online)
        state = state._replace(
            online=online, key_sum=sums[:, :, -1], position=state.position + length.astype(jnp.int32)
        )
        return state, jnp.swapaxes(y, 1, 2)

    up_params = jax.tree.map(lambda x: x.astype(wide), params)
    state = jax.tree.map(lambda x: x.astype(wide) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)
    run = jax.checkpoint(one, prevent_cse=False)
    rows = jax.tree.map(lambda x: grid.lay_chunks(x, count, width, front), tokens)
    state, y = meshes.scan(run, state, (rows, jnp.arange(count)))
    return grid.pick_chunks(y, time, front).astype(dtype), state


def step(rule: CachedRule, params: Any, state: CachedState, tokens: Tokens) -> tuple[jax.Array, CachedState]:
    """One token; `tokens` has no time axis."""
    dtype = tokens.q.dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    state = _push(rule, params, state, state.position == rule.segment_size)
    up = lambda x: x.astype(wide)[:, :, None]
    total = state.key_sum + tokens.k.astype(wide)
    own_keys = gating.running_pool(rule, total, (state.position + 1)[:, None])
    end = {}

    def own_read(soup: Soup | None) -> jax.Array:
        options: dict[str, Any] = {} if soup is None else {"soup": soup._replace(gates=soup.gates[:, 0])}
        y, end["state"] = rule.rule.step(params, state.online, tokens.q, tokens.k, tokens.v, tokens.gates, **options)
        return up(y)

    u = None if tokens.connector is None else up(tokens.connector)
    up_params = jax.tree.map(lambda x: x.astype(wide), params)
    y = _read_cache(rule, up_params, state, up(tokens.q), u, own_keys[:, :, None], own_read, dtype)[:, :, 0]
    y = jnp.where(_overfull(rule, state)[:, None, None], jnp.nan, y)
    state = state._replace(online=end["state"], key_sum=total, position=state.position + 1)
    return y.astype(dtype), state


@functools.partial(jax.jit, static_argnames=("rule",), inline=True)
def read_state(
    rule: CachedRule, params: Any, state: CachedState, q: jax.Array, connector: jax.Array | None
) -> jax.Array:
    """Reads a state without writing: q, connector [batch, time, heads, key_dim] → [batch, time, heads, value_dim]."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    up_params = jax.tree.map(lambda x: x.astype(wide), params)
    up = lambda x: jnp.swapaxes(x.astype(wide), 1, 2)
    keys = gating.running_pool(rule, state.key_sum, state.position[:, None])
    own_keys = jnp.broadcast_to(keys[:, :, None], (*keys.shape[:2], q.shape[1], keys.shape[2]))

    def own_read(soup: Soup | None) -> jax.Array:
        if soup is None:
            return up(rule.rule.read(params, state.online, q.astype(wide)))
        own = rule.rule.cached_weights(state.online)
        together = {name: jnp.concatenate([w[:, :, None], soup.weights[name]], axis=2) for name, w in own.items()}
        y = combine.read_mixed(rule.rule, wide, up_params, together, up(q), jnp.swapaxes(soup.gates, 1, 2))
        skip = combine.residual(rule.rule, up_params, up(q))
        return y if skip is None else skip + y

    u = None
    if rule.has_scores:
        u = up(q if connector is None else connector)
    y = _read_cache(rule, up_params, state, up(q), u, own_keys, own_read, wide)
    y = jnp.where(_overfull(rule, state)[:, None, None, None], jnp.nan, y)
    return jnp.swapaxes(y, 1, 2).astype(q.dtype)
