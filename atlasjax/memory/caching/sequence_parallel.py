"""Memory Caching whose tokens are divided over devices: each writes the segments of its own tokens, and reads those of all."""

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax.memory import grid
from atlasjax.memory.caching import gates as gating
from atlasjax.memory.caching.parallel import Cached, read_segments, write_segments
from atlasjax.memory.caching.rule import CachedRule
from atlasjax.memory.caching.state import CachedState, Tokens, empty_cache
from atlasjax.memory.rule import Params


def scan_part(
    rule: CachedRule[Params], axes: tuple[str, ...], params: Params, tokens: Tokens
) -> tuple[jax.Array, CachedState]:
    """The part of one device, inside a `shard_map` that divides the tokens over `axes`, from a fresh memory.

    Segments start fresh, so no device waits for another to write its own. What the devices exchange is what a segment leaves
    behind: its pooled key, and its memory.

    Args:
      rule: one that is not `undivided`.
      axes: mesh axes; their devices, in order, have the parts of the sequence in order.
      params: the parameters of `rule.rule`.
      tokens: those of this device, whole segments.

    Returns:
      y of this device's tokens, and the state after the whole sequence.
    """
    time, size = tokens.q.shape[1], rule.segment_size
    count = time // size
    total = count * jax.lax.axis_size(axes)
    first = jax.lax.axis_index(axes) * count
    s, i = first + jnp.arange(count)[:, None, None], jnp.arange(total)
    visible = (i < s) & (s - i <= (total if rule.capacity is None else rule.capacity))
    rows = jax.tree.map(lambda x: grid.lay_chunks(x, count, size, None), tokens)
    y, ends, _ = write_segments(rule, params, rows, None, None)
    weights = rule.rule.cached_weights(ends)
    if rule.stop_gradient:
        weights = jax.lax.stop_gradient(weights)
    cached = Cached(weights, visible, first, axes)
    y = read_segments(rule, params, rows, y, cached)
    out = grid.pick_chunks(jnp.swapaxes(y, 2, 3), time, None).astype(tokens.q.dtype)

    # The state, the same on all devices. What is not used of it, as in training, is not computed.
    of_last_device = lambda x: jax.lax.all_gather(x[-1], axes)[-1]
    wide = jnp.promote_types(rows.k.dtype, jnp.float32)
    keys = jnp.swapaxes(rows.k.astype(wide), 2, 3)  # [segments, batch, heads, C, key_dim]
    places = max(1, total - 1) if rule.capacity is None else rule.capacity
    state = empty_cache(rule, params, jax.tree.map(of_last_device, ends), places)
    kept = np.arange(max(0, total - 1 - places), total - 1)

    def put(empty: jax.Array, each: jax.Array) -> jax.Array:
        """[batch, heads, places, …] from this device's [segments, batch, heads, …]."""
        memories = jnp.moveaxis(cached.of_all(each)[kept], 0, 2)
        return empty.astype(each.dtype).at[:, :, kept % places].set(memories)

    number = jnp.full_like(state.position, 1)
    return out, state._replace(
        cached={name: put(x, weights[name]) for name, x in state.cached.items()},
        keys=put(state.keys, gating.pool(rule, keys, axis=3)),
        key_sum=of_last_device(jnp.sum(keys, axis=3)),
        position=size * number,
        cached_count=(total - 1) * number,
    )
