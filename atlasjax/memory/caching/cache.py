"""The cache of a state: a segment's memory moves to it, and tokens read it together with their own memory."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from atlasjax.memory.caching import combine
from atlasjax.memory.caching import gates as gating
from atlasjax.memory.caching.rule import CachedRule
from atlasjax.memory.caching.state import CachedState, fresh_memory, in_segment
from atlasjax.memory.fast_weights.chunk import Soup
from atlasjax.memory.grid import choose
from atlasjax.memory.rule import Params


def push(rule: CachedRule[Params], params: Params, state: CachedState, full: jax.Array) -> CachedState:
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


def read_cache(
    rule: CachedRule[Params], params: Params, state: CachedState, q: jax.Array, u: jax.Array | None, blend: jax.Array | None,
    own_keys: jax.Array, own_read: Callable[[Soup | None], jax.Array], dtype: jnp.dtype,
) -> jax.Array:  # fmt: skip
    """The tokens' reads of the cache and of their own memory.

    Args:
      q: [batch, heads, tokens, key_dim].
      u: like q, or [batch, heads, tokens, 1 + capacity] with connector="age".
      blend: λ, [batch, heads, tokens].
      own_keys: p of the current segment for each token, like q.
      own_read: function that reads their own memory, given the soup to mix in or None: [batch, heads, tokens, value_dim].
    """
    batch, heads, tokens = q.shape[:3]
    order, there = _by_age(state)
    row = jnp.arange(batch)[:, None]
    keys = jnp.moveaxis(state.keys, 2, 1)[row, order]  # [batch, N, heads, key_dim]
    if u is not None and rule.connector == "age":
        age = jnp.sum(there, axis=-1, keepdims=True) - jnp.arange(keys.shape[1])
        scores, own = gating.by_age(u, jnp.broadcast_to(age[:, None, None], (*u.shape[:3], keys.shape[1]))), u[..., 0]
    elif u is None:
        scores, own = jnp.zeros((batch, heads, tokens, keys.shape[1]), q.dtype), jnp.zeros(q.shape[:3], q.dtype)
    else:
        scores = jnp.einsum("bhtd,bnhd->bhtn", u, keys, precision=jax.lax.Precision.HIGHEST)
        own = gating.score(u, own_keys)
    seen = jnp.broadcast_to(there[:, None, None], scores.shape)
    if rule.aggregation == "ssc":
        chosen = gating.select(rule, scores, seen)
        pick = lambda x: jnp.take_along_axis(x, chosen, axis=-1)
        gamma, mine = gating.gamma(rule, pick(scores), own, pick(seen), blend)
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
    gamma, mine = gating.gamma(rule, scores, own, seen, blend)
    # Back to the order of the slots.
    back = jnp.argsort(order, axis=-1)
    gamma = jnp.take_along_axis(gamma, jnp.broadcast_to(back[:, None, None], gamma.shape), axis=-1)
    if rule.mixes_weights:
        shares = jnp.concatenate([mine[..., None], gamma], axis=-1)
        return own_read(Soup(state.cached, jnp.swapaxes(shares, 1, 2)))
    return combine.join(
        rule.rule, params, q, own_read(None), mine, combine.read_all(rule.rule, dtype, params, state.cached, q, gamma)
    )


def overfull(rule: CachedRule[Params], state: CachedState) -> jax.Array:
    """Whether more memories were cached than the cache has slots although none may be evicted."""
    if rule.capacity is not None:
        return jnp.zeros(state.cached_count.shape, bool)
    return state.cached_count > state.keys.shape[2]
