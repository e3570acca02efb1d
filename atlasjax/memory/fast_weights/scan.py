"""`MemoryRule.scan`, the XLA engine: lays out a call as slots and scans them."""

import functools

import jax
import jax.numpy as jnp

from atlasjax.memory import grid
from atlasjax.memory.fast_weights.chunk import Plan, Slot, Soup, Window, plan
from atlasjax.memory.fast_weights.init import init_state
from atlasjax.memory.fast_weights.linear import linear_scan
from atlasjax.memory.fast_weights.linear_momentum import momentum_scan
from atlasjax.memory.fast_weights.linear_pass import linear_pass
from atlasjax.memory.fast_weights.slots import Carry, SlotInputs, from_slots, scan_slots, to_slots
from atlasjax.memory.fast_weights.spec import MemorySpec
from atlasjax.memory.fast_weights.state import MemoryParams, MemoryState
from atlasjax.memory.gates import Weights
from atlasjax.memory.grid import MaybeArray, choose
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.tokens import Tokens


@functools.partial(jax.jit, static_argnames=("rule", "max_segments", "by_kernel"))
def xla_scan(
    rule: MemorySpec,
    params: MemoryParams,
    state: MemoryState | None,
    tokens: Tokens,
    max_segments: int | None = None,
    lengths: jax.Array | None = None,
    *,
    soup: Soup | None = None,
    by_kernel: bool = False,
) -> tuple[jax.Array, MemoryState]:
    """The recurrence over a sequence. Arguments as in `memory.scan`, already checked.

    lengths: [batch], number of tokens in each row, only without segment_ids. The others are not written, and their outputs are NaN.
    soup: other memories to mix with this one in every read, only for a rule without `is_linear`.
    by_kernel: whether the memory of a rule with `is_linear` goes from block to block in a GPU kernel.
    """
    # Before anything else, so that every form of the engine sees the same θ.
    tokens = tokens._replace(gates=rule.within_horizon(tokens.gates))
    q, k, v, gates, segment_ids = tokens
    wide = wide_dtype(q.dtype)
    batch, time, heads, _ = q.shape
    fresh = state is None
    if state is None:
        state = init_state(rule, params, batch_size=batch)
    sizes = plan(rule, params, q.dtype, time)
    where = _layout(rule, sizes, state, fresh, batch, time, segment_ids, max_segments, lengths)

    def put(x: MaybeArray, fill: float) -> MaybeArray:
        return None if x is None else to_slots(x.astype(wide), sizes, where, fill)

    # Padding has γ = 0 besides η = 0, because Muon's momentum takes γ without η.
    gamma = jnp.ones((batch, time, heads, 1), wide) if gates.window_weights is None else gates.window_weights
    write_size = gates.write_size
    if write_size is None and rule.optimizer.is_linear and rule.optimizer.has_momentum:
        write_size = jnp.ones((batch, time, heads), wide)  # padding has zeros, or it would write the momentum again
    own = lambda x: to_slots(x, sizes, where, 0.0)  # in their own dtype; converted chunk by chunk
    slots = Slot(
        q=own(q),
        k=own(k),
        v=own(v),
        retention=put(gates.retention, 1.0),
        step_size=put(gates.step_size, 0.0),
        momentum_decay=put(gates.momentum_decay, 1.0),
        write_size=put(write_size, 0.0),
        window_weights=put(gamma, 0.0),
        threshold=put(gates.threshold, 1.0),
        removal_key=put(gates.removal_key, 0.0),
        removal=put(gates.removal, 0.0),
        real=put(jnp.ones((batch, time, heads), wide), 0.0) if rule.masks_padding else None,
        soup=None if soup is None else put(soup.gates, 0.0),
    )

    carry = Carry(state.memory, state.momentum, window_of(state), state.chunk_start or state.memory)
    # States of float64 calls may come from float32 ones; a loop's carry must keep its dtype.
    carry = jax.tree.map(lambda x: x.astype(wide), carry)
    operands = (
        jax.tree.map(lambda x: x.astype(wide), params),
        carry,
        (slots, where.window_count, where.resets, where.filled),
        where.first,
        None if soup is None else jax.tree.map(lambda x: x.astype(wide), soup.weights),
    )
    y, carry = _run_slots(rule, sizes, q.dtype, operands, fresh, by_kernel)
    y = from_slots(y, sizes, where, time)
    return y, state_after(rule, state, carry, where, tokens, lengths)


# The operands of a call's slots: params, carry, inputs, first and soup of `slots.scan_slots`.
_Operands = tuple[MemoryParams, Carry, SlotInputs, jax.Array | None, Weights | None]


def _run_slots(
    rule: MemorySpec, sizes: Plan, dtype: jnp.dtype, operands: _Operands, fresh: bool, by_kernel: bool
) -> tuple[jax.Array, Carry]:
    """All slots of a call, in the form that the rule allows. Operands and `fresh` as in `slots.scan_slots`."""
    params, carry, inputs, _, _ = operands
    if rule.is_linear:
        run_blocks = linear_pass if by_kernel else linear_scan
        y, memory = run_blocks(rule, dtype, params, carry.memory, inputs[0], inputs[2])
        # Where the chunk size has no effect, every token is a chunk's end.
        return y, carry._replace(memory=memory, chunk_start=memory)
    if rule.is_linear_with_momentum:
        y, memory, momentum = momentum_scan(rule, dtype, params, carry.memory, carry.momentum, inputs[0], inputs[2])
        return y, carry._replace(memory=memory, momentum=momentum, chunk_start=memory)
    return scan_slots(rule, sizes, dtype, *operands, fresh=fresh)


def window_of(state: MemoryState) -> Window | None:
    """The window of a state, None for c = 1. Thresholds are ones if the loss does not use them."""
    if state.window_keys is None:
        return None
    assert state.window_values is not None
    thresholds = state.window_thresholds
    if thresholds is None:
        thresholds = jnp.ones(state.window_keys.shape[:-1], state.window_keys.dtype)
    return Window(state.window_keys, state.window_values, thresholds)


def window_count_of(state: MemoryState) -> jax.Array:
    return jnp.zeros(state.segment.shape, jnp.int32) if state.window_count is None else state.window_count


def _layout(
    rule: MemorySpec,
    sizes: Plan,
    state: MemoryState,
    fresh: bool,
    batch: int,
    time: int,
    segment_ids: jax.Array | None,
    max_segments: int | None,
    lengths: jax.Array | None,
) -> grid.Layout:
    count = window_count_of(state)
    position = jnp.zeros_like(count) if state.position is None else state.position
    if segment_ids is not None:
        assert max_segments is not None
        return grid.segmented_layout(
            segment_ids, max_segments, sizes.chunk, sizes.width, rule.window, position, count, state.segment
        )
    known = fresh or state.position is None
    if known and lengths is None:
        return grid.aligned_layout(batch, time, sizes.chunk, rule.window, count)
    begin = None if known else position
    return grid.streamed_layout(time, sizes.chunk, sizes.width, rule.window, begin, count, lengths)


def state_after(
    rule: MemorySpec,
    state: MemoryState,
    carry: Carry,
    where: grid.Layout,
    tokens: Tokens,
    lengths: jax.Array | None = None,
) -> MemoryState:
    """The state after a call on the slots `where`, from the state before it and the carry after the last slot."""
    _, k, v, gates, segment_ids = tokens
    memory = carry.memory
    if where.overflow is not None:
        # No error can be raised in compiled code. NaN is seen at once; a state without some documents is not.
        memory = choose(where.overflow, jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), memory), memory)
    chunk_start = None
    if state.chunk_start is not None:
        # At position 0 the next token begins a chunk, whose start is the memory of now.
        chunk_start = choose(where.position == 0, memory, carry.chunk_start)

    def tail(old: jax.Array | None, new: jax.Array | None) -> jax.Array | None:
        return None if old is None or new is None else window_after(old, new, lengths)

    return MemoryState(
        memory=memory,
        chunk_start=chunk_start,
        momentum=carry.momentum,
        window_keys=tail(state.window_keys, k),
        window_values=tail(state.window_values, v),
        window_thresholds=tail(state.window_thresholds, gates.threshold),
        window_count=None if state.window_count is None else where.last_count.astype(jnp.int32),
        position=None if state.position is None else where.position.astype(jnp.int32),
        segment=state.segment if segment_ids is None else segment_ids[:, -1],
    )


def window_after(old: jax.Array, new: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
    """The window after a call. old: [batch, heads, c − 1(, dim)]; new: [batch, time, heads(, dim)]; lengths: as in `xla_scan`."""
    size, new = old.shape[2], jnp.moveaxis(new, 1, 2).astype(old.dtype)
    if lengths is None:
        return jnp.concatenate([old, new[:, :, -size:]], axis=2)[:, :, -size:]
    # A row that ends early has its window there, not at the row's end.
    both = jnp.concatenate([old, new], axis=2)
    last = lambda x, n: jax.lax.dynamic_slice_in_dim(x, n, size, axis=1)
    return jax.vmap(last)(both, lengths)
