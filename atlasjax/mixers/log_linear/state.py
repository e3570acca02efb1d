"""The streaming state of log-linear attention."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlasjax.memory.check import check_sizes
from atlasjax.mixers.log_linear.levels import num_levels


class LogLinearState(NamedTuple):
    """One state for each level, float32, with the batch axis first.

    Attributes:
      states: decayed Σ v kᵀ over each level's segment, [batch, heads, levels, value_dim, key_dim].
      key_sums: Σ k over each level's segment, [batch, heads, levels, key_dim].
      position: number of tokens read, [batch], int32.
    """

    states: Float[Array, "batch heads levels value_dim key_dim"]
    key_sums: Float[Array, "batch heads levels key_dim"]
    position: Int[Array, " batch"]

    @property
    def heads_axis(self) -> int:  # of its arrays, for `distributed.cache_shardings`
        return 1


def init_state(batch_size: int, heads: int, key_dim: int, value_dim: int, max_length: int) -> LogLinearState:
    """The state before the first token, for at most `max_length` tokens. Each doubling of `max_length` adds a level.

    Raises:
      ValueError: a size is not an integer ≥ 1.
    """
    where = "log_linear.init_state"
    check_sizes(where, batch_size=batch_size, heads=heads, key_dim=key_dim, value_dim=value_dim, max_length=max_length)
    levels = num_levels(max_length)
    return LogLinearState(
        states=jnp.zeros((batch_size, heads, levels, value_dim, key_dim), jnp.float32),
        key_sums=jnp.zeros((batch_size, heads, levels, key_dim), jnp.float32),
        position=jnp.zeros((batch_size,), jnp.int32),
    )
