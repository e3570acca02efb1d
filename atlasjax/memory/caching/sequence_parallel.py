"""Memory Caching whose tokens are divided over devices: each writes the segments of its own tokens, and reads those of all."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax.memory import grid
from atlasjax.memory.caching import combine
from atlasjax.memory.caching import gates as gating
from atlasjax.memory.caching.init import empty_cache
from atlasjax.memory.caching.parallel import Cached, read_segments, write_segments
from atlasjax.memory.caching.spec import CachedSpec
from atlasjax.memory.caching.state import CachedState, CachedTokens
from atlasjax.memory.check import check_fresh
from atlasjax.memory.gates import Weights
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.rule import Params, ScanCall
from atlasjax.memory.tokens import Tokens


def scan_part(
    rule: CachedSpec[Params], axes: tuple[str, ...], run: ScanCall[Params, CachedState],
    params: Params, state: CachedState | None, tokens: Tokens,
) -> tuple[jax.Array, CachedState]:  # fmt: skip
    """The part of one device, inside a `shard_map` that divides the tokens over `axes`, from a fresh memory.

    Segments start fresh, so no device waits for another to write its own. What the devices exchange is what a segment leaves
    behind: its pooled key, and its memory.

    Args:
      rule: one that is not `undivided`.
      axes: mesh axes; their devices, in order, have the parts of the sequence in order.
      run: not used.
      params: the parameters of `rule.rule`.
      state: None, a fresh memory.
      tokens: those of this device, whole segments.

    Returns:
      y of this device's tokens, and the state after the whole sequence.
    """
    check_fresh("CachedRule", state)
    time, size = tokens.q.shape[1], rule.segment_size
    count = time // size
    total = count * jax.lax.axis_size(axes)
    first = jax.lax.axis_index(axes) * count
    s, i = first + jnp.arange(count)[:, None, None], jnp.arange(total)
    visible = (i < s) & (s - i <= (total if rule.capacity is None else rule.capacity))
    rows = jax.tree.map(lambda x: grid.lay_chunks(x, count, size, None), gating.tokens_of(rule, tokens))
    y, ends, _ = write_segments(rule, params, rows, None, None)
    weights = rule.rule.cached_weights(ends)
    if rule.stop_gradient:
        weights = jax.lax.stop_gradient(weights)
    cached = Cached(weights, visible, first, axes)
    if rule.aggregation == "ssc" or rule.mixes_weights:
        y = read_segments(rule, params, rows, y, cached)
    else:
        y = _read_in_turn(rule, params, rows, y, cached)
    out = grid.pick_chunks(jnp.swapaxes(y, 2, 3), time, None).astype(tokens.q.dtype)

    # The state, the same on all devices. Training does not use it, and then XLA does not compute it.
    of_last_device = lambda x: jax.lax.all_gather(x[-1], axes)[-1]
    wide = wide_dtype(rows.tokens.k.dtype)
    keys = jnp.swapaxes(rows.tokens.k.astype(wide), 2, 3)  # [segments, batch, heads, C, key_dim]
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


def _line(x: jax.Array) -> jax.Array:
    """[segments, batch, heads, C, …] → [batch, heads, segments · C, …]."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])


# From the arrays of `_scores` and the numbers of memories [devices], one of each device: [devices, batch, heads, tokens].
_Scores = Callable[[tuple[jax.Array, ...], jax.Array], jax.Array]


def _scores(
    rule: CachedSpec[Params], rows: CachedTokens, cached: Cached, reader: jax.Array
) -> tuple[tuple[jax.Array, ...], jax.Array, _Scores]:
    """The scores of memories as a function, because those of all memories are too many to hold.

    reader: [tokens], each token's segment.

    Returns:
      The arrays that the function takes; the scores of each token's own segment, [batch, heads, tokens]; the function.
    """
    wide = wide_dtype(rows.tokens.q.dtype)
    up = lambda x: jnp.swapaxes(x.astype(wide), 2, 3)  # [segments, batch, heads, C, …]
    k = up(rows.tokens.k)
    shape = _line(k).shape[:-1]
    if rows.connector is None:
        return (), jnp.zeros(shape, wide), lambda _, number: jnp.zeros((len(number), *shape), wide)
    u = up(rows.connector)
    if rule.connector == "age":
        age = lambda number: jnp.broadcast_to(reader[:, None] - number, (*shape, len(number)))
        by_age = lambda given, number: jnp.moveaxis(gating.by_age(given[0], age(number)), -1, 0)
        return (_line(u),), _line(u)[..., 0], by_age
    own = gating.score(u, gating.running_pool(rule, jnp.cumsum(k, axis=3), jnp.arange(1, k.shape[3] + 1)))
    by_key = lambda given, number: jnp.einsum(
        "bhtd,ibhd->ibht", given[0], given[1][number], precision=jax.lax.Precision.HIGHEST
    )
    return (_line(u), cached.of_all(gating.pool(rule, k, axis=3))), _line(own), by_key


def _read_in_turn(
    rule: CachedSpec[Params], params: Params, rows: CachedTokens, y: jax.Array, cached: Cached
) -> jax.Array:
    """`read_segments`, where every device sends one memory at a time to all others.

    A device never holds more memories than there are devices, nor γ of more, forward or backward: a softmax is summed on the way.
    """
    dtype = rows.tokens.q.dtype
    wide = wide_dtype(dtype)
    line = lambda x: _line(jnp.swapaxes(x.astype(wide), 2, 3))
    count, batch, size, heads = rows.tokens.q.shape[:4]
    params = jax.tree.map(lambda x: x.astype(wide), params)
    q, own_read = line(rows.tokens.q), line(y)
    reader = jnp.repeat(cached.first + jnp.arange(count), size)  # each token's segment
    numbers = jnp.arange(jax.lax.axis_size(cached.axes)) * count  # of the first memory of each device
    reach = cached.visible.shape[-1] if rule.capacity is None else rule.capacity

    def seen(number: jax.Array) -> jax.Array:
        """[devices, tokens], whether a token reads a memory."""
        age = reader - number[:, None]
        return (age > 0) & (age <= reach)

    given, own, scores = _scores(rule, rows, cached, reader)
    # The largest score only keeps exponentials small; it cancels in the quotient.
    top, fixed = jax.lax.stop_gradient((own, given))
    if gating.is_softmax(rule):

        def highest(top: jax.Array, j: jax.Array) -> tuple[jax.Array, None]:
            low = jnp.where(seen(numbers + j)[:, None, None], scores(fixed, numbers + j), -jnp.inf)
            return jnp.maximum(top, jnp.max(low, axis=0)), None

        top, _ = jax.lax.scan(highest, top, jnp.arange(count))

    run = combine.over_heads(rule.rule, dtype)
    nothing = jnp.zeros((*q.shape[:-1], rule.sizes(params).value_dim), wide)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def read(params: Params, q: jax.Array, weights: Weights, share: jax.Array, is_read: jax.Array) -> jax.Array:
        # No token of this device may read the memory: then its product is not computed.
        return jax.lax.cond(is_read, lambda: share[..., None] * run(params, weights, q), lambda: nothing)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def turn(params: Params, q: jax.Array, given: tuple, j: jax.Array, mine: Weights) -> tuple[jax.Array, jax.Array]:
        """The reads of memory j of each device, and its part of the sums of γ."""
        sees = seen(numbers + j)
        shares = gating.unnormalized(rule, scores(given, numbers + j), sees[:, None, None], top)
        add = lambda y, xs: (y + read(params, q, *xs), None)
        # The gathered memories are computed again in the backward pass (`checkpoint`), not kept for it.
        xs = (jax.lax.all_gather(mine, cached.axes), shares, jnp.any(sees, axis=-1))
        return jax.lax.scan(add, nothing, xs)[0], jnp.sum(shares, axis=0)

    def add_turn(sums: tuple[jax.Array, jax.Array], xs: tuple) -> tuple[tuple[jax.Array, jax.Array], None]:
        return jax.tree.map(jnp.add, sums, turn(params, q, given, *xs)), None

    mine = gating.unnormalized(rule, own, None, top)
    (others, total), _ = jax.lax.scan(add_turn, (nothing, mine), (jnp.arange(count), cached.weights))
    if gating.is_softmax(rule):
        others, mine = others / total[..., None], mine / total
    if rows.blend is not None:
        blend = line(rows.blend)
        others, mine = blend[..., None] * others, 1 + blend * (mine - 1)
    out = combine.join(rule.rule, params, q, own_read, mine, others)
    return jnp.moveaxis(out.reshape(batch, heads, count, size, -1), 2, 0)
