"""`MemoryRule.step`: one token, as a slot of one token."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from atlasjax.memory.axes.optimizers import OptimizerState
from atlasjax.memory.blocks import product_dtype
from atlasjax.memory.fast_weights.chunk import Plan, Slot, Soup, Window, run_chunk
from atlasjax.memory.fast_weights.linear import linear_scan
from atlasjax.memory.fast_weights.scan import window_count_of, window_of
from atlasjax.memory.fast_weights.spec import MemorySpec
from atlasjax.memory.fast_weights.state import MemoryParams, MemoryState
from atlasjax.memory.gates import Weights
from atlasjax.memory.grid import MaybeArray, choose, widened
from atlasjax.memory.layerwise import change_some, put_layer, take_layer
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.tokens import Tokens

_Updated = tuple[Weights, OptimizerState, Weights | None, Window | None, jax.Array]
_Token = Callable[..., _Updated]


# Inlined into the program of a traced caller. A scan is not: every gradient outside `jit` would compile its transposed loop again.
@functools.partial(jax.jit, static_argnames=("rule",), inline=True)
def xla_step(
    rule: MemorySpec,
    params: MemoryParams,
    state: MemoryState,
    tokens: Tokens,
    *,
    soup: Soup | None = None,
) -> tuple[jax.Array, MemoryState]:
    """One token, without the time axis. soup: see `xla_scan`."""
    q = tokens.q
    wide = wide_dtype(q.dtype)
    # Chunk 1 is the layout of one token; where chunks begin and end is in `position`, not here.
    sizes = Plan(1, 1, 1, product_dtype(q.dtype))

    slot = _slot(rule, state, tokens, soup)
    count = window_count_of(state)
    if rule.is_linear:
        up_params = jax.tree.map(lambda x: x.astype(wide), params)
        # The engine's axis of slots.
        one = jax.tree.map(lambda x: x[None], slot)
        y, memory = linear_scan(rule, q.dtype, up_params, widened(state.memory, wide), one, None)
        return y[0, :, :, 0], state._replace(memory=memory)
    up_state = jax.tree.map(lambda x: x.astype(wide) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)
    arguments = (jax.tree.map(lambda x: x.astype(wide), params), up_state, slot, None if soup is None else soup.weights)
    if state.position is None:
        memory, momentum, chunk_start, window, y = _token(rule, sizes, *arguments)
    else:
        memory, momentum, chunk_start, window, y = _token_of_rows(rule, sizes, *arguments)
    position = None if state.position is None else (state.position + 1) % rule.chunk_size
    return y[:, :, 0].astype(q.dtype), MemoryState(
        memory=memory,
        chunk_start=chunk_start,
        momentum=momentum,
        window_keys=None if window is None else window.keys,
        window_values=None if window is None else window.values,
        window_thresholds=None if window is None or state.window_thresholds is None else window.thresholds,
        window_count=None if state.window_count is None else jnp.minimum(count + 1, rule.window - 1),
        position=position,
        segment=state.segment,
    )


def _slot(rule: MemorySpec, state: MemoryState, tokens: Tokens, soup: Soup | None) -> Slot:
    """One token as a slot. A token at which `Optimizer.every` does not write has η = 0."""
    q, k, v, gates, _ = tokens
    wide = wide_dtype(q.dtype)
    batch, heads, _ = q.shape
    gates = rule.within_horizon(gates)

    def up(x: MaybeArray) -> MaybeArray:
        return None if x is None else x.astype(wide)[:, :, None]

    step_size = gates.step_size
    if rule.optimizer.every > 1 and state.position is not None:
        assert step_size is not None
        writes = (state.position + 1) % rule.optimizer.every == 0
        # The engine takes a slot of one token as a write; with η = 0 it is none.
        step_size = jnp.where(writes.reshape(-1, *(1,) * (step_size.ndim - 1)), step_size, 0.0)
    gamma = jnp.ones((batch, heads, 1), wide) if gates.window_weights is None else gates.window_weights
    return Slot(
        q=up(q),
        k=up(k),
        v=up(v),
        retention=up(gates.retention),
        step_size=up(step_size),
        momentum_decay=up(gates.momentum_decay),
        write_size=up(gates.write_size),
        window_weights=up(gamma),
        threshold=up(gates.threshold),
        removal_key=up(gates.removal_key),
        removal=up(gates.removal),
        real=None,
        soup=None if soup is None else up(soup.gates),
    )


def xla_step_layer(
    rule: MemorySpec, params: MemoryParams, states: MemoryState, layer: jax.Array, tokens: Tokens
) -> tuple[jax.Array, MemoryState]:
    """`xla_step` in the states of all layers, [layers, batch, …]. The memory at a chunk's start is written only where one begins or
    ends."""
    state = take_layer(states, layer)
    y, after = xla_step(rule, params, state, tokens)
    if state.chunk_start is None:
        return y, put_layer(states, after, layer, y)
    assert state.position is not None
    # The large array is written apart: `put_layer` would copy the whole of it at every token.
    rest = lambda state: state._replace(chunk_start=None)
    put = lambda starts: put_layer(starts, after.chunk_start, layer, y)
    starts = change_some(put, states.chunk_start, _special(rule, state.position), y)
    return y, put_layer(rest(states), rest(after), layer, y)._replace(chunk_start=starts)


def _special(rule: MemorySpec, position: jax.Array) -> jax.Array:
    """Whether a chunk begins or ends with the token, [batch]."""
    return (position == 0) | ((position + 1) % rule.chunk_size == 0)


def _token_of_rows(
    rule: MemorySpec, sizes: Plan, params: MemoryParams, state: MemoryState, slot: Slot, soup: Weights | None
) -> _Updated:
    """`_token`, by the shorter `_inner_token` for rows that neither begin nor end a chunk, nor write with Muon."""
    assert state.position is not None
    special = _special(rule, state.position)
    if rule.optimizer.every > 1:
        special |= (state.position + 1) % rule.optimizer.every == 0
    every, inner = (functools.partial(token, rule, sizes) for token in (_token, _inner_token))
    some = functools.partial(_some_special, every, inner, special)

    def together(params: MemoryParams, state: MemoryState, slot: Slot, soup: Weights | None) -> _Updated:
        return jax.lax.cond(jnp.any(special), every, inner, params, state, slot, soup)

    # On GPUs the host waits for a condition, which is worth it only for an orthogonalization. On a CPU it pays to take out the rows
    # that need more; on other platforms the rows may be on several devices.
    default = together if rule.optimizer.every > 1 else every
    return jax.lax.platform_dependent(params, state, slot, soup, cpu=some, tpu=together, default=default)


def _some_special(
    every: _Token, inner: _Token, special: jax.Array, params: MemoryParams, state: MemoryState, slot: Slot, soup: Weights | None
) -> _Updated:  # fmt: skip
    """`inner` for all rows, then `every` for the few special ones; or `every` for all."""
    few = 0 if is_symbolic_dim(special.shape[0]) else special.shape[0] // 8

    def some(params: MemoryParams, state: MemoryState, slot: Slot, soup: Weights | None) -> _Updated:
        # The special rows first, filled up with others, to which the long form does no harm.
        rows = jnp.argsort(~special, stable=True)[:few]
        part = every(params, *jax.tree.map(lambda x: x[rows], (state, slot, soup)))
        put = lambda all_, these: all_.at[rows].set(these, unique_indices=True)
        return jax.tree.map(put, inner(params, state, slot, soup), part)

    number = jnp.sum(special)
    branches = [inner, some, every] if few else [inner, every]
    which = jnp.where(number == 0, 0, jnp.where(number <= few, 1, len(branches) - 1))
    return jax.lax.switch(which, branches, params, state, slot, soup)


def _token(
    rule: MemorySpec, sizes: Plan, params: MemoryParams, state: MemoryState, slot: Slot, soup: Weights | None
) -> _Updated:
    """(M, S, chunk start, window, y) after one token."""
    before, start = (rule.begin_chunk(state.memory), rule.begin_momentum(state.momentum)), None
    if state.chunk_start is not None:
        assert state.position is not None
        before = choose(state.position == 0, before, (state.memory, state.momentum))
        start = choose(state.position == 0, before[0], state.chunk_start)
    memory, momentum, window, y = _run(rule, sizes, params, state, start, *before, slot, soup)
    if start is not None:
        assert state.position is not None
        start = choose((state.position + 1) % rule.chunk_size == 0, memory, start)
    return memory, momentum, start, window, y


def _inner_token(
    rule: MemorySpec, sizes: Plan, params: MemoryParams, state: MemoryState, slot: Slot, soup: Weights | None
) -> _Updated:
    """`_token` where no chunk begins or ends, and Muon does not write if it does not write at every token."""
    sizes = sizes._replace(writes=rule.optimizer.every == 1)
    memory, momentum, window, y = _run(
        rule, sizes, params, state, state.chunk_start, state.memory, state.momentum, slot, soup
    )
    return memory, momentum, state.chunk_start, window, y


def _run(
    rule: MemorySpec, sizes: Plan, params: MemoryParams, state: MemoryState, start: Weights | None, memory: Weights,
    momentum: OptimizerState, slot: Slot, soup: Weights | None,
) -> tuple[Weights, OptimizerState, Window | None, jax.Array]:  # fmt: skip
    """`run_chunk` of every batch element and head."""

    def chunk(params, start, memory, momentum, window, slot, count, mixed):
        return run_chunk(rule, sizes, params, start, memory, momentum, window, slot, None, count, mixed)

    by_head = jax.vmap(chunk, in_axes=(0, 0, 0, 0, 0, 0, None, 0))
    by_batch = jax.vmap(by_head, in_axes=(None, 0, 0, 0, 0, 0, 0, 0))
    return by_batch(params, start, memory, momentum, window_of(state), slot, window_count_of(state), soup)
