"""The state of a log-linear memory, and which of its memories are written and read in a segment."""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from atlasjax.memory.caching import combine
from atlasjax.memory.grid import choose
from atlasjax.memory.rule import Params

if TYPE_CHECKING:
    from atlasjax.memory.log_linear.rule import LogLinearRule


class LogLinearState(NamedTuple):
    """The memory of the current segment and one for each level. float32 (float64 for float64 inputs) and int32, batch axis first.

    Level j holds 2^j segments while bit j of the segment's number b is set, and is read. While bit j is clear and bit j − 1 is set,
    it is written: it began as a copy of level j − 1, whose segments are the first half of its own. In between it is not used.

    Attributes:
      own: state of the current segment's memory.
      levels: states of the inner rule.
      position: number of tokens of the document read so far, [batch].
    """

    own: PyTree
    levels: tuple[PyTree, ...]
    position: Int[Array, " batch"]

    @property
    def heads_axis(self) -> int:  # of its arrays, for `distributed.cache_shardings`
        return 1


def count_levels(rule: "LogLinearRule", tokens: int) -> int:
    """Levels that some token of a text of this length reads."""
    return min(rule.levels, ((tokens - 1) // rule.segment_size).bit_length())


def fresh_memory(rule: "LogLinearRule[Params]", params: Params, batch_size: int) -> PyTree:
    """A fresh state of the inner rule."""
    return rule.rule.init_state(params, batch_size=batch_size, max_length=rule.segment_size)


def init_state(
    rule: "LogLinearRule[Params]", params: Params, batch_size: int, max_length: int | None = None
) -> LogLinearState:
    """`LogLinearRule.init_state`."""
    fresh = fresh_memory(rule, params, batch_size)
    levels = rule.levels if max_length is None else count_levels(rule, max_length)
    # Copies, because a state whose leaves share a buffer could not be donated to a jitted call.
    copies = tuple(jax.tree.map(jnp.copy, fresh) for _ in range(levels))
    return LogLinearState(fresh, copies, jnp.zeros(batch_size, jnp.int32))


def begin_segment(
    rule: "LogLinearRule[Params]", params: Params, state: LogLinearState, begins: Bool[Array, " batch"]
) -> tuple[LogLinearState, Int[Array, " batch"]]:
    """Where `begins`, the next token is the first of a segment: memories are handed on. Also returns the segment's number."""
    number = state.position // rule.segment_size
    levels = list(state.levels)
    if levels:
        levels[0] = choose(begins & (number % 2 == 1), state.own, levels[0])
    for j in range(1, len(levels)):
        half = number % (2 << j) == (1 << j) // 2
        levels[j] = choose(begins & half, levels[j - 1], levels[j])
    fresh = fresh_memory(rule, params, begins.shape[0])
    own = choose(begins, jax.tree.map(lambda x, like: x.astype(like.dtype), fresh, state.own), state.own)
    return LogLinearState(own, tuple(levels), state.position), number


def bit(number: Int[Array, " batch"], j: int) -> Bool[Array, " batch"]:
    """Whether bit j of a segment's number is set: its tokens read level j."""
    return (number >> j) & 1 == 1


def writers(state: LogLinearState) -> PyTree:
    """The states that a segment may write, own and levels from 1 on, as one state of `count_writers` rows for each of the batch.
    Level 0 is never written: it is the memory of a whole segment."""
    return jax.tree.map(_rows, state.own, *state.levels[1:])


def count_writers(state: LogLinearState) -> int:
    """The number of `writers`."""
    return max(1, len(state.levels))


def _rows(*x: jax.Array) -> jax.Array:
    """Arrays [batch, …] as one of [batch · n, …]. The batch is the outer axis, as in `grid.as_rows`."""
    return jnp.stack(x, axis=1).reshape(x[0].shape[0] * len(x), *x[0].shape[1:])


def written(number: Int[Array, " batch"], state: LogLinearState) -> Bool[Array, " rows"]:
    """Which rows of `writers` a segment writes."""
    higher = [~bit(number, j) & bit(number, j - 1) for j in range(1, len(state.levels))]
    return _rows(jnp.ones(number.shape, bool), *higher)


def with_written(state: LogLinearState, after: PyTree) -> LogLinearState:
    """The state with the memories of `writers` after they were written."""
    part = lambda i: jax.tree.map(lambda x: x[i :: count_writers(state)], after)
    higher = tuple(part(i) for i in range(1, len(state.levels)))
    return state._replace(own=part(0), levels=state.levels[:1] + higher)


def read_levels(
    rule: "LogLinearRule[Params]",
    params: Params,
    state: LogLinearState,
    number: Int[Array, " batch"],
    q: Float[Array, "batch heads time key_dim"],
    own_read: Float[Array, "batch heads time value_dim"],
    weights: Float[Array, "batch heads time connector_dim"],
    dtype: jnp.dtype,
) -> Float[Array, "batch heads time value_dim"]:
    """y of tokens of one segment, from the reads of their own memories and those of the levels. NaN where a level is missing.

    params: in q's dtype. weights: λ. dtype: of the products' inputs.
    """
    others = jnp.zeros_like(own_read)
    for j, level in enumerate(state.levels):
        y = combine.over_heads(rule.rule, dtype)(params, rule.rule.cached_weights(level), q)
        share = jnp.where(bit(number, j)[:, None, None], weights[..., 1 + j], 0.0)
        others = others + share[..., None] * y
    missing = (number % (1 << rule.levels)) >> len(state.levels) > 0
    y = combine.join(rule.rule, params, q, own_read, weights[..., 0], others)
    return jnp.where(missing[:, None, None, None], jnp.nan, y)
