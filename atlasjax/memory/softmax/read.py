"""Reads of a `SoftmaxRule` without writing: of a state, and of memories kept by a `CachedRule`."""

import functools

import jax
import jax.numpy as jnp

from atlasjax.memory.blocks import applied, product_dtype
from atlasjax.memory.gates import Weights
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.softmax import sums
from atlasjax.memory.softmax.reference import read_one
from atlasjax.memory.softmax.scan import stored_places
from atlasjax.memory.softmax.spec import SoftmaxSpec
from atlasjax.memory.softmax.state import SoftmaxParams, SoftmaxState
from atlasjax.memory.softmax.step import OpenChunk, open_chunk, read_open, seen
from atlasjax.memory.softmax.tape import Cache


@functools.partial(jax.jit, static_argnames=("rule",))
def read_state(rule: SoftmaxSpec, params: SoftmaxParams, state: SoftmaxState, q: jax.Array) -> jax.Array:
    """M_t(φ*(q)) for queries [batch, time, heads, key_dim]."""
    wide = wide_dtype(q.dtype, state.keys.dtype)
    entries = state.keys.shape[2]
    held = stored_places(rule, entries, state.num_tokens)

    def one(cache, weights, weights_momentum, tail, q, held, count, position):
        part = sums.partial_sums(rule, q, cache, seen(rule, entries, held, position - 1)[None], products)
        if not rule.pending:
            empty = lambda x: x[:0]
            width = cache.coefficients.shape[1]
            nothing = jnp.zeros((0,), wide)
            s = None if weights_momentum is None else jnp.zeros((), wide)
            chunk = OpenChunk(
                empty(tail.keys), empty(tail.values), jnp.zeros((0, width), wide), nothing > 0, jnp.ones((), wide), s,
                nothing, None, jnp.zeros((), jnp.int32),
            )  # fmt: skip
            return read_open(rule, weights, weights_momentum, part, chunk, q, products)[0]
        chunk = open_chunk(rule, tail, tail.preactivations, jnp.maximum(position, 1), count, position > 0)
        none = position == 0
        chunk = chunk._replace(
            sees=chunk.sees & ~none,
            A=jnp.where(none, 1.0, chunk.A),
            s=None if chunk.s is None else jnp.where(none, 0.0, chunk.s),
            coefficients=jax.tree.map(lambda x: jnp.where(none, 0.0, x), chunk.coefficients),
        )
        return read_open(rule, weights, weights_momentum, part, chunk, q, products)[0]

    products = product_dtype(q.dtype)
    cache = Cache(state.keys, state.coefficients, state.momentum, state.decay)
    by_head = jax.vmap(one, in_axes=(0, 0, 0, 0, 1, None, None, None), out_axes=1)
    y = jax.vmap(by_head)(
        cache, state.weights, state.weights_momentum, state.tail, q.astype(wide), held, state.num_tokens, state.position
    )
    if rule.cache_window is None:
        y = jnp.where((state.num_tokens + state.position <= entries)[:, None, None, None], y, jnp.nan)
    return y.astype(q.dtype)


def cached_weights(state: SoftmaxState) -> Weights:
    """The part of a state for a `CachedRule`: the terms of the sums at a chunk's end, and an MLP's W1. Empty places add zero."""
    entries = {"keys": state.keys, "coefficients": state.coefficients, "decay": state.decay[..., None]}
    return {**state.weights, **entries}


def read_cached(rule: SoftmaxSpec, dtype: jnp.dtype, weights: Weights, q: jax.Array) -> jax.Array:
    """The read of one cached memory of one head, with its own Z and without the residual: q [n, key_dim] → [n, value_dim]."""
    cache = Cache(weights["keys"], weights["coefficients"], None, weights["decay"][:, 0])
    part = sums.partial_sums(rule, q, cache, jnp.ones((1, cache.keys.shape[0]), bool), dtype)
    h = sums.divide(part.value, part.mass if rule.normalized else None)
    linear = lambda name, x: h if name == rule.inner else applied(x, weights[name], dtype)
    skip = q if rule.structure.residual else None
    y = rule.structure.apply(linear, q, skip, None)
    return y if skip is None else y - skip


def reference_read(rule: SoftmaxSpec, weights: Weights, x: jax.Array) -> jax.Array:
    """The definition of a read of one cached memory of one head with its residual: x [key_dim] → [value_dim]."""
    entries = {"keys": weights["keys"], "a": weights["coefficients"], "rho": weights["decay"][:, 0]}
    present = jnp.ones(entries["rho"].shape, bool)
    return read_one(rule, {**entries, "weights": weights, "present": present}, x)
