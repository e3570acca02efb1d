"""`SoftmaxRule.step`: one token.

A state has the cache as it was at the chunk's start t', and h_{t'} of the tokens since then. So a token costs one read of the
cache, for its key and query together, and the cache itself changes once per chunk.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from atlasjax.memory import meshes
from atlasjax.memory.blocks import Factors, dot, product_dtype
from atlasjax.memory.gates import Weights
from atlasjax.memory.grid import choose, widened
from atlasjax.memory.layerwise import change_some, put_layer, put_places, take_layer
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.softmax import sums
from atlasjax.memory.softmax.block import gradients, moved, read_out, with_bound, write_weights
from atlasjax.memory.softmax.coefficients import Coefficients, coefficients
from atlasjax.memory.softmax.init import empty_state
from atlasjax.memory.softmax.scan import cache_reads, stored_places
from atlasjax.memory.softmax.spec import SoftmaxSpec
from atlasjax.memory.softmax.state import SoftmaxParams, SoftmaxState, Tail
from atlasjax.memory.softmax.tape import Cache
from atlasjax.memory.tokens import Tokens


class OpenChunk(NamedTuple):
    """The unfinished chunk including its window, n tokens of one head. A, s: the coefficients of its last token.

    coefficients: those of the chunk, None if it has no token; last: the row of its last token.
    """

    k: jax.Array
    v: jax.Array
    h: jax.Array
    sees: jax.Array  # [n], whether the read sees the token
    A: jax.Array
    s: jax.Array | None
    entries: jax.Array  # [n], ρ of the tokens at the time of the read
    coefficients: Coefficients | None
    last: jax.Array


def seen(rule: SoftmaxSpec, entries: int, held: jax.Array, last: jax.Array) -> jax.Array:
    """Whether a read sees each place of a stored cache, [N]. last: the read's position in its chunk, −1 exactly at t'."""
    return held if rule.cache_window is None else held & (jnp.arange(entries) > last)


def read_open(
    rule: SoftmaxSpec, weights: Weights, momentum: Weights | None, part: sums.Partial, chunk: OpenChunk, q: jax.Array,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array, dict, Coefficients | None]:  # fmt: skip
    """y of the queries [r, key_dim] from their sums over the cache and the unfinished chunk, and the chunk's gradients and
    coefficients."""
    left, factors, out = gradients(rule, weights, chunk.h, chunk.k, chunk.v, dtype)
    coef, own = chunk.coefficients, jnp.zeros((chunk.k.shape[0],), chunk.h.dtype)
    if coef is not None:
        coef = with_bound(rule, coef, left, factors, out, chunk.v)
        own = jax.lax.dynamic_index_in_dim(coef.gradients, chunk.last, keepdims=False)
    raw = sums.scores(rule, q, chunk.k, dtype)
    kappa, value, mass = sums.join(rule, part, chunk.A, chunk.s, raw, chunk.entries[None], chunk.sees[None])
    h = sums.divide(value + dot(kappa * own[None], left, dtype), mass)
    rows = lambda x: None if x is None else jnp.broadcast_to(x, q.shape[:1])
    C = jnp.broadcast_to(own, (q.shape[0], own.shape[0]))
    y = read_out(rule, h, q, weights, momentum, factors, rows(chunk.A), rows(chunk.s), C, dtype)  # type: ignore[arg-type]
    return y, left, factors, coef


def open_chunk(
    rule: SoftmaxSpec, tail: Tail, h: jax.Array, position: jax.Array, count: jax.Array, commit: jax.Array
) -> OpenChunk:
    """The tail of one head as a chunk that is read after `position` ≥ 1 tokens."""
    c, b = rule.window, tail.step_size.shape[0]
    place = jnp.arange(c - 1 + b)
    real = (place >= c - 1 - count) & (place < c - 1 + position)
    coef = coefficients(
        rule, tail.retention, tail.step_size, tail.momentum_decay, tail.window_weights, jnp.broadcast_to(real, (b, real.shape[0])),
        real[c - 1 :], commit,
    )  # fmt: skip
    sees = real
    if rule.cache_window is not None:
        sees = sees & (place - (c - 1) > position - 1 - rule.cache_window)
    at = lambda x: jax.lax.dynamic_index_in_dim(x, position - 1, keepdims=False)
    s = None if coef.momentum is None else at(coef.momentum)
    entries = jnp.concatenate([jnp.zeros((c - 1,), coef.entries.dtype), at(coef.entries)])
    return OpenChunk(tail.keys, tail.values, h, sees, at(coef.decay), s, entries, coef, position - 1)


CacheSums = Callable[[jax.Array, jax.Array, jnp.dtype], sums.Partial]
"""(x [batch, heads, r, key_dim], sees [batch, r, N], dtype of the products) → the sums over the stored caches, [batch, heads, …]"""


def _cache(state: SoftmaxState) -> Cache:
    return Cache(state.keys, state.coefficients, state.momentum, state.decay)


def _sums_of(rule: SoftmaxSpec, cache: Cache) -> CacheSums:
    """How caches [batch, heads, …] are read."""

    def run(x: jax.Array, sees: jax.Array, dtype: jnp.dtype) -> sums.Partial:
        one = lambda x, cache, sees: sums.partial_sums(rule, x, cache, sees, dtype)
        return jax.vmap(jax.vmap(one, in_axes=(0, 0, None)))(x, cache, sees)

    return run


def _sums_of_layer(rule: SoftmaxSpec, caches: Cache, layer: jax.Array) -> CacheSums:
    """How those of one layer are read in the caches of all layers, [layers, batch, heads, …].

    A CPU takes what a product reads out of a larger array first. One head after another, that is little at a time.
    """

    def by_head(x: jax.Array, sees: jax.Array, caches: Cache, layer: jax.Array, dtype: jnp.dtype) -> sums.Partial:
        batch, heads = x.shape[:2]

        def one(_: None, at: tuple[jax.Array, jax.Array]) -> tuple[None, sums.Partial]:
            place = (layer, *at)
            return None, sums.partial_sums(rule, x[at], jax.tree.map(lambda a: a[place], caches), sees[at[0]], dtype)

        rows = jnp.divmod(jnp.arange(batch * heads), heads)
        _, part = meshes.scan(one, None, rows)
        return jax.tree.map(lambda a: a.reshape(batch, heads, *a.shape[1:]), part)

    def run(x: jax.Array, sees: jax.Array, dtype: jnp.dtype) -> sums.Partial:
        together = lambda x, sees, caches, layer: _sums_of(rule, take_layer(caches, layer))(x, sees, dtype)
        cpu = functools.partial(by_head, dtype=dtype)
        return jax.lax.platform_dependent(x, sees, caches, layer, cpu=cpu, default=together)

    return run


class Written(NamedTuple):
    """The arrays that a token leaves behind, [batch, heads, …].

    The tail, with a place for the last token of a chunk too. For the chunk's tokens: ∂ℓ/∂h [c − 1 + b, width], the gradients of
    the other weights, and their coefficients.
    """

    tail: Tail
    left: jax.Array
    factors: dict[str, Factors]
    coefficients: Coefficients


def _write(rule: SoftmaxSpec, state: SoftmaxState, tokens: Tokens, cache_sums: CacheSums) -> tuple[jax.Array, Written]:
    """y of one token, and what it leaves behind. Arguments as for `xla_step`. cache_sums: how the cache is read."""
    q, k, v, gates, _ = tokens
    wide = wide_dtype(q.dtype, state.keys.dtype)
    batch, heads, _ = q.shape
    c, b, entries = rule.window, rule.pending + 1, state.keys.shape[2]
    held = stored_places(rule, entries, state.num_tokens)
    gate = lambda x, *shape: jnp.ones((batch, heads, *shape), wide) if x is None else x.astype(wide)
    token = (
        q.astype(wide), k.astype(wide), v.astype(wide), gate(gates.retention), gate(gates.step_size),
        gate(gates.momentum_decay), gate(gates.window_weights, c),
    )  # fmt: skip

    x, sees = token[0][:, :, None], jax.vmap(lambda *x: seen(rule, entries, *x))(held, state.position)[:, None]
    if state.tail.preactivations is not None:
        # The key is read with the query, in one pass over the cache. It reads the cache at t', so all entries that are held.
        x, sees = jnp.stack(token[:2], axis=2), jnp.concatenate([sees, held[:, None]], axis=1)

    def one(part, weights, weights_momentum, tail, token, count, position):
        """One head."""
        q, k, v, retention, step_size, momentum_decay, window_weights = token
        row = lambda i: jax.tree.map(lambda x: x[i : i + 1], part)
        # The tail has b − 1 pending places; the last token of a chunk gets one beyond them until it is committed.
        put = lambda x, new, at: jnp.concatenate([x, jnp.zeros_like(x, shape=(1, *x.shape[1:]))]).at[at].set(new)
        h = jnp.zeros((c - 1 + b, part.value.shape[1]), wide)
        if tail.preactivations is not None:
            new_h = sums.divide(row(1).value, row(1).mass if rule.normalized else None)[0]
            h = put(tail.preactivations, new_h, c - 1 + position)
        tail = Tail(
            keys=put(tail.keys, k, c - 1 + position),
            values=put(tail.values, v, c - 1 + position),
            preactivations=None if tail.preactivations is None else h,
            retention=put(tail.retention, retention, position),
            step_size=put(tail.step_size, step_size, position),
            momentum_decay=put(tail.momentum_decay, momentum_decay, position),
            window_weights=put(tail.window_weights, window_weights, position),
        )
        commit = position + 1 == b
        chunk = open_chunk(rule, tail, h, position + 1, count, commit)
        y, left, factors, coef = read_open(rule, weights, weights_momentum, row(0), chunk, q[None], products)
        assert coef is not None
        return y[0], Written(tail, left, factors, coef)

    products = product_dtype(q.dtype)
    part = cache_sums(x, sees, products)
    by_head = jax.vmap(one, in_axes=(0, 0, 0, 0, 0, None, None))
    y, written = jax.vmap(by_head)(
        part, state.weights, state.weights_momentum, state.tail, token, state.num_tokens, state.position
    )
    if rule.cache_window is None:
        y = jnp.where((state.num_tokens + state.position < entries)[:, None, None], y, jnp.nan)
    return y, written


def _committed(
    rule: SoftmaxSpec, params: SoftmaxParams, state: SoftmaxState, written: Written, dtype: jnp.dtype
) -> SoftmaxState:
    """The state after the last token of a chunk. state: that before the token, or after it; dtype: of the tokens."""
    batch, heads = state.keys.shape[:2]
    products = product_dtype(dtype)
    c, b, wide = rule.window, rule.pending + 1, wide_dtype(dtype, state.keys.dtype)
    tail, left, factors, coef = written

    def one(cache, weights, weights_momentum, keys, left, factors, coef, count):
        return _commit(rule, cache, keys, left, coef, count), write_weights(weights, weights_momentum, factors, coef)

    by_head = jax.vmap(one, in_axes=(0, 0, 0, 0, 0, 0, 0, None))
    new_cache, (weights, weights_momentum) = jax.vmap(by_head)(
        _cache(state), state.weights, state.weights_momentum, tail.keys, left, factors, coef, state.num_tokens
    )
    count = state.num_tokens + b
    if rule.cache_window is not None:
        count = jnp.minimum(count, rule.cache_window)
    fresh = empty_state(rule, params, batch, heads, 0, wide).tail
    window = lambda x, rest: jnp.concatenate([x[:, :, b:], rest[:, :, c - 1 :]], axis=2)
    # The window goes on; pending tokens are committed, and their places are empty again.
    new_tail = fresh._replace(keys=window(tail.keys, fresh.keys), values=window(tail.values, fresh.values))
    if fresh.preactivations is not None and c - 1 + rule.pending:
        real = jnp.arange(c - 1 + rule.pending)[None]
        real = (real < c - 1) & (real >= c - 1 - count[:, None])
        new_tail = new_tail._replace(preactivations=cache_reads(rule, new_cache, count, new_tail.keys, products, real))
    return SoftmaxState(
        new_cache.keys,
        new_cache.coefficients,
        new_cache.momentum,
        new_cache.decay,
        count,
        weights,
        weights_momentum,
        new_tail,
        jnp.zeros_like(state.position),
        state.segment,
    )


@functools.partial(jax.jit, static_argnames=("rule",), inline=True)
def xla_step(
    rule: SoftmaxSpec,
    params: SoftmaxParams,
    state: SoftmaxState,
    tokens: Tokens,
) -> tuple[jax.Array, SoftmaxState]:
    """One token, without the time axis."""
    dtype = tokens.q.dtype
    state = widened(state, dtype)
    y, written = _write(rule, state, tokens, _sums_of(rule, _cache(state)))
    y = y.astype(dtype)
    if not rule.pending:
        return y, _committed(rule, params, state, written, dtype)
    full = state.position == rule.pending
    after = state._replace(tail=jax.tree.map(lambda x, old: x[:, :, : old.shape[2]], written.tail, state.tail))
    after = after._replace(position=state.position + 1)
    commit = lambda _: choose(full, _committed(rule, params, state, written, dtype), after)
    # A condition, not a selection: the cache is touched once per chunk, and a selection would copy it at every token.
    return y, jax.lax.cond(jnp.any(full), commit, lambda _: after, None)


def xla_step_layer(
    rule: SoftmaxSpec,
    params: SoftmaxParams,
    states: SoftmaxState,
    layer: jax.Array,
    tokens: Tokens,
) -> tuple[jax.Array, SoftmaxState]:
    """`xla_step` in the states of all layers: a token is written into its place of the tail, and the cache at a chunk's end."""
    dtype = tokens.q.dtype
    state = widened(take_layer(states, layer), dtype)
    y, written = _write(rule, state, tokens, _sums_of_layer(rule, _cache(states), layer))
    if not rule.pending:  # every token changes the whole cache
        return y.astype(dtype), put_layer(states, _committed(rule, params, state, written, dtype), layer, y)
    last = rule.window - 1 + state.position

    def put(all_: jax.Array, new: jax.Array) -> jax.Array:
        place = last if new.shape[2] == written.tail.keys.shape[2] else state.position
        return put_places(all_, jax.vmap(lambda new, place: new[:, place])(new, place), layer, place)

    tail = jax.tree.map(put, states.tail, written.tail)
    full = state.position == rule.pending
    states = states._replace(tail=tail, position=states.position.at[layer].set(state.position + 1))

    def commit(states: SoftmaxState) -> SoftmaxState:
        one = widened(take_layer(states, layer), dtype)
        return put_layer(
            states, choose(full, _committed(rule, params, one, written, dtype), one), layer, one.num_tokens
        )

    return y.astype(dtype), change_some(commit, states, full, y)


def _commit(
    rule: SoftmaxSpec, cache: Cache, keys: jax.Array, left: jax.Array, coef: Coefficients, count: jax.Array
) -> Cache:
    """The cache of one head after a chunk; keys, left: [c − 1 + b, …]."""
    c, b, N = rule.window, coef.end_entries.shape[0], cache.decay.shape[0]
    a, momentum, rho = cache.coefficients, cache.momentum, cache.decay
    if rule.has_scaling:
        a, rho = moved(a, momentum, coef.end), coef.end.decay * rho
        if momentum is not None and coef.end.momentum_decay is not None:
            momentum = coef.end.momentum_decay * momentum
    if rule.cache_window is not None:

        def add(x: jax.Array, new: jax.Array) -> jax.Array:
            # Shifts by b: with a window the newest entry is always at the last place.
            x = jnp.pad(x, ((0, b), *((0, 0),) * (x.ndim - 1)))
            return x.at[N + b - new.shape[0] :].add(new)[b:]
    else:

        def add(x: jax.Array, new: jax.Array) -> jax.Array:
            place = count + b - new.shape[0] + jnp.arange(new.shape[0])
            # Gradients of the window go to entries before the chunk. At the start of a segment there are none: out of range.
            return x.at[jnp.where(place < 0, N, place)].add(new, mode="drop")

    return Cache(
        add(cache.keys, keys[c - 1 :]),
        add(a, coef.end_gradients[:, None] * left),
        None if momentum is None or coef.end_momentum is None else add(momentum, coef.end_momentum[:, None] * left),
        add(rho, coef.end_entries),
    )
