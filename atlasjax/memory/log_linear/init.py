"""Fresh states of a `LogLinearRule`."""

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from atlasjax.memory.log_linear.spec import LogLinearSpec
from atlasjax.memory.log_linear.state import LogLinearState
from atlasjax.memory.rule import Params


def fresh_memory(rule: LogLinearSpec[Params], params: Params, batch_size: int) -> PyTree:
    """A fresh state of the inner rule."""
    return rule.rule.init_state(params, batch_size=batch_size, max_length=rule.segment_size)


def init_state(
    rule: LogLinearSpec[Params], params: Params, *, batch_size: int, max_length: int | None = None
) -> LogLinearState:
    """Fresh memories, for the levels that `max_length` tokens need; None: for all. Outputs of tokens that need more are NaN."""
    fresh = fresh_memory(rule, params, batch_size)
    levels = rule.levels if max_length is None else rule.count_levels(max_length)
    # Copies, because a state whose leaves share a buffer could not be donated to a jitted call.
    copies = tuple(jax.tree.map(jnp.copy, fresh) for _ in range(levels))
    return LogLinearState(fresh, copies, jnp.zeros(batch_size, jnp.int32))
