"""A scan whose tokens are divided over devices: each has a share of every chunk, and the devices add up what they write.

A chunk's tokens read the same memory, so they can lie on any device, and the next memory needs the sums G of all of them. So every
device first sends each token of its part to the device that has its share of the chunk (one all-to-all). Then for one chunk after
another each reads its share, the sums are added over the devices (one psum), and all write the same memory. In the end the outputs
are sent back. This is LaCT's sequence parallelism (arXiv 2505.23884), for parts that are contiguous.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax.memory.blocks import product_dtype
from atlasjax.memory.check import check_fresh
from atlasjax.memory.fast_weights.state import MemoryParams
from atlasjax.memory.gates import Weights
from atlasjax.memory.grid import widened
from atlasjax.memory.large_chunk.chunk import Piece, Written, run_piece, write
from atlasjax.memory.large_chunk.init import init_state
from atlasjax.memory.large_chunk.scan import carry_of, piece_of, state_of
from atlasjax.memory.large_chunk.spec import LargeChunkSpec
from atlasjax.memory.large_chunk.state import LargeChunkState
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.rule import ScanCall
from atlasjax.memory.tokens import Tokens


class Shares(NamedTuple):
    """Which token goes where; device i holds the tokens of part i, device j the share j of each chunk.

    sent: [i, j, n], the places in part i of the tokens for device j. received: [i, j, n], where they lie in the chunks of j, laid
    one after another. Both have the number of places where there is no token. length: of the share of a chunk.
    """

    sent: np.ndarray
    received: np.ndarray
    length: int


def shares_of(parts: int, part: int, chunk: int) -> Shares:
    """Shares of `parts` devices with `part` tokens each, of which a chunk has `chunk`."""
    token = np.arange(parts * part)
    chunk = min(chunk, len(token))
    length = -(-chunk // parts)
    device, place = np.divmod(token % chunk, length)
    place += token // chunk * length
    places = -(-len(token) // chunk) * length
    source, number = token // part, np.zeros(len(token), int)
    for pair in np.unique(source * parts + device):  # how many went from one device to another before
        same = source * parts + device == pair
        number[same] = np.arange(np.sum(same))
    shape = (parts, parts, number.max() + 1)
    sent, received = np.full(shape, part), np.full(shape, places)
    sent[source, device, number] = token % part
    received[source, device, number] = place
    return Shares(sent, received, length)


class Exchange:
    """Sends arrays between parts of the sequence and shares of its chunks, inside a `shard_map` over `axes`.

    Args:
      axes: mesh axes; their devices, in order, have the parts of the sequence in order.
      time: the number of tokens of a part.
      chunk: the number of tokens of a chunk.
    """

    def __init__(self, axes: tuple[str, ...], time: int, chunk: int):
        self.axes, self.time, parts = axes, time, jax.lax.axis_size(axes)
        self.number = -(-parts * time // chunk)
        shares, me = shares_of(parts, time, chunk), jax.lax.axis_index(axes)
        self.length = shares.length
        self.in_part, self.in_chunks = jnp.asarray(shares.sent)[me], jnp.asarray(shares.received)[:, me]  # [devices, n]

    def deal(self, x: jax.Array) -> jax.Array:
        """[batch, time, …] → this device's share of each chunk, [chunks, batch, length, …], zeros where it has no token."""
        laid = self._moved(x, self.in_part, self.in_chunks, self.number * self.length)
        return jnp.moveaxis(laid.reshape(x.shape[0], self.number, self.length, *x.shape[2:]), 1, 0)

    def collect(self, y: jax.Array) -> jax.Array:
        """The inverse of `deal`."""
        laid = jnp.moveaxis(y, 0, 1).reshape(y.shape[1], -1, *y.shape[3:])
        return self._moved(laid, self.in_chunks, self.in_part, self.time)

    def _moved(self, x: jax.Array, here: jax.Array, there: jax.Array, places: int) -> jax.Array:
        given = jnp.moveaxis(jnp.take(x, here, axis=1, mode="fill", fill_value=0), 1, 0)  # [devices, batch, n, …]
        got = jnp.moveaxis(jax.lax.all_to_all(given, self.axes, split_axis=0, concat_axis=0), 0, 1)
        return jnp.zeros((x.shape[0], places, *x.shape[2:]), x.dtype).at[:, there].set(got, mode="drop")


def scan_part(
    rule: LargeChunkSpec, axes: tuple[str, ...], run: ScanCall[MemoryParams, LargeChunkState],
    params: MemoryParams, state: LargeChunkState | None, tokens: Tokens,
) -> tuple[jax.Array, LargeChunkState]:  # fmt: skip
    """The part of one device, inside a `shard_map` that divides the tokens over `axes`, from a fresh memory.

    Args:
      rule: the rule.
      axes: as for `Exchange`.
      run: not used.
      params: the parameters.
      state: None, a fresh memory.
      tokens: those of this device. All devices have the same number of them.

    Returns:
      y of this device's tokens, and the state after the whole sequence.
    """
    check_fresh("LargeChunkRule", state)
    dtype, time = tokens.q.dtype, tokens.q.shape[1]
    params = widened(params, wide_dtype(dtype))
    exchange = Exchange(axes, time, rule.chunk_size)
    before = init_state(rule, params, batch_size=tokens.q.shape[0])
    carry, products = carry_of(before, params, dtype), product_dtype(dtype)
    read = jax.checkpoint(functools.partial(run_piece, rule, products), prevent_cse=False)

    def shared(memory: Weights, piece: Piece) -> tuple[jax.Array, Written]:
        y, written = read(params, memory, piece)
        # Each device adds its share of a chunk's tokens; then all write the same memory.
        return y, jax.lax.psum(written, axes)

    def chunk(memories: tuple[Weights, Weights | None], piece: Piece) -> tuple[tuple, jax.Array]:
        y, written = shared(memories[0], piece)
        return write(rule, params.weights, *memories, written), y

    pieces = jax.tree.map(exchange.deal, piece_of(tokens))
    memories, outputs = (carry.memory, carry.momentum), []
    count, rest = divmod(jax.lax.axis_size(axes) * time, rule.chunk_size)
    if count:
        whole = jax.tree.map(lambda x: x[:count], pieces)
        # The backward pass keeps the memory before each chunk and computes the chunk again.
        memories, y = jax.lax.scan(jax.checkpoint(chunk, prevent_cse=False), memories, whole)
        outputs.append(y)
    carry = carry._replace(memory=memories[0], momentum=memories[1])
    if rest:
        y, written = shared(carry.memory, jax.tree.map(lambda x: x[count], pieces))
        carry = carry._replace(written=written, position=carry.position + rest)
        outputs.append(y[None])
    return exchange.collect(jnp.concatenate(outputs)).astype(dtype), state_of(carry, before.segment)
