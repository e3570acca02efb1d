"""Block attention with an elastic memory (arXiv 2602.11212, §2.2–2.3) as pure functions, in parallel or streaming.

A sequence is read in blocks of L tokens. A token attends to itself and the earlier tokens of its block, and to samples of the
history before the block:

    y_t = Σ_j softmax_j(q_t · k̃_j / √key_dim) ṽ_j        over j in [R C_k^(m) | rotated keys of the block, up to t], m = ⌊t / L⌋
    C^(m+1) = P_m C^(m) + K_m [k, v of block m]

C^(m) holds the Legendre coefficients of the keys and values of blocks 0 … m−1 (`hippo`), where each channel is a signal over time.
One softmax covers samples and tokens (the trapezoidal mask). The first block has no memory. Keys are compressed before rotation,
rotary positions are local to the block, and the memory is queried with rotated queries, as in the paper's Algorithm 1
(`rotate_memory_queries`).

Coefficients, banks, logits and softmax are float32. State size and time per token do not depend on the number of tokens read.
"""

import dataclasses
import functools
from numbers import Integral
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from atlasjax import check
from atlasjax.memory.check import check_segments, check_sizes
from atlasjax.mixers.blocks import block_source, continued, continued_queries, documents, unfinished, whole
from atlasjax.mixers.elastic.banks import Bank
from atlasjax.mixers.elastic.matrices import Matrices, Memory
from atlasjax.mixers.rotary import check_rotary
from atlasjax.mixers.shapes import check_dtype, check_shapes
from atlasjax.mixers.softmax_attention import Source, softmax_attention

_AXES = {
    "q": "batch time heads key_dim",
    "k": "batch time heads key_dim",
    "v": "batch time heads value_dim",
    "bank.transitions": "blocks order order",
    "bank.kernels": "blocks order block_size",
    "reconstruction": "samples order",
}
_STATE_AXES = {
    "state.coefficients": "batch order heads key_dim+value_dim",
    "state.memory_keys": "batch samples heads key_dim",
    "state.memory_values": "batch samples heads value_dim",
    "state.keys": "batch block_size heads key_dim",
    "state.values": "batch block_size heads value_dim",
    "state.position": "batch",
}
_EMPTY = ("blocks", "order", "samples")  # axes that are empty without a memory


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("coefficients", "memory_keys", "memory_values", "keys", "values", "position"),
    meta_fields=("max_length",),
)
@dataclasses.dataclass(frozen=True)
class ElasticState:
    """The streaming state.

    Attributes:
      coefficients: Legendre coefficients of the keys and values of all blocks before the current one, float32
        [batch, order, heads, key_dim + value_dim].
      memory_keys: keys sampled from them, [batch, samples, heads, key_dim].
      memory_values: values sampled from them, [batch, samples, heads, value_dim].
      keys: unrotated keys of the current block, stored by position in the block, [batch, block_size, heads, key_dim].
      values: values of the current block, [batch, block_size, heads, value_dim].
      position: number of tokens read, [batch].
      max_length: maximum number of tokens that will be read. Static, because it determines the size of the bank.
    """

    heads_axis: ClassVar[int] = 2  # of its arrays, for `distributed.cache_shardings`

    coefficients: Float[Array, "batch order heads _channels"]
    memory_keys: Float[Array, "batch samples heads key_dim"]
    memory_values: Float[Array, "batch samples heads value_dim"]
    keys: Float[Array, "batch block_size heads key_dim"]
    values: Float[Array, "batch block_size heads value_dim"]
    position: Int[Array, " batch"]
    max_length: int


def blocks_needed(time: int, block_size: int) -> int:
    """Number of bank blocks that a context of `time` tokens needs. The last block only reads, so it needs none.

    Raises:
      ValueError: time is not an integer ≥ 0, or block_size not one ≥ 1.
    """
    check.integer("elastic.blocks_needed", "time", time, 0, kinds=Integral)
    check.integer("elastic.blocks_needed", "block_size", block_size, kinds=Integral)
    return max(-(-time // block_size) - 1, 0)


def no_bank(blocks: int, block_size: int) -> Bank:
    """A bank of order 0, for attention within blocks without a memory.

    Raises:
      ValueError: blocks is not an integer ≥ 0, or block_size not one ≥ 1.
    """
    check.integer("elastic.no_bank", "blocks", blocks, 0, kinds=Integral)
    check.integer("elastic.no_bank", "block_size", block_size, kinds=Integral)
    return Bank(np.zeros((blocks, 0, 0), np.float32), np.zeros((blocks, 0, block_size), np.float32))


def attention(
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time heads key_dim"],
    v: Float[Array, "batch time heads value_dim"],
    bank: Bank,
    reconstruction: Float[np.ndarray, "samples order"] | Float[Array, "samples order"] | None,
    *,
    rope_theta: float | None = 1e4,
    rotate_memory_queries: bool = True,
    segment_ids: Int[Array, "batch time"] | None = None,
    max_segments: int | None = None,
) -> Float[Array, "batch time heads value_dim"]:
    """Elastic block attention over whole sequences.

    Args:
      q, k: before rotation, [batch, time, heads, key_dim], with an even key_dim.
      v: [batch, time, heads, value_dim].
      bank: a bank of at least `blocks_needed(time, L)` blocks (`banks.load`). Its kernels determine the block length L.
      reconstruction: R, [samples, order] (`sampling.sampled_reconstruction`). It may differ from the one used in training. None,
        together with a bank of order 0 (`no_bank`), means no memory.
      rope_theta: base of the rotary wavelengths. None means no rotation.
      rotate_memory_queries: whether the queries that read the samples are rotated by their position in the block.
      segment_ids: integers [batch, time]. A new document begins where the id changes; memory and blocks are reset there.
      max_segments: static bound on the number of documents in a row. Required under jit with `segment_ids`. Outputs for
        documents beyond the bound are NaN.

    Returns:
      [batch, time, heads, value_dim], in v's dtype. Gradients flow across blocks.

    Raises:
      TypeError, ValueError: invalid arguments.
    """
    where = "elastic.attention"
    options: dict[str, Any] = {"rope_theta": rope_theta, "rotate_memory_queries": rotate_memory_queries}
    matrices, _ = _check(where, q, k, v, bank, reconstruction, None, **options)
    return _whole(q, k, v, matrices, segment_ids, check_segments(segment_ids, max_segments, q, where), **options)


@functools.partial(jax.jit, static_argnames=("max_segments", "rope_theta", "rotate_memory_queries"))
def _whole(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    matrices: Matrices,
    segment_ids: jax.Array | None,
    max_segments: int | None,
    **options: Any,
) -> jax.Array:
    (batch, time), size = q.shape[:2], matrices.block_size
    if segment_ids is None:
        grid = whole(batch, time, size)
        q, k, v = (grid.lay(x) for x in (q, k, v))
        # Also saves the bank: a context of one block needs none.
        if grid.touched == 1:  # a single block has no memory to read
            return _attend(q[0], None, k[0], v[0], None, grid.index[0], **options)
        return grid.pick(_attend_blocks(q, k, v, matrices.uniform_states(k, v), grid.index, matrices, **options))
    assert max_segments is not None
    grid = documents(segment_ids, max_segments, size)
    q, k, v = (grid.lay(x) for x in (q, k, v))
    # Blocks of different documents have different indices, and so different transitions; without documents all rows share them.
    states = matrices.states(k, v, grid.index)
    return grid.pick(_attend_blocks(q, k, v, states, grid.index, matrices, **options))


def init_state(
    batch_size: int,
    max_length: int,
    block_size: int,
    reconstruction: Float[np.ndarray, "samples order"] | Float[Array, "samples order"] | None,
    heads: int,
    key_dim: int,
    value_dim: int,
    dtype: jax.typing.DTypeLike,
) -> ElasticState:
    """The state before the first token. Outputs of tokens beyond `max_length` are NaN.

    Args:
      max_length: maximum number of tokens that will be read, ≥ 1.
      reconstruction: R, as in `attention`, or None.
      dtype: that of keys and values.
      batch_size, block_size, heads, key_dim, value_dim: sizes, each ≥ 1.

    Raises:
      TypeError, ValueError: a size is not an integer ≥ 1, reconstruction is no array [samples, order], or dtype is not one of
        floating point.
    """
    where = "elastic.init_state"
    check_sizes(
        where, batch_size=batch_size, max_length=max_length, block_size=block_size, heads=heads, key_dim=key_dim,
        value_dim=value_dim,
    )  # fmt: skip
    check_dtype(where, dtype)
    check_shapes(where, _AXES, optional=("reconstruction",), empty=_EMPTY, reconstruction=reconstruction)
    samples, order = (0, 0) if reconstruction is None else reconstruction.shape
    zeros = lambda size, dim: jnp.zeros((batch_size, size, heads, dim), dtype)
    return ElasticState(
        coefficients=jnp.zeros((batch_size, order, heads, key_dim + value_dim), jnp.float32),
        memory_keys=zeros(samples, key_dim),
        memory_values=zeros(samples, value_dim),
        keys=zeros(block_size, key_dim),
        values=zeros(block_size, value_dim),
        position=jnp.zeros(batch_size, jnp.int32),
        max_length=max_length,
    )


def extend(
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time heads key_dim"],
    v: Float[Array, "batch time heads value_dim"],
    state: ElasticState,
    bank: Bank,
    reconstruction: Float[np.ndarray, "samples order"] | Float[Array, "samples order"] | None,
    *,
    rope_theta: float | None = 1e4,
    rotate_memory_queries: bool = True,
) -> tuple[Float[Array, "batch time heads value_dim"], ElasticState]:
    """`attention` for the next tokens of a stream, with any time ≥ 1. Rows may have read different numbers of tokens.

    Args:
      q, k, v, rope_theta, rotate_memory_queries: as in `attention`.
      state: from `init_state` or the previous `extend`.
      bank: a bank of at least `blocks_needed(state.max_length, L)` blocks.
      reconstruction: R. If it differs from the previous call's, samples change from the next block on, however the stream is
        split.

    Returns:
      The output of `attention`, NaN for tokens beyond max_length, and the next state.

    Raises:
      TypeError, ValueError: invalid arguments.
    """
    where = "elastic.extend"
    check.instance(where, "state", state, ElasticState)
    options: dict[str, Any] = {"rope_theta": rope_theta, "rotate_memory_queries": rotate_memory_queries}
    matrices, sizes = _check(where, q, k, v, bank, reconstruction, state.max_length, **options)
    known = sizes | {"key_dim+value_dim": sizes["key_dim"] + sizes["value_dim"]}
    check_shapes(where, _STATE_AXES, integers=("state.position",), empty=_EMPTY, known=known, state=state)
    return _extend(q, k, v, state, matrices, **options)


@functools.partial(jax.jit, static_argnames=("rope_theta", "rotate_memory_queries"))
def _extend(
    q: jax.Array, k: jax.Array, v: jax.Array, state: ElasticState, matrices: Matrices, **options: Any
) -> tuple[jax.Array, ElasticState]:
    step = _one_token if q.shape[1] == 1 else _piece
    y, after = step(q, k, v, state, matrices, **options)
    position = state.position[:, None] + jnp.arange(q.shape[1])[None]
    return jnp.where((position < state.max_length)[:, :, None, None], y, jnp.nan), after


def _one_token(
    q: jax.Array, k: jax.Array, v: jax.Array, state: ElasticState, matrices: Matrices, **options: Any
) -> tuple[jax.Array, ElasticState]:
    size, rows = matrices.block_size, jnp.arange(q.shape[0])
    index, place = state.position // size, state.position % size
    keys, values = state.keys.at[rows, place].set(k[:, 0]), state.values.at[rows, place].set(v[:, 0])
    memory = state.coefficients, state.memory_keys, state.memory_values
    y = _attend(q, place[:, None], keys, values, memory[1:], index > 0, **options)
    memory = matrices.write(memory, keys, values, index, place == size - 1)
    return y, ElasticState(*memory, keys, values, state.position + 1, state.max_length)


def _piece(
    q: jax.Array, k: jax.Array, v: jax.Array, state: ElasticState, matrices: Matrices, **options: Any
) -> tuple[jax.Array, ElasticState]:
    """Places the new tokens on the block grid after those of the current block, then computes as for a whole sequence."""
    size, (batch, time) = matrices.block_size, q.shape[:2]
    grid, last = continued(state.position, time, size), unfinished(state.position, time, size)
    queries, places = continued_queries(state.position, time, size)
    kb, vb = grid.lay(k, state.keys), grid.lay(v, state.values)
    full = jnp.arange(grid.touched)[:, None] < last[None]

    def block(memory: Memory, xs: tuple[jax.Array, ...]) -> tuple[Memory, jax.Array]:
        q, place, k, v, index, full = xs
        y = _attend(q, place, k, v, memory[1:], index > 0, **options)
        return matrices.write(memory, k, v, index, full), y

    xs = (queries.lay(q), places, kb[: grid.touched], vb[: grid.touched], queries.index, full)
    memory = state.coefficients, state.memory_keys, state.memory_values
    # The backward pass keeps the memory before each block and computes the scores of the block again.
    memory, y = jax.lax.scan(jax.checkpoint(block, prevent_cse=False), memory, xs)
    keys, values = (x[last, jnp.arange(batch)] for x in (kb, vb))
    return queries.pick(y), ElasticState(*memory, keys, values, state.position + time, state.max_length)


def _attend_blocks(
    q: jax.Array, k: jax.Array, v: jax.Array, states: jax.Array, index: jax.Array, matrices: Matrices, **options: Any
) -> jax.Array:
    """Attention block by block: q, k, v [blocks, batch, L, heads, dim], C before each block, and its index in its document."""

    def block(xs: tuple[jax.Array, ...]) -> jax.Array:
        q, k, v, coefficients, m = xs
        return _attend(q, None, k, v, matrices.sample(coefficients, k, v), m > 0, **options)

    # The scores of one block at a time, computed again in the backward pass.
    return jax.lax.map(jax.checkpoint(block, prevent_cse=False), (q, k, v, states, index))


def _attend(
    q: jax.Array,
    place: jax.Array | None,
    k: jax.Array,
    v: jax.Array,
    samples: tuple[jax.Array, jax.Array] | None,
    has_memory: jax.Array,
    *,
    rope_theta: float | None,
    rotate_memory_queries: bool,
) -> jax.Array:
    """Attention of queries at positions `place` of one block, as for `block_source`, with keys and values k, v [batch, L, …]."""
    block = block_source(q, place, k, v, rope_theta)
    sources = [block]
    if samples is not None and samples[0].shape[1]:
        sources.append(Source(block.q if rotate_memory_queries else q, *samples, has_memory[:, None, None]))
    return softmax_attention(*sources)


def _check(
    where: str,
    q: object,
    k: object,
    v: object,
    bank: Bank,
    reconstruction: Float[np.ndarray, "samples order"] | Float[Array, "samples order"] | None,
    time: int | None,
    rope_theta: float | None,
    rotate_memory_queries: bool,
) -> tuple[Matrices, dict[str, int]]:
    """The matrices for `time` tokens, or for those of q if it is None, and the sizes by axis name."""
    sizes = check_shapes(where, _AXES, q=q, k=k, v=v)
    check_rotary(where, rope_theta, sizes["key_dim"])
    check.boolean(where, "rotate_memory_queries", rotate_memory_queries)
    check.instance(where, "bank", bank, Bank)
    if reconstruction is None:
        reconstruction = np.zeros((0, 0), np.float32)
    sizes |= check_shapes(where, _AXES, empty=_EMPTY, bank=bank, reconstruction=reconstruction)
    if bool(sizes["order"]) != bool(sizes["samples"]):
        raise ValueError(
            f"{where}: order {sizes['order']} with {sizes['samples']} samples: both must be 0, or neither."
        )
    time = sizes["time"] if time is None else time
    needed = blocks_needed(time, sizes["block_size"])
    if sizes["blocks"] < needed:
        raise ValueError(
            f"{where}: the bank has {sizes['blocks']} blocks of {sizes['block_size']} tokens, but {time} tokens need {needed}. "
            f"Load a longer one: banks.load(…, blocks={needed})."
        )
    constant = lambda x: jnp.asarray(x, jnp.float32)
    return Matrices(*map(constant, (bank.transitions, bank.kernels, reconstruction))), sizes
