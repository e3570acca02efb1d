"""A large-chunk memory for one token, and read without a write."""

import functools

import jax

from atlasjax.memory.blocks import product_dtype
from atlasjax.memory.fast_weights.state import MemoryParams
from atlasjax.memory.grid import widened
from atlasjax.memory.large_chunk.chunk import read_head
from atlasjax.memory.large_chunk.scan import add_piece, carry_of, piece_of, state_of
from atlasjax.memory.large_chunk.spec import LargeChunkSpec
from atlasjax.memory.large_chunk.state import LargeChunkState
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.tokens import Tokens


@functools.partial(jax.jit, static_argnames=("rule",), inline=True)
def xla_step(
    rule: LargeChunkSpec, params: MemoryParams, state: LargeChunkState, tokens: Tokens
) -> tuple[jax.Array, LargeChunkState]:
    """`LargeChunkRule.step`."""
    dtype = tokens.q.dtype
    params = widened(params, wide_dtype(dtype))
    piece = jax.tree.map(lambda x: x[:, None], piece_of(tokens))
    carry, y = add_piece(rule, product_dtype(dtype), params, carry_of(state, dtype), piece, 1)
    return y[:, 0].astype(dtype), state_of(carry, state.segment)


@functools.partial(jax.jit, static_argnames=("rule",))
def read_state(rule: LargeChunkSpec, params: MemoryParams, state: LargeChunkState, q: jax.Array) -> jax.Array:
    """`LargeChunkRule.read`: as the next token reads, [batch, time, heads, key_dim] → [batch, time, heads, value_dim]."""
    wide = wide_dtype(q.dtype)
    params = widened(params, wide)
    head = lambda params, weights, q: read_head(rule, params, weights, q.astype(wide), wide)
    by_head = jax.vmap(head, in_axes=(0, 0, 1), out_axes=1)
    return jax.vmap(by_head, in_axes=(None, 0, 0))(params, state.memory, q).astype(q.dtype)
