"""Memory Caching for one token."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from atlasjax.memory.caching import cache, combine
from atlasjax.memory.caching import gates as gating
from atlasjax.memory.caching.gates import tokens_of
from atlasjax.memory.caching.spec import CachedSpec
from atlasjax.memory.caching.state import CachedState
from atlasjax.memory.fast_weights.chunk import Soup
from atlasjax.memory.grid import widened
from atlasjax.memory.layerwise import put_layer, step_layer, take_layer
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.rule import Params
from atlasjax.memory.tokens import Tokens


@functools.partial(jax.jit, static_argnames=("rule",), inline=True)
def xla_step(
    rule: CachedSpec[Params], params: Params, state: CachedState, tokens: Tokens
) -> tuple[jax.Array, CachedState]:
    """`Rule.step`: one step of the inner rule and one read of the cache (with "ssc", of top_k memories)."""
    state = widened(state, tokens.q.dtype)
    state = cache.push(rule, params, state, state.position == rule.segment_size)

    def own(soup: Soup | None, tokens: Tokens) -> tuple[jax.Array, PyTree]:
        return _step(rule, soup)(params, state.online, *tokens[:4])

    y, online, total = _token(rule, params, state, tokens, own)
    return y, state._replace(online=online, key_sum=total, position=state.position + 1)


def xla_step_layer(
    rule: CachedSpec[Params], params: Params, states: CachedState, layer: jax.Array, tokens: Tokens
) -> tuple[jax.Array, CachedState]:
    """`Rule.step_layer`: cached memories are read where they lie, and one is written where a segment ends."""
    full = states.position[layer] == rule.segment_size
    states = cache.push_layer(rule, params, states, layer, full)
    numbers = cache.counted(take_layer(states._replace(online=None, cached={}), layer), full)

    def own(soup: Soup | None, tokens: Tokens) -> tuple[jax.Array, PyTree]:
        if soup is None:
            return step_layer(rule.rule, params, states.online, layer, tokens)
        y, online = _step(rule, soup)(params, take_layer(states.online, layer), *tokens[:4])
        return y, put_layer(states.online, online, layer, y)

    state = numbers._replace(cached=states.cached)
    y, online, total = _token(rule, params, state, tokens, own, layer)
    numbers = numbers._replace(key_sum=total, position=numbers.position + 1)
    put = lambda all_, one: all_.at[layer].set(one.astype(all_.dtype))
    changed = {
        name: put(getattr(states, name), getattr(numbers, name)) for name in ("key_sum", "position", "cached_count")
    }
    return y, states._replace(online=online, **changed)


def _step(rule: CachedSpec[Params], soup: Soup | None) -> Callable[..., tuple[jax.Array, PyTree]]:
    """The inner rule's `step`. soup: memories whose layers its reads mix in."""
    if soup is None:
        return rule.rule.step
    return functools.partial(combine.mixing(rule.rule).step, soup=soup._replace(gates=soup.gates[:, 0]))


def _token(
    rule: CachedSpec[Params], params: Params, state: CachedState, tokens: Tokens,
    own: Callable[[Soup | None, Tokens], tuple[jax.Array, PyTree]], layer: jax.Array | None = None,
) -> tuple[jax.Array, PyTree, jax.Array]:  # fmt: skip
    """One token after `push`: y, what `own` returns as the next memory, and the sum of the segment's keys.

    state, layer: as for `cache.read_cache`. own: (soup or None, tokens) → the inner rule's y and next memory.
    """
    tokens, connector, blend = tokens_of(rule, tokens)
    dtype = tokens.q.dtype
    wide = wide_dtype(dtype)
    up = lambda x: x.astype(wide)[:, :, None]
    total = state.key_sum + tokens.k.astype(wide)
    own_keys = gating.running_pool(rule, total, (state.position + 1)[:, None])
    end = {}

    def own_read(soup: Soup | None) -> jax.Array:
        y, end["state"] = own(soup, tokens)
        return up(y)

    u = None if connector is None else up(connector)
    blend = None if blend is None else up(blend)
    up_params = jax.tree.map(lambda x: x.astype(wide), params)
    y = cache.read_cache(
        rule, up_params, state, up(tokens.q), u, blend, own_keys[:, :, None], own_read, dtype, layer
    )[:, :, 0]  # fmt: skip
    y = jnp.where(cache.overfull(rule, state)[:, None, None], jnp.nan, y)
    return y.astype(dtype), end["state"], total
