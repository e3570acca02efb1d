"""Blocks of tokens of memories that Newton–Schulz writes (Muon), where reads are not linear in the gradients.

Each write has its own matrices (`orthogonal`). Only those of one short block exist at a time.
"""

import jax
import jax.numpy as jnp

from atlasjax.memory.blocks import BlockGates, Factors, applied, decay_products, exact
from atlasjax.memory.fast_weights import orthogonal
from atlasjax.memory.fast_weights.block import Block, Written
from atlasjax.memory.fast_weights.spec import MemorySpec
from atlasjax.memory.gates import Weights
from pallas_kernels.newton_schulz import SCHEDULES, coefficients


def muon_block(rule: MemorySpec, block: Block) -> Written:
    """Muon: orthogonalizes the momenta of the block's writing tokens together, in float32, and sums them.

    Newton–Schulz is not linear, so there is no dual form. The block starts at a multiple of `Muon.every` tokens from the start of
    its chunk, or is one token long with η masked by the caller.
    """
    memory, momentum, factors, gates, _, read, dtype = block
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
    triples = coefficients(SCHEDULES[muon.schedule], muon.steps)
    updates = {name: orthogonal.updates(S, triples, m, channels=decay.ndim == 3) for name, S in momenta.items()}

    def linear(name: str, h: jax.Array) -> jax.Array:
        # Decays h and not the memory: h is smaller, and one product serves all tokens.
        started = h if a is None else h * (a[:, None] if a.ndim == 1 else a)
        return applied(started, memory[name], dtype) + updates[name].read(h, decay, dtype)

    y = read(linear)
    started = lambda name: memory[name] if a is None else a[-1] * memory[name]
    new_memory = {name: started(name) + update.total(decay[-1]) for name, update in updates.items()}
    return new_memory, {name: S.last() for name, S in momenta.items()}, y


def unwritten_block(rule: MemorySpec, block: Block) -> Written:
    """`muon_block` of one token that does not write: the momentum takes its gradient, and nothing is orthogonalized."""
    memory, momentum, factors, gates, _, read, dtype = block
    decay = None if gates.retention is None else gates.retention[0]
    decayed = lambda x: x if decay is None else decay * x
    y = read(lambda name, h: applied(decayed(h), memory[name], dtype))
    momenta = _momenta(momentum, factors, gates, slice(None))
    return jax.tree.map(decayed, memory), {name: S.last() for name, S in momenta.items()}, y


def _momenta(
    momentum: Weights | None, factors: dict[str, Factors], gates: BlockGates, tokens: slice
) -> dict[str, orthogonal.Momenta]:
    """S_t of some of the block's tokens, as sums of the block's gradients."""
    assert momentum is not None
    assert gates.momentum_decay is not None
    beta, pairwise = decay_products(gates.momentum_decay)
    # Without η, which for Muon scales the orthogonalized step and not the gradient.
    D = -exact(pairwise, gates.gamma)[tokens]
    return {name: orthogonal.Momenta(momentum[name], beta[tokens], D, factors[name]) for name in factors}
