"""The cache of a state: a segment's memory moves to it, and tokens read it together with their own memory."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from atlasjax.memory.caching import combine
from atlasjax.memory.caching import gates as gating
from atlasjax.memory.caching.init import fresh_memory
from atlasjax.memory.caching.spec import CachedSpec
from atlasjax.memory.caching.state import CachedState, in_segment
from atlasjax.memory.fast_weights.chunk import Soup
from atlasjax.memory.gates import Weights
from atlasjax.memory.grid import choose
from atlasjax.memory.layerwise import change_some, put_layer, put_places, take_layer, take_places
from atlasjax.memory.rule import Params


def push(rule: CachedSpec[Params], params: Params, state: CachedState, full: jax.Array) -> CachedState:
    """Where `full` [batch] is True, moves the segment's memory to the cache and begins a new segment."""
    places = state.keys.shape[2]
    place = jnp.where(full, state.cached_count % places, places)  # one beyond the last is left out
    weights, keys = _to_cache(rule, state)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return jax.vmap(lambda old, place, new: old.at[:, place].set(new, mode="drop"))(
            old, place, new.astype(old.dtype)
        )

    cached = {name: put(old, weights[name]) for name, old in state.cached.items()}
    state = state._replace(online=_next_memory(rule, params, state, full), cached=cached, keys=put(state.keys, keys))
    return counted(state, full)


def push_layer(
    rule: CachedSpec[Params], params: Params, states: CachedState, layer: jax.Array, full: jax.Array
) -> CachedState:
    """`push` in the states of all layers, [layers, batch, …], without `counted`. A memory is written to its place, and
    nothing else of the cache moves."""

    def end(states: CachedState) -> CachedState:
        state = take_layer(states._replace(cached={}), layer)
        (weights, keys), place = _to_cache(rule, state), state.cached_count % state.keys.shape[2]
        put = lambda all_, new: put_places(all_, new, layer, place, full)
        cached = {name: put(all_, weights[name]) for name, all_ in states.cached.items()}
        online = put_layer(states.online, _next_memory(rule, params, state, full), layer, keys)
        return states._replace(online=online, cached=cached, keys=put(states.keys, keys))

    return change_some(end, states, full)


def _to_cache(rule: CachedSpec[Params], state: CachedState) -> tuple[Weights, jax.Array]:
    """The weights and the pooled key that the segment's memory leaves in the cache."""
    weights = rule.rule.cached_weights(state.online)
    if rule.stop_gradient:
        weights = jax.lax.stop_gradient(weights)
    return weights, gating.running_pool(rule, state.key_sum, state.position[:, None])


def _next_memory(rule: CachedSpec[Params], params: Params, state: CachedState, full: jax.Array) -> PyTree:
    """The memory that the next token writes to: in rows where `full`, that at the start of a segment."""
    online = state.online
    if rule.start != "fresh":
        return online
    fresh = fresh_memory(rule, params, full.shape[0])
    # A selection must not widen the state, or the loop that decodes would change its carry.
    fresh = jax.tree.map(lambda x, like: x.astype(like.dtype), fresh, online)
    return choose(full, in_segment(fresh, getattr(online, "segment", None)), online)


def counted(state: CachedState, full: jax.Array) -> CachedState:
    """The numbers of a state after `push`."""
    return state._replace(
        key_sum=choose(full, jnp.zeros_like(state.key_sum), state.key_sum),
        position=jnp.where(full, 0, state.position),
        cached_count=state.cached_count + full.astype(jnp.int32),
    )


def _by_age(state: CachedState) -> tuple[jax.Array, jax.Array]:
    """Places of the cache from the oldest memory to the newest, [batch, N], and whether each holds a memory."""
    places = state.keys.shape[2]
    n = jnp.arange(places)[None]
    # The cache is a ring: after it has been full, the oldest memory is where the next one will go.
    order = (jnp.where(state.cached_count > places, state.cached_count % places, 0)[:, None] + n) % places
    return order, n < jnp.minimum(state.cached_count, places)[:, None]


def read_cache(
    rule: CachedSpec[Params], params: Params, state: CachedState, q: jax.Array, u: jax.Array | None, blend: jax.Array | None,
    own_keys: jax.Array, own_read: Callable[[Soup | None], jax.Array], dtype: jnp.dtype, layer: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """The tokens' reads of the cache and of their own memory.

    Args:
      state: the state. With a layer its `cached` is that of all layers, [layers, batch, heads, memories, …].
      q: [batch, heads, tokens, key_dim].
      u: like q, or [batch, heads, tokens, 1 + capacity] with connector="age".
      blend: λ, [batch, heads, tokens].
      own_keys: p of the current segment for each token, like q.
      own_read: function that reads their own memory, given the soup to mix in or None: [batch, heads, tokens, value_dim].
      layer: the layer whose cache is read, where it lies unless layers are mixed. For one token only.
    """
    batch, heads, tokens = q.shape[:3]
    order, held = _by_age(state)
    keys = jax.vmap(lambda keys, order: keys[:, order])(state.keys, order)  # [batch, heads, N, key_dim]
    places = order.shape[1]
    if u is not None and rule.connector == "age":
        age = jnp.sum(held, axis=-1, keepdims=True) - jnp.arange(places)
        scores, own = gating.by_age(u, jnp.broadcast_to(age[:, None, None], (*u.shape[:3], places))), u[..., 0]
    elif u is None:
        scores, own = jnp.zeros((batch, heads, tokens, places), q.dtype), jnp.zeros(q.shape[:3], q.dtype)
    else:
        scores = jnp.einsum("bhtd,bhnd->bhtn", u, keys, precision=jax.lax.Precision.HIGHEST)
        own = gating.score(u, own_keys)
    seen = jnp.broadcast_to(held[:, None, None], scores.shape)
    if rule.aggregation == "ssc":
        chosen = gating.select(rule, scores, seen)
        pick = lambda x: jnp.take_along_axis(x, chosen, axis=-1)
        gamma, mine = gating.gamma(rule, pick(scores), own, pick(seen), blend)
        place = jnp.take_along_axis(jnp.broadcast_to(order[:, None, None], scores.shape), chosen, axis=-1)
        index = jnp.where(pick(seen), place, places)
        if tokens == 1:
            selected = jax.tree.map(functools.partial(take_places, i=layer, places=place[:, :, 0]), state.cached)
            others = combine.read_all(rule.rule, dtype, params, selected, q, gamma)
        else:
            by_memory = jax.tree.map(lambda w: jnp.moveaxis(w, 2, 0), state.cached)
            others = combine.read_selected(rule.rule, dtype, params, by_memory, q, index, gamma)
        return combine.join(rule.rule, params, q, own_read(None), mine, others)
    gamma, mine = gating.gamma(rule, scores, own, seen, blend)
    # Back to the order of the places.
    back = jnp.argsort(order, axis=-1)
    gamma = jnp.take_along_axis(gamma, jnp.broadcast_to(back[:, None, None], gamma.shape), axis=-1)
    if rule.mixes_weights:
        shares = jnp.concatenate([mine[..., None], gamma], axis=-1)
        return own_read(Soup(take_layer(state.cached, layer), jnp.swapaxes(shares, 1, 2)))
    if layer is None:
        others = combine.read_all(rule.rule, dtype, params, state.cached, q, gamma)
    else:
        others = combine.read_layer(rule.rule, dtype, params, state.cached, layer, q, gamma)
    return combine.join(rule.rule, params, q, own_read(None), mine, others)


def overfull(rule: CachedSpec[Params], state: CachedState) -> jax.Array:
    """Whether more memories were cached than the cache has places although none may be evicted."""
    if rule.capacity is not None:
        return jnp.zeros(state.cached_count.shape, bool)
    return state.cached_count > state.keys.shape[2]
