"""The state of a log-linear memory, and which of its memories are written and read in a segment."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree


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
