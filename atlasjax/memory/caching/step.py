"""Memory Caching for one token."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from atlasjax.memory.caching import cache, combine
from atlasjax.memory.caching import gates as gating
from atlasjax.memory.caching.rule import CachedRule
from atlasjax.memory.caching.state import CachedState, tokens_of
from atlasjax.memory.fast_weights.chunk import Soup
from atlasjax.memory.gates import Gates
from atlasjax.memory.rule import Params


def xla_step(
    rule: CachedRule[Params], params: Params, state: CachedState, q: jax.Array, k: jax.Array, v: jax.Array, gates: Gates
) -> tuple[jax.Array, CachedState]:
    """`CachedRule.step`."""
    tokens = tokens_of(rule, q, k, v, gates)
    dtype = tokens.q.dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    state = cache.push(rule, params, state, state.position == rule.segment_size)
    up = lambda x: x.astype(wide)[:, :, None]
    total = state.key_sum + tokens.k.astype(wide)
    own_keys = gating.running_pool(rule, total, (state.position + 1)[:, None])
    end = {}

    def own_read(soup: Soup | None) -> jax.Array:
        run: Callable[..., tuple[jax.Array, PyTree]] = rule.rule.step
        if soup is not None:
            run = functools.partial(combine.mixing(rule.rule).step, soup=soup._replace(gates=soup.gates[:, 0]))
        y, end["state"] = run(params, state.online, tokens.q, tokens.k, tokens.v, tokens.gates)
        return up(y)

    u = None if tokens.connector is None else up(tokens.connector)
    blend = None if tokens.blend is None else up(tokens.blend)
    up_params = jax.tree.map(lambda x: x.astype(wide), params)
    y = cache.read_cache(rule, up_params, state, up(tokens.q), u, blend, own_keys[:, :, None], own_read, dtype)[:, :, 0]
    y = jnp.where(cache.overfull(rule, state)[:, None, None], jnp.nan, y)
    state = state._replace(online=end["state"], key_sum=total, position=state.position + 1)
    return y.astype(dtype), state
