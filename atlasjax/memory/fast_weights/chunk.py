"""One chunk of one head: gradient factors at the chunk's start, then its blocks one after another."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax.memory import blocks, bounds, meshes
from atlasjax.memory.axes import structures
from atlasjax.memory.axes.objectives import Objective
from atlasjax.memory.axes.optimizers import OptimizerState
from atlasjax.memory.fast_weights import dual, formed, mapped, sequential, step_sizes
from atlasjax.memory.fast_weights.block import Block, BlockFunction, Written
from atlasjax.memory.fast_weights.spec import MemorySpec
from atlasjax.memory.fast_weights.state import MemoryParams
from atlasjax.memory.gates import Weights
from atlasjax.memory.part_checks import PartsWithFeatures, check_all_applied, check_applied
from atlasjax.memory.products import wide_dtype

# Block lengths: number of tokens combined at once. They never affect the result (SEMANTICS 1.4).
_DUAL_BLOCK = 128  # masks grow with the square of the block, so longer chunks are computed in parts
_CHANNEL_BLOCK = 16  # forms [block, block + c − 1, D]
_FREE_BLOCK = 64  # the fastest length where the chunk size has no effect
_SYSTEM_BLOCK = 32  # triangular systems of a delta rule, or a linear rule with a decay per channel
_CHANNEL_SYSTEM = 16  # one system per channel of the value, with rows unrolled
_FORMED_MATRICES = 8  # matrices formed per block: momenta, mapped or sequential memories; fewer if they are large
_FORMED_NUMBERS = 2**20  # in all matrices of a block


class Plan(NamedTuple):
    """Static sizes of a call: tokens per chunk, block and slot (a chunk padded to whole blocks), and the dtype of products.

    `writes` is False for slots of one token at which `Muon` does not write.
    """

    chunk: int
    block: int
    width: int
    dtype: jnp.dtype
    writes: bool = True


def plan(rule: MemorySpec, params: MemoryParams, dtype: jnp.dtype, time: int | None = None) -> Plan:
    """Sizes of a call of `time` tokens in `dtype` (None: many). Short calls use shorter chunks where that changes nothing."""
    dtype = blocks.product_dtype(dtype)
    # A power of two, because blocks are halved (`decay_products`).
    few = _FREE_BLOCK if time is None else 1 << (time - 1).bit_length()
    if rule.is_linear or rule.is_linear_with_momentum:
        block = _FREE_BLOCK if rule.objective.gradient_is_value else _SYSTEM_BLOCK
        if rule.retention.gate == "channel":
            block = _SYSTEM_BLOCK
        if rule.optimizer.per_channel:
            block = _CHANNEL_SYSTEM
        block = min(block, few)
        return Plan(block, block, block, dtype)
    chunk = min(_FREE_BLOCK, few) if rule.has_constant_gradient else rule.chunk_size
    if rule.uses_muon or rule.is_sequential:
        largest = max(math.prod(w.shape[1:]) for w in params.weights.values())
        # Whole multiples of `every`, so that the last token of a block always writes.
        block = min(chunk, rule.optimizer.every * min(_FORMED_MATRICES, max(1, _FORMED_NUMBERS // largest)))
    elif rule.retention.gate == "channel":
        block = min(chunk, _CHANNEL_BLOCK)
    else:
        # The fewest blocks of at most _DUAL_BLOCK tokens, made equally long, so that there is little padding.
        block = -(-chunk // -(-chunk // _DUAL_BLOCK))
    return Plan(chunk, block, -(-chunk // block) * block, dtype)


class Window(NamedTuple):
    """The last c − 1 tokens before a slot of one head: [c − 1, dim], [c − 1, dim], [c − 1]."""

    keys: jax.Array
    values: jax.Array
    thresholds: jax.Array


class Soup(NamedTuple):
    """Memories that every read mixes with the one being written (Memory Soup, MC §3.2). Each layer is linear in its weights.

    Attributes:
      weights: name → [batch, heads, n, out, in].
      gates: [batch, time, heads, 1 + n] (without time in `step`), with the memory being written first.
    """

    weights: Weights
    gates: jax.Array


class Slot(NamedTuple):
    """The tokens of one slot of one head. Gates of padding have no effect. q, k, v: [width, dim]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    retention: jax.Array | None
    step_size: jax.Array | None
    momentum_decay: jax.Array | None
    write_size: jax.Array | None
    window_weights: jax.Array
    threshold: jax.Array | None
    removal_key: jax.Array | None
    removal: jax.Array | None
    real: jax.Array | None  # 1 for tokens, 0 for padding; see `blocks.BlockGates`
    soup: jax.Array | None  # [width, 1 + n], see `Soup`


class Differentiated(PartsWithFeatures, Protocol):
    """The traits of a rule of any family that `gradient_factors` needs."""

    @property
    def limited_objective(self) -> Objective: ...


def gradient_factors(
    rule: Differentiated,
    params: MemoryParams,
    weights: Weights,
    k: jax.Array,
    v: jax.Array,
    threshold: jax.Array | None,
    dtype: jnp.dtype,
    *,
    bounded: bool = False,
) -> tuple[dict[str, blocks.Factors], jax.Array | None, jax.Array]:
    """For E tokens of one head: ∇ℓ at `weights` as factors of outer products, one pair per weight; if `bounded`,
    `bounds.toward_target` of their outputs and of outputs of zero, [2, E, value_dim]; and ⟨∇ℓ, weights⟩ [E].

    A zero is added to every product W h. The derivative with respect to it is the cotangent of the product, which is the left
    factor; h is the right one. So autodiff covers any structure and objective, in one pass over all tokens.
    """
    x = rule.features.apply(params.coefficients, k)
    skip = rule.features.degree_one(params.coefficients, k) if rule.structure.residual else None

    def outputs(zeros: Weights) -> tuple[jax.Array, tuple[Weights, Weights]]:
        inputs: Weights = {}
        products: Weights = {}

        def linear(name: str, h: jax.Array) -> jax.Array:
            check_applied(rule.structure, name, weights, inputs)
            inputs[name] = h
            products[name] = blocks.applied(h, weights[name], dtype)
            return products[name] + zeros[name]

        out = rule.structure.apply(linear, x, skip, params.norm)
        check_all_applied(rule.structure, weights, inputs)
        return out, (inputs, products)

    # Under shard_map the zeros must vary over devices like the inputs, otherwise their derivatives would be summed over devices.
    zeros = {name: jnp.zeros((k.shape[0], w.shape[0]), k.dtype) for name, w in weights.items()}
    zeros = meshes.vary_like(zeros, weights, k, v)
    out, pull_back, (inputs, products) = jax.vjp(outputs, zeros, has_aux=True)
    slope, decreases = _slope(rule, out, v, threshold, bounded)
    # The loss of a token depends on that token alone, so the gradient of the sum has each token's own in its row.
    (left,) = pull_back(slope)
    factors = {name: blocks.Factors(left[name], inputs[name]) for name in weights}
    return (
        factors,
        decreases,
        sum((blocks.row_sums(left[name] * products[name]) for name in weights), jnp.zeros(k.shape[0], k.dtype)),
    )


def _slope(
    rule: Differentiated, out: jax.Array, v: jax.Array, threshold: jax.Array | None, bounded: bool
) -> tuple[jax.Array, jax.Array | None]:
    """∂ℓ/∂out of E tokens, and the second result of `gradient_factors`."""

    def total_loss(out: jax.Array, v: jax.Array, threshold: jax.Array | None) -> jax.Array:
        loss = rule.limited_objective.loss(out, v, threshold)
        if loss.shape != out.shape[:-1]:
            raise ValueError(
                f"{type(rule.objective).__name__}.loss returned shape {loss.shape} for outputs {out.shape}; it must be one "
                f"number for each token, {out.shape[:-1]}."
            )
        return jnp.sum(loss)

    slope = jax.grad(total_loss)
    if not bounded:
        return slope(meshes.vary_like(out, v), v, threshold), None
    both = meshes.vary_like(jnp.stack([out, jnp.zeros_like(out)]), v)
    slopes = jax.vmap(slope, in_axes=(0, None, None))(both, v, threshold)
    return slopes[0], slopes * (both - v[None])


def mix(linear: structures.Linear, soup: Weights, gates: jax.Array, dtype: jnp.dtype) -> structures.Linear:
    """γ_0 W_t h + Σ_i γ_i W^(i) h for every token: the soup's layers, without forming a matrix for each token."""

    def mixed(name: str, h: jax.Array) -> jax.Array:
        each = soup[name]
        weighed = (gates[:, 1:, None] * h[:, None]).reshape(h.shape[0], -1)
        # One product for all memories: their weights side by side, the queries scaled by γ_i.
        others = blocks.dot(weighed, jnp.moveaxis(each, 0, 1).reshape(each.shape[1], -1).T, dtype)
        return gates[:, :1] * linear(name, h) + others

    return mixed


class _Gradients(NamedTuple):
    """For the E tokens of a slot and of the window before it: ∇ℓ as factors; the same with step sizes per channel moved into them;
    `Losses`, None without bounded steps; and which are real, None if all are."""

    gradients: dict[str, blocks.Factors]
    factors: dict[str, blocks.Factors]
    losses: step_sizes.Losses | None
    real: jax.Array | None


def _with_window(
    rule: MemorySpec, plan: Plan, window: Window | None, slot: Slot, first: jax.Array | None, count: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None, Window | None]:
    """k, v and threshold of the window's tokens and the slot's; which of them are real, None if all are; the window after the slot.
    Arguments as in `run_chunk`."""
    k, v, threshold, c = slot.k, slot.v, slot.threshold, rule.window
    if window is None:
        return k, v, threshold, None, None
    join = lambda old, new: jnp.concatenate([old, new])
    if first is not None:
        # The window ends right before the first real token. Everything before the window is masked.
        join = lambda old, new: jax.lax.dynamic_update_slice(
            jnp.concatenate([old, new]), old, (first, *[jnp.zeros_like(first)] * (old.ndim - 1))
        )
    k, v = join(window.keys, k), join(window.values, v)
    if threshold is not None:
        threshold = join(window.thresholds, threshold)
    # The last `count` entries of the window are tokens; at the start of a segment the others are left over from before.
    real = jnp.arange(k.shape[0]) >= (0 if first is None else first) + (c - 1 - count)
    # The last c − 1 tokens of the chunk, not of the slot, which may end with padding.
    after = slice(plan.chunk, plan.chunk + c - 1)
    window = Window(k[after], v[after], window.thresholds if threshold is None else threshold[after])
    return k, v, threshold, real, window


def _gradients(
    rule: MemorySpec, plan: Plan, params: MemoryParams, origin: Weights, slot: Slot, k: jax.Array, v: jax.Array,
    threshold: jax.Array | None, real: jax.Array | None,
) -> tuple[_Gradients, Slot]:  # fmt: skip
    """The gradients at `origin` of the tokens of `_with_window`, and the slot with the step sizes that are left to its gates."""
    # Newton–Schulz enlarges small singular values, and with them the rounding of products.
    exact = wide_dtype(plan.dtype) if rule.uses_muon else plan.dtype
    bounded = rule.step_bound is not None
    gradients, decreases, along = gradient_factors(
        rule, params, rule.weights(origin), k, v, threshold, exact, bounded=bounded
    )
    losses = None
    if decreases is not None:
        decrease, empty = jnp.maximum(blocks.row_sums(decreases), 0.0)
        losses = step_sizes.Losses(decrease, bounds.softened(decrease, empty), along)
    if not rule.optimizer.per_channel:
        return _Gradients(gradients, gradients, losses, real), slot
    factors, scale = gradients, slot.step_size
    assert scale is not None
    if rule.step_bound is not None and decreases is not None:
        (name,) = gradients
        square = jnp.square(gradients[name].left) * jnp.sum(jnp.square(gradients[name].inputs), -1, keepdims=True)
        # The bound of each channel for itself, before it is moved into the factors, where it cannot be told from the gradient.
        scale = blocks.capped(rule.step_bound, scale, decreases[0], square)
    if not rule.is_sequential:
        # Windows are one token long, so step sizes per row can be moved into the left factors.
        factors = {name: blocks.Factors(scale * left, inputs) for name, (left, inputs) in gradients.items()}
        scale = jnp.ones_like(scale[:, 0])
    return _Gradients(gradients, factors, losses, real), slot._replace(step_size=scale)


def block_function(rule: MemorySpec, plan: Plan) -> BlockFunction:
    """The function that writes the blocks of a rule."""
    if rule.maps_sums:
        return mapped.mapped_block
    if rule.is_sequential:
        return sequential.sequential_block
    if rule.uses_muon:
        return formed.muon_block if plan.writes else formed.unwritten_block
    return dual.channel_block if rule.retention.gate == "channel" else dual.dual_block


def block_gates(slot: Slot, real: jax.Array | None) -> blocks.BlockGates:
    """The gates of a slot. real: which tokens of the window and the slot are real, None if all are."""
    gamma = blocks.window_matrix(slot.window_weights)
    if real is not None:
        gamma = jnp.where(real, gamma, 0.0)
    assert slot.step_size is not None
    return blocks.BlockGates(slot.retention, slot.step_size, slot.momentum_decay, slot.write_size, gamma, slot.real)


def _read(rule: MemorySpec, plan: Plan, params: MemoryParams, slot: Slot, soup: Weights | None) -> blocks.Read:
    """Reads of a block's queries, with the memories of `soup` mixed in."""
    x = rule.features.apply(params.coefficients, slot.q)
    skip = rule.features.degree_one(params.coefficients, slot.q) if rule.structure.residual else None

    def apply(linear: blocks.Linear, queries: blocks.Queries) -> jax.Array:
        x, skip, shares = queries
        if soup is not None:
            assert shares is not None
            linear = mix(linear, soup, shares, plan.dtype)
        return rule.structure.apply(linear, x, skip, params.norm)

    return blocks.Read(apply, (x, skip, slot.soup))


_RunBlock = Callable[[Weights, OptimizerState, _Gradients, Slot], Written]


def _in_turn(
    run: _RunBlock, plan: Plan, window: int, memory: Weights, momentum: OptimizerState, tokens: _Gradients, slot: Slot
) -> Written:
    """The blocks of a chunk, one after another. Each sees the window before it."""
    count = slot.q.shape[0] // plan.block
    # In numpy, so that these indices are constants and XLA sees slices.
    rows = np.arange(count)[:, None] * plan.block + np.arange(plan.block + window - 1)
    parts = jax.tree.map(lambda x: x[rows], tokens)
    slots = jax.tree.map(lambda x: x.reshape(count, plan.block, *x.shape[1:]), slot)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def body(carry, xs):
        (memory, momentum), (tokens, slot) = carry, xs
        memory, momentum, y = run(memory, momentum, tokens, slot)
        return (memory, momentum), y

    (memory, momentum), y = meshes.scan(body, (memory, momentum), (parts, slots))
    return memory, momentum, y.reshape(slot.q.shape[0], -1)


def run_chunk(
    rule: MemorySpec,
    plan: Plan,
    params: MemoryParams,
    chunk_start: Weights | None,
    memory: Weights,
    momentum: OptimizerState,
    window: Window | None,
    slot: Slot,
    first: jax.Array | None,
    count: jax.Array,
    soup: Weights | None,
) -> tuple[Weights, OptimizerState, Window | None, jax.Array]:
    """One slot of one head. Returns (M, S, window, y) after it.

    Args:
      rule, plan: static.
      params: `MemoryParams` of the head.
      chunk_start: M_{t'}, at which gradients are taken. None means `memory`.
      memory, momentum: M and S before the slot's first token.
      window: the c − 1 tokens before it. None for c = 1.
      slot: the tokens.
      first: offset of the slot's first real token. None means 0.
      count: number of real tokens in the window.
      soup: memories to mix into reads, name → [n, out, in]. None if there are none.
    """
    k, v, threshold, real, window = _with_window(rule, plan, window, slot, first, count)
    several = slot.q.shape[0] > plan.block
    # With it False the engine leaves out products that would only give ⟨∇, 0⟩.
    moved = (chunk_start is not None or several) and not rule.retention.decay_first
    origin = memory if chunk_start is None else chunk_start
    if rule.retention.decay_first:  # chunks are one token long, so its decay applies to the whole memory
        assert slot.retention is not None
        decay = slot.retention[0]
        origin = {name: rule.retention.decay(w, decay) for name, w in origin.items()}
    tokens, slot = _gradients(rule, plan, params, origin, slot, k, v, threshold, real)
    write = block_function(rule, plan)

    def run(memory: Weights, momentum: OptimizerState, tokens: _Gradients, slot: Slot) -> Written:
        gradients, factors, losses, real = tokens
        gates, read, reference = block_gates(slot, real), _read(rule, plan, params, slot, soup), None
        if losses is not None:
            assert rule.step_bound is not None
            step, capped = rule.step_bound / rule.horizon, rule.optimizer.per_channel
            reference = step_sizes.Origin(step, rule.horizon, origin, gradients, losses, moved, capped)
        return write(rule, Block(memory, momentum, factors, gates, reference, read, plan.dtype))

    if several:
        memory, momentum, y = _in_turn(run, plan, rule.window, memory, momentum, tokens, slot)
    else:
        memory, momentum, y = run(memory, momentum, tokens, slot)
    return memory, momentum, window, y
