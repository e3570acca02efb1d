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

from atlasjax.memory.rule import MemoryRule
from atlasjax.memory.state import Weights

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


def exact(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def neighbours(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Even and odd entries of the first axis; the derivative is a concatenation, where that of slices would be padding."""
    first, second = jax.lax.split(x.reshape(-1, 2, *x.shape[1:]), (1, 1), axis=1)
    return first[:, 0], second[:, 0]


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
        (first, second), (start_first, start_second) = neighbours(products), neighbours(start)
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


class Coefficients(NamedTuple):
    """The tokens' memories as combinations of what the block starts with: see the head of this file."""

    momentum_start: jax.Array | None  # β_t
    momentum_gradients: jax.Array  # D[t, i]
    memory_start: jax.Array | None  # a_t
    memory_momentum: jax.Array | None  # s_t
    memory_gradients: jax.Array  # C[t, i]


def coefficients(gates: BlockGates) -> Coefficients:
    m = gates.step_size.shape[0]
    scaled = -gates.step_size[:, None] * gates.gamma
    beta = a = s = None
    D = scaled
    if gates.momentum is not None:
        beta, pairwise = decay_products(gates.momentum)
        D = exact(pairwise, scaled)
    if gates.retention is None:
        pairwise = jnp.tril(jnp.ones((m, m), scaled.dtype))
    else:
        a, pairwise = decay_products(gates.retention)
    if gates.real is not None:
        pairwise = pairwise * gates.real
    C = exact(pairwise, D)
    if beta is not None:
        s = exact(pairwise, beta)
    return Coefficients(beta, D, a, s, C)


def outer_sum(weights: jax.Array, factors: Factors, dtype: jnp.dtype) -> jax.Array:
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
    c = coefficients(gates)

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
        M = M + outer_sum(c.memory_gradients[-1], factors[name], dtype)
        if momentum is not None:
            assert c.memory_momentum is not None
            assert c.momentum_start is not None
            M = M + c.memory_momentum[-1] * momentum[name]
            step = outer_sum(c.momentum_gradients[-1], factors[name], dtype)
            new_momentum[name] = c.momentum_start[-1] * momentum[name] + step
        new_memory[name] = M
    return new_memory, new_momentum if momentum is not None else None, y


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
        D = exact(momentum_pairwise, D)
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
    S = beta[-1] * momentum[name] + outer_sum(D[-1], factors[name], dtype)
    return {name: M}, {name: S}, y
