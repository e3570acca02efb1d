"""The online delta rules in block-parallel form: many tokens at once, exactly (WY / UT transform; Yang et al. 2024).

    W_t = W_{t−1} Diag(α_t) + u_t s_tᵀ + v_t k_tᵀ        u_t = rate_t (target_t − W̃_t r_t)

with W̃_t = W_{t−1}, or W_{t−1} Diag(α_t) where the decay comes first. For the delta rule r = s = φ(k), target = v, rate = η, and
there is no v kᵀ term; for Longhorn the rate is β/(1 + β‖φ(k)‖²); for RWKV-7 r = κ̂, s = a ⊙ κ̂, target = 0, rate = 1. With
A_t = α_1 … α_t and P[t,i] = α_{i+1} … α_t, all u of a block solve one unit lower-triangular system,

    (I + diag(rate) L_s) U = diag(rate) (target − (Ã ⊙ R) W_0ᵀ − L_k V)        L_s[t,i] = Σ_d P̃[t,i,d] r_t[d] s_i[d] for i < t,

where tildes take the decays up to t − 1 (or t). A rate for each channel of the value has a system for each channel. The
block's length does not change the result.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from atlasjax.memory.blocks import BlockGates, Read, decay_products, exact
from atlasjax.memory.objectives import RemoveAndReplace
from atlasjax.memory.optimizers import Implicit
from atlasjax.memory.rule import MemoryRule
from atlasjax.memory.state import Weights


class DeltaTokens(NamedTuple):
    """What the tokens of a block do, in the notation of this file.

    removal r, write s: [m, D] · rate: [m] or [m, value_dim] · target: [m, value_dim], None for zero · added: k [m, D] and v
    [m, value_dim] of the term v kᵀ, or None.
    """

    removal: jax.Array
    write: jax.Array
    rate: jax.Array
    target: jax.Array | None
    added: tuple[jax.Array, jax.Array] | None


def delta_tokens(
    rule: MemoryRule,
    k: jax.Array,
    v: jax.Array,
    step_size: jax.Array | None,
    removal_key: jax.Array | None,
    removal: jax.Array | None,
) -> DeltaTokens:
    """The tokens of a rule with `is_online_delta`; k: [m, D], features of the keys."""
    if isinstance(rule.objective, RemoveAndReplace):
        assert removal_key is not None
        assert removal is not None
        return DeltaTokens(removal_key, removal * removal_key, jnp.ones(k.shape[0], k.dtype), None, (k, v))
    assert step_size is not None
    if isinstance(rule.optimizer, Implicit):
        square = jnp.sum(k * k, axis=-1)
        step_size = step_size / (1.0 + step_size * (square if step_size.ndim == 1 else square[:, None]))
    return DeltaTokens(k, k, step_size, v, None)


def delta_block(
    rule: MemoryRule, memory: Weights, tokens: DeltaTokens, gates: BlockGates, read: Read
) -> tuple[Weights, jax.Array]:
    """One block of tokens. Returns (W, y) after it.

    Products take float32 inputs: errors of one token enter those of all later ones, and some versions of XLA's CPU backend have
    no product of bfloat16 with a float32 result for these shapes. With a decay per channel [m, m, D] numbers are formed, so
    blocks are short (`chunk.plan`).

    Args:
      rule: static.
      memory: {"W": W_0}.
      tokens: see `DeltaTokens`.
      gates: retention of the block; the other gates are in `tokens`.
      read: as in `blocks.dual_block`.
    """
    ((name, W),) = memory.items()
    m, dtype = tokens.removal.shape[0], tokens.removal.dtype
    if gates.retention is None:
        start, pairwise = jnp.ones(m, dtype), jnp.tril(jnp.ones((m, m), dtype))
    else:
        start, pairwise = decay_products(gates.retention)
    if rule.retention.decay_first:
        before, pairwise_before = start, jnp.where(_strictly_lower(m, pairwise.ndim), pairwise, 0.0)
    else:
        before = jnp.concatenate([jnp.ones_like(start[:1]), start[:-1]])
        # Zero on and above the diagonal.
        pairwise_before = jnp.concatenate([jnp.zeros_like(pairwise[:1]), pairwise[:-1]])

    errors = -_decayed(before, tokens.removal) @ W.T
    if tokens.target is not None:
        errors = tokens.target + errors
    if tokens.added is not None:
        key, value = tokens.added
        errors = errors - _scores(tokens.removal, key, pairwise_before) @ value
    system = _scores(tokens.removal, tokens.write, pairwise_before)
    u = _solve(tokens.rate, system, errors)

    def linear(_: str, h: jax.Array) -> jax.Array:
        out = _decayed(start, h) @ W.T + _scores(h, tokens.write, pairwise) @ u
        return out if tokens.added is None else out + _scores(h, key, pairwise) @ value

    y = read(linear)
    last = start[-1] * W + u.T @ _decayed(pairwise[-1], tokens.write)
    if tokens.added is not None:
        last = last + value.T @ _decayed(pairwise[-1], key)
    return {name: last}, y


def _strictly_lower(m: int, ndim: int) -> jax.Array:
    return jnp.tril(jnp.ones((m, m), bool), -1).reshape(m, m, *(1,) * (ndim - 2))


def _decayed(decay: jax.Array, x: jax.Array) -> jax.Array:
    """Rows of x [m, D] times decays [m] or [m, D]."""
    return decay * x if decay.ndim == x.ndim else decay[:, None] * x


def _scores(queries: jax.Array, keys: jax.Array, pairwise: jax.Array) -> jax.Array:
    """Σ_d P[t,i,d] queries[t,d] keys[i,d]: [m, m]; P: [m, m] or [m, m, D]."""
    if pairwise.ndim == 2:
        return exact(queries, keys.T) * pairwise
    return jnp.einsum("td,tid,id->ti", queries, pairwise, keys, precision=jax.lax.Precision.HIGHEST)


def _solve(rate: jax.Array, scores: jax.Array, errors: jax.Array) -> jax.Array:
    """U of (I + diag(rate) scores) U = diag(rate) errors, `scores` strictly lower triangular; rate [m] or [m, value_dim]."""
    eye = jnp.eye(scores.shape[0], dtype=scores.dtype)
    if rate.ndim == 1:
        system, right = eye + rate[:, None] * scores, rate[:, None] * errors
        return jax.scipy.linalg.solve_triangular(system, right, lower=True, unit_diagonal=True)
    system = eye + rate.T[:, :, None] * scores  # [value_dim, m, m]
    right = (rate * errors).T[:, :, None]
    return jax.scipy.linalg.solve_triangular(system, right, lower=True, unit_diagonal=True)[:, :, 0].T
