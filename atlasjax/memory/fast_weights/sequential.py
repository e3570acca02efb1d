"""Blocks of tokens that are written one after another: the general engine, for any optimizer and retention.

A user-defined optimizer or retention can only be applied token by token. Gradients are still computed for the whole chunk at its
start, as outer products, and reads are computed together. Only the gradients and memories of one short block are formed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from atlasjax.memory import blocks, bounds, meshes
from atlasjax.memory.axes.optimizers import OptimizerState
from atlasjax.memory.blocks import dot
from atlasjax.memory.fast_weights import step_sizes
from atlasjax.memory.fast_weights.block import Block, Written
from atlasjax.memory.fast_weights.spec import MemorySpec
from atlasjax.memory.gates import Weights

_Carry = tuple[Weights, OptimizerState]
# The gradient and the gates of a token; what it should and could decrease its loss by; φ(k), if the retention follows it.
_Token = tuple[Weights, "_Gates", jax.Array | None, jax.Array | None, jax.Array | None]


class _Gates(NamedTuple):
    retention: jax.Array | None
    step_size: jax.Array
    momentum_decay: jax.Array | None
    write_size: jax.Array | None
    real: jax.Array | None


def sequential_block(rule: MemorySpec, block: Block) -> Written:
    """(M, S, y) after the block. Arguments as in `dual.dual_block`. The block starts at a multiple of `Optimizer.every` tokens from
    the start of its chunk, or is one token long with η masked by the caller."""
    memory, momentum, factors, gates, origin, read, dtype = block
    m = gates.step_size.shape[0]
    step_size = gates.step_size
    if m > 1 and rule.optimizer.every > 1:
        writes = (jnp.arange(m) + 1) % rule.optimizer.every == 0
        step_size = jnp.where(writes.reshape(-1, *(1,) * (step_size.ndim - 1)), step_size, 0.0)
    # Formed, because a user's optimizer takes a gradient as a matrix.
    form = lambda f: jnp.einsum("te,eo,ei->toi", gates.gamma, f.left, f.inputs, precision=jax.lax.Precision.HIGHEST)
    gradients = {name: form(f) for name, f in factors.items()}
    decrease = scale = None
    if origin is not None:
        decrease, scale = (blocks.exact(gates.gamma, x) for x in (origin.losses.decrease, origin.losses.scale))

    def write(carry: _Carry, token: _Token) -> tuple[_Carry, Weights]:
        memory, momentum = carry
        gradient, (retention, step_size, theta, write_size, real), decrease, scale, key = token
        if origin is not None:
            assert decrease is not None
            assert scale is not None
            before = memory
            if rule.retention.decay_first:
                assert retention is not None
                before = {name: rule.retention.decay(w, retention) for name, w in memory.items()}
            step_size = _bounded(rule, origin, before, momentum, gradient, step_size, theta, decrease, scale)
        after = rule.write(memory, momentum, gradient, retention, step_size, theta, write_size, key)
        if real is not None:
            # An optimizer or retention of one's own need not be a no-op for the gates of padding.
            after = jax.tree.map(lambda new, old: jnp.where(real > 0, new, old), after, carry)
        return after, after[0]

    each = _Gates(gates.retention, step_size, gates.momentum_decay, gates.write_size, gates.real)
    keys = factors[rule.structure.readers[0]].inputs[-m:] if rule.retention.follows_keys else None
    tokens = (gradients, each, decrease, scale, keys)
    (memory, momentum), written = meshes.scan(write, (memory, momentum), tokens)
    weights = rule.weights(written)
    y = read(lambda name, h: dot(weights[name], h[:, :, None], dtype)[:, :, 0])
    return memory, momentum, y


def _bounded(
    rule: MemorySpec,
    origin: step_sizes.Origin,
    memory: Weights,
    momentum: OptimizerState,
    gradient: Weights,
    step_size: jax.Array,
    theta: jax.Array | None,
    decrease: jax.Array,
    scale: jax.Array,
) -> jax.Array:
    """η' of one token, by the recurrence in the docstring of `bounds`. The optimizer is linear in the gradient.

    memory: A_{t−1}, decayed if its decay comes first, as `origin` is.
    """
    eta = step_size
    if not origin.capped:
        eta = blocks.capped(origin.step, eta, decrease, rule.change_along(origin.weights, gradient))
    if theta is not None:
        memory = jax.tree.map(lambda x, s: x + origin.horizon * theta * s, memory, momentum)
    change = jax.tree.map(jnp.subtract, rule.weights(memory), rule.weights(origin.weights))
    moved = sum((jnp.sum(gradient[name] * change[name]) for name in gradient), jnp.zeros((), eta.dtype))
    return eta * bounds.left_over(moved, scale)
