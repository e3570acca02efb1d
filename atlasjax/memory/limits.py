"""Limits of step sizes, shared by the bounds of all rules: how far a token may step, to first order."""

import jax
import jax.numpy as jnp

from atlasjax.memory import meshes
from atlasjax.memory.axes.objectives import Objective
from atlasjax.memory.blocks import divisible

_LEAST = 2.0**-10  # lower bound of 1 − θ: slower momentum is treated as if it ended after 1,024 tokens


def toward_target(objective: Objective, out: jax.Array, v: jax.Array, threshold: jax.Array | None) -> jax.Array:
    """⟨∂ℓ/∂out, out − v⟩ by channel, [..., value_dim], from out and v [..., value_dim]. Its sum is ≥ 0 for a convex loss whose
    minimum is v."""
    slope = jax.grad(lambda o: jnp.sum(objective.loss(o, v, threshold)))(meshes.vary_like(out, v))
    return slope * (out - v)


def least_forgetting(momentum_decay: jax.Array) -> jax.Array:
    """1 − θ, at least 2⁻¹⁰."""
    return jnp.maximum(1.0 - momentum_decay, _LEAST)


def capped(
    step: float, step_size: jax.Array, decrease: jax.Array, square: jax.Array, momentum_decay: jax.Array | None
) -> jax.Array:
    """η̄ = min(η, step (1 − θ) a/‖g‖²), elementwise, and η where the gradient is zero."""
    there = divisible(square)
    most = step * decrease / jnp.where(there, square, 1.0)
    if momentum_decay is not None:
        most = most * least_forgetting(momentum_decay)
    return jnp.where(there, jnp.minimum(step_size, most), step_size)
