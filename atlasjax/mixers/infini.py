"""Infini-attention (Munkhdalai et al. 2024, arXiv 2404.07143) in blocks, as a baseline of Elastic Memory (arXiv 2602.11212).

    local_t = softmax attention to the tokens of the block, up to t; rotary positions, local to the block
    A(x)    = φ(x) M / (φ(x) · z),  φ = elu + 1                                M: [key_dim, value_dim], z: [key_dim], for each head
    y_t     = (1 − σ(β_h)) local_t + σ(β_h) RMSNorm(A(q_t))                    one β for each head; local_t alone in the first block
    M ← M + Σ_i φ(k_i)ᵀ (v_i − A(k_i)),   z ← z + Σ_i φ(k_i)                   over the block's tokens, once, after the block

This is the paper's "linear + delta" write: A(k_i) is what memory held before the block, an empty one nothing (0/0 = 0). As in the
paper, memory has no positions: it is written and read by keys and queries without rotation. The norm of the read has no parameters
and is that of Elastic Memory's comparison, not of the paper; it stands behind the read that is mixed, not inside the write, where
A(k_i) is compared with v_i.

The norm matters, since z counts every write and M only what is new: where memory gives back exactly what it stored, storing it
again leaves M as it was and doubles z, so A halves.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from atlasjax.mixers import block_memory
from atlasjax.mixers.block_memory import BlockMemoryState


class Associative(NamedTuple):
    """The compressed past, float32.

    Attributes:
      matrix: M, [batch, heads, key_dim, value_dim].
      normalizer: z, [batch, heads, key_dim].
    """

    matrix: jax.Array
    normalizer: jax.Array


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate: jax.Array,
    *,
    block_size: int,
    rope_theta: float | None = 1e4,
    norm_eps: float = 1e-6,
    segment_ids: jax.Array | None = None,
    max_segments: int | None = None,
) -> jax.Array:
    """Infini-attention over whole sequences.

    Args:
      q, k: not rotated, [batch, time, heads, key_dim], key_dim even.
      v: [batch, time, heads, value_dim].
      gate: β, [heads].
      block_size: L ≥ 1 tokens of a block.
      rope_theta: base of the wave lengths of the rotation; None: no rotation.
      norm_eps: added to the mean square of what is read.
      segment_ids: integers [batch, time]; where the id changes a new document begins: memory and blocks start afresh.
      max_segments: static bound on the documents of a row; needed under jit with `segment_ids`. Tokens of further ones get NaN.

    Returns:
      [batch, time, heads, value_dim], of v's dtype. Gradients flow across the blocks.

    Raises:
      TypeError, ValueError: an argument that does not fit.
    """
    block_memory.check("infini.attention", q, k, v, gate, block_size)
    return block_memory.attention(
        q, k, v, gate, init_memory(q.shape[0], k.shape[2], k.shape[3], v.shape[3]), functools.partial(_read, norm_eps), write,
        where="infini.attention", block_size=block_size, rope_theta=rope_theta, segment_ids=segment_ids,
        max_segments=max_segments,
    )  # fmt: skip


def init_memory(batch_size: int, heads: int, key_dim: int, value_dim: int) -> Associative:
    """The empty memory."""
    return Associative(
        jnp.zeros((batch_size, heads, key_dim, value_dim), jnp.float32), jnp.zeros((batch_size, heads, key_dim), jnp.float32)
    )  # fmt: skip


def init_state(
    batch_size: int, block_size: int, heads: int, key_dim: int, value_dim: int, dtype: Any
) -> BlockMemoryState:
    """The state before the first token; sizes as of `attention`, dtype of the current block's keys and values.

    Raises:
      ValueError: a block_size below one.
    """
    block_memory.check_block_size("infini.init_state", block_size)
    memory = init_memory(batch_size, heads, key_dim, value_dim)
    return block_memory.init_state(memory, batch_size, block_size, heads, key_dim, value_dim, dtype)


def extend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate: jax.Array,
    state: BlockMemoryState,
    *,
    rope_theta: float | None = 1e4,
    norm_eps: float = 1e-6,
) -> tuple[jax.Array, BlockMemoryState]:
    """`attention` of the next tokens of a stream, any time ≥ 1. Rows may have read different numbers of tokens.

    Args:
      q, k, v, gate, rope_theta, norm_eps: as in `attention`.
      state: from `init_state` or the last `extend`.

    Returns:
      As `attention`; and the next state.

    Raises:
      TypeError, ValueError: an argument that does not fit.
    """
    where = "infini.extend"
    block_memory.check_state_type(where, state, Associative)
    size = state.block.keys.shape[1]
    block_memory.check(where, q, k, v, gate, size)
    (heads, key_dim), value_dim = k.shape[2:], v.shape[-1]
    expected = lambda: init_state(q.shape[0], size, heads, key_dim, value_dim, k.dtype)
    block_memory.check_state(where, state, expected)
    return block_memory.extend(
        q, k, v, gate, state, functools.partial(_read, norm_eps), write, rope_theta=rope_theta
    )  # fmt: skip


def feature_map(x: jax.Array) -> jax.Array:
    """φ = elu + 1, float32: x + 1 for x > 0 and eˣ otherwise, which stays above zero where elu(x) + 1 would round to it."""
    x = x.astype(jnp.float32)
    positive = x > 0
    return jnp.where(positive, x + 1, jnp.exp(jnp.where(positive, 0, x)))


def read(memory: Associative, x: jax.Array) -> jax.Array:
    """A(x) = φ(x) M / (φ(x) · z), zero of an empty memory: [batch, time, heads, key_dim] → [.., value_dim], float32."""
    return _divide(feature_map(x), memory)


def write(memory: Associative, k: jax.Array, v: jax.Array) -> Associative:
    """The memory after the tokens k, v [batch, time, heads, dim], all of them written at once by the delta rule."""
    phi = feature_map(k)
    error = v.astype(jnp.float32) - _divide(phi, memory)
    return Associative(
        memory.matrix + _einsum("bthk,bthv->bhkv", phi, error), memory.normalizer + jnp.sum(phi, axis=1)
    )  # fmt: skip


def _divide(phi: jax.Array, memory: Associative) -> jax.Array:
    total = _einsum("bthk,bhk->bth", phi, memory.normalizer)
    empty = total <= 0
    y = _einsum("bthk,bhkv->bthv", phi, memory.matrix) / jnp.where(empty, 1.0, total)[..., None]
    return jnp.where(empty[..., None], 0.0, y)


# What is new is a difference of two numbers of the same size: it would drown in products of bfloat16, an accelerator's default.
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def _read(norm_eps: float, memory: Associative, q: jax.Array, index: jax.Array) -> jax.Array:
    y = read(memory, q)
    return y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + norm_eps)
