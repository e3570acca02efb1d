"""Kernel sums Σ_i κ(k_i, x) a_i over parts of a cache, combined with a running maximum as in softmax attention.

For a normalized memory every sum is stored multiplied by e^{−shift}, where the shift is about the largest score_i + log ρ_i. The
factor cancels between the sum and Z, and derivatives treat it as constant. ρ enters as a factor, not through its logarithm, so that
ρ = 0 is exact. Where ρ_i is far below the largest (only momentum can leave a_i nonzero there), exponents are clipped before they
overflow.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from atlasjax.memory.blocks import applied, dot
from atlasjax.memory.products import product
from atlasjax.memory.softmax.spec import SoftmaxSpec
from atlasjax.memory.softmax.tape import Cache


class Partial(NamedTuple):
    """Sums over a part of the cache for r queries of one head, multiplied by e^{−shift}.

    Attributes:
      shift: [r].
      mass: Σ_i ρ_i κ_i, [r], zero if the memory is not normalized.
      value: Σ_i a_i κ_i, [r, width].
      momentum: Σ_i s_i κ_i, [r, width], None without momentum.
    """

    shift: jax.Array
    mass: jax.Array
    value: jax.Array
    momentum: jax.Array | None


def scores(rule: SoftmaxSpec, x: jax.Array, keys: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """scale · x·k: [r, n]."""
    return applied(x, keys, dtype) * rule.score_scale(x.shape[-1])


def _limit(dtype: jnp.dtype) -> float:
    # Below the maximum, with room for a sum over entries and a product with their coefficients.
    return 0.7 * math.log(float(jnp.finfo(dtype).max))


def _largest(scores: jax.Array, weight: jax.Array, visible: jax.Array) -> jax.Array:
    """Maximum of score + log weight over visible entries with a positive weight; −inf if there are none."""
    # The shift cancels in the quotient, and so does its derivative.
    scores, weight = jax.lax.stop_gradient((scores, weight))
    weight = jnp.broadcast_to(weight, scores.shape)
    log = jnp.log(jnp.where(weight > 0, weight, 1.0))
    return jnp.max(jnp.where(visible & (weight > 0), scores + log, -jnp.inf), axis=-1, initial=-jnp.inf)


def _kappa(scores: jax.Array, shift: jax.Array | None, visible: jax.Array) -> jax.Array:
    if shift is None:
        return jnp.where(visible, jnp.exp(jnp.where(visible, scores, 0.0)), 0.0)
    return jnp.where(visible, jnp.exp(jnp.minimum(scores - shift[:, None], _limit(scores.dtype))), 0.0)


def partial_sums(rule: SoftmaxSpec, x: jax.Array, cache: Cache, visible: jax.Array, dtype: jnp.dtype) -> Partial:
    """Sums over the visible entries of `cache` for the queries x [r, key_dim]. visible: [r or 1, n]."""
    r, n = x.shape[0], cache.decay.shape[0]
    if n == 0:
        nothing = jnp.zeros((r, cache.coefficients.shape[1]), cache.coefficients.dtype)
        zero = jnp.zeros((r,), cache.decay.dtype)
        return Partial(zero, zero, nothing, None if cache.momentum is None else nothing)
    raw = scores(rule, x, cache.keys, dtype)
    shift, mass = None, jnp.zeros((r,), raw.dtype)
    if rule.normalized:
        shift = _largest(raw, cache.decay, visible)
        if cache.momentum is not None:  # entries of zero weight may still have a momentum
            unweighted = jax.lax.stop_gradient(jnp.max(jnp.where(visible, raw, -jnp.inf), axis=-1))
            shift = jnp.where(shift == -jnp.inf, unweighted, shift)
        shift = jnp.where(shift == -jnp.inf, 0.0, shift)
    kappa = _kappa(raw, shift, visible)
    if rule.normalized:
        mass = product(kappa, cache.decay[:, None], "nn", kappa.dtype, jax.lax.Precision.HIGHEST)[:, 0]
    momentum = None if cache.momentum is None else dot(kappa, cache.momentum, dtype)
    return Partial(
        jnp.zeros((r,), raw.dtype) if shift is None else shift,
        mass,
        dot(kappa, cache.coefficients, dtype),
        momentum,
    )


def join(
    rule: SoftmaxSpec,
    part: Partial,
    decay: jax.Array,
    momentum: jax.Array | None,
    raw: jax.Array,
    weight: jax.Array,
    visible: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Combines sums over a part of the cache, advanced in time, with further entries under a common shift.

    Args:
      rule: the rule.
      part: the sums over the first part.
      decay, momentum: the transition since these sums were computed, [r] or [].
      raw: scores of the further entries, [r, n]; weight: their ρ, [r or 1, n]; visible: [r or 1, n].

    Returns:
      κ of the further entries, [r, n]; Σ a κ of the first part, [r, width]; Z of both, [r], None if the memory is not normalized.
    """
    mass: jax.Array | None = None
    if not rule.normalized:
        kappa, factor = _kappa(raw, None, visible), jnp.ones_like(part.shift)
    else:
        # A first part without mass has a shift of 0, which would be far too large beside strongly negative scores.
        passed = jax.lax.stop_gradient(jnp.where(part.mass > 0, decay, 0.0))
        before = jnp.where(passed > 0, part.shift + jnp.log(jnp.where(passed > 0, passed, 1.0)), -jnp.inf)
        top = jnp.maximum(before, _largest(raw, weight, visible))
        top = jax.lax.stop_gradient(jnp.where(top == -jnp.inf, 0.0, top))
        kappa = _kappa(raw, top, visible)
        factor = jax.lax.stop_gradient(jnp.exp(jnp.minimum(part.shift - top, _limit(raw.dtype))))
        mass = decay * factor * part.mass + jnp.sum(kappa * weight, axis=-1)
    rows = lambda x: jnp.broadcast_to(x, part.mass.shape)[:, None]
    value = rows(decay * factor) * part.value
    if part.momentum is not None and momentum is not None:
        value = value + rows(momentum * factor) * part.momentum
    return kappa, value, mass


def divide(value: jax.Array, mass: jax.Array | None) -> jax.Array:
    """value / Z, with 0/0 = 0 also in derivatives. value: [r, width]; mass: [r], or None if not normalized."""
    if mass is None:
        return value
    # Twice `where`: a quotient by zero that is not selected would still have a NaN as its derivative.
    some = (mass > 0)[:, None]
    return jnp.where(some, value / jnp.where(some, mass[:, None], 1.0), 0.0)
