"""The loop of the XLA engine over slots (padded chunks), with masked matmuls inside.

Only the memories at chunk boundaries are stored for the backward pass. Everything inside a chunk is recomputed.
"""

import functools
import math
import os
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
_CPU_LANES = 4  # a few: each adds compile time
_LANE_NUMBERS = 2**20  # tokens times weights; a smaller product is too short to be worth a lane


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
_OfSlot = tuple[jax.Array, jax.Array | None, jax.Array | None]  # the last three for one slot
_ChunkFn = Callable[..., tuple[Weights, OptimizerState, Window | None, jax.Array]]  # `run_chunk` of all rows


def cpu_lanes(sizes: Plan, params: MemoryParams) -> int:
    """Number of groups of heads (lanes) that are separate operations on a CPU.

    XLA's CPU backend runs each product of this size on one thread, but independent products in parallel. With one operation for all
    heads the other cores would be mostly idle. Small products gain nothing, and each lane adds compile time. Several CPU devices
    need no lanes: each has a core of its own, and the heads may be divided between them, which lanes would send back and forth.
    """
    if jax.default_backend() == "cpu" and jax.local_device_count() > 1:
        return 1
    heads = next(iter(params.weights.values())).shape[0]
    largest = max(math.prod(w.shape[1:]) for w in params.weights.values())
    return math.gcd(heads, min(_CPU_LANES, os.cpu_count() or 1)) if sizes.width * largest >= _LANE_NUMBERS else 1


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


def _run_lane(
    rule: MemorySpec, dtype: jnp.dtype, constants: tuple[MemoryParams, Weights | None], carry: Carry, slot: Slot, rest: _OfSlot,
    first: jax.Array | None, chunk_fn: _ChunkFn,
) -> tuple[Carry, jax.Array]:  # fmt: skip
    """One slot of some heads. chunk_fn: `_from_carry` or `_from_start` of the rule."""
    params, mixed = constants
    count, resets, filled = rest
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
        begins, params, given, memory, momentum, carry.window, slot, first, count, mixed
    )
    # Outside the checkpointed function, so that it is not stored for the backward pass.
    kept = start if filled is None else choose(filled, start, carry.chunk_start)
    return Carry(memory, momentum, window, kept), y.astype(dtype)


_Lanes = tuple[Carry, ...]
_SlotOfLanes = tuple[tuple[Slot, ...], _OfSlot]
_RunSlot = Callable[[_Lanes, _SlotOfLanes, jax.Array | None, _ChunkFn], tuple[_Lanes, tuple[jax.Array, ...]]]


def _in_groups(
    run_slot: _RunSlot, chunk_fn: _ChunkFn, size: int, carries: _Lanes, xs: _SlotOfLanes
) -> tuple[_Lanes, tuple[jax.Array, ...]]:
    """Slots, a multiple of `size`. The slots of a group, which are short, share a stored boundary state."""
    outer = _checkpoint(lambda c, x: meshes.scan(lambda c, x: run_slot(c, x, None, chunk_fn), c, x))
    # Short chunks would otherwise store nearly as many memories as there are tokens.
    groups = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), xs)
    carries, y = meshes.scan(outer, carries, groups)
    return carries, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), y)


def scan_slots(
    rule: MemorySpec,
    sizes: Plan,
    dtype: jnp.dtype,
    lanes: int,
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
      lanes: static, the number of separate groups of heads, a divisor of the number of heads.
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
    constants = tuple(zip(_split(params, lanes, 0), _split(soup, lanes, 1)))

    def run_slot(
        carries: _Lanes, xs: _SlotOfLanes, first: jax.Array | None, chunk_fn: _ChunkFn
    ) -> tuple[_Lanes, tuple[jax.Array, ...]]:
        slots, rest = xs
        each = zip(constants, carries, slots, strict=True)
        run_lane = jax.jit(functools.partial(_run_lane, rule, dtype, chunk_fn=chunk_fn))  # traced once for all lanes
        results = [run_lane(*lane, rest, first) for lane in each]
        return tuple(carry for carry, _ in results), tuple(y for _, y in results)

    carries, xs, outputs = _split(carry, lanes, 1), (_split(inputs[0], lanes, 2), inputs[1:]), []
    remaining = inputs[1].shape[0]
    if first is not None:
        # Only the first slot may begin inside a chunk. Apart, so that the loop over the others needs no selection of chunk
        # starts.
        carries, y = run_slot(carries, jax.tree.map(lambda x: x[0], xs), first, _checkpoint(from_carry))
        outputs.append(jax.tree.map(lambda x: x[None], y))
        xs = jax.tree.map(lambda x: x[1:], xs)
        remaining -= 1
    group = max(1, _GROUP_TOKENS // sizes.width)
    if group > 1 and (grouped := remaining // group * group):
        carries, y = _in_groups(run_slot, from_carry, group, carries, jax.tree.map(lambda x: x[:grouped], xs))
        outputs.append(y)
        xs = jax.tree.map(lambda x: x[grouped:], xs)
        remaining -= grouped
    if remaining:
        # A call of one chunk from a fresh memory: every row has the same start.
        only = fresh and inputs[1].shape[0] == 1 and first is None and all(x is None for x in inputs[2:])
        chunk_fn = _checkpoint(from_start if only else from_carry)
        carries, y = meshes.scan(lambda c, x: run_slot(c, x, None, chunk_fn), carries, xs)
        outputs.append(y)
    y = jax.tree.map(lambda *parts: jnp.concatenate(parts) if len(parts) > 1 else parts[0], *outputs)
    return _join(y, 2), _join(carries, 1)


def _split(tree: Tree, lanes: int, axis: int) -> tuple[Tree, ...]:
    """Equal parts of every leaf along its heads axis."""
    if lanes == 1:
        return (tree,)
    part = lambda x, i: jax.lax.slice_in_dim(
        x, i * (x.shape[axis] // lanes), (i + 1) * (x.shape[axis] // lanes), axis=axis
    )
    return tuple(jax.tree.map(lambda x, i=i: part(x, i), tree) for i in range(lanes))


def _join(trees: tuple[Tree, ...], axis: int) -> Tree:
    if len(trees) == 1:
        return trees[0]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=axis), *trees)
