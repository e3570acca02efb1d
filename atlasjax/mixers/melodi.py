"""Melodi's short-term memory (arXiv 2410.03156, §3) within one layer, as pure functions, in parallel or streaming.

A sequence is read in blocks of L tokens. Each block is followed by N learned summary tokens U, which attend to it. A linear map
over the token axis then turns block and summary tokens into the N memory tokens Z for the next block. With the layer's input x
[L, dim]:

    q, k, v = W_in of [n_z(Z^(m)) | x | U]             at positions −N … −1 | 0 … L−1 | L … L+N−1, rotated (RoPE)
    o_x, o_U = W_out softmax(q kᵀ / √key_dim) v        for the queries of x and U, causal over everything before them
    Z^(m+1) = (U + o_U) + W_mixᵀ [n_x(x + o_x) ; n_U(U + o_U)] + b        W_mix: [L + N, N];  n: RMSNorm

The output is o_x. Z^(0) is empty, so the first block has local attention only. Blocks are sequential, because the memory that a
block writes depends on what it has read.

Choices that the sources leave open, and differences. The authors' model (google-research/meliad, transformer/memory2) has such a
layer everywhere: its summary tokens pass through all layers and their feed-forward networks, and a second mixing in each layer
makes the next layer's. As a baseline of Elastic Memory (arXiv 2602.11212, §3.1, which takes only the memory within a layer) the
memory belongs to one layer, so summary tokens begin and end in it: Z is made from the attention's output, before the layer's
feed-forward network, and there is no second mixing. x is the output of the layer's norm, and Z has its own norm, while meliad
uses one norm for both. Z^(0) is masked, while meliad uses zero tokens. Positions are rotary instead of T5 biases. There is no
long-term memory. Gradients flow across blocks.

Logits, softmax, norms, the sums of the mixing and the memory are float32. Keys and values computed from the memory have x's dtype.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlasjax import check
from atlasjax.memory.check import check_segments, check_sizes
from atlasjax.memory.grid import choose
from atlasjax.mixers.blocks import block_source, continued, continued_queries, documents, unfinished, whole
from atlasjax.mixers.rotary import check_rotary, rotate
from atlasjax.mixers.shapes import check_dtype, check_shapes
from atlasjax.mixers.softmax_attention import Source, softmax_attention

_AXES = {
    "x": "batch time dim",
    "weights.inputs": "dim heads 2·key_dim+value_dim",
    "weights.out": "heads·value_dim dim",
    "weights.summary": "summary dim",
    "weights.mixing": "_size summary",
    "weights.mixing_bias": "summary",
    "weights.context_norm": "dim",
    "weights.summary_norm": "dim",
    "weights.memory_norm": "dim",
}
_STATE_AXES = {
    "state.memory.keys": "batch summary heads key_dim",
    "state.memory.values": "batch summary heads value_dim",
    "state.block.keys": "batch block_size heads key_dim",
    "state.block.values": "batch block_size heads value_dim",
    "state.mixed": "batch summary dim",
    "state.position": "batch",
}


@dataclasses.dataclass(frozen=True)
class MelodiConfig:
    """Melodi's short-term memory. Both sizes are sizes of parameters too.

    Attributes:
      summary_tokens: N ≥ 1 tokens that a block leaves to the next.
      block_size: L ≥ 1 tokens of a block.

    Raises:
      ValueError: a field out of its range.
    """

    summary_tokens: int = 540
    block_size: int = 1024

    def __post_init__(self) -> None:
        check.integers(self, {"summary_tokens": 1, "block_size": 1})


class Weights(NamedTuple):
    """The parameters of the layer.

    Attributes:
      inputs: W_in, to queries, keys and values, [dim, heads, 2 · key_dim + value_dim], key_dim even.
      out: W_out, [heads · value_dim, dim].
      summary: U, [summary, dim].
      mixing: W_mix, [block_size + summary, summary]. It determines the block size.
      mixing_bias: b, [summary].
      context_norm, summary_norm, memory_norm: scales of the norms n_x, n_U, n_z, [dim].
    """

    inputs: Float[Array, "dim heads _channels"]
    out: Float[Array, "_channels dim"]
    summary: Float[Array, "summary dim"]
    mixing: Float[Array, "_size summary"]
    mixing_bias: Float[Array, " summary"]
    context_norm: Float[Array, " dim"]
    summary_norm: Float[Array, " dim"]
    memory_norm: Float[Array, " dim"]


class KeysAndValues(NamedTuple):
    """Rotated keys [batch, size, heads, key_dim], and values [batch, size, heads, value_dim]."""

    keys: Float[Array, "batch size heads key_dim"]
    values: Float[Array, "batch size heads value_dim"]

    @property
    def heads_axis(self) -> int:  # of its arrays, for `distributed.cache_shardings`
        return 2


class MelodiState(NamedTuple):
    """The streaming state.

    Attributes:
      memory: keys and values of the memory tokens; size: summary.
      block: keys and values of the current block, stored by position; size: block_size.
      mixed: the mixing's sum over the tokens of the current block so far, float32 [batch, summary, dim].
      position: number of tokens read, [batch].
    """

    memory: KeysAndValues
    block: KeysAndValues
    mixed: Float[Array, "batch summary dim"]
    position: Int[Array, " batch"]


_Carry = tuple[KeysAndValues, jax.Array]  # the memory, and the mixing's sum over the current block


def attention(
    x: Float[Array, "batch time dim"],
    weights: Weights,
    *,
    rope_theta: float | None = 1e4,
    norm_eps: float = 1e-6,
    segment_ids: Int[Array, "batch time"] | None = None,
    max_segments: int | None = None,
) -> Float[Array, "batch time dim"]:
    """The layer over whole sequences.

    Args:
      x: [batch, time, dim].
      weights: used in x's dtype.
      rope_theta: base of the rotary wavelengths. None means no rotation.
      norm_eps: > 0, added to the mean square in the norms.
      segment_ids: integers [batch, time]. A new document begins where the id changes; memory and blocks are reset there.
      max_segments: static bound on the number of documents in a row. Required under jit with `segment_ids`. Tokens of documents
        beyond the bound get NaN.

    Returns:
      o_x, [batch, time, dim], in x's dtype.

    Raises:
      TypeError, ValueError: invalid arguments.
    """
    layer, _ = _make("melodi.attention", weights, rope_theta, norm_eps, x=x)
    return _whole(layer, x, segment_ids, check_segments(segment_ids, max_segments, x, "melodi.attention"))


@functools.partial(jax.jit, static_argnames=("max_segments",))
def _whole(layer: "_Layer", x: jax.Array, segment_ids: jax.Array | None, max_segments: int | None) -> jax.Array:
    batch, time = x.shape[:2]
    if segment_ids is None:
        grid = whole(batch, time, layer.block_size)
        place = jnp.broadcast_to(jnp.arange(time) % layer.block_size, (batch, time))
    else:
        assert max_segments is not None
        grid = documents(segment_ids, max_segments, layer.block_size)
        assert grid.place is not None
        place = grid.place % layer.block_size
    q, k, v = layer.rotated(x, place)
    q, k, v = grid.lay(q), grid.lay(k), grid.lay(v)
    if grid.touched == 1:  # a single block has no memory to read
        return grid.pick(layer.attend(q[0], None, k[0], v[0], None)[None])
    start = layer.empty(batch, layer.summary, x.dtype), layer.nothing_mixed(batch)
    lies = grid.lay(jnp.ones((batch, time), bool))  # empty places must not enter the mixing, whose taps go over all
    y, _ = _read_blocks(layer, (q, None, k, v, grid.lay(x), lies, grid.index, None), start)
    return grid.pick(y)


def init_state(batch_size: int, weights: Weights, dtype: jax.typing.DTypeLike) -> MelodiState:
    """The state before the first token. `dtype` is that of later inputs x.

    Raises:
      TypeError, ValueError: invalid weights, batch_size is not an integer ≥ 1, or dtype is not one of floating point.
    """
    check_sizes("melodi.init_state", batch_size=batch_size)
    check_dtype("melodi.init_state", dtype)
    layer, _ = _make("melodi.init_state", weights, None, 1e-6)
    memory, block = (layer.empty(batch_size, size, dtype) for size in (layer.summary, layer.block_size))
    return MelodiState(memory, block, layer.nothing_mixed(batch_size), jnp.zeros(batch_size, jnp.int32))


def extend(
    x: Float[Array, "batch time dim"],
    weights: Weights,
    state: MelodiState,
    *,
    rope_theta: float | None = 1e4,
    norm_eps: float = 1e-6,
) -> tuple[Float[Array, "batch time dim"], MelodiState]:
    """`attention` for the next tokens of a stream, any time ≥ 1. Rows may have read different numbers of tokens.

    Args:
      x, weights, rope_theta, norm_eps: as in `attention`.
      state: from `init_state` or the previous `extend`.

    Returns:
      The output of `attention`, and the next state.

    Raises:
      TypeError, ValueError: invalid arguments.
    """
    layer, sizes = _make("melodi.extend", weights, rope_theta, norm_eps, x=x)
    check.instance("melodi.extend", "state", state, MelodiState)
    check_shapes("melodi.extend", _STATE_AXES, integers=("state.position",), known=sizes, state=state)
    return (_one_token if x.shape[1] == 1 else _piece)(layer, x, state)


@jax.jit
def _one_token(layer: "_Layer", x: jax.Array, state: MelodiState) -> tuple[jax.Array, MelodiState]:
    size, rows = layer.block_size, jnp.arange(x.shape[0])
    index, place = state.position // size, state.position % size
    q, k, v = layer.rotated(x, place[:, None])
    keys, values = (held.at[rows, place].set(new[:, 0]) for held, new in zip(state.block, (k, v)))
    source = (*state.memory, _visible(index))
    y = layer.attend(q, place[:, None], keys, values, source)  # causally: later places still hold the last block
    normed = layer.context(x, y)[:, 0]
    taps = layer.weights.mixing[place].astype(x.dtype)
    mixed = state.mixed + jnp.einsum("bn,bd->bnd", taps, normed, preferred_element_type=jnp.float32)
    memory, mixed = _write_full(layer, (state.memory, mixed), keys, values, source, place == size - 1)
    return y, MelodiState(memory, KeysAndValues(keys, values), mixed, state.position + 1)


def _write_full(
    layer: "_Layer", before: _Carry, k: jax.Array, v: jax.Array, source: tuple[jax.Array, ...], full: jax.Array
) -> _Carry:
    """The memory and the mixing's sum after a block, which changes them only in the rows where it is full, boolean [batch]."""

    def write(before: _Carry) -> _Carry:
        _, mixed = before
        return choose(full, (layer.write(k, v, source, mixed), jnp.zeros_like(mixed)), before)

    return jax.lax.cond(jnp.any(full), write, lambda before: before, before)  # most tokens fill no block


@jax.jit
def _piece(layer: "_Layer", x: jax.Array, state: MelodiState) -> tuple[jax.Array, MelodiState]:
    """Places the new tokens on the block grid after those of the current block, then computes as for a whole sequence."""
    size, (batch, time) = layer.block_size, x.shape[:2]
    grid, last = continued(state.position, time, size), unfinished(state.position, time, size)
    queries, places = continued_queries(state.position, time, size)
    q, k, v = layer.rotated(x, (state.position[:, None] + jnp.arange(time)[None]) % size)
    kb, vb = grid.lay(k, state.block.keys), grid.lay(v, state.block.values)
    lies, full = queries.lay(jnp.ones((batch, time), bool)), jnp.arange(grid.touched)[:, None] < last[None]
    touched = (x[: grid.touched] for x in (kb, vb))
    blocks = (queries.lay(q), places, *touched, queries.lay(x), lies, queries.index, full)
    y, (memory, mixed) = _read_blocks(layer, blocks, (state.memory, state.mixed))
    block = jax.tree.map(lambda x: x[last, jnp.arange(batch)], KeysAndValues(kb, vb))
    return queries.pick(y), MelodiState(memory, block, mixed, state.position + time)


def _read_blocks(layer: "_Layer", blocks: tuple[Any, ...], start: _Carry) -> tuple[jax.Array, _Carry]:
    """Reads the blocks one after another.

    Args:
      blocks: rotated q [blocks, batch, queries, heads, dim], and their places in the blocks, [blocks, batch, queries], or None
        for all places; rotated k, and v [blocks, batch, L, heads, dim]; x [blocks, batch, queries, dim], and whether a token lies
        there; the index of each block in its document, [blocks, batch]; and which blocks are full and are written to the memory,
        boolean [blocks, batch]. None writes all of them: a block that is not full is the last of its document or of the row, so
        nothing reads its write.
      start: the memory before the first block, and the mixing's partial sum for that block.

    Returns:
      o_x [blocks, batch, queries, dim]; the memory and the mixing's sum after the last block.
    """

    def block(carry: _Carry, xs: tuple[Any, ...]) -> tuple[_Carry, jax.Array]:
        memory, mixed = carry
        q, place, k, v, x, lies, m, full = xs
        source = (*memory, _visible(m))
        y = layer.attend(q, place, k, v, source)
        normed = jnp.where(lies[:, :, None], layer.context(x, y), 0)
        taps = layer.weights.mixing[: layer.block_size]
        mixed = mixed + layer.mix(normed, taps if place is None else taps[place])
        if full is None:
            return (layer.write(k, v, source, mixed), jnp.zeros_like(mixed)), y
        return _write_full(layer, (memory, mixed), k, v, source, full), y

    end, y = jax.lax.scan(jax.checkpoint(block, prevent_cse=False), start, blocks)  # stores only what blocks hand on
    return y, end


def _visible(index: jax.Array) -> jax.Array:
    """Whether queries of block `index`, [batch], see the memory. Queries of the first block do not."""
    return (index > 0)[:, None, None]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("weights",),
    meta_fields=("heads", "key_dim", "value_dim", "block_size", "summary", "theta", "eps"),
)
@dataclasses.dataclass(frozen=True)
class _Layer:
    """The weights of a call, and the operations that use them."""

    weights: Weights
    heads: int
    key_dim: int
    value_dim: int
    block_size: int
    summary: int
    theta: float | None
    eps: float

    def empty(self, batch: int, size: int, dtype: jax.typing.DTypeLike) -> KeysAndValues:
        zeros = lambda dim: jnp.zeros((batch, size, self.heads, dim), dtype)
        return KeysAndValues(zeros(self.key_dim), zeros(self.value_dim))

    def nothing_mixed(self, batch: int) -> jax.Array:
        return jnp.zeros((batch, self.summary, self.weights.summary.shape[1]), jnp.float32)

    def rotated(self, x: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rotated queries and keys, and values, of tokens [batch, time, dim] at the given positions."""
        y = jnp.tensordot(x, self.weights.inputs.astype(x.dtype), axes=1)
        q, k, v = jnp.split(y, (self.key_dim, 2 * self.key_dim), axis=-1)
        return rotate(q, place, self.theta), rotate(k, place, self.theta), v

    def normed(self, x: jax.Array, scale: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """RMSNorm of x [..., dim], computed in float32."""
        scale = jnp.broadcast_to(scale, x.shape)
        return (x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps) * scale).astype(dtype)

    def context(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """n_x(x + o_x), in x's dtype."""
        return self.normed(x.astype(jnp.float32) + y.astype(jnp.float32), self.weights.context_norm, x.dtype)

    def mix(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """[batch, tokens, dim], [(batch,) tokens, summary] → float32 [batch, summary, dim]."""
        taps = "btn" if kernel.ndim == 3 else "tn"
        # In this order, because XLA's CPU backend of jax 0.12 refuses bfloat16 products that contract the middle axis of the first.
        return jnp.einsum(f"{taps},btd->bnd", kernel.astype(x.dtype), x, preferred_element_type=jnp.float32)

    def attend(
        self, q: jax.Array, place: jax.Array | None, k: jax.Array, v: jax.Array, memory: tuple[jax.Array, ...] | None
    ) -> jax.Array:
        """o_x for rotated queries at positions `place` of a block (`block_source`), with rotated keys k: [batch, queries, dim]."""
        sources = [block_source(q, place, k, v, None)]
        if memory is not None:
            sources.append(Source(q, *memory))
        return self.output(softmax_attention(*sources))

    def output(self, y: jax.Array) -> jax.Array:
        return y.reshape(*y.shape[:2], -1) @ self.weights.out.astype(y.dtype)

    def write(self, k: jax.Array, v: jax.Array, memory: tuple[jax.Array, ...], mixed: jax.Array) -> KeysAndValues:
        """Keys and values of the next memory, from a full block's rotated keys, its values and its mixing sum."""
        batch, dtype, weights = k.shape[0], k.dtype, self.weights
        u = jnp.broadcast_to(weights.summary.astype(dtype), (batch, *weights.summary.shape))
        order = jnp.broadcast_to(jnp.arange(self.summary), (batch, self.summary))
        uq, uk, uv = self.rotated(u, self.block_size + order)
        causal = jnp.tril(jnp.ones((self.summary, self.summary), bool))[None]
        y = softmax_attention(Source(uq, k, v), Source(uq, uk, uv, causal), Source(uq, *memory))
        u = u.astype(jnp.float32) + self.output(y).astype(jnp.float32)
        normed = self.normed(u, weights.summary_norm, dtype)
        mixed = mixed + self.mix(normed, weights.mixing[self.block_size :]) + weights.mixing_bias[None, :, None]
        z = self.normed(u + mixed, weights.memory_norm, dtype)
        _, keys, values = self.rotated(z, order - self.summary)
        return KeysAndValues(keys, values)


def _make(
    where: str, weights: Weights, theta: float | None, eps: float, **tokens: Any
) -> tuple[_Layer, dict[str, int]]:
    """The layer, and its sizes by axis name. tokens: x, where it is given."""
    check.instance(where, "weights", weights, Weights)
    sizes = check_shapes(where, _AXES, weights=weights, **tokens)
    check.number(where, "norm_eps", eps, above=0)
    heads, width = weights.inputs.shape[1:]
    value_dim, rest = divmod(weights.out.shape[0], heads)
    key_dim = (width - value_dim) // 2
    if rest or key_dim < 1 or 2 * key_dim + value_dim != width:
        raise ValueError(
            f"{where}: weights.inputs has shape {weights.inputs.shape} and weights.out {weights.out.shape}, must be "
            "[dim, heads, 2·key_dim+value_dim] and [heads·value_dim, dim]."
        )
    check_rotary(where, theta, key_dim)
    total, summary = weights.mixing.shape
    if total <= summary:
        raise ValueError(
            f"{where}: weights.mixing has shape {weights.mixing.shape}, must be [block_size+summary, summary={summary}], "
            "block_size ≥ 1."
        )
    block_size = total - summary
    sizes |= {"key_dim": key_dim, "value_dim": value_dim, "block_size": block_size}
    return _Layer(weights, heads, key_dim, value_dim, block_size, summary, theta, eps), sizes
