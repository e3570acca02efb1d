"""Blocks of tokens of memories with a retention map (`KL`, `Lq`), where M_t = map(A_t) is not linear in the gradients.

The accumulators are sums of the gradients, but each step of the bound depends on the memory before it, so the tokens are taken one
after another. Each needs the whole memory: this costs as many operations per token as there are weights, several times. What does
not depend on the memory's earlier steps is computed for all tokens together, and gradients stay outer products.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax.memory import bounds, meshes
from atlasjax.memory.axes.optimizers import OptimizerState
from atlasjax.memory.blocks import Factors, Queries, capped, dot, exact, row_sums, scaled
from atlasjax.memory.fast_weights.block import Block, Written
from atlasjax.memory.fast_weights.spec import MemorySpec
from atlasjax.memory.gates import Weights


class _Bounded(NamedTuple):
    """Two numbers of a token that the bound needs: ⟨g_t, M_{t'}⟩ and n_t."""

    start: jax.Array
    scale: jax.Array


class _Token(NamedTuple):
    """g_t = Σ_j left[j] ⊗ inputs[j] for each weight, over the c tokens of the window; the gates; and what to read."""

    gradient: dict[str, Factors]
    retention: jax.Array | None
    step_size: jax.Array
    momentum_decay: jax.Array | None
    write_size: jax.Array | None
    bounded: _Bounded | None
    queries: Queries


def mapped_block(rule: MemorySpec, block: Block) -> Written:
    """(A, S, y) after the block, for an optimizer that is linear in the gradient. Arguments as in `dual.dual_block`."""
    memory, momentum, factors, gates, origin, read, dtype = block
    m, expanded = gates.gamma.shape
    # Row t has the c tokens whose losses token t minimizes.
    window = np.arange(m)[:, None] + np.arange(expanded - m + 1)
    gamma = jnp.take_along_axis(gates.gamma, window, axis=1)
    gradients = {name: Factors(gamma[:, :, None] * f.left[window], f.inputs[window]) for name, f in factors.items()}
    step_size, bounded = gates.step_size, None
    if origin is not None:
        started = rule.weights(origin.weights)
        along = [row_sums(f.left * exact(f.inputs, started[name].T)) for name, f in factors.items()]
        bounded = _Bounded(exact(gates.gamma, sum(along[1:], along[0])), exact(gates.gamma, origin.losses.scale))
        if not origin.capped:
            change = jax.vmap(lambda g: rule.change_along_factors(origin.weights, g))(gradients)
            decrease = exact(gates.gamma, origin.losses.decrease)
            step_size = capped(origin.step, step_size, decrease, change)

    def write(carry: tuple[Weights, OptimizerState, Weights], token: _Token):
        stored, momentum, weights = carry
        eta = token.step_size
        if token.bounded is not None:
            eta = eta * _left_over(rule, stored, momentum, weights, token)
        steps = {name: -exact((eta * f.left).T, f.inputs) for name, f in token.gradient.items()}
        if momentum is not None:
            # S without β, which scales only what M takes of it.
            steps = momentum = {name: token.momentum_decay * momentum[name] + step for name, step in steps.items()}
            if token.write_size is not None:
                steps = {name: scaled(token.write_size, step) for name, step in steps.items()}
        a = token.retention
        stored = {name: (w if a is None else scaled(a, w)) + steps[name] for name, w in stored.items()}
        # The map is not linear, so no read can be a sum over gradients.
        stored, weights = rule.stored_and_mapped(stored)
        y = read.apply(lambda name, h: dot(weights[name], h.T, dtype).T, jax.tree.map(lambda x: x[None], token.queries))
        return (stored, momentum, weights), y[0]

    tokens = _Token(
        gradients, gates.retention, step_size, gates.momentum_decay, gates.write_size, bounded, read.queries
    )
    carry = (memory, momentum, rule.weights(memory))
    # Each token's matrices are computed again: stored, they would be as many memories as tokens.
    (memory, momentum, _), y = meshes.scan(jax.checkpoint(write, prevent_cse=False), carry, tokens)
    return memory, momentum, y


def _left_over(
    rule: MemorySpec, stored: Weights, momentum: OptimizerState, weights: Weights, token: _Token
) -> jax.Array:
    """1 + x_t/n_t of the docstring of `bounds`."""
    assert token.bounded is not None
    if rule.retention.decay_first:  # then the chunk's start is decayed, too
        alpha = token.retention
        assert alpha is not None
        stored = {name: alpha * w for name, w in stored.items()}
        weights = rule.weights(stored)
    if momentum is not None:
        assert token.momentum_decay is not None
        coming = rule.horizon * token.momentum_decay
        weights = rule.weights({name: w + coming * momentum[name] for name, w in stored.items()})
    along = sum(jnp.sum(f.left * exact(weights[name], f.inputs.T).T) for name, f in token.gradient.items())
    return bounds.left_over(along - token.bounded.start, token.bounded.scale)
