"""Initial values of step sizes Δ = softplus(… + bias) and decay rates, as Mamba published them."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

_MIN, _MAX = 1e-3, 1e-1


def step_bias(rngs: nnx.Rngs, count: int) -> jax.Array:
    """Biases [count] at which softplus(bias) is spread log-uniformly over [0.001, 0.1] (Gu & Dao 2023, §3.6)."""
    step = jnp.exp(jax.random.uniform(rngs.params(), (count,), minval=math.log(_MIN), maxval=math.log(_MAX)))
    return step + jnp.log(-jnp.expm1(-step))  # the inverse of softplus


def log_rates(rngs: nnx.Rngs, count: int, low: float, high: float) -> jax.Array:
    """Logarithms [count] of rates uniform in [low, high], low > 0."""
    return jnp.log(jax.random.uniform(rngs.params(), (count,), minval=low, maxval=high))
