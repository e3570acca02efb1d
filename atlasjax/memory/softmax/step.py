"""`SoftmaxRule.step`: one token.

A state has the cache as it was at the chunk's start t', and h_{t'} of the tokens since then. So a token costs one read of the
cache, for its key and query together, and the cache itself changes once per chunk.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from atlasjax.memory.blocks import dot
from atlasjax.memory.gates import Gates, Weights
from atlasjax.memory.grid import choose
from atlasjax.memory.softmax import sums
from atlasjax.memory.softmax.block import gradients, moved, read_out, with_bound, write_weights
from atlasjax.memory.softmax.coefficients import Coefficients, coefficients
from atlasjax.memory.softmax.rule import SoftmaxRule
from atlasjax.memory.softmax.scan import cache_reads, stored_places
from atlasjax.memory.softmax.state import SoftmaxParams, SoftmaxState, Tail, empty_state, has_scaling
from atlasjax.memory.softmax.tape import Cache


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


def seen(rule: SoftmaxRule, entries: int, held: jax.Array, last: jax.Array) -> jax.Array:
    """Whether a read sees each slot of a stored cache, [N]. last: the read's position in its chunk, −1 exactly at t'."""
    return held if rule.cache_window is None else held & (jnp.arange(entries) > last)


def read_open(
    rule: SoftmaxRule, weights: Weights, momentum: Weights | None, part: sums.Partial, chunk: OpenChunk, q: jax.Array,
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
    h = sums.divide(value + dot(kappa * own, left, dtype), mass)
    rows = lambda x: None if x is None else jnp.broadcast_to(x, q.shape[:1])
    C = jnp.broadcast_to(own, (q.shape[0], own.shape[0]))
    y = read_out(rule, h, q, weights, momentum, factors, rows(chunk.A), rows(chunk.s), C, dtype)  # type: ignore[arg-type]
    return y, left, factors, coef


def open_chunk(
    rule: SoftmaxRule, tail: Tail, h: jax.Array, position: jax.Array, count: jax.Array, commit: jax.Array
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


@functools.partial(jax.jit, static_argnames=("rule",), inline=True)
def xla_step(
    rule: SoftmaxRule,
    params: SoftmaxParams,
    state: SoftmaxState,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: Gates,
) -> tuple[jax.Array, SoftmaxState]:
    """One token: q, k: [batch, heads, key_dim], v: [batch, heads, value_dim], gates [batch, heads(, n)]."""
    wide = jnp.promote_types(q.dtype, state.keys.dtype)
    batch, heads, _ = q.shape
    c, b, entries = rule.window, rule.pending + 1, state.keys.shape[2]
    held = stored_places(rule, entries, state.num_tokens)
    gate = lambda x, *shape: jnp.ones((batch, heads, *shape), wide) if x is None else x.astype(wide)
    token = (
        q.astype(wide), k.astype(wide), v.astype(wide), gate(gates.retention), gate(gates.step_size),
        gate(gates.momentum_decay), gate(gates.window_weights, c),
    )  # fmt: skip

    def one(cache, weights, weights_momentum, tail, token, held, count, position):
        """One head: y, and the arrays needed for a commit."""
        q, k, v, retention, step_size, momentum_decay, window_weights = token
        x, sees = q[None], seen(rule, entries, held, position)[None]
        if tail.preactivations is not None:
            x, sees = jnp.stack([q, k]), jnp.concatenate([sees, held[None]])
        part = sums.partial_sums(rule, x, cache, sees, state_dtype)
        row = lambda i: jax.tree.map(lambda x: x[i : i + 1], part)
        put = lambda x, new, at: jnp.concatenate([x, jnp.zeros_like(x, shape=(1, *x.shape[1:]))]).at[at].set(new)
        h = jnp.zeros((c - 1 + b, cache.coefficients.shape[1]), wide)
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
        y, left, factors, coef = read_open(rule, weights, weights_momentum, row(0), chunk, q[None], state_dtype)
        assert coef is not None
        return y[0], tail, left, coef, write_weights(weights, weights_momentum, factors, coef, state_dtype)

    state_dtype = q.dtype
    cache = Cache(state.keys, state.coefficients, state.momentum, state.decay)
    by_head = jax.vmap(one, in_axes=(0, 0, 0, 0, 0, None, None, None))
    y, tail, left, coef, (weights, weights_momentum) = jax.vmap(by_head)(
        cache, state.weights, state.weights_momentum, state.tail, token, held, state.num_tokens, state.position
    )
    if rule.cache_window is None:
        y = jnp.where((state.num_tokens + state.position < entries)[:, None, None], y, jnp.nan)

    full = state.position + 1 == b
    after = state._replace(tail=jax.tree.map(lambda x, old: x[:, :, : old.shape[2]], tail, state.tail))
    after = after._replace(position=state.position + 1)

    def commit(_: None) -> SoftmaxState:
        commit_head = jax.vmap(lambda *x: _commit(rule, *x), in_axes=(0, 0, 0, 0, None))
        new_cache = jax.vmap(commit_head)(cache, tail.keys, left, coef, state.num_tokens)
        count = state.num_tokens + b
        if rule.cache_window is not None:
            count = jnp.minimum(count, rule.cache_window)
        fresh = empty_state(rule, params, batch, heads, 0, wide).tail
        window = lambda x, rest: jnp.concatenate([x[:, :, b:], rest[:, :, c - 1 :]], axis=2)
        new_tail = fresh._replace(keys=window(tail.keys, fresh.keys), values=window(tail.values, fresh.values))
        if fresh.preactivations is not None and c - 1 + rule.pending:
            real = jnp.arange(c - 1 + rule.pending)
            real = (real < c - 1) & (real >= c - 1 - count[:, None])
            new_tail = new_tail._replace(
                preactivations=cache_reads(rule, new_cache, count, new_tail.keys, state_dtype, real)
            )
        done = SoftmaxState(
            *new_cache, count, weights, weights_momentum, new_tail, jnp.zeros_like(state.position), state.segment
        )
        return choose(full, done, after) if rule.pending else done

    if not rule.pending:
        new = commit(None)
    else:
        new = jax.lax.cond(jnp.any(full), commit, lambda _: after, None)
    return y.astype(q.dtype), new


def _commit(
    rule: SoftmaxRule, cache: Cache, keys: jax.Array, left: jax.Array, coef: Coefficients, count: jax.Array
) -> Cache:
    """The cache of one head after a chunk; keys, left: [c − 1 + b, …]."""
    c, b, N = rule.window, coef.end_entries.shape[0], cache.decay.shape[0]
    a, momentum, rho = cache.coefficients, cache.momentum, cache.decay
    if has_scaling(rule):
        a, rho = moved(a, momentum, coef.end), coef.end.decay * rho
        if momentum is not None and coef.end.momentum_decay is not None:
            momentum = coef.end.momentum_decay * momentum
    if rule.cache_window is not None:

        def add(x: jax.Array, new: jax.Array) -> jax.Array:
            x = jnp.pad(x, ((0, b), *((0, 0),) * (x.ndim - 1)))
            return x.at[N + b - new.shape[0] :].add(new)[b:]
    else:

        def add(x: jax.Array, new: jax.Array) -> jax.Array:
            place = count + b - new.shape[0] + jnp.arange(new.shape[0])
            return x.at[jnp.where(place < 0, N, place)].add(new, mode="drop")

    return Cache(
        add(cache.keys, keys[c - 1 :]),
        add(a, coef.end_gradients[:, None] * left),
        None if momentum is None or coef.end_momentum is None else add(momentum, coef.end_momentum[:, None] * left),
        add(rho, coef.end_entries),
    )
