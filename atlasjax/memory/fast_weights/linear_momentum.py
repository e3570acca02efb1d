"""Delta rules with momentum of a matrix memory, in exact block-parallel form.

    e_t = ρ_t W_{t−1} k_t − v_t         S_t = θ_t S_{t−1} − η_t e_t k_tᵀ         W_t = α_t W_{t−1} + β_t S_t

with φ(k_t) for k_t, and ρ_t = α_t if the decay comes first, otherwise 1. With the coefficients of `blocks`,

    W_t = a_t W_0 + s_t S_0 + Σ_{i≤t} C[t,i] e_i k_iᵀ         S_t = b_t S_0 + Σ_{i≤t} D[t,i] e_i k_iᵀ

so that all errors e of a block solve one unit lower-triangular system, as in the delta rule (`linear`), with C in place of products
of decays:

    e_t − ρ_t Σ_{i<t} C[t−1,i] ⟨k_t, k_i⟩ e_i = ρ_t (a_{t−1} W_0 + s_{t−1} S_0) k_t − v_t

Its solution is affine in [W_0, S_0]. So the systems of all blocks are solved in parallel, the recurrence is one product per block,
and then all reads are computed in parallel. A bound of the steps would depend on the memory, and the form would not hold.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from atlasjax.memory import blocks, meshes
from atlasjax.memory.blocks import applied, before, dot, exact, outer, product_dtype, scaled_rows
from atlasjax.memory.fast_weights.chunk import Slot, block_gates
from atlasjax.memory.fast_weights.linear import in_groups, over_slots
from atlasjax.memory.fast_weights.spec import MemorySpec
from atlasjax.memory.fast_weights.state import MemoryParams
from atlasjax.memory.gates import Weights
from atlasjax.memory.products import wide_dtype

_Both = tuple[jax.Array, jax.Array]  # W and S, [value_dim, D]


class Prepared(NamedTuple):
    """The parts of a block that do not depend on W_0 and S_0.

    e = removed [W_0, S_0]ᵀ − written: [m, 2 D] and [m, value_dim]. end: k_i weighted for W and S after the block, [m, 2 D].
    decay: a, or None for 1; started: s; momentum: b, those of its last token.
    """

    removed: jax.Array
    written: jax.Array
    end: jax.Array
    decay: jax.Array | None
    started: jax.Array
    momentum: jax.Array


class Reads(NamedTuple):
    """The reads of a block's queries: [W_0, S_0] with `start` [m, 2 D], and the errors e with `scores` [m, m]."""

    start: jax.Array
    scores: jax.Array


def prepare(rule: MemorySpec, params: MemoryParams, slot: Slot) -> tuple[Prepared, Reads]:
    """A slot of one head, which is one block."""
    wide = wide_dtype(slot.q.dtype)
    q, k = (rule.features.apply(params.coefficients, x.astype(wide)) for x in (slot.q, slot.k))
    gates = block_gates(slot, None)
    decays = blocks.decays(gates)
    c = blocks.coefficients(decays, gates)
    a, s, b = c.memory_start, c.memory_momentum, c.momentum_start
    assert s is not None
    assert b is not None
    # At full precision: rounding here goes through the inverse of the system.
    products = applied(jnp.concatenate([k, q]), k, wide, jax.lax.Precision.HIGHEST)
    of_keys, of_queries = jnp.split(products, 2)

    def decayed(x: jax.Array) -> jax.Array:
        if not rule.retention.decay_first:
            return x
        assert gates.retention is not None
        return scaled_rows(gates.retention, x)

    from_start = lambda a, s, x: jnp.concatenate([x if a is None else scaled_rows(a, x), scaled_rows(s, x)], axis=1)
    start = decayed(from_start(None if a is None else before(a, 1.0), before(s, 0.0), k))
    # Row t of the error reads the memory before it, hence `before`.
    lower = -decayed(before(c.memory_gradients, 0.0) * of_keys)
    inverse = blocks.unit_lower_inverse(lower)
    of_end = (scaled_rows(weights[-1], k) for weights in (c.memory_gradients, c.momentum_gradients))
    prepared = Prepared(
        removed=exact(inverse, start),
        written=exact(inverse, slot.v.astype(wide)),
        end=jnp.concatenate([*of_end], axis=1),
        decay=None if a is None else a[-1],
        started=s[-1],
        momentum=b[-1],
    )
    return prepared, Reads(from_start(a, s, q), c.memory_gradients * of_queries)


def advance(both: _Both, block: Prepared) -> tuple[_Both, jax.Array]:
    """W and S after the block, and its errors e [m, value_dim], from W and S before it."""
    W, S = both
    errors = applied(block.removed, jnp.concatenate(both, axis=1), W.dtype) - block.written
    of_memory, of_momentum = jnp.split(outer(errors, block.end, W.dtype), 2, axis=1)
    decayed = W if block.decay is None else block.decay * W
    return (decayed + block.started * S + of_memory, block.momentum * S + of_momentum), errors


def momentum_scan(
    rule: MemorySpec,
    dtype: jnp.dtype,
    params: MemoryParams,
    memory: Weights,
    momentum: Weights,
    slots: Slot,
    resets: jax.Array | None,
) -> tuple[jax.Array, Weights, Weights]:
    """All slots of a call of a rule with `is_linear_with_momentum`.

    Args:
      rule, dtype: static; dtype of the outputs.
      params: in the state's dtype.
      memory, momentum: {"W": [batch, heads, value_dim, D]} before the first slot.
      slots: [slots, batch, heads, block, …]. Padding must have no effect (α = 1, θ = 1, η = 0, β = 0).
      resets: [slots, batch], whether a slot begins with a fresh memory. None if none does.

    Returns:
      y [slots, batch, heads, block, value_dim], and the memory and the momentum after the last slot.
    """
    ((name, fresh),) = rule.start(params.weights).items()
    start = (fresh, rule.start_momentum({name: fresh[None]})[name][0])
    products = product_dtype(dtype)

    def read(reads: Reads, both: _Both, errors: jax.Array) -> jax.Array:
        y = applied(reads.start, jnp.concatenate(both, axis=1), products)
        return (y + dot(reads.scores, errors, errors.dtype)).astype(dtype)

    def step(both: _Both, xs: tuple[Prepared, jax.Array | None]) -> tuple[_Both, tuple[_Both, jax.Array]]:
        block, reset = xs
        if reset is not None:
            both = jax.tree.map(lambda first, x: jnp.where(reset[:, None, None, None], first, x), start, both)
        after, errors = jax.vmap(jax.vmap(advance))(both, block)
        return after, (both, errors)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def group(both: _Both, xs: tuple[Slot, jax.Array | None]) -> tuple[_Both, jax.Array]:
        slots, resets = xs
        block, reads = over_slots(functools.partial(prepare, rule))(params, slots)
        last, (starts, errors) = meshes.scan(step, both, (block, resets))
        return last, jax.vmap(jax.vmap(jax.vmap(read)))(reads, starts, errors)

    (W, S), y = in_groups(group, (memory[name], momentum[name]), (slots, resets))
    return y, {name: W}, {name: S}
