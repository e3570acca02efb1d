"""The loop of the XLA engine over slots (padded chunks), with masked matmuls inside.

Only the memories at chunk boundaries are stored for the backward pass. Everything inside a chunk is recomputed.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from atlasjax.memory import grid, meshes
from atlasjax.memory.axes.optimizers import OptimizerState
from atlasjax.memory.fast_weights.chunk import Plan, Slot, Window, run_chunk
from atlasjax.memory.fast_weights.spec import MemorySpec
from atlasjax.memory.fast_weights.state import MemoryParams
from atlasjax.memory.gates import Weights
from atlasjax.memory.grid import Tree, choose
from atlasjax.memory.products import wide_dtype

_GROUP_TOKENS = 32  # chunks shorter than this share one checkpoint


def to_slots(x: jax.Array, plan: Plan, where: grid.Layout, fill: float) -> jax.Array:
    """[batch, time, heads, …] → [slots, batch, heads, width, …]."""
    size = plan.chunk if where.place is None else plan.width
    x = grid.lay_chunks(x, where.num_slots, size, where.place, fill)
    if size < plan.width:
        pad = ((0, 0), (0, 0), (0, plan.width - size), *((0, 0),) * (x.ndim - 3))
        # Pads each chunk to whole blocks, with gates that make the padding a no-op.
        x = jnp.pad(x, pad, constant_values=fill)
    return jnp.swapaxes(x, 2, 3)


def from_slots(y: jax.Array, plan: Plan, where: grid.Layout, time: int) -> jax.Array:
    """[slots, batch, heads, width, dim] → [batch, time, heads, dim]. NaN for tokens without a slot."""
    y = jnp.swapaxes(y, 2, 3)
    return grid.pick_chunks(y[:, :, : plan.chunk] if where.place is None else y, time, where.place)


class Carry(NamedTuple):
    """The carry between slots. Leaves [batch, heads, …]."""

    memory: Weights
    momentum: OptimizerState
    window: Window | None
    chunk_start: Weights


# Slots [slots, batch, heads, …], and window_count, resets and filled of each slot, [slots, batch] (see `grid.Layout`).
SlotInputs = tuple[Slot, jax.Array, jax.Array | None, jax.Array | None]
_ChunkFn = Callable[..., tuple[Weights, OptimizerState, Window | None, jax.Array]]  # `run_chunk` of all rows


# In `lax.scan`, where nearly all slots are, XLA cannot merge what is computed again with the first time, so barriers against it
# would only cost time.
_checkpoint = functools.partial(jax.checkpoint, prevent_cse=False)


def _of_all_rows(rule: MemorySpec, sizes: Plan, wide: jnp.dtype) -> _ChunkFn:
    """`run_chunk` of every batch element and head."""

    def chunk(params, chunk_start, memory, momentum, window, slot, first, count, mixed):
        # Here and not before the loop: only one slot at a time is held in the wide dtype.
        slot = slot._replace(q=slot.q.astype(wide), k=slot.k.astype(wide), v=slot.v.astype(wide))
        return run_chunk(rule, sizes, params, chunk_start, memory, momentum, window, slot, first, count, mixed)

    by_head = jax.vmap(chunk, in_axes=(0, 0, 0, 0, 0, 0, None, None, 0))
    return jax.vmap(by_head, in_axes=(None, 0, 0, 0, 0, 0, 0, 0, 0))


def _begin(begun: Callable[[Tree], Tree], weights: Tree, begins: jax.Array | None) -> Tree:
    return begun(weights) if begins is None else choose(begins, begun(weights), weights)


def _from_carry(rule, run: _ChunkFn, begins, params, chunk_start, memory, momentum, *rest):  # type: ignore[no-untyped-def]
    """The chunk of each row, from its own memory."""
    momentum = _begin(rule.begin_momentum, momentum, begins)
    return run(params, chunk_start, _begin(rule.begin_chunk, memory, begins), momentum, *rest)


def _from_start(rule, run: _ChunkFn, begins, params, chunk_start, memory, momentum, *rest):  # type: ignore[no-untyped-def]
    """The only chunk of each row. All begin with the same memory, so one row is begun for all."""
    batch = jax.tree.leaves(memory)[0].shape[0]
    initial = jax.tree.map(lambda w: w[None], rule.start(params.weights))
    begun = rule.begin_chunk(initial), rule.begin_momentum(rule.start_momentum(initial))
    memory, momentum = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:])), begun)
    return run(params, chunk_start, memory, momentum, *rest)


def _run_slot(
    rule: MemorySpec,
    dtype: jnp.dtype,
    params: MemoryParams,
    soup: Weights | None,
    chunk_fn: _ChunkFn,
    first: jax.Array | None,
    carry: Carry,
    xs: SlotInputs,
) -> tuple[Carry, jax.Array]:
    """One slot. chunk_fn: `_from_carry` or `_from_start` of the rule. xs: of this slot."""
    slot, count, resets, filled = xs
    memory, momentum = carry.memory, carry.momentum
    batch = jax.tree.leaves(memory)[0].shape[0]
    if resets is not None:
        initial = jax.tree.map(lambda w: jnp.broadcast_to(w, (batch, *w.shape)), rule.start(params.weights))
        memory = choose(resets, initial, memory)
        momentum = choose(resets, rule.start_momentum(initial), momentum)
    # The call may begin in the middle of a chunk, and a slot without tokens does not begin a chunk.
    begins = None if first is None else first == 0
    if filled is not None:
        begins = filled if begins is None else begins & filled
    start = _checkpoint(functools.partial(_begin, rule.begin_chunk))(memory, begins)
    if first is not None:
        start = choose(first > 0, carry.chunk_start, start)
    given = None if first is None else start
    memory, momentum, window, y = chunk_fn(
        begins, params, given, memory, momentum, carry.window, slot, first, count, soup
    )
    # Outside the checkpointed function, so that it is not stored for the backward pass.
    kept = start if filled is None else choose(filled, start, carry.chunk_start)
    return Carry(memory, momentum, window, kept), y.astype(dtype)


def _in_groups(
    run_slot: Callable[[Carry, SlotInputs], tuple[Carry, jax.Array]], size: int, carry: Carry, xs: SlotInputs
) -> tuple[Carry, jax.Array]:
    """Slots, a multiple of `size`. The slots of a group, which are short, share a stored boundary state."""
    outer = _checkpoint(functools.partial(meshes.scan, run_slot))
    # Short chunks would otherwise store nearly as many memories as there are tokens.
    groups = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), xs)
    carry, y = meshes.scan(outer, carry, groups)
    return carry, y.reshape(-1, *y.shape[2:])


def scan_slots(
    rule: MemorySpec,
    sizes: Plan,
    dtype: jnp.dtype,
    params: MemoryParams,
    carry: Carry,
    inputs: SlotInputs,
    first: jax.Array | None,
    soup: Weights | None,
    *,
    fresh: bool = False,
) -> tuple[jax.Array, Carry]:
    """All slots of a call.

    Args:
      rule, sizes, dtype: static; dtype of the outputs.
      fresh: static, whether the memory and momentum of `carry` are those of `init_state`.
      params: in the state's dtype.
      carry: the carry before the first slot.
      inputs: the slots.
      first: [batch], offset of the call's first token in slot 0. None if the call begins at the start of a chunk.
      soup: weights of memories to mix into every read, [batch, heads, n, …]. None if there are none.

    Returns:
      y [slots, batch, heads, width, value_dim], and the carry after the last slot.
    """
    run = _of_all_rows(rule, sizes, wide_dtype(dtype))
    from_carry, from_start = (functools.partial(chunks, rule, run) for chunks in (_from_carry, _from_start))
    run_slot = functools.partial(_run_slot, rule, dtype, params, soup)
    xs, outputs = inputs, []
    remaining = inputs[1].shape[0]
    if first is not None:
        # Only the first slot may begin inside a chunk. Apart, so that the loop over the others needs no selection of chunk
        # starts.
        carry, y = run_slot(_checkpoint(from_carry), first, carry, jax.tree.map(lambda x: x[0], xs))
        outputs.append(y[None])
        xs = jax.tree.map(lambda x: x[1:], xs)
        remaining -= 1
    group = max(1, _GROUP_TOKENS // sizes.width)
    if group > 1 and (grouped := remaining // group * group):
        few = jax.tree.map(lambda x: x[:grouped], xs)
        carry, y = _in_groups(functools.partial(run_slot, from_carry, None), group, carry, few)
        outputs.append(y)
        xs = jax.tree.map(lambda x: x[grouped:], xs)
        remaining -= grouped
    if remaining:
        # A call of one chunk from a fresh memory: every row has the same start.
        only = fresh and inputs[1].shape[0] == 1 and first is None and all(x is None for x in inputs[2:])
        chunk_fn = _checkpoint(from_start if only else from_carry)
        carry, y = meshes.scan(functools.partial(run_slot, chunk_fn, None), carry, xs)
        outputs.append(y)
    return jnp.concatenate(outputs) if len(outputs) > 1 else outputs[0], carry
