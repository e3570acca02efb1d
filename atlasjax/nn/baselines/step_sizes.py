"""Step sizes Δ = softplus(… + bias), decay rates and their initial values, as published for Mamba."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

_MIN, _MAX = 1e-3, 1e-1


def step_bias(rngs: nnx.Rngs, count: int) -> jax.Array:
    """Biases [count] such that softplus(bias) is log-uniform in [0.001, 0.1] (Gu & Dao 2023, §3.6)."""
    step = jnp.exp(jax.random.uniform(rngs.params(), (count,), jnp.float32, math.log(_MIN), math.log(_MAX)))
    return step + jnp.log(-jnp.expm1(-step))  # the inverse of softplus


def log_rates(rngs: nnx.Rngs, count: int, low: float, high: float) -> jax.Array:
    """Logarithms [count] of rates that are uniform in [low, high], with low > 0."""
    return jnp.log(jax.random.uniform(rngs.params(), (count,), jnp.float32, low, high))


def decay(logits: jax.Array, A_log: jax.Array, bias: jax.Array) -> jax.Array:
    """α = exp(−exp(A_log) softplus(logits + bias)), [batch, time, heads]. A_log and bias: [heads]."""
    return jnp.exp(-jnp.exp(A_log[None, None]) * jax.nn.softplus(logits + bias[None, None]))
