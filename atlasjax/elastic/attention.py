"""Block attention with an elastic memory (arXiv 2602.11212, §2.2–2.4) as pure functions: in parallel, or as a stream.

A sequence is read in blocks of L tokens. A token sees the tokens of its block up to itself, and samples of all before its block:

    y_t = Σ_j softmax_j(q_t · k̃_j / √key_dim) ṽ_j        over j in [R C_k^(m) | rotated keys of the block, up to t], m = ⌊t / L⌋
    C^(m+1) = P_m C^(m) + K_m [k, v of block m]

C^(m): the Legendre coefficients of all keys and values of blocks 0 … m−1 (`hippo`), each channel a signal over time. One softmax
goes over samples and tokens: a trapezoidal mask. The first block has no memory. Keys enter the memory unrotated, positions are
local to the block, and memory is asked by rotated queries, as printed in the paper (`rotate_memory_queries`).

Coefficients, banks, logits and softmax are float32. State and time per token do not depend on how much was read.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax.elastic.banks import Bank
from atlasjax.mixers.attention import Source, softmax_attention
from atlasjax.mixers.blocks import block_source, continued, documents, unfinished, whole
from atlasjax.mixers.shapes import check_shapes

_AXES = {"q": "batch time heads key_dim", "k": "batch time heads key_dim", "v": "batch time heads value_dim"}
_BANK_AXES = {
    "bank.transitions": "blocks order order",
    "bank.kernels": "blocks order block_size",
    "reconstruction": "samples order",
}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("coefficients", "memory_keys", "memory_values", "keys", "values", "position"),
    meta_fields=("max_length",),
)
@dataclasses.dataclass(frozen=True)
class ElasticState:
    """What is carried through a stream.

    Attributes:
      coefficients: of keys and values of all blocks before the current one, float32 [batch, order, heads, key_dim + value_dim].
      memory_keys: what is sampled from them, [batch, samples, heads, key_dim].
      memory_values: [batch, samples, heads, value_dim].
      keys: of the current block, not rotated, at their places, [batch, block_size, heads, key_dim].
      values: [batch, block_size, heads, value_dim].
      position: tokens read, [batch].
      max_length: the most tokens that will be read; static, since the bank's size follows from it.
    """

    coefficients: jax.Array
    memory_keys: jax.Array
    memory_values: jax.Array
    keys: jax.Array
    values: jax.Array
    position: jax.Array
    max_length: int


def blocks_needed(time: int, block_size: int) -> int:
    """Blocks of a bank that a context of `time` tokens needs: the last block only reads."""
    return max(-(-time // block_size) - 1, 0)


def no_bank(blocks: int, block_size: int) -> Bank:
    """Stands for a bank where there is no memory: attention within blocks alone."""
    return Bank(np.zeros((blocks, 0, 0), np.float32), np.zeros((blocks, 0, block_size), np.float32))


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bank: Bank,
    reconstruction: Any,
    *,
    rope_theta: float | None = 1e4,
    rotate_memory_queries: bool = True,
    segment_ids: jax.Array | None = None,
    max_segments: int | None = None,
) -> jax.Array:
    """Elastic block attention over whole sequences.

    Args:
      q, k: not rotated, [batch, time, heads, key_dim], key_dim even.
      v: [batch, time, heads, value_dim].
      bank: of at least `blocks_needed(time, L)` blocks (`banks.load`); L is that of its kernels.
      reconstruction: R, [samples, order] (`sampling.sampled_reconstruction`): another one may be used than in training. None, with
        a bank of order 0 (`no_bank`): no memory.
      rope_theta: base of the wave lengths of the rotation; None: no rotation.
      rotate_memory_queries: whether queries meet the samples rotated by their place in the block, or as they are.
      segment_ids: integers [batch, time]; where the id changes a new document begins: memory and blocks start afresh.
      max_segments: static bound on the documents of a row; needed under jit with `segment_ids`. Tokens of further ones get NaN.

    Returns:
      [batch, time, heads, value_dim], of v's dtype. Gradients flow across the blocks.

    Raises:
      TypeError, ValueError: an argument that does not fit.
    """
    time = q.shape[1] if getattr(q, "ndim", 0) == 4 else 0
    matrices = _check("elastic.attention", q, k, v, bank, reconstruction, time)
    size, batch = matrices.block_size, q.shape[0]
    options: dict[str, Any] = {"rope_theta": rope_theta, "rotate_memory_queries": rotate_memory_queries}
    if segment_ids is None:
        grid = whole(batch, time, size)
        q, k, v = (grid.lay(x) for x in (q, k, v))
        if grid.touched == 1:  # nothing to remember
            place = jnp.broadcast_to(jnp.arange(size), (batch, size))
            return _attend(q[0], place, k[0], v[0], None, grid.index[0], **options)[:, :time]
        return grid.pick(_attend_blocks(q, k, v, matrices.uniform_states(k, v), grid.index, matrices, **options))
    grid = documents(segment_ids, max_segments, q, size, "elastic.attention")
    q, k, v = (grid.lay(x) for x in (q, k, v))
    states = matrices.states(k, v, grid.index, _empty_coefficients(batch, matrices, k, v))[:-1]
    return grid.pick(_attend_blocks(q, k, v, states, grid.index, matrices, **options))


def init_state(
    batch_size: int, max_length: int, block_size: int, reconstruction: Any, heads: int, key_dim: int, value_dim: int, dtype: Any
) -> ElasticState:  # fmt: skip
    """The state before the first token; `max_length`: the most tokens that will be read, those beyond get NaN."""
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
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    state: ElasticState,
    bank: Bank,
    reconstruction: Any,
    *,
    rope_theta: float | None = 1e4,
    rotate_memory_queries: bool = True,
) -> tuple[jax.Array, ElasticState]:
    """`attention` of the next tokens of a stream, any time ≥ 1. Rows may have read different numbers of tokens.

    Args:
      q, k, v, rope_theta, rotate_memory_queries: as in `attention`.
      state: from `init_state` or the last `extend`.
      bank: of at least `blocks_needed(state.max_length, L)` blocks.
      reconstruction: R. With another one than before, samples change from the next block on.

    Returns:
      As `attention`, NaN for tokens beyond max_length; and the next state.

    Raises:
      TypeError, ValueError: an argument that does not fit.
    """
    matrices = _check("elastic.extend", q, k, v, bank, reconstruction, state.max_length)
    _check_state(state, k, v, matrices)
    step = _one_token if q.shape[1] == 1 else _piece
    y, after = step(q, k, v, state, matrices, rope_theta=rope_theta, rotate_memory_queries=rotate_memory_queries)
    position = state.position[:, None] + jnp.arange(q.shape[1])
    return jnp.where((position < state.max_length)[:, :, None, None], y, jnp.nan), after


def _one_token(
    q: jax.Array, k: jax.Array, v: jax.Array, state: ElasticState, matrices: "_Matrices", **options: Any
) -> tuple[jax.Array, ElasticState]:
    size, rows = matrices.block_size, jnp.arange(q.shape[0])
    index, place = state.position // size, state.position % size
    keys, values = state.keys.at[rows, place].set(k[:, 0]), state.values.at[rows, place].set(v[:, 0])
    samples = state.memory_keys, state.memory_values
    y = _attend(q, place[:, None], keys, values, samples, index > 0, **options)

    def write(state: ElasticState) -> ElasticState:
        full = place == size - 1
        states = matrices.states(keys[None], values[None], index[None], state.coefficients)
        choose = lambda new, old: jnp.where(full[:, None, None, None], new, old)
        coefficients = choose(states[1], state.coefficients)
        mk, mv = matrices.sample(coefficients, keys, values)
        return dataclasses.replace(
            state,
            coefficients=coefficients,
            memory_keys=choose(mk, state.memory_keys),
            memory_values=choose(mv, state.memory_values),
        )

    state = jax.lax.cond(jnp.any(place == size - 1), write, lambda state: state, state)
    return y, dataclasses.replace(state, keys=keys, values=values, position=state.position + 1)


def _piece(
    q: jax.Array, k: jax.Array, v: jax.Array, state: ElasticState, matrices: "_Matrices", **options: Any
) -> tuple[jax.Array, ElasticState]:
    """Tokens are laid on the grid of blocks after those that the current block has; then as for a whole sequence."""
    size, (batch, time) = matrices.block_size, q.shape[:2]
    grid = continued(state.position, time, size)
    queries, kb, vb = grid.lay(q), grid.lay(k, state.keys), grid.lay(v, state.values)
    states = matrices.states(kb[:-1], vb[:-1], grid.index[:-1], state.coefficients)
    cut = lambda x: x[: grid.touched]
    y = grid.pick(_attend_blocks(cut(queries), cut(kb), cut(vb), cut(states), cut(grid.index), matrices, **options))
    last, every = unfinished(state.position, time, size), jnp.arange(batch)
    coefficients = states[last, every]
    mk, mv = matrices.sample(coefficients, k, v)
    return y, ElasticState(
        coefficients, mk, mv, kb[last, every], vb[last, every], state.position + time, state.max_length
    )


class _Matrices:
    """The constants of a call on the device, and what is done with them."""

    def __init__(self, bank: Bank, reconstruction: Any):
        constant = lambda x: jnp.asarray(x, jnp.float32)
        self.transitions, self.kernels = constant(bank.transitions), constant(bank.kernels)
        self.reconstruction = constant(reconstruction)
        self.order, self.block_size = self.kernels.shape[1:]

    def uniform_states(self, k: jax.Array, v: jax.Array) -> jax.Array:
        """C before each block of whole sequences: k, v [blocks, batch, L, …] → [blocks, batch, order, heads, dims].

        Only P_m C has to wait for the block before.
        """
        count = k.shape[0] - 1
        x = _together(k, v)
        empty = jnp.zeros((1, x.shape[1], self.order, *x.shape[3:]), jnp.float32)
        if not count or not self.order:
            return jnp.broadcast_to(empty, (count + 1, *empty.shape[1:]))
        writes = _einsum("mnl,mblhd->mbnhd", self.kernels[:count], x[:count])

        def step(c: jax.Array, xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            p, write = xs
            c = _einsum("nk,bkhd->bnhd", p, c) + write
            return c, c

        # P_0 meets the empty state.
        _, later = jax.lax.scan(step, writes[0], (self.transitions[1:count], writes[1:]))
        return jnp.concatenate([empty, writes[:1], later])

    def states(self, k: jax.Array, v: jax.Array, index: jax.Array, initial: jax.Array) -> jax.Array:
        """C before each block and after the last, with a block number of each row's own.

        k, v: [blocks, batch, L, …]; index: [blocks, batch], 0 at a document's first block; → [blocks + 1, batch, order, …].
        """
        last = self.transitions.shape[0] - 1
        if last < 0 or not self.order:
            return jnp.zeros((k.shape[0] + 1, *initial.shape), jnp.float32)

        def step(c: jax.Array, xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, m = xs
            c = jnp.where((m > 0)[:, None, None, None], c, 0)
            m = jnp.minimum(m, last)  # beyond it nothing reads what is written
            new = _einsum("bnk,bkhd->bnhd", self.transitions[m], c) + _einsum("bnl,blhd->bnhd", self.kernels[m], x)
            return new, c

        final, before = jax.lax.scan(step, initial, (_together(k, v), index))
        return jnp.concatenate([before, final[None]])

    def sample(self, coefficients: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values at the sampled positions, in the dtypes of k and v: [batch, samples, heads, dim]."""
        samples = _einsum("sn,bnhd->bshd", self.reconstruction, coefficients)
        return samples[..., : k.shape[-1]].astype(k.dtype), samples[..., k.shape[-1] :].astype(v.dtype)


def _together(k: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.concatenate([k.astype(jnp.float32), v.astype(jnp.float32)], axis=-1)


# Coefficients alternate in sign and cancel: products of bfloat16 inputs, which accelerators take by default, would not do.
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def _attend_blocks(
    q: jax.Array, k: jax.Array, v: jax.Array, states: jax.Array, index: jax.Array, matrices: _Matrices, **options: Any
) -> jax.Array:
    """Blocks one after another: q, k, v [blocks, batch, L, heads, dim], C before each, and its number in its document."""
    batch, size = q.shape[1:3]
    place = jnp.broadcast_to(jnp.arange(size), (batch, size))

    def block(xs: tuple[jax.Array, ...]) -> jax.Array:
        q, k, v, coefficients, m = xs
        return _attend(q, place, k, v, matrices.sample(coefficients, k, v), m > 0, **options)

    if q.shape[0] == 1:
        return block((q[0], k[0], v[0], states[0], index[0]))[None]
    return jax.lax.map(jax.checkpoint(block, prevent_cse=False), (q, k, v, states, index))


def _attend(
    q: jax.Array,
    place: jax.Array,
    k: jax.Array,
    v: jax.Array,
    samples: tuple[jax.Array, jax.Array] | None,
    has_memory: jax.Array,
    *,
    rope_theta: float | None,
    rotate_memory_queries: bool,
) -> jax.Array:
    """Queries at places [batch, queries] of one block, whose tokens k, v [batch, L, …] lie at their own places."""
    block = block_source(q, place, k, v, rope_theta)
    sources = [block]
    if samples is not None and samples[0].shape[1]:
        sources.append(Source(block.q if rotate_memory_queries else q, *samples, has_memory[:, None, None]))
    return softmax_attention(*sources)


def _empty_coefficients(batch: int, matrices: _Matrices, k: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.zeros((batch, matrices.order, k.shape[-2], k.shape[-1] + v.shape[-1]), jnp.float32)


def _check(where: str, q: Any, k: Any, v: Any, bank: Bank, reconstruction: Any, time: int) -> _Matrices:
    sizes = check_shapes(where, _AXES, q=q, k=k, v=v)
    if sizes["key_dim"] % 2:
        raise ValueError(f"{where}: key_dim is {sizes['key_dim']}, should be even, for rotary positions.")
    named = {"bank.transitions": bank.transitions, "bank.kernels": bank.kernels, "reconstruction": reconstruction}
    known: dict[str, int] = {}
    if reconstruction is None:
        named["reconstruction"] = reconstruction = np.zeros((0, 0), np.float32)
    for name, x in named.items():
        names, shape = _BANK_AXES[name].split(), np.shape(x)
        own = dict(zip(names, shape))
        if len(shape) != len(names) or tuple((own | known)[n] for n in names) != shape:
            want = ", ".join(f"{n}={known[n]}" if n in known else n for n in names)
            raise ValueError(f"{where}: {name} has shape {shape}, should be [{want}].")
        known |= own
    if bool(known["order"]) != bool(known["samples"]):
        raise ValueError(f"{where}: order {known['order']} with {known['samples']} samples; without memory both are 0.")
    needed = blocks_needed(time, known["block_size"])
    if known["blocks"] < needed:
        raise ValueError(
            f"{where}: the bank has {known['blocks']} blocks of {known['block_size']} tokens, but {time} tokens need {needed}. "
            f"banks.load(…, blocks={needed}) extends it."
        )
    return _Matrices(bank, reconstruction)


def _check_state(state: ElasticState, k: jax.Array, v: jax.Array, matrices: _Matrices) -> None:
    batch, heads, samples = k.shape[0], k.shape[2], matrices.reconstruction.shape[0]
    wanted = {
        "coefficients": (batch, matrices.order, heads, k.shape[-1] + v.shape[-1]),
        "memory_keys": (batch, samples, heads, k.shape[-1]),
        "keys": (batch, matrices.block_size, heads, k.shape[-1]),
        "values": (batch, matrices.block_size, heads, v.shape[-1]),
    }
    for name, shape in wanted.items():
        if getattr(state, name).shape != shape:
            raise ValueError(f"elastic.extend: state.{name} has shape {getattr(state, name).shape}, should be {shape}.")
