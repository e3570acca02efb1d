"""Streaming log-linear attention: one token, or the next piece of a stream."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from atlasjax.memory.blocks import decay_products
from atlasjax.mixers.log_linear.check import check_stream
from atlasjax.mixers.log_linear.levels import level_of, softmax
from atlasjax.mixers.log_linear.state import LogLinearState

_PIECE = 64  # tokens whose pairwise scores are formed

# q, k, v, weights, retention and connector.
_Tokens = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]


def step(
    state: LogLinearState,
    q: Float[Array, "batch heads key_dim"],
    k: Float[Array, "batch heads key_dim"],
    v: Float[Array, "batch heads value_dim"],
    weights: Float[Array, "batch heads levels"] | None = None,
    retention: Float[Array, "batch heads"] | None = None,
    connector: Float[Array, "batch heads key_dim"] | None = None,
) -> tuple[Float[Array, "batch heads value_dim"], LogLinearState]:
    """One token of a stream.

    Args:
      state: from `init_state` or the previous step.
      q, k: [batch, heads, key_dim]; v: [batch, heads, value_dim].
      weights: λ, [batch, heads, levels]. Levels beyond the state's are ignored. Give either this or `connector`.
      connector: u of Log-Linear++, [batch, heads, key_dim], from which λ is computed.
      retention: α, [batch, heads]. None means no decay.

    Returns:
      y: [batch, heads, value_dim], NaN beyond the state's max_length, and the next state.

    Raises:
      TypeError, ValueError: invalid arguments, among them both or neither of weights and connector, and too few levels.
    """
    check_stream("log_linear.step", state, q, k, v, weights, retention, connector, time=False)
    return _step(state, (q, k, v, weights, retention, connector))


@jax.jit
def _step(state: LogLinearState, tokens: _Tokens) -> tuple[jax.Array, LogLinearState]:
    q, k, v, weights, retention, connector = tokens
    levels, t = state.states.shape[2], state.position
    wide = state.states.dtype
    q_, k_, v_ = (x.astype(wide) for x in (q, k, v))
    # Token t closes the segments below its lowest set bit n, which merge into the segment of level n + 1.
    lowest = jnp.where(t > 0, 31 - jax.lax.clz(t & -t), -1)
    level = jnp.arange(levels)[None]
    below, at = level <= lowest[:, None], (level == lowest[:, None] + 1) & (t > 0)[:, None]

    def merge(x: jax.Array) -> jax.Array:
        """[batch, heads, levels, …]: merges the lower levels into one."""
        expand = lambda mask: mask.reshape(mask.shape[0], 1, levels, *(1,) * (x.ndim - 3))
        merged = jnp.sum(jnp.where(expand(below), x, 0.0), axis=2, keepdims=True)
        return jnp.where(expand(at), merged, jnp.where(expand(below), 0.0, x))

    states, sums = merge(state.states), merge(state.key_sums)
    if retention is not None:
        states = retention.astype(wide)[:, :, None, None, None] * states
    states = states.at[:, :, 0].set(v_[..., :, None] * k_[..., None, :])
    sums = sums.at[:, :, 0].set(k_)
    if connector is not None:
        length = jnp.left_shift(1, jnp.maximum(level - 1, 0)).astype(wide)
        scores = jnp.einsum("bhd,bhld->bhl", connector.astype(wide), sums, precision=jax.lax.Precision.HIGHEST)
        shares = softmax(scores / length[None], t[:, None, None])
    else:
        assert weights is not None
        shares = weights[..., :levels].astype(wide)
    reads = jnp.einsum("bhlvk,bhk->bhlv", states, q_, precision=jax.lax.Precision.HIGHEST)
    y = jnp.einsum("bhl,bhlv->bhv", shares, reads, precision=jax.lax.Precision.HIGHEST)
    beyond = t >= 1 << (levels - 1)
    y = jnp.where(beyond[:, None, None], jnp.nan, y)
    return y.astype(q.dtype), LogLinearState(states, sums, t + 1)


def extend(
    state: LogLinearState,
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time heads key_dim"],
    v: Float[Array, "batch time heads value_dim"],
    weights: Float[Array, "batch time heads levels"] | None = None,
    retention: Float[Array, "batch time heads"] | None = None,
    connector: Float[Array, "batch time heads key_dim"] | None = None,
) -> tuple[Float[Array, "batch time heads value_dim"], LogLinearState]:
    """The next piece of a stream, any time ≥ 1. Equals that many `step`s, but computes 64 tokens at once.

    Args:
      state: from `init_state` or the previous call.
      q, k: [batch, time, heads, key_dim]; v: [batch, time, heads, value_dim].
      weights, retention, connector: as in `step`, with a time axis.

    Returns:
      y: [batch, time, heads, value_dim], NaN beyond the state's max_length, and the next state.

    Raises:
      TypeError, ValueError: as for `step`.
    """
    check_stream("log_linear.extend", state, q, k, v, weights, retention, connector, time=True)
    return _extend(state, (q, k, v, weights, retention, connector))


@jax.jit
def _extend(state: LogLinearState, tokens: _Tokens) -> tuple[jax.Array, LogLinearState]:
    q, k, v, weights, retention, connector = tokens
    time, levels, wide = q.shape[1], state.states.shape[2], state.states.dtype
    if time == 1:
        y, state = _step(state, jax.tree.map(lambda x: x[:, 0], tokens))
        return y[:, None], state
    block = min(_PIECE, time)
    count = -(-time // block)

    def parts(x: jax.Array | None, fill: float = 0.0) -> jax.Array | None:
        """[batch, time, heads, …] → [pieces, batch, heads, block, …]."""
        if x is None:
            return None
        pad = ((0, 0), (0, count * block - time), *((0, 0),) * (x.ndim - 2))
        x = jnp.pad(x.astype(wide), pad, constant_values=fill).reshape(x.shape[0], count, block, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 3, 2)

    if retention is None:
        retention = jnp.ones(q.shape[:3], wide)
    if weights is not None:
        weights = weights[..., :levels]
    lengths = jnp.minimum(time - jnp.arange(count, dtype=jnp.int32) * block, block)
    pieces = (*map(parts, (q, k, v, weights)), parts(retention, 1.0), parts(connector))
    # The gradient of a piece needs only the state before it.
    run = jax.checkpoint(_extend_piece, prevent_cse=False)
    state, y = jax.lax.scan(run, state, (pieces, lengths))
    y = jnp.moveaxis(y, 0, 1)  # [batch, pieces, heads, block, value_dim]
    return jnp.swapaxes(y, 2, 3).reshape(q.shape[0], -1, *v.shape[2:])[:, :time].astype(q.dtype), state


def _extend_piece(state: LogLinearState, xs: tuple[_Tokens, jax.Array]) -> tuple[LogLinearState, jax.Array]:
    """Tokens [batch, heads, block, …], of which the first `length` exist. The others have zero keys and values."""
    (q, k, v, weights, decay, connector), length = xs
    assert decay is not None  # ones where there is no decay
    einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    levels, block, wide = state.states.shape[2], q.shape[2], q.dtype
    level = jnp.arange(levels)[None]
    t = state.position[:, None] + jnp.arange(block)[None]
    # Start positions of the states' segments, as seen from the last token read. Absent levels are zero.
    newest = state.position[:, None] - 1
    begin = jnp.where(level == 0, newest, jnp.left_shift(jnp.right_shift(newest, level), level))
    distance = lambda a, b: jnp.clip(level_of(a, b), 0, levels - 1)
    of_state, of_token = distance(t[:, :, None], begin[:, None]), distance(t[:, :, None], t[:, None])
    one_hot = lambda x: jax.nn.one_hot(x, levels, dtype=wide)
    past = jnp.tril(jnp.ones((block, block), wide))
    if connector is not None:
        scores = einsum("bhtl,btlm->bhtm", einsum("bhtd,bhld->bhtl", connector, state.key_sums), one_hot(of_state))
        scores += einsum(
            "bhts,btsm->bhtm", einsum("bhtd,bhsd->bhts", connector, k) * past[None, None], one_hot(of_token)
        )
        spans = jnp.left_shift(1, jnp.maximum(level - 1, 0)).astype(wide)  # tokens of each level
        shares = softmax(scores / spans[None, None], t[:, None, :, None])
    else:
        assert weights is not None
        shares = weights
    share_of = lambda x: jnp.take_along_axis(shares, jnp.broadcast_to(x[:, None], (*q.shape[:3], x.shape[2])), axis=3)
    from_start, pairwise = jax.vmap(jax.vmap(decay_products))(decay)
    old = share_of(of_state) * from_start[..., None]
    y = einsum("bhtlk,bhlvk->bhtv", old[..., None] * q[:, :, :, None], state.states)
    y += einsum("bhts,bhsv->bhtv", einsum("bhtk,bhsk->bhts", q, k) * pairwise * share_of(of_token), v)
    y = jnp.where((t >= 1 << (levels - 1))[:, None, :, None], jnp.nan, y)

    end = state.position[:, None] + length - 1
    moved, token = one_hot(distance(end, begin)), one_hot(distance(end, t))
    written = token[:, None, :, :, None] * (v * pairwise[:, :, -1, :, None])[:, :, :, None]
    states = einsum("bhlvk,blm->bhmvk", from_start[:, :, -1, None, None, None] * state.states, moved)
    states += einsum("bhsmv,bhsk->bhmvk", written, k)
    key_sums = einsum("bhld,blm->bhmd", state.key_sums, moved) + einsum("bhsd,bsm->bhmd", k, token)
    return LogLinearState(states, key_sums, state.position + length), y
