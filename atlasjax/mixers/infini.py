"""Infini-attention (Munkhdalai et al. 2024, arXiv 2404.07143) in blocks, as a baseline of Elastic Memory (arXiv 2602.11212).

    local_t = softmax attention to the tokens of the block, up to t; rotary positions, local to the block
    A(x)    = φ(x) M / (φ(x) · z),  φ = elu + 1                                M: [key_dim, value_dim], z: [key_dim], for each head
    y_t     = (1 − σ(β_h)) local_t + σ(β_h) RMSNorm(A(q_t))                    one β for each head; only local_t in the first block
    M ← M + Σ_i φ(k_i)ᵀ (v_i − A(k_i)),   z ← z + Σ_i φ(k_i)                   over the block's tokens, once, after the block

This is the paper's "linear + delta" update. A(k_i) is read from the memory before the block, and an empty memory reads 0/0 = 0.
As in the paper, the memory has no positions: it is written and read with unrotated keys and queries. RMSNorm on the read has no
parameters. It comes from Elastic Memory's comparison (§3.1, added there for stability), which does not state its position. Here it
is applied to the read that is mixed into the output, and not inside the write, where A(k_i) is compared with v_i.

The norm matters because z counts every write while M accumulates only what is new. If the memory already returns exactly the stored
value, storing it again leaves M unchanged and doubles z, so A is halved.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Float, Int

from atlasjax import check
from atlasjax.memory.blocks import divisible
from atlasjax.memory.check import check_floating, check_sizes
from atlasjax.mixers import block_memory
from atlasjax.mixers.block_memory import BlockMemoryState
from atlasjax.mixers.shapes import check_dtype, check_shapes

_AXES = {
    "state.memory.matrix": "batch heads key_dim value_dim",
    "state.memory.normalizer": "batch heads key_dim",
    "memory.matrix": "batch heads key_dim value_dim",
    "memory.normalizer": "batch heads key_dim",
    "x": "batch time heads key_dim",
    "k": "batch time heads key_dim",
    "v": "batch time heads value_dim",
}


@dataclasses.dataclass(frozen=True)
class InfiniConfig:
    """Infini-attention in blocks.

    Attributes:
      block_size: L ≥ 1 tokens of a block.

    Raises:
      ValueError: a field out of its range.
    """

    block_size: int = 1024

    def __post_init__(self) -> None:
        check.integers(self, {"block_size": 1})


class Associative(NamedTuple):
    """The associative memory, float32.

    Attributes:
      matrix: M, [batch, heads, key_dim, value_dim].
      normalizer: z, [batch, heads, key_dim].
    """

    matrix: Float[Array, "batch heads key_dim value_dim"]
    normalizer: Float[Array, "batch heads key_dim"]

    @property
    def heads_axis(self) -> int:  # of its arrays, for `distributed.cache_shardings`
        return 1


def attention(
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time heads key_dim"],
    v: Float[Array, "batch time heads value_dim"],
    gate: Float[Array, " heads"],
    *,
    block_size: int,
    rope_theta: float | None = 1e4,
    norm_eps: float = 1e-6,
    segment_ids: Int[Array, "batch time"] | None = None,
    max_segments: int | None = None,
) -> Float[Array, "batch time heads value_dim"]:
    """Infini-attention over whole sequences.

    Args:
      q, k: before rotation, [batch, time, heads, key_dim], key_dim even.
      v: [batch, time, heads, value_dim].
      gate: β, [heads].
      block_size: L ≥ 1 tokens per block.
      rope_theta: base of the rotary wavelengths. None means no rotation.
      norm_eps: > 0, added to the mean square of the read in RMSNorm.
      segment_ids: integers [batch, time]. A new document begins where the id changes; memory and blocks are reset there.
      max_segments: static bound on the number of documents in a row. Required under jit with `segment_ids`. Tokens of documents
        beyond the bound get NaN.

    Returns:
      [batch, time, heads, value_dim], in v's dtype. Gradients flow across blocks.

    Raises:
      TypeError, ValueError: invalid arguments.
    """
    where = "infini.attention"
    block_memory.check_call(where, q, k, v, gate, block_size, rope_theta)
    check.number(where, "norm_eps", norm_eps, above=0)
    return block_memory.attention(
        q, k, v, gate, init_memory(q.shape[0], k.shape[2], k.shape[3], v.shape[3]), Partial(_read, norm_eps), write,
        where=where, block_size=block_size, rope_theta=rope_theta, segment_ids=segment_ids,
        max_segments=max_segments,
    )  # fmt: skip


def init_memory(batch_size: int, heads: int, key_dim: int, value_dim: int) -> Associative:
    """The empty memory.

    Raises:
      ValueError: a size is not an integer ≥ 1.
    """
    check_sizes("infini.init_memory", batch_size=batch_size, heads=heads, key_dim=key_dim, value_dim=value_dim)
    return Associative(
        jnp.zeros((batch_size, heads, key_dim, value_dim), jnp.float32), jnp.zeros((batch_size, heads, key_dim), jnp.float32)
    )  # fmt: skip


def init_state(
    batch_size: int, block_size: int, heads: int, key_dim: int, value_dim: int, dtype: jax.typing.DTypeLike
) -> BlockMemoryState[Associative]:
    """The state before the first token. Sizes as in `attention`; `dtype` is that of the current block's keys and values.

    Raises:
      TypeError, ValueError: a size is not an integer ≥ 1, or dtype is not one of floating point.
    """
    where = "infini.init_state"
    check_sizes(where, batch_size=batch_size, block_size=block_size, heads=heads, key_dim=key_dim, value_dim=value_dim)
    check_dtype(where, dtype)
    memory = init_memory(batch_size, heads, key_dim, value_dim)
    return block_memory.init_state(memory, batch_size, block_size, heads, key_dim, value_dim, dtype)


def extend(
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time heads key_dim"],
    v: Float[Array, "batch time heads value_dim"],
    gate: Float[Array, " heads"],
    state: BlockMemoryState[Associative],
    *,
    rope_theta: float | None = 1e4,
    norm_eps: float = 1e-6,
) -> tuple[Float[Array, "batch time heads value_dim"], BlockMemoryState[Associative]]:
    """`attention` for the next tokens of a stream, any time ≥ 1. Rows may have read different numbers of tokens.

    Args:
      q, k, v, gate, rope_theta, norm_eps: as in `attention`.
      state: from `init_state` or the previous `extend`.

    Returns:
      The output of `attention`, and the next state.

    Raises:
      TypeError, ValueError: invalid arguments.
    """
    where = "infini.extend"
    block_memory.check_extend(where, q, k, v, gate, state, rope_theta, Associative, _AXES)
    check.number(where, "norm_eps", norm_eps, above=0)
    return block_memory.extend(
        q, k, v, gate, state, Partial(_read, norm_eps), write, rope_theta=rope_theta
    )  # fmt: skip


def feature_map(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """φ = elu + 1, float32: x + 1 for x > 0 and eˣ otherwise, which stays positive where elu(x) + 1 would round to zero."""
    check_floating("x", x, "infini.feature_map")
    x = x.astype(jnp.float32)
    positive = x > 0
    return jnp.where(positive, x + 1, jnp.exp(jnp.where(positive, 0, x)))


def read(
    memory: Associative, x: Float[Array, "batch time heads key_dim"]
) -> Float[Array, "batch time heads value_dim"]:
    """A(x) = φ(x) M / (φ(x) · z), zero for an empty memory: [batch, time, heads, key_dim] → [.., value_dim], float32.

    Raises:
      TypeError, ValueError: invalid arguments.
    """
    check.instance("infini.read", "memory", memory, Associative)
    check_shapes("infini.read", _AXES, memory=memory, x=x)
    return _divide(feature_map(x), memory)


def write(
    memory: Associative, k: Float[Array, "batch time heads key_dim"], v: Float[Array, "batch time heads value_dim"]
) -> Associative:
    """The memory after the tokens k, v [batch, time, heads, dim] are written at once by the delta rule.

    Raises:
      TypeError, ValueError: invalid arguments.
    """
    check.instance("infini.write", "memory", memory, Associative)
    check_shapes("infini.write", _AXES, memory=memory, k=k, v=v)
    phi = feature_map(k)
    # All tokens of a block read the memory before it, as published; so one product writes them.
    error = v.astype(jnp.float32) - _divide(phi, memory)
    return Associative(
        memory.matrix + _einsum("bthk,bthv->bhkv", phi, error), memory.normalizer + jnp.sum(phi, axis=1)
    )  # fmt: skip


def _divide(phi: jax.Array, memory: Associative) -> jax.Array:
    # φ = eˣ may be 1e-30: the quotient is as good as any, but its derivative divides by the square of the total. So both factors
    # are scaled to about 1, which changes neither the quotient nor its derivatives.
    phi = phi * _scale(jnp.max(phi, axis=-1, keepdims=True))
    scale = _scale(jnp.max(memory.normalizer, axis=-1, keepdims=True))
    total = _einsum("bthk,bhk->bth", phi, memory.normalizer * scale)
    filled = divisible(total)
    y = _einsum("bthk,bhkv->bthv", phi, memory.matrix * scale[..., None]) / jnp.where(filled, total, 1.0)[..., None]
    return jnp.where(filled[..., None], y, 0.0)


def _scale(x: jax.Array) -> jax.Array:
    """A power of two that takes x > 0 to [1/2, 1), so that multiplying rounds nothing; 1 for x = 0. Without a derivative."""
    _, exponent = jnp.frexp(jax.lax.stop_gradient(x))
    return jnp.ldexp(jnp.ones_like(x), -jnp.clip(exponent, -126, 126))


# v − A(k) is a difference of similar numbers, which bfloat16 products, the default on accelerators, would swamp in rounding error.
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def _read(norm_eps: float, memory: Associative, q: jax.Array, index: jax.Array) -> jax.Array:
    y = read(memory, q)
    return y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + norm_eps)
