"""A large-chunk memory for one token, and read without a write."""

import functools

import jax
import jax.numpy as jnp

from atlasjax.memory.blocks import product_dtype
from atlasjax.memory.fast_weights.state import MemoryParams
from atlasjax.memory.grid import widened
from atlasjax.memory.large_chunk.chunk import read_head
from atlasjax.memory.large_chunk.scan import Carry, add_piece, carry_of, end_chunks, ends_chunk, piece_of, state_of
from atlasjax.memory.large_chunk.spec import LargeChunkSpec
from atlasjax.memory.large_chunk.state import LargeChunkState
from atlasjax.memory.layerwise import change_some, put_layer, take_layer
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.tokens import Tokens


@functools.partial(jax.jit, static_argnames=("rule",), inline=True)
def xla_step(
    rule: LargeChunkSpec, params: MemoryParams, state: LargeChunkState, tokens: Tokens
) -> tuple[jax.Array, LargeChunkState]:
    """`Rule.step`."""
    params, carry, y = _added(rule, params, state, tokens)
    end = functools.partial(end_chunks, rule, params)
    carry = jax.lax.cond(jnp.any(ends_chunk(rule, carry)), end, lambda carry: carry, carry)
    return y, state_of(carry, state.segment)


def xla_step_layer(
    rule: LargeChunkSpec, params: MemoryParams, states: LargeChunkState, layer: jax.Array, tokens: Tokens
) -> tuple[jax.Array, LargeChunkState]:
    """`xla_step` in the states of all layers, [layers, batch, …]. Memory and momentum are written only where a chunk ends."""
    state = take_layer(states, layer)
    params, carry, y = _added(rule, params, state, tokens)
    rest = lambda state: state._replace(memory=None, momentum=None)
    added = put_layer(rest(states), rest(state_of(carry, state.segment)), layer, y)
    added = added._replace(memory=states.memory, momentum=states.momentum)
    end = lambda states: put_layer(states, state_of(end_chunks(rule, params, carry), state.segment), layer, y)
    return y, change_some(end, added, ends_chunk(rule, carry), y)


def _added(
    rule: LargeChunkSpec, params: MemoryParams, state: LargeChunkState, tokens: Tokens
) -> tuple[MemoryParams, Carry, jax.Array]:
    """`add_piece` for one token: the parameters as it took them, the carry before a chunk is written, and y."""
    dtype = tokens.q.dtype
    params = widened(params, wide_dtype(dtype))
    piece = jax.tree.map(lambda x: x[:, None], piece_of(tokens))
    carry, y = add_piece(rule, product_dtype(dtype), params, carry_of(state, params, dtype), piece, 1)
    return params, carry, y[:, 0].astype(dtype)


@functools.partial(jax.jit, static_argnames=("rule",))
def read_state(rule: LargeChunkSpec, params: MemoryParams, state: LargeChunkState, q: jax.Array) -> jax.Array:
    """`Rule.read`: as the next token reads, [batch, time, heads, key_dim] → [batch, time, heads, value_dim]."""
    wide = wide_dtype(q.dtype)
    params = widened(params, wide)
    head = lambda params, weights, q: read_head(rule, params, weights, q.astype(wide), wide)
    by_head = jax.vmap(head, in_axes=(0, 0, 1), out_axes=1)
    return jax.vmap(by_head, in_axes=(None, 0, 0))(params, state.memory, q).astype(q.dtype)
