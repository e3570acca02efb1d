"""Levels of the Fenwick tree: the levels that a token has, and the level of a pair of tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from atlasjax import check
from atlasjax.memory.check import ARRAYS


def num_levels(length: int) -> int:
    """Number of levels for a text of `length` tokens, including level 0, the token itself.

    Raises:
      ValueError: length < 1.
    """
    check.integer("num_levels", "length", length)
    return (length - 1).bit_length() + 1


def level_of(t: Int[Array, "..."], s: Int[Array, "..."]) -> Int[Array, "..."]:
    """level(t, s) = bit_length(t xor s) for integers ≥ 0.

    Raises:
      TypeError: t or s is not an array of integers.
    """
    for name, x in (("t", t), ("s", s)):
        if not isinstance(x, (int, *ARRAYS)) or not jnp.issubdtype(jnp.result_type(x), jnp.integer):
            raise TypeError(f"level_of: {name} must be integers, got {getattr(x, 'dtype', type(x).__name__)}.")
        check.plain_array("level_of", name, x)
    different = jnp.bitwise_xor(t, s)
    return 32 - jax.lax.clz(different.astype(jnp.int32))


def has_level(level: Int[Array, "..."], t: Int[Array, "..."]) -> Bool[Array, "..."]:
    """Whether token t has the level: always level 0, and level ℓ ≥ 1 if bit ℓ − 1 of t is set."""
    check.plain_array("has_level", "level", level)
    check.plain_array("has_level", "t", t)
    return (level == 0) | (jnp.right_shift(t, jnp.maximum(level - 1, 0)) & 1 == 1)


def softmax(scores: Float[Array, "*tokens levels"], t: Int[Array, "*tokens 1"]) -> Float[Array, "*tokens levels"]:
    """Softmax of scores [..., levels] over the levels that token t [..., 1] has."""
    check.plain_array("log_linear.softmax", "scores", scores)
    has = has_level(jnp.arange(scores.shape[-1]).reshape(*(1,) * (t.ndim - 1), -1), t)
    return jax.nn.softmax(jnp.where(has, scores, -jnp.inf), axis=-1)
