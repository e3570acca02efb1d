"""Blocks of tokens in the dual form, which forms neither weights nor gradients of single tokens."""

import jax
import jax.numpy as jnp

from atlasjax.memory import blocks
from atlasjax.memory.blocks import decay_products, dot, exact, outer_sum
from atlasjax.memory.fast_weights import step_sizes
from atlasjax.memory.fast_weights.block import Block, Written
from atlasjax.memory.fast_weights.spec import MemorySpec


def dual_block(rule: MemorySpec, block: Block) -> Written:
    """A block of a rule that is linear in the gradient, with scalar retention. Returns (M, S, y) after the block."""
    memory, momentum, factors, gates, origin, read, dtype = block
    decays = blocks.decays(gates)
    if origin is not None:
        gates = gates._replace(step_size=step_sizes.dual_steps(memory, momentum, origin, factors, gates, decays))
    c = blocks.coefficients(decays, gates)

    def linear(name: str, h: jax.Array) -> jax.Array:
        scaled = lambda a, weight: (
            blocks.applied(blocks.scaled_rows(a, h), weight, dtype)
            # Scales the narrower of both sides of the product.
            if h.shape[1] <= weight.shape[0]
            else blocks.scaled_rows(a, blocks.applied(h, weight, dtype))
        )
        out = blocks.applied(h, memory[name], dtype) if c.memory_start is None else scaled(c.memory_start, memory[name])
        if momentum is not None:
            assert c.memory_momentum is not None
            out = out + scaled(c.memory_momentum, momentum[name])
        left, inputs = factors[name]
        # Attention without softmax: scores ⟨h_t, input_i⟩, weighed by C, times the left factors.
        return out + dot(blocks.applied(h, inputs, dtype) * c.memory_gradients, left, dtype)

    y = read(linear)
    new_memory, new_momentum = {}, {}
    for name in factors:
        M = memory[name] if c.memory_start is None else blocks.scaled(c.memory_start[-1], memory[name])
        M = M + outer_sum(c.memory_gradients[-1], factors[name], dtype)
        if momentum is not None:
            assert c.memory_momentum is not None
            assert c.momentum_start is not None
            M = M + blocks.scaled(c.memory_momentum[-1], momentum[name])
            step = outer_sum(c.momentum_gradients[-1], factors[name], dtype)
            new_momentum[name] = blocks.scaled(c.momentum_start[-1], momentum[name]) + step
        new_memory[name] = M
    return new_memory, new_momentum if momentum is not None else None, y


def channel_block(rule: MemorySpec, block: Block) -> Written:
    """`dual_block` for a retention per feature channel, where C[t, i] is a vector over the D channels.

    It forms arrays [m, E, D], so blocks are short (`chunk.plan`).
    """
    memory, momentum, factors, gates, origin, read, dtype = block
    if origin is not None:
        gates = gates._replace(step_size=step_sizes.channel_steps(memory, momentum, origin, factors, gates))
    assert gates.retention is not None
    (name,) = memory  # the checks of a rule leave only a matrix a decay per channel
    left, inputs = factors[name]
    a, pairwise = decay_products(gates.retention)  # [m, D], [m, m, D]
    D = -gates.step_size[:, None] * gates.gamma
    if momentum is not None:
        assert gates.momentum_decay is not None
        momentum_start, momentum_pairwise = decay_products(gates.momentum_decay)
        D = exact(momentum_pairwise, D)
        if gates.write_size is not None:
            pairwise = pairwise * gates.write_size[:, None]
        s = jnp.einsum("tjd,j->td", pairwise, momentum_start, precision=jax.lax.Precision.HIGHEST)
    C = jnp.einsum("tjd,ji->tid", pairwise, D, precision=jax.lax.Precision.HIGHEST)

    def linear(_: str, h: jax.Array) -> jax.Array:
        out = blocks.applied(a * h, memory[name], dtype)
        if momentum is not None:
            out = out + blocks.applied(s * h, momentum[name], dtype)
        scores = jnp.einsum("td,tid,id->ti", h, C, inputs, precision=jax.lax.Precision.HIGHEST)
        return out + dot(scores, left, dtype)

    y = read(linear)
    # a and C have one entry per input channel, so they scale columns of the weight.
    M = a[-1] * memory[name] + blocks.outer(left, C[-1] * inputs, dtype)
    if momentum is None:
        return {name: M}, None, y
    M = M + s[-1] * momentum[name]
    S = momentum_start[-1] * momentum[name] + outer_sum(D[-1], factors[name], dtype)
    return {name: M}, {name: S}, y
