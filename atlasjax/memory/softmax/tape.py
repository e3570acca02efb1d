"""Conversion between states and sequences: a call's tokens preceded by those held in a state, and back to a state.

On the tape of a call every token has a place: first the tokens of the unfinished chunk in the state, then the call's own. Cache
entries are indexed so that the state's N entries end where the tape begins.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from atlasjax.memory import grid
from atlasjax.memory.softmax.spec import SoftmaxSpec
from atlasjax.memory.softmax.state import SoftmaxState, Tail
from atlasjax.memory.tokens import Tokens


class Tape(NamedTuple):
    """Tokens by place, [batch, places, heads, …]. Gates of empty places have no effect. real, segment: [batch, places]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    retention: jax.Array
    step_size: jax.Array
    momentum_decay: jax.Array
    window_weights: jax.Array
    real: jax.Array
    segment: jax.Array


def tape_of(
    rule: SoftmaxSpec,
    state: SoftmaxState,
    tokens: Tokens,
    place: jax.Array | None,
    places: int,
    keep: jax.Array | None = None,
) -> Tape:
    """Puts the tokens of a state and of a call on one tape.

    Args:
      rule, state, tokens: as in `scan`.
      place: [batch, time], of each token. None means that token t is at place t and the state holds none.
      places: length of the tape, static.
      keep: [batch], whether the state's tokens are kept. None means yes.
    """
    q, k, v, gates, ids = tokens
    batch, time, heads, _ = q.shape
    tail, wide = state.tail, state.keys.dtype
    pending = jnp.arange(rule.pending)[None] < state.position[:, None]
    if keep is not None:
        pending = pending & keep[:, None]

    def put(old: jax.Array | None, new: jax.Array, fill: float | jax.Array) -> jax.Array:
        """old: [batch, heads, p, …]; new: [batch, time, heads, …]."""
        held = None
        if place is not None and old is not None and rule.pending:
            old = jnp.moveaxis(old, 2, 1).astype(new.dtype)
            mask = pending.reshape(*pending.shape, *(1,) * (old.ndim - 2))
            held = jnp.where(mask, old, jnp.asarray(fill, new.dtype))
        return grid.lay(new, places, place, fill, held)

    # A place without a token changes nothing: η = 0 writes nothing, and decays of 1 forget nothing.
    def put_gate(old: jax.Array, new: jax.Array | None, fill: float, *channels: int) -> jax.Array:
        if new is None:
            new = jnp.ones((batch, time, heads, *channels), wide)
        return put(old, new.astype(wide), fill)

    c = rule.window
    flat = lambda x: x[:, None]  # [batch, p] → [batch, heads = 1, p]
    real = put(flat(pending), jnp.ones((batch, time, 1), bool), False)[:, :, 0]
    base = state.segment
    if ids is None:
        ids = jnp.broadcast_to(base[:, None], (batch, time))
    # A state without an id is continued by the first segment, whatever its id.
    base = jnp.where(base < 0, ids[:, 0], base)
    old_ids = jnp.broadcast_to(base[:, None], pending.shape)
    return Tape(
        q=put(None, q, 0.0),
        k=put(tail.keys[:, :, c - 1 :], k, 0.0),
        v=put(tail.values[:, :, c - 1 :], v, 0.0),
        retention=put_gate(tail.retention, gates.retention, 1.0),
        step_size=put_gate(tail.step_size, gates.step_size, 0.0),
        momentum_decay=put_gate(tail.momentum_decay, gates.momentum_decay, 1.0),
        window_weights=put_gate(tail.window_weights, gates.window_weights, 0.0, c),
        real=real,
        segment=put(flat(old_ids), ids[:, :, None].astype(jnp.int32), -2)[:, :, 0],
    )


class Cache(NamedTuple):
    """Entries in order of their tokens: keys [N, key_dim], coefficients and momentum [N, width], decay [N]. For one head, or with
    leading batch and heads axes."""

    keys: jax.Array
    coefficients: jax.Array
    momentum: jax.Array | None
    decay: jax.Array


def ordered_cache(rule: SoftmaxSpec, state: SoftmaxState) -> Cache:
    """The cache of a state with its last entry at place N − 1, and zeros in empty places."""
    cache = Cache(state.keys, state.coefficients, state.momentum, state.decay)
    entries = state.keys.shape[2]
    if rule.cache_window is not None or entries == 0:
        return cache
    index = jnp.arange(entries)[None] - entries + state.num_tokens[:, None]
    return jax.tree.map(lambda x: _take(x, index, (index >= 0) & (index < entries)), cache)


def stored_cache(rule: SoftmaxSpec, cache: Cache, end: jax.Array, count: jax.Array, entries: int) -> Cache:
    """The inverse of `ordered_cache`: the stored form of the entries before `end` [batch], the last `count` of its segment."""
    place = jnp.arange(entries)[None]
    if rule.cache_window is None:
        index, valid = end[:, None] - count[:, None] + place, place < count[:, None]
    else:
        index, valid = end[:, None] - entries + place, place >= entries - count[:, None]
    return jax.tree.map(lambda x: _take(x, index, valid), cache)


def cut_tail(
    rule: SoftmaxSpec, state: SoftmaxState, tape: Tape, start: jax.Array, count: jax.Array, position: jax.Array
) -> Tail:
    """The tail of the new state, without preactivations.

    Args:
      rule: the rule.
      state: the state before the call.
      tape: the call's tape.
      start: [batch], place of the first token after t'.
      count: [batch], number of the segment's tokens up to t'.
      position: [batch], number of tokens after t'.
    """
    c, p = rule.window, rule.pending
    valid = tail_places(rule, count, position)
    index = start[:, None] + jnp.arange(c - 1 + p)[None]  # the window of the old state precedes the tape
    by_head = lambda x: jnp.moveaxis(x, 1, 2)

    def tokens(old: jax.Array, new: jax.Array) -> jax.Array:
        return _take(jnp.concatenate([old[:, :, : c - 1], by_head(new).astype(old.dtype)], axis=2), index, valid)

    pending = start[:, None] + jnp.arange(p)[None]
    real = jnp.arange(p)[None] < position[:, None]
    gate = lambda new, fill: _take(by_head(new), pending, real, fill)
    return Tail(
        keys=tokens(state.tail.keys, tape.k),
        values=tokens(state.tail.values, tape.v),
        preactivations=None,
        retention=gate(tape.retention, 1.0),
        step_size=gate(tape.step_size, 0.0),
        momentum_decay=gate(tape.momentum_decay, 1.0),
        window_weights=gate(tape.window_weights, 0.0),
    )


def tail_places(rule: SoftmaxSpec, count: jax.Array, position: jax.Array) -> jax.Array:
    """Whether each place of a tail holds a token, [batch, c − 1 + p], given the tokens up to t' and after it, [batch]."""
    places, c = jnp.arange(rule.window - 1 + rule.pending)[None], rule.window
    return (places >= c - 1 - count[:, None]) & (places < c - 1 + position[:, None])


def _take(x: jax.Array, index: jax.Array, valid: jax.Array, fill: float = 0.0) -> jax.Array:
    """Gathers x [batch, heads, n, …] at index [batch, m]: [batch, heads, m, …], with `fill` where `valid` [batch, m] is False."""
    if index.shape[1] == 0:
        return x[:, :, :0]
    if x.shape[2] == 0:
        return jnp.full((*x.shape[:2], index.shape[1], *x.shape[3:]), fill, x.dtype)
    # Clipped places have no entry; `valid` replaces their values.
    taken = jax.vmap(lambda row, i: row[:, i])(x, jnp.clip(index, 0, x.shape[2] - 1))
    mask = valid.reshape(valid.shape[0], 1, valid.shape[1], *(1,) * (x.ndim - 3))
    return jnp.where(mask, taken, jnp.asarray(fill, x.dtype))
