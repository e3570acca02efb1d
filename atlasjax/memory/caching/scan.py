"""Memory Caching over a sequence: from a fresh memory in parallel (`parallel`), from a state one segment after another."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from atlasjax.memory import grid, meshes
from atlasjax.memory.caching import cache, combine
from atlasjax.memory.caching import gates as gating
from atlasjax.memory.caching.gates import tokens_of
from atlasjax.memory.caching.parallel import parallel_scan
from atlasjax.memory.caching.spec import CachedSpec
from atlasjax.memory.caching.state import CachedState, CachedTokens
from atlasjax.memory.fast_weights.chunk import Soup
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.rule import Params
from atlasjax.memory.tokens import Tokens


@functools.partial(jax.jit, static_argnames=("rule", "max_segments"))
def xla_scan(
    rule: CachedSpec[Params],
    params: Params,
    state: CachedState | None,
    tokens: Tokens,
    max_segments: int | None = None,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, CachedState]:
    """`Rule.scan`. A fresh memory computes the segments in parallel. The state that comes back then has room only for the
    memories of this call, unless the rule has a capacity: to continue a sequence, start with `init_state`."""
    if lengths is not None:
        raise TypeError("CachedRule.scan: lengths is only for the rule inside a CachedRule.")
    own = tokens_of(rule, tokens)
    if state is None:
        return parallel_scan(rule, params, own, tokens.segment_ids, max_segments)
    return _from_state(rule, params, state, own)


def _from_state(
    rule: CachedSpec[Params], params: Params, state: CachedState, tokens: CachedTokens
) -> tuple[jax.Array, CachedState]:
    """A call that continues from a state anywhere in a segment, one segment after another."""
    time, dtype = tokens.tokens.q.shape[1], tokens.tokens.q.dtype
    size = rule.segment_size
    wide = wide_dtype(dtype)
    where = grid.continued_pieces(time, size, state.position)

    def one(state: CachedState, xs: tuple[CachedTokens, jax.Array]) -> tuple[CachedState, jax.Array]:
        row, length = xs
        # A full segment moves to the cache when the next token comes, not before: until then it is the online memory.
        state = cache.push(rule, params, state, (length > 0) & (state.position == size))
        up = lambda x: jnp.swapaxes(x.astype(wide), 1, 2)
        q, k = up(row.tokens.q), up(row.tokens.k)
        real = jnp.arange(where.width)[None] < length[:, None]
        k = jnp.where(real[:, None, :, None], k, 0.0)
        # Each token's score is that of the segment up to itself.
        sums = state.key_sum[:, :, None] + jnp.cumsum(k, axis=2)
        seen = state.position[:, None, None] + jnp.arange(1, where.width + 1)[None, None]
        own_keys = gating.running_pool(rule, sums, jnp.broadcast_to(seen, sums.shape[:-1]))
        # Filled by `own_read`, which `read_cache` calls once: with a soup only the engine can read the own memory.
        end = {}

        def own_read(soup: Soup | None) -> jax.Array:
            run: Callable[..., tuple[jax.Array, PyTree]] = rule.rule.scan
            if soup is not None:
                run = functools.partial(combine.mixing(rule.rule).scan, soup=soup)
            y, end["state"] = run(params, state.online, *row.tokens, lengths=length)
            return up(jnp.where(real[..., None, None], y, 0.0))

        u = None if row.connector is None else up(row.connector)
        blend = None if row.blend is None else up(row.blend)
        y = cache.read_cache(rule, up_params, state, q, u, blend, own_keys, own_read, dtype)
        y = jnp.where(cache.overfull(rule, state)[:, None, None, None], jnp.nan, y)
        online = jax.tree.map(lambda x, like: x.astype(like.dtype), end["state"], state.online)
        state = state._replace(
            online=online, key_sum=sums[:, :, -1], position=state.position + length.astype(jnp.int32)
        )
        return state, jnp.swapaxes(y, 1, 2)

    up_params = jax.tree.map(lambda x: x.astype(wide), params)
    # Writes and sums of the whole call are kept wide; a loop cannot change the dtype of its carry.
    state = jax.tree.map(lambda x: x.astype(wide) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)
    # The backward pass keeps the state before each piece and computes the piece again.
    run = jax.checkpoint(one, prevent_cse=False)
    rows = jax.tree.map(lambda x: grid.lay_chunks(x, where.slots, where.width, where.place), tokens)
    state, y = meshes.scan(run, state, (rows, where.lengths))
    return grid.pick_chunks(y, time, where.place).astype(dtype), state
