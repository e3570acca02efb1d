"""The state of one layer in the stacked states of all layers, which XLA keeps in one place while tokens are decoded."""

import jax
import jax.numpy as jnp
from jaxtyping import PyTree


def take_layer(states: PyTree, i: jax.Array | None) -> PyTree:
    """Layer i of states [layers, …]. i None: these are a layer's own states."""
    if i is None:
        return states
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), states)


def put_layer(states: PyTree, state: PyTree, i: jax.Array | None, x: jax.Array) -> PyTree:
    """States [layers, …] with the next state of layer i. x: what the layer computed from its state, such as its output."""
    if i is None:
        return state
    i = _after(i, x)
    return jax.tree.map(lambda all_, one: jax.lax.dynamic_update_index_in_dim(all_, one, i, 0), states, state)


def _after(i: jax.Array, x: jax.Array) -> jax.Array:
    """i. On CPUs it depends on x: then all of a layer's reads of its state come before the write, without which XLA may copy the
    states of all layers (Mamba-2, Log-Linear). XLA's CPU compiler drops an `optimization_barrier` before it decides."""
    never = lambda i, x: i + (jnp.max(jnp.abs(x)) > jnp.inf)
    return jax.lax.platform_dependent(i, x, cpu=never, default=lambda i, x: i)
