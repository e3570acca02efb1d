"""Limits of step sizes, shared by the bounds of all rules: how far a token may step, to first order."""

import jax
import jax.numpy as jnp

from atlasjax.memory import meshes
from atlasjax.memory.axes.objectives import Objective

# How many times momentum may add a token's write to the memory. Less follows long momentum less; more limits each write more.
HORIZON = 32.0


def toward_target(objective: Objective, out: jax.Array, v: jax.Array, threshold: jax.Array | None) -> jax.Array:
    """⟨∂ℓ/∂out, out − v⟩ by channel, [..., value_dim], from out and v [..., value_dim]. Its sum is ≥ 0 for a convex loss whose
    minimum is v."""
    slope = jax.grad(lambda o: jnp.sum(objective.loss(o, v, threshold)))(meshes.vary_like(out, v))
    return slope * (out - v)


def within_horizon(horizon: float, momentum_decay: jax.Array) -> jax.Array:
    """min(θ, 1 − 1/H): whatever θ is from now on, momentum adds S at most H times."""
    return jnp.minimum(momentum_decay, 1.0 - 1.0 / horizon)
