"""`LargeChunkRule.scan`, the XLA engine: one chunk after another, or one piece of a chunk where a call has packed segments."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from atlasjax.memory import grid, meshes
from atlasjax.memory.blocks import product_dtype
from atlasjax.memory.fast_weights.state import MemoryParams
from atlasjax.memory.gates import Weights
from atlasjax.memory.grid import choose
from atlasjax.memory.large_chunk.chunk import Piece, Written, add, run_piece, write
from atlasjax.memory.large_chunk.init import init_state
from atlasjax.memory.large_chunk.spec import LargeChunkSpec
from atlasjax.memory.large_chunk.state import LargeChunkState
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.tokens import Tokens

# Tokens of a piece with packed segments. Whole chunks would be mostly padding where documents are shorter. But the backward pass
# keeps the memory and the sums once per piece, so pieces are not shorter than products need.
_LEAST, _MOST = 64, 256


class Carry(NamedTuple):
    """Between two pieces: `LargeChunkState` without the segment."""

    memory: Weights
    momentum: Weights | None
    written: Written
    position: jax.Array


def carry_of(state: LargeChunkState, params: MemoryParams, dtype: jnp.dtype) -> Carry:
    """The carry of a state, at least as wide as the parameters, which are written to it, and `dtype`."""
    dtype = wide_dtype(dtype, *(x.dtype for x in jax.tree.leaves(params)))
    carry = Carry(state.memory, state.momentum, Written(state.sums, state.decay_sum), state.position)
    return grid.widened(carry, dtype)


def state_of(carry: Carry, segment: jax.Array) -> LargeChunkState:
    """The inverse of `carry_of`."""
    return LargeChunkState(
        carry.memory, carry.written.sums, carry.momentum, carry.written.decay_sum, carry.position, segment
    )


def piece_of(tokens: Tokens) -> Piece:
    """The tokens of a call with the gates that are written with."""
    gates = tokens.gates
    assert gates.step_size is not None
    wide = wide_dtype(tokens.q.dtype)
    up = lambda x: None if x is None else x.astype(wide)
    step_size = gates.step_size.astype(wide)
    return Piece(tokens.q, tokens.k, tokens.v, step_size, up(gates.momentum_decay), up(gates.threshold))


def add_piece(
    rule: LargeChunkSpec, dtype: jnp.dtype, params: MemoryParams, carry: Carry, piece: Piece, count: jax.Array | int
) -> tuple[Carry, jax.Array]:
    """The carry after `count` tokens of a chunk, before the chunk is written if they are its last; and y."""
    y, written = run_piece(rule, dtype, params, carry.memory, piece)
    return carry._replace(written=add(carry.written, written), position=carry.position + count), y


def ends_chunk(rule: LargeChunkSpec, carry: Carry) -> jax.Array:
    """Whether the tokens of each row complete a chunk, [batch]."""
    return carry.position == rule.chunk_size


def end_chunks(rule: LargeChunkSpec, params: MemoryParams, carry: Carry) -> Carry:
    """The carry with the complete chunks written."""
    memory, momentum = write(rule, params.weights, carry.memory, carry.momentum, carry.written)
    empty = jax.tree.map(jnp.zeros_like, (carry.written, carry.position))
    return choose(ends_chunk(rule, carry), Carry(memory, momentum, *empty), carry)


@functools.partial(jax.jit, static_argnames=("rule", "max_segments"))
def xla_scan(
    rule: LargeChunkSpec,
    params: MemoryParams,
    state: LargeChunkState | None,
    tokens: Tokens,
    max_segments: int | None = None,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, LargeChunkState]:
    """`Rule.scan`."""
    segment_ids, dtype = tokens.segment_ids, tokens.q.dtype
    params = grid.widened(params, wide_dtype(dtype))
    before = init_state(rule, params, batch_size=tokens.q.shape[0]) if state is None else state
    carry, piece = carry_of(before, params, dtype), piece_of(tokens)
    products = product_dtype(dtype)
    if segment_ids is None and state is None and lengths is None:
        y, carry = _whole_chunks(rule, products, params, carry, piece)
        return y.astype(dtype), state_of(carry, before.segment)
    if segment_ids is None:
        where = grid.continued_pieces(tokens.q.shape[1], rule.chunk_size, before.position)
        segment = before.segment
    else:
        assert max_segments is not None
        where = _packed(segment_ids, max_segments, piece_size(rule.chunk_size), before)
        segment = segment_ids[:, -1]
    if lengths is not None:
        piece, where = _cut(piece, where, lengths)
    y, carry = _pieces(rule, products, params, carry, piece, where)
    if where.overflow is not None:
        carry = carry._replace(memory=choose(where.overflow, jax.tree.map(_poison, carry.memory), carry.memory))
    return y.astype(dtype), state_of(carry, segment)


def _poison(x: jax.Array) -> jax.Array:
    return jnp.full_like(x, jnp.nan)


def piece_size(chunk: int) -> int:
    """Tokens of a piece with packed segments: the largest divisor of the chunk size in a range, or the chunk size."""
    sizes = [size for size in range(_LEAST, _MOST + 1) if chunk % size == 0]
    return max(sizes, default=chunk)


def _packed(segment_ids: jax.Array, max_segments: int, size: int, state: LargeChunkState) -> grid.Pieces:
    """Pieces of packed segments, the first of which may continue from the state."""
    # No window, so no tokens before the call.
    zeros = jnp.zeros_like(state.position)
    # In a grid of pieces: a piece never reaches over the end of a chunk, since the piece's size divides the chunk's.
    where = grid.segmented_layout(segment_ids, max_segments, size, size, 1, state.position % size, zeros, state.segment)
    assert where.place is not None
    lengths = _counts(where.place // size, where.num_slots, 1)
    return grid.Pieces(where.num_slots, size, where.place, lengths, where.resets, where.overflow)


def _counts(slots: jax.Array, num_slots: int, each: jax.Array | int) -> jax.Array:
    """The number of tokens in each piece, [pieces, batch], from the pieces of tokens [batch, time]. each: 0 for padding."""
    each = jnp.broadcast_to(each, slots.shape)
    count = lambda slots, each: jnp.zeros(num_slots, jnp.int32).at[slots].add(each, mode="drop")
    return jax.vmap(count)(slots, each).T


def _cut(piece: Piece, where: grid.Pieces, lengths: jax.Array) -> tuple[Piece, grid.Pieces]:
    """The tokens and their pieces with so many tokens in each row, [batch]. The others write nothing."""
    real = jnp.arange(piece.q.shape[1])[None] < lengths[:, None]
    cut = lambda x: jnp.where(jnp.expand_dims(real, range(2, x.ndim)), x, 0.0)
    theta = piece.momentum_decay
    # η = 0 keeps a token out of the sums, θ = 0 out of their sum.
    piece = piece._replace(step_size=cut(piece.step_size), momentum_decay=None if theta is None else cut(theta))
    return piece, where._replace(lengths=_counts(where.place // where.width, where.slots, real.astype(jnp.int32)))


def _pieces(
    rule: LargeChunkSpec, dtype: jnp.dtype, params: MemoryParams, carry: Carry, piece: Piece, where: grid.Pieces
) -> tuple[jax.Array, Carry]:
    """A call that begins anywhere in a chunk, or has packed segments."""
    fresh = carry_of(init_state(rule, params, batch_size=piece.q.shape[0]), params, wide_dtype(dtype))

    def body(carry: Carry, xs: tuple[Piece, jax.Array, jax.Array | None]) -> tuple[Carry, jax.Array]:
        piece, count, resets = xs
        if resets is not None:
            carry = choose(resets, fresh, carry)
        carry, y = add_piece(rule, dtype, params, carry, piece, count)
        # Most pieces end no chunk, and an orthogonalization costs more than they do.
        some = jnp.any(ends_chunk(rule, carry))
        return jax.lax.cond(some, functools.partial(end_chunks, rule, params), lambda carry: carry, carry), y

    rows = jax.tree.map(lambda x: grid.lay_chunks(x, where.slots, where.width, where.place), piece)
    xs = (rows, where.lengths.astype(jnp.int32), where.resets)
    # The backward pass keeps the memory and the sums before each piece and computes the piece again.
    carry, y = meshes.scan(jax.checkpoint(body, prevent_cse=False), carry, xs)
    return grid.pick_chunks(y, piece.q.shape[1], where.place), carry


def _whole_chunks(
    rule: LargeChunkSpec, dtype: jnp.dtype, params: MemoryParams, carry: Carry, piece: Piece
) -> tuple[jax.Array, Carry]:
    """A call from a fresh memory: whole chunks without padding, whose sums are not carried, and the tokens after them."""
    time, chunk = piece.q.shape[1], rule.chunk_size
    count, rest = divmod(time, chunk)
    parts = []
    if count:

        def body(memories: tuple[Weights, Weights | None], piece: Piece) -> tuple[tuple, jax.Array]:
            y, written = run_piece(rule, dtype, params, memories[0], piece)
            return write(rule, params.weights, *memories, written), y

        whole = jax.tree.map(lambda x: grid.lay_chunks(x[:, : count * chunk], count, chunk), piece)
        # The backward pass keeps the memory before each chunk and computes the chunk again.
        run = jax.checkpoint(body, prevent_cse=False)
        (memory, momentum), y = meshes.scan(run, (carry.memory, carry.momentum), whole)
        carry = carry._replace(memory=memory, momentum=momentum)
        parts.append(grid.pick_chunks(y, count * chunk))
    if rest:
        last = jax.tree.map(lambda x: x[:, count * chunk :], piece)
        # Its sums stay in the state until a later call completes the chunk.
        run_last = jax.checkpoint(functools.partial(run_piece, rule, dtype), prevent_cse=False)
        y, written = run_last(params, carry.memory, last)
        carry = carry._replace(written=written, position=carry.position + rest)
        parts.append(y)
    return jnp.concatenate(parts, axis=1), carry
