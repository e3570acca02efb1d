"""Memory Caching read without a write."""

import functools

import jax
import jax.numpy as jnp

from atlasjax.memory.caching import cache, combine
from atlasjax.memory.caching import gates as gating
from atlasjax.memory.caching.spec import CachedSpec
from atlasjax.memory.caching.state import CachedState
from atlasjax.memory.fast_weights.chunk import Soup
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.rule import Params


@functools.partial(jax.jit, static_argnames=("rule",))
def read_state(
    rule: CachedSpec[Params],
    params: Params,
    state: CachedState,
    q: jax.Array,
    connector: jax.Array | None,
    blend: jax.Array | None,
) -> jax.Array:
    """Reads a state without writing: q, connector [batch, time, heads, key_dim] → [batch, time, heads, value_dim]."""
    wide = wide_dtype(q.dtype)
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
    if rule.blended:
        blend = jnp.ones(q.shape[:-1], wide) if blend is None else blend.astype(wide)
    blend = None if blend is None else jnp.swapaxes(blend, 1, 2)
    y = cache.read_cache(rule, up_params, state, up(q), u, blend, own_keys, own_read, wide)
    y = jnp.where(cache.overfull(rule, state)[:, None, None, None], jnp.nan, y)
    return jnp.swapaxes(y, 1, 2).astype(q.dtype)
