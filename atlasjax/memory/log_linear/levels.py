"""The levels of a log-linear memory: how a segment begins, and how they are read."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from atlasjax.memory.caching import combine
from atlasjax.memory.grid import choose
from atlasjax.memory.log_linear.init import fresh_memory
from atlasjax.memory.log_linear.spec import LogLinearSpec
from atlasjax.memory.log_linear.state import LogLinearState, bit
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.rule import Params
from atlasjax.memory.tokens import Tokens


def own_tokens(tokens: Tokens) -> tuple[Tokens, Float[Array, "*tokens heads connector_dim"]]:
    """The tokens with the gates of the inner rule alone, and λ."""
    gates, wide = tokens.gates, wide_dtype(tokens.q.dtype)
    assert gates.connector is not None
    weights = jax.nn.softplus(gates.connector.astype(wide))
    return tokens._replace(gates=gates._replace(connector=None)), weights


def begin_segment(
    rule: LogLinearSpec[Params], params: Params, state: LogLinearState, begins: Bool[Array, " batch"]
) -> tuple[LogLinearState, Int[Array, " batch"]]:
    """Where `begins`, the next token is the first of a segment: memories are handed on. Also returns the segment's number."""
    number = state.position // rule.segment_size
    levels = list(state.levels)
    if levels:
        levels[0] = choose(begins & (number % 2 == 1), state.own, levels[0])
    # A level begins as a copy of the one below, and the next segments write it on until it has seen twice as many.
    for j in range(1, len(levels)):
        half = number % (2 << j) == (1 << j) // 2
        levels[j] = choose(begins & half, levels[j - 1], levels[j])
    fresh = fresh_memory(rule, params, begins.shape[0])
    own = choose(begins, jax.tree.map(lambda x, like: x.astype(like.dtype), fresh, state.own), state.own)
    return LogLinearState(own, tuple(levels), state.position), number


def read_levels(
    rule: LogLinearSpec[Params],
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
    # Bits of the segment's number for which the state has no level: an answer without them would be wrong silently.
    missing = (number % (1 << rule.levels)) >> len(state.levels) > 0
    y = combine.join(rule.rule, params, q, own_read, weights[..., 0], others)
    return jnp.where(missing[:, None, None, None], jnp.nan, y)
