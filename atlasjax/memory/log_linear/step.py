"""A log-linear memory for one token, and read without a write."""

import functools

import jax
import jax.numpy as jnp

from atlasjax.memory.grid import choose
from atlasjax.memory.log_linear import state as states
from atlasjax.memory.log_linear.levels import begin_segment, own_tokens, read_levels
from atlasjax.memory.log_linear.spec import LogLinearSpec
from atlasjax.memory.log_linear.state import LogLinearState
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.rule import Params
from atlasjax.memory.tokens import Tokens


@functools.partial(jax.jit, static_argnames=("rule",), inline=True)
def xla_step(
    rule: LogLinearSpec[Params],
    params: Params,
    state: LogLinearState,
    tokens: Tokens,
) -> tuple[jax.Array, LogLinearState]:
    """`Rule.step`: one step of every memory and one read of each."""
    dtype = tokens.q.dtype
    wide = wide_dtype(dtype)
    tokens, weights = own_tokens(tokens)
    state, number = begin_segment(rule, params, state, state.position % rule.segment_size == 0)
    before = states.writers(state)
    copies = states.count_writers(state)
    repeat = lambda x: jnp.repeat(x, copies, axis=0)
    y, after = rule.rule.step(params, before, *jax.tree.map(repeat, tokens)[:4])
    state = states.with_written(state, choose(states.written(number, state), after, before))
    up = lambda x: x.astype(wide)[:, :, None]
    up_params = jax.tree.map(lambda x: x.astype(wide), params)
    y = read_levels(rule, up_params, state, number, up(tokens.q), up(y[::copies]), weights[:, :, None], dtype)
    return y[:, :, 0].astype(dtype), state._replace(position=state.position + 1)


@functools.partial(jax.jit, static_argnames=("rule",), inline=True)
def read_state(
    rule: LogLinearSpec[Params], params: Params, state: LogLinearState, q: jax.Array, connector: jax.Array
) -> jax.Array:
    """`Rule.read`."""
    wide = wide_dtype(q.dtype)
    up = lambda x: jnp.swapaxes(x.astype(wide), 1, 2)
    up_params = jax.tree.map(lambda x: x.astype(wide), params)
    own = up(rule.rule.read(params, state.own, q.astype(wide)))
    number = jnp.maximum(state.position - 1, 0) // rule.segment_size
    y = read_levels(rule, up_params, state, number, up(q), own, up(jax.nn.softplus(connector.astype(wide))), wide)
    return jnp.swapaxes(y, 1, 2).astype(q.dtype)
