"""Blocks of tokens whose matrices are formed, because reads are not linear in the gradients.

Newton–Schulz (Muon) needs the matrix itself. Only the matrices of one short block exist at a time.
"""

import jax
import jax.numpy as jnp

from atlasjax.memory.blocks import BlockGates, Factors, Read, decay_products, dot, exact
from atlasjax.memory.fast_weights import step_sizes
from atlasjax.memory.fast_weights.rule import MemoryRule
from atlasjax.memory.gates import Weights
from pallas_kernels.newton_schulz import SCHEDULES, newton_schulz


def muon_block(
    rule: MemoryRule,
    memory: Weights,
    momentum: Weights | None,
    factors: dict[str, Factors],
    gates: BlockGates,
    origin: step_sizes.Origin | None,
    read: Read,
    dtype: jnp.dtype,
) -> tuple[Weights, Weights | None, jax.Array]:
    """Muon: forms the momenta of the block's writing tokens, orthogonalizes them together in float32, and sums them.

    Newton–Schulz is not linear, so there is no dual form. The block starts at a multiple of `Muon.every` tokens from the start of
    its chunk, or is one token long with η masked by the caller.
    """
    muon = rule.optimizer
    m = gates.step_size.shape[0]
    every = muon.every if m > 1 else 1
    writers = slice(every - 1, None, every)  # the last token of a block always writes
    if gates.retention is None:
        a, decay = None, jnp.tril(jnp.ones((m, m), gates.step_size.dtype))
    else:
        a, decay = decay_products(gates.retention)
    step_size = gates.step_size[writers]
    decay = decay[:, writers] * step_size.reshape(1, -1, *(1,) * (decay.ndim - 2))  # [m, writers] or [m, writers, D]
    momenta = _momenta(momentum, factors, gates, writers)
    updates = {name: newton_schulz(S, muon.steps, SCHEDULES[muon.schedule]) for name, S in momenta.items()}

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
    return new_memory, {name: S[-1] for name, S in momenta.items()}, y


def unwritten_block(
    rule: MemoryRule,
    memory: Weights,
    momentum: Weights | None,
    factors: dict[str, Factors],
    gates: BlockGates,
    origin: step_sizes.Origin | None,
    read: Read,
    dtype: jnp.dtype,
) -> tuple[Weights, Weights | None, jax.Array]:
    """`muon_block` of one token that does not write: the momentum takes its gradient, and nothing is orthogonalized."""
    decay = None if gates.retention is None else gates.retention[0]
    decayed = lambda x: x if decay is None else decay * x
    y = read(lambda name, h: dot(decayed(h), memory[name].T, dtype))
    momenta = _momenta(momentum, factors, gates, slice(None))
    return jax.tree.map(decayed, memory), {name: S[-1] for name, S in momenta.items()}, y


def _momenta(
    momentum: Weights | None, factors: dict[str, Factors], gates: BlockGates, tokens: slice
) -> dict[str, jax.Array]:
    """S_t of some of the block's tokens, name → [tokens, out, in]."""
    assert momentum is not None
    assert gates.momentum_decay is not None
    beta, pairwise = decay_products(gates.momentum_decay)
    D = -exact(pairwise, gates.gamma)[tokens]
    momenta = {}
    for name, (left, inputs) in factors.items():
        gradients = jnp.einsum("je,eo,ei->joi", D, left, inputs, precision=jax.lax.Precision.HIGHEST)
        momenta[name] = beta[tokens, None, None] * momentum[name] + gradients
    return momenta
