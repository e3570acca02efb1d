"""Reads of a `MemoryRule` without writing: of a state, and of memories kept by a `CachedRule`."""

import functools

import jax
import jax.numpy as jnp

from atlasjax.memory.blocks import applied
from atlasjax.memory.fast_weights.chunk import mix
from atlasjax.memory.fast_weights.reference import read_one
from atlasjax.memory.fast_weights.spec import MemorySpec
from atlasjax.memory.fast_weights.state import MemoryParams, MemoryState
from atlasjax.memory.gates import Weights
from atlasjax.memory.products import wide_dtype


@functools.partial(jax.jit, static_argnames=("rule",))
def read_state(rule: MemorySpec, params: MemoryParams, state: MemoryState, q: jax.Array) -> jax.Array:
    """M_t(φ(q)) for queries [batch, time, heads, key_dim]."""
    wide = wide_dtype(q.dtype)
    up = jax.tree.map(lambda x: x.astype(wide), params)
    one = lambda p, w, x: read_one(rule, p, w, x)
    over_time = jax.vmap(one, in_axes=(None, None, 0))
    over_heads = jax.vmap(over_time, in_axes=(0, 0, 1), out_axes=1)
    over_batch = jax.vmap(over_heads, in_axes=(None, 0, 0))
    return over_batch(up, state.memory, q.astype(wide)).astype(q.dtype)


def read_cached(rule: MemorySpec, dtype: jnp.dtype, params: MemoryParams, weights: Weights, q: jax.Array) -> jax.Array:
    """Reads of one memory of one head without the residual: weights [out, in], q [n, key_dim] → [n, value_dim]."""
    x = rule.features.apply(params.coefficients, q)
    skip = residual(rule, params, q)
    y = rule.structure.apply(lambda name, h: applied(h, weights[name], dtype), x, skip, params.norm)
    return y if skip is None else y - skip


def residual(rule: MemorySpec, params: MemoryParams, q: jax.Array) -> jax.Array | None:
    """r(q) of one head: q [..., key_dim] → [..., value_dim]. None for a memory without a residual."""
    return rule.features.degree_one(params.coefficients, q) if rule.structure.residual else None


def read_mixed(
    rule: MemorySpec, dtype: jnp.dtype, params: MemoryParams, weights: Weights, q: jax.Array, gamma: jax.Array
) -> jax.Array:
    """Reads of a soup of n memories of one head, with layers mixed for each token, without the residual.

    weights: [n, out, in]; q: [tokens, key_dim]; gamma: [tokens, n]. Returns [tokens, value_dim].
    """
    x = rule.features.apply(params.coefficients, q)
    zero = lambda name, h: jnp.zeros((h.shape[0], weights[name].shape[1]), h.dtype)
    # `mix` counts the memory being written first; here there is none.
    shares = jnp.concatenate([jnp.zeros_like(gamma[:, :1]), gamma], axis=1)
    skip = residual(rule, params, q)
    y = rule.structure.apply(mix(zero, weights, shares, dtype), x, skip, params.norm)
    return y if skip is None else y - skip
