"""One chunk of one head: gradient factors at the chunk's start, then its blocks one after another."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax.memory import blocks, meshes
from atlasjax.memory.axes import structures
from atlasjax.memory.fast_weights import bounds, dual, formed, sequential, step_sizes
from atlasjax.memory.fast_weights.rule import MemoryRule
from atlasjax.memory.fast_weights.state import MemoryParams
from atlasjax.memory.gates import Weights

# Block lengths: how many tokens are combined at once. They never change a result (SEMANTICS 1.4).
_DUAL_BLOCK = 128  # the masks grow with the block's square, so longer chunks are computed in parts
_CHANNEL_BLOCK = 16  # forms [block, block + c − 1, D]
_FREE_BLOCK = (
    64  # where the chunk size has no effect (or is one token, with a closed form), chunks are as long as is fast
)
_SYSTEM_BLOCK = 32  # a delta rule's triangular systems, or a linear rule's decays per channel
_CHANNEL_SYSTEM = 16  # a system for each channel of the value, its rows written out
_FORMED_MATRICES = 8  # momenta orthogonalized, or memories mapped or written in turn, together; fewer if they are large
_FORMED_NUMBERS = 2**20


class Plan(NamedTuple):
    """Static sizes of a call: tokens of a chunk, tokens of a block, tokens of a slot (a chunk in whole blocks)."""

    chunk: int
    block: int
    width: int
    dtype: Any


def plan(rule: MemoryRule, params: MemoryParams, dtype: Any, time: int | None = None) -> Plan:
    """Sizes of a call of `time` tokens (None: many); where chunks have no effect, few tokens are not padded to a long one."""
    few = _FREE_BLOCK if time is None else 1 << (time - 1).bit_length()
    if rule.is_linear:
        block = _FREE_BLOCK if rule.objective.gradient_is_value else _SYSTEM_BLOCK
        if rule.retention.gate == "channel":
            block = _SYSTEM_BLOCK
        if rule.optimizer.per_channel:
            block = _CHANNEL_SYSTEM
        block = min(block, few)
        return Plan(block, block, block, dtype)
    chunk = min(_FREE_BLOCK, few) if rule.has_constant_gradient else rule.chunk_size
    if rule.uses_muon or rule.retention.has_map or rule.is_sequential:
        largest = max(math.prod(w.shape[1:]) for w in params.weights.values())
        block = min(chunk, rule.optimizer.every * min(_FORMED_MATRICES, max(1, _FORMED_NUMBERS // largest)))
    elif rule.retention.gate == "channel":
        block = min(chunk, _CHANNEL_BLOCK)
    else:
        block = -(-chunk // -(-chunk // _DUAL_BLOCK))
    return Plan(chunk, block, -(-chunk // block) * block, dtype)


class Window(NamedTuple):
    """The last c − 1 tokens before a slot, of one head: [c − 1, dim], [c − 1, dim], [c − 1]."""

    keys: jax.Array
    values: jax.Array
    thresholds: jax.Array


class Soup(NamedTuple):
    """Memories that every read mixes with the one that is written (Memory Soup, MC §3.2): each layer is linear in its weights.

    Attributes:
      weights: name → [batch, heads, n, out, in].
      gates: [batch, time, heads, 1 + n] (in a step without time): of the memory that is written, and of the others.
    """

    weights: Weights
    gates: jax.Array


class Slot(NamedTuple):
    """The tokens of one slot of one head, gates filled with no-ops where there is no token; q, k, v: [width, dim]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    retention: jax.Array | None
    step_size: jax.Array | None
    momentum: jax.Array | None
    gamma: jax.Array
    threshold: jax.Array | None
    removal_key: jax.Array | None
    removal: jax.Array | None
    real: jax.Array | None  # 1 for tokens, 0 for padding; see `blocks.BlockGates`
    soup: jax.Array | None  # [width, 1 + n], see `Soup`


def gradient_factors(
    rule: MemoryRule,
    params: Any,
    weights: Weights,
    k: jax.Array,
    v: jax.Array,
    threshold: jax.Array | None,
    dtype: Any,
) -> tuple[dict[str, blocks.Factors], jax.Array, jax.Array]:
    """∇ℓ at `weights` of E tokens of one head as outer products, one pair of factors for each weight; M(φ(k)); and
    ⟨∇ℓ, weights⟩, [E].

    Adding a zero to every product W h and differentiating with respect to it gives the cotangent of the product, which is the
    left factor; h is the right one. So autodiff does the work for any structure and objective, once for all tokens.
    """
    x = rule.features.apply(params.coefficients, k)
    skip = rule.features.degree_one(params.coefficients, k) if rule.structure.residual else None

    def total_loss(zeros: Weights) -> tuple[jax.Array, tuple[Weights, Weights, jax.Array]]:
        inputs: Weights = {}
        products: Weights = {}

        def linear(name: str, h: jax.Array) -> jax.Array:
            inputs[name] = h
            products[name] = blocks.dot(h, weights[name].T, dtype)
            return products[name] + zeros[name]

        out = rule.structure.apply(linear, x, skip, params.norm)
        return jnp.sum(rule.objective.loss(out, v, threshold)), (inputs, products, out)

    # Where a derivative is taken must vary as what it depends on: under shard_map it would be summed over the devices.
    zeros = {name: jnp.zeros((k.shape[0], w.shape[0]), k.dtype) for name, w in weights.items()}
    zeros = meshes.vary_like(zeros, weights, k, v)
    left, (inputs, products, out) = jax.grad(total_loss, has_aux=True)(zeros)
    factors = {name: blocks.Factors(left[name], inputs[name]) for name in weights}
    return (
        factors,
        out,
        sum((jnp.sum(left[name] * products[name], -1) for name in weights), jnp.zeros(k.shape[0], k.dtype)),
    )


def mix(linear: structures.Linear, soup: Weights, gates: jax.Array, dtype: Any) -> structures.Linear:
    """γ_0 W_t h + Σ_i γ_i W^(i) h for every token: the soup's layers, without a matrix for each token."""

    def mixed(name: str, h: jax.Array) -> jax.Array:
        each = soup[name]
        weighed = (gates[:, 1:, None] * h[:, None]).reshape(h.shape[0], -1)
        others = blocks.dot(weighed, jnp.moveaxis(each, 0, 1).reshape(each.shape[1], -1).T, dtype)
        return gates[:, :1] * linear(name, h) + others

    return mixed


def run_chunk(
    rule: MemoryRule,
    plan: Plan,
    params: Any,
    chunk_start: Weights | None,
    memory: Weights,
    momentum: Any,
    window: Window | None,
    slot: Slot,
    first: jax.Array | None,
    count: jax.Array,
    soup: Weights | None,
) -> tuple[Weights, Any, Window | None, jax.Array]:
    """One slot of one head: (M, S, window, y) after it.

    Args:
      rule, plan: static.
      params: `MemoryParams` of the head.
      chunk_start: M_{t'}, where gradients are taken; None if the slot begins with it.
      memory, momentum: M and S before the slot's first token.
      window: the c − 1 tokens before it, None for c = 1.
      slot: the tokens.
      first: offset of the slot's first real token; None for 0.
      count: how many tokens of the window are real.
      soup: memories to be mixed into reads, [n, out, in]; None if there are none.
    """
    c = rule.window
    k, v, threshold = slot.k, slot.v, slot.threshold
    real = None
    if window is not None:
        join = lambda old, new: jnp.concatenate([old, new])
        if first is not None:
            # The window stands right before the first real token; what is left of it is masked.
            join = lambda old, new: jax.lax.dynamic_update_slice(
                jnp.concatenate([old, new]), old, (first, *[jnp.zeros_like(first)] * (old.ndim - 1))
            )
        k, v = join(window.keys, k), join(window.values, v)
        if threshold is not None:
            threshold = join(window.thresholds, threshold)
        real = jnp.arange(k.shape[0]) >= (0 if first is None else first) + (c - 1 - count)
        after = slice(plan.chunk, plan.chunk + c - 1)
        window = Window(k[after], v[after], window.thresholds if threshold is None else threshold[after])

    moved = chunk_start is not None
    if chunk_start is None:
        chunk_start = memory
    if rule.retention.decay_first:  # chunks of one token: its decay is that of the whole memory
        assert slot.retention is not None
        decay = slot.retention[0]
        chunk_start = {name: rule.retention.decay(w, decay) for name, w in chunk_start.items()}
    gradients, out, along = gradient_factors(rule, params, rule.weights(chunk_start), k, v, threshold, plan.dtype)
    factors, decrease, losses = gradients, None, None
    if rule.step_bound is not None:
        decrease = bounds.toward_target(rule.objective, out, v, threshold)
        empty = bounds.toward_target(rule.objective, jnp.zeros_like(out), v, threshold)
        total = lambda x: jnp.maximum(jnp.sum(x, axis=-1), 0.0)
        losses = step_sizes.Losses(total(decrease), bounds.softened(total(decrease), total(empty)), along)
    if rule.optimizer.per_channel:
        assert slot.step_size is not None
        scale = slot.step_size
        if rule.step_bound is not None and decrease is not None:
            (name,) = gradients
            square = jnp.square(gradients[name].left) * jnp.sum(jnp.square(gradients[name].inputs), -1, keepdims=True)
            scale = bounds.capped(rule.step_bound, scale, decrease, square, None)
        if not rule.is_sequential:
            # Windows are one token, so a row's step size can go to the row's factor.
            factors = {name: blocks.Factors(scale * left, inputs) for name, (left, inputs) in gradients.items()}
            scale = jnp.ones_like(scale[:, 0])
        slot = slot._replace(step_size=scale)
    num_blocks = slot.q.shape[0] // plan.block
    moved = (moved or num_blocks > 1) and not rule.retention.decay_first
    block_fn: Any = dual.dual_block
    if rule.is_sequential:
        block_fn = sequential.sequential_block
    elif rule.uses_muon:
        block_fn = formed.muon_block
    elif rule.retention.has_map:
        block_fn = formed.mapped_block
    elif rule.retention.gate == "channel":
        block_fn = dual.channel_block

    def run_block(memory, momentum, tokens, slot):
        gradients, factors, losses, real = tokens
        gamma = blocks.window_matrix(slot.gamma)
        if real is not None:
            gamma = jnp.where(real, gamma, 0.0)
        assert slot.step_size is not None
        gates = blocks.BlockGates(slot.retention, slot.step_size, slot.momentum, gamma, slot.real)
        x = rule.features.apply(params.coefficients, slot.q)
        skip = rule.features.degree_one(params.coefficients, slot.q) if rule.structure.residual else None
        mixed = lambda linear: linear if soup is None else mix(linear, soup, slot.soup, plan.dtype)
        read = lambda linear: rule.structure.apply(mixed(linear), x, skip, params.norm)
        origin = None
        if losses is not None:
            assert rule.step_bound is not None
            capped = rule.optimizer.per_channel
            origin = step_sizes.Origin(rule.step_bound, chunk_start, gradients, losses, moved, capped)
        return block_fn(rule, memory, momentum, factors, gates, origin, read, plan.dtype)

    tokens = (gradients, factors, losses, real)
    if num_blocks <= 1:
        memory, momentum, y = run_block(memory, momentum, tokens, slot)
        return memory, momentum, window, y

    rows = np.arange(num_blocks)[:, None] * plan.block + np.arange(plan.block + c - 1)
    parts = jax.tree.map(lambda x: x[rows], tokens)
    slots = jax.tree.map(lambda x: x.reshape(num_blocks, plan.block, *x.shape[1:]), slot)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def body(carry, xs):
        (memory, momentum), (tokens, slot) = carry, xs
        memory, momentum, y = run_block(memory, momentum, tokens, slot)
        return (memory, momentum), y

    (memory, momentum), y = meshes.scan(body, (memory, momentum), (parts, slots))
    return memory, momentum, window, y.reshape(slot.q.shape[0], -1)
