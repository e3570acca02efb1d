"""The arithmetic of one block of tokens of one head, without any per-token weight or gradient.

A block gets the gradient factors of its tokens and of the window before them. Every inner gradient is an outer product,
∇_W ℓ_i = left_i ⊗ input_i for each weight W, so with

    S_t = β_t S_0 + Σ_i D[t,i] ∇_i        M_t = a_t M_0 + s_t S_0 + Σ_i C[t,i] ∇_i        C = T_α D,  D = −T_θ diag(η) Γ

a read is M_t h = a_t M_0 h + s_t S_0 h + Σ_i C[t,i] (input_i · h) left_i: masked matmuls, as in attention (the dual form).
T_α[t,i] = α_{i+1} … α_t (t ≥ i), Γ[t,i] = γ_{t,t−i}. The products are formed by multiplication, not as exponentials of
differences of logarithms: that is exact at α = 0 and θ = 0, values and derivatives, and can neither overflow nor divide by zero.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from atlasjax.memory.optimizers import Muon
from atlasjax.memory.rule import MemoryRule
from atlasjax.memory.state import Weights
from pallas_kernels.newton_schulz import SCHEDULES, newton_schulz

# Reads the queries of the block through `linear(name, h)`, h: [tokens, in] → [tokens, out].
Read = Callable[[Callable[[str, jax.Array], jax.Array]], jax.Array]


class BlockGates(NamedTuple):
    """Gates of a block of m tokens; E = tokens of the block and of the window before it.

    retention: [m], [m, D] or None (α = 1) · step_size: [m] · momentum: [m] or None (no momentum state) · gamma: Γ [m, E] ·
    real: [m], 1 for tokens and 0 for padding. None where gates alone make padding a no-op (α = 1, θ = 1, η = 0, γ = 0): true for
    Muon and plain gradient descent, but with momentum M_t = α_t M_{t−1} + S_t would add S_t again.
    """

    retention: jax.Array | None
    step_size: jax.Array
    momentum: jax.Array | None
    gamma: jax.Array
    real: jax.Array | None


class Factors(NamedTuple):
    """Gradient factors of one weight for E tokens: ∇_i = left[i] ⊗ inputs[i]; left [E, out], inputs [E, in]."""

    left: jax.Array
    inputs: jax.Array


def dot(a: jax.Array, b: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """a @ b with inputs in the compute dtype and at least float32 accumulation and result."""
    wide = jnp.promote_types(dtype, jnp.float32)
    return jnp.matmul(a.astype(dtype), b.astype(dtype), preferred_element_type=wide)


def _exact(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def decay_products(decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Products of consecutive decays.

    Args:
      decay: [m] or [m, channels].

    Returns:
      from_start: [m, …], decay_0 … decay_t; pairwise: [m, m, …], decay_{i+1} … decay_t for t ≥ i, else 0.
    """
    m = decay.shape[0]
    padding = (1 << (m - 1).bit_length()) - m
    start = jnp.pad(decay, ((0, padding), *((0, 0),) * (decay.ndim - 1)), constant_values=1.0)[:, None]
    products = jnp.ones_like(start)[:, None]  # [parts, 1, 1, …]: parts of one token each
    while products.shape[0] > 1:  # two neighbouring parts become one
        first, second = products[0::2], products[1::2]
        start_first, start_second = start[0::2], start[1::2]
        across = start_second[:, :, None] * first[:, -1:]
        above = jnp.concatenate([first, jnp.zeros_like(first)], axis=2)
        below = jnp.concatenate([across, second], axis=2)
        products = jnp.concatenate([above, below], axis=1)
        start = jnp.concatenate([start_first, start_first[:, -1:] * start_second], axis=1)
    return start[0, :m], products[0, :m, :m]


def window_matrix(gamma: jax.Array) -> jax.Array:
    """Γ: [m, m + c − 1] from γ: [m, c]; row t holds γ_{t,j} at column t − j + c − 1, and zero elsewhere."""
    m, c = gamma.shape
    if c == 1:
        return jnp.diag(gamma[:, 0])
    # Rows of length E + 1 read back with length E move one column to the right at every row.
    width = m + c - 1
    padded = jnp.pad(gamma[:, ::-1], ((0, 0), (0, width + 1 - c)))
    return padded.reshape(-1)[: m * width].reshape(m, width)


class _Coefficients(NamedTuple):
    """The tokens' memories as combinations of what the block starts with: see the head of this file."""

    momentum_start: jax.Array | None  # β_t
    momentum_gradients: jax.Array  # D[t, i]
    memory_start: jax.Array | None  # a_t
    memory_momentum: jax.Array | None  # s_t
    memory_gradients: jax.Array  # C[t, i]


def _coefficients(gates: BlockGates) -> _Coefficients:
    m = gates.step_size.shape[0]
    scaled = -gates.step_size[:, None] * gates.gamma
    beta = a = s = None
    D = scaled
    if gates.momentum is not None:
        beta, pairwise = decay_products(gates.momentum)
        D = _exact(pairwise, scaled)
    if gates.retention is None:
        pairwise = jnp.tril(jnp.ones((m, m), scaled.dtype))
    else:
        a, pairwise = decay_products(gates.retention)
    if gates.real is not None:
        pairwise = pairwise * gates.real
    C = _exact(pairwise, D)
    if beta is not None:
        s = _exact(pairwise, beta)
    return _Coefficients(beta, D, a, s, C)


def _outer_sum(weights: jax.Array, factors: Factors, dtype: jnp.dtype) -> jax.Array:
    """Σ_i weights[i] left_i ⊗ input_i: [out, in]. The weights go to the narrower factor, which is less to multiply."""
    left, inputs = factors
    if left.shape[1] <= inputs.shape[1]:
        left = left * weights[:, None]
    else:
        inputs = inputs * weights[:, None]
    return dot(left.T, inputs, dtype)


def dual_block(
    rule: MemoryRule,
    memory: Weights,
    momentum: Weights | None,
    factors: dict[str, Factors],
    gates: BlockGates,
    read: Read,
    dtype: jnp.dtype,
) -> tuple[Weights, Weights | None, jax.Array]:
    """Everything linear in the gradient, with scalar retention. Returns (M, S, y) after the block."""
    c = _coefficients(gates)

    def linear(name: str, h: jax.Array) -> jax.Array:
        out = dot(h, memory[name].T, dtype)
        if c.memory_start is not None:
            out = c.memory_start[:, None] * out
        if momentum is not None:
            assert c.memory_momentum is not None
            out = out + c.memory_momentum[:, None] * dot(h, momentum[name].T, dtype)
        left, inputs = factors[name]
        return out + dot(dot(h, inputs.T, dtype) * c.memory_gradients, left, dtype)

    y = read(linear)
    new_memory, new_momentum = {}, {}
    for name in factors:
        M = memory[name] if c.memory_start is None else c.memory_start[-1] * memory[name]
        M = M + _outer_sum(c.memory_gradients[-1], factors[name], dtype)
        if momentum is not None:
            assert c.memory_momentum is not None
            assert c.momentum_start is not None
            M = M + c.memory_momentum[-1] * momentum[name]
            step = _outer_sum(c.momentum_gradients[-1], factors[name], dtype)
            new_momentum[name] = c.momentum_start[-1] * momentum[name] + step
        new_memory[name] = M
    return new_memory, new_momentum if momentum is not None else None, y


def delta_block(
    memory: Weights,
    k: jax.Array,
    v: jax.Array,
    gates: BlockGates,
    read: Read,
) -> tuple[Weights, jax.Array]:
    """The online delta rule (chunks of one token), many tokens at once: the WY form (Yang et al. 2024), with decay.

    W_t = α_t W_{t−1} + u_t k_tᵀ with u_t = η_t (v_t − W_{t−1} k_t). With W_t = a_t W_0 + Σ_{i≤t} T_α[t,i] u_i k_iᵀ, all u of a
    block solve one unit lower-triangular system, (I + L) U = diag(η) (V − a_{t−1} K W_0ᵀ), where L[t,i] = η_t T_α[t−1,i] (k_i·k_t)
    for i < t. The block's length does not change the result.

    Args:
      memory: {name: W_0}.
      k, v: features of the keys [m, D] and values [m, value_dim].
      gates, read: as in `dual_block`. Products take float32 inputs: errors of one token enter those of all later ones, and some
        versions of XLA's CPU backend have no product of bfloat16 with a float32 result for these shapes.
    """
    ((name, W),) = memory.items()
    m = k.shape[0]
    if gates.retention is None:
        start, pairwise = jnp.ones(m, k.dtype), jnp.tril(jnp.ones((m, m), k.dtype))
    else:
        start, pairwise = decay_products(gates.retention)
    before = jnp.concatenate([jnp.ones_like(start[:1]), start[:-1]])
    pairwise_before = jnp.concatenate([jnp.zeros_like(pairwise[:1]), pairwise[:-1]])  # zero on and above the diagonal
    eta = gates.step_size[:, None]
    system = jnp.eye(m, dtype=k.dtype) + eta * pairwise_before * _exact(k, k.T)
    errors = eta * (v - before[:, None] * k @ W.T)
    u = jax.scipy.linalg.solve_triangular(system, errors, lower=True, unit_diagonal=True)
    y = read(lambda _, h: start[:, None] * (h @ W.T) + (h @ k.T * pairwise) @ u)
    return {name: start[-1] * W + _outer_sum(pairwise[-1], Factors(u, k), u.dtype)}, y


def channel_block(
    rule: MemoryRule,
    memory: Weights,
    momentum: Weights | None,
    factors: dict[str, Factors],
    gates: BlockGates,
    read: Read,
    dtype: jnp.dtype,
) -> tuple[Weights, Weights | None, jax.Array]:
    """As `dual_block` for a retention per feature channel: C[t, i] becomes a vector over the D channels.

    [m, E, D] numbers are formed, so blocks are short (`chunk.plan`).
    """
    assert gates.retention is not None
    (name,) = memory
    left, inputs = factors[name]
    a, pairwise = decay_products(gates.retention)  # [m, D], [m, m, D]
    D = -gates.step_size[:, None] * gates.gamma
    if momentum is not None:
        assert gates.momentum is not None
        beta, momentum_pairwise = decay_products(gates.momentum)
        D = _exact(momentum_pairwise, D)
        if gates.real is not None:
            pairwise = pairwise * gates.real[:, None]
        s = jnp.einsum("tjd,j->td", pairwise, beta, precision=jax.lax.Precision.HIGHEST)
    C = jnp.einsum("tjd,ji->tid", pairwise, D, precision=jax.lax.Precision.HIGHEST)

    def linear(_: str, h: jax.Array) -> jax.Array:
        out = dot(a * h, memory[name].T, dtype)
        if momentum is not None:
            out = out + dot(s * h, momentum[name].T, dtype)
        scores = jnp.einsum("td,tid,id->ti", h, C, inputs, precision=jax.lax.Precision.HIGHEST)
        return out + dot(scores, left, dtype)

    y = read(linear)
    M = a[-1] * memory[name] + dot(left.T, C[-1] * inputs, dtype)
    if momentum is None:
        return {name: M}, None, y
    M = M + s[-1] * momentum[name]
    S = beta[-1] * momentum[name] + _outer_sum(D[-1], factors[name], dtype)
    return {name: M}, {name: S}, y


def muon_block(
    rule: MemoryRule,
    memory: Weights,
    momentum: Weights | None,
    factors: dict[str, Factors],
    gates: BlockGates,
    read: Read,
    dtype: jnp.dtype,
) -> tuple[Weights, Weights | None, jax.Array]:
    """Muon: the momenta of the block's writing tokens are formed, orthogonalized together in float32, and summed.

    Newton–Schulz is not linear, so there is no dual form; only one short block's matrices exist at a time. The block starts
    at a multiple of `Muon.every` tokens from the start of its chunk, or is one token long with η masked by the caller.
    """
    assert momentum is not None
    assert gates.momentum is not None
    assert isinstance(rule.optimizer, Muon)
    m = gates.step_size.shape[0]
    every = rule.optimizer.every if m > 1 else 1
    writers = slice(every - 1, None, every)  # the block's last token is always one
    beta, pairwise = decay_products(gates.momentum)
    D = -_exact(pairwise, gates.gamma)[writers]
    if gates.retention is None:
        a, decay = None, jnp.tril(jnp.ones((m, m), D.dtype))
    else:
        a, decay = decay_products(gates.retention)
    step_size = gates.step_size[writers]
    decay = decay[:, writers] * step_size.reshape(1, -1, *(1,) * (decay.ndim - 2))  # [m, writers] or [m, writers, D]

    updates: Weights = {}
    new_momentum: Weights = {}
    for name, (left, inputs) in factors.items():
        gradients = jnp.einsum("je,eo,ei->joi", D, left, inputs, precision=jax.lax.Precision.HIGHEST)
        S = beta[writers, None, None] * momentum[name] + gradients
        new_momentum[name] = S[-1]
        updates[name] = newton_schulz(S, rule.optimizer.steps, SCHEDULES[rule.optimizer.schedule])

    def linear(name: str, h: jax.Array) -> jax.Array:
        started = h if a is None else h * (a[:, None] if a.ndim == 1 else a)
        out = dot(started, memory[name].T, dtype)
        if decay.ndim == 2:
            each = dot(h, updates[name].mT, dtype)  # [writers, m, out]
            return out + jnp.einsum("tj,jto->to", decay, each)
        return out + jnp.einsum("jto->to", dot(jnp.swapaxes(decay, 0, 1) * h, updates[name].mT, dtype))

    y = read(linear)
    new_memory = {}
    for name, update in updates.items():
        started = memory[name] if a is None else a[-1] * memory[name]
        if decay.ndim == 2:
            new_memory[name] = started + jnp.einsum("j,joi->oi", decay[-1], update)
        else:
            new_memory[name] = started + jnp.einsum("ji,joi->oi", decay[-1], update)
    return new_memory, new_momentum, y
