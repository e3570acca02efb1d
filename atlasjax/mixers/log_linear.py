"""Log-linear attention: linear attention whose past is kept as one state for each level of a Fenwick tree.

    y_t = Σ_{s ≤ t} λ_t[level(t, s)] (α_{s+1} … α_t) ⟨q_t, k_s⟩ v_s        level(t, s) = bit_length(t xor s)

(Guo et al. 2025, arXiv 2506.04761.) Level 0 is the token itself, level ℓ ≥ 1 the dyadic segment of 2^{ℓ−1} tokens that t's own
segment of that size follows: nearer tokens are told apart more finely. Levels depend on positions alone, never on the length of
the text. The second variant, Log-Linear++ of the Memory Caching paper (§4), is gated residual memory over the same segments: its
λ_t = softmax over the levels that t has of ⟨u_t, mean of the segment's keys⟩ (`segment_weights`).

Both are computed by halves: two neighbouring segments become one, and what the second reads of the first is one product with the
first's state. O(T log T) work, log T states for each sequence in decoding.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from atlasjax.memory.blocks import decay_products, dot, exact, neighbours

_BLOCK = 16  # tokens whose pairwise scores are formed; a power of two


class LogLinearState(NamedTuple):
    """One state for each level; float32, batch axis first.

    Attributes:
      states: Σ v kᵀ of each level's segment, decayed, [batch, heads, levels, value_dim, key_dim].
      key_sums: Σ k of it, [batch, heads, levels, key_dim].
      position: tokens read, [batch], int32.
    """

    states: jax.Array
    key_sums: jax.Array
    position: jax.Array


def num_levels(length: int) -> int:
    """Levels that tokens of a text of so many tokens have, the token's own included.

    Raises:
      ValueError: length < 1.
    """
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ValueError(f"num_levels: length must be an integer ≥ 1, got {length!r}.")
    return (length - 1).bit_length() + 1


def level_of(t: jax.Array, s: jax.Array) -> jax.Array:
    """level(t, s) = bit_length(t xor s) of integers ≥ 0."""
    different = jnp.bitwise_xor(t, s)
    return 32 - jax.lax.clz(different.astype(jnp.int32))


def _check(
    where: str, q: jax.Array, k: jax.Array, v: jax.Array, weights: jax.Array, retention: jax.Array | None
) -> None:
    if q.ndim != 4 or 0 in q.shape:
        raise ValueError(f"{where}: q has shape {q.shape}, should be [batch, time ≥ 1, heads, key_dim].")
    lead = q.shape[:3]
    for name, x, shape in (("k", k, q.shape), ("v", v, (*lead, "value_dim")), ("retention", retention, lead)):
        if x is None:
            continue
        if x.ndim != len(shape) or any(a != b for a, b in zip(x.shape, shape) if not isinstance(b, str)):
            raise ValueError(f"{where}: {name} has shape {x.shape}, should be {list(shape)}.")
    needed = num_levels(q.shape[1])
    if weights.ndim != 4 or weights.shape[:3] != lead or weights.shape[3] < needed:
        raise ValueError(
            f"{where}: weights has shape {weights.shape}, should be {[*lead, needed]} or more levels for {q.shape[1]} tokens."
        )


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, weights: jax.Array, retention: jax.Array | None = None
) -> jax.Array:
    """Log-linear attention over whole sequences.

    Args:
      q, k: [batch, time ≥ 1, heads, key_dim], floating point.
      v: [batch, time, heads, value_dim].
      weights: λ, [batch, time, heads, levels] with at least `num_levels(time)` levels.
      retention: α ∈ [0, 1], [batch, time, heads]; None: no decay.

    Returns:
      [batch, time, heads, value_dim], of q's dtype.

    Raises:
      ValueError: a shape that does not fit.
    """
    _check("log_linear.attention", q, k, v, weights, retention)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    time = q.shape[1]
    size = max(1 << (time - 1).bit_length(), 1)
    if retention is None:
        retention = jnp.ones(q.shape[:3], wide)

    def one(q: jax.Array, k: jax.Array, v: jax.Array, weights: jax.Array, decay: jax.Array) -> jax.Array:
        """One head of one sequence, padded to a power of two."""
        block = min(_BLOCK, size)
        parts = lambda x, fill=0.0: jnp.pad(
            x, ((0, size - time), *((0, 0),) * (x.ndim - 1)), constant_values=fill
        ).reshape(-1, block, *x.shape[1:])
        q, k, v, weights, decay = parts(q), parts(k), parts(v), parts(weights), parts(decay, 1.0)
        start, pairwise = jax.vmap(decay_products)(decay)  # [parts, m], [parts, m, m]
        level = level_of(jnp.arange(block)[:, None], jnp.arange(block))
        shares = jnp.take_along_axis(weights, jnp.broadcast_to(level, (q.shape[0], block, block)), axis=2)
        y = dot(exact(q, k.mT) * pairwise * shares, v, q.dtype)
        states = dot((v * pairwise[:, -1, :, None]).mT, k, q.dtype)  # [parts, value_dim, key_dim]
        whole = start[:, -1]
        # q: decayed from its part's start; states: to its part's end; whole: a part's decay.
        q = q * start[:, :, None]
        while q.shape[0] > 1:
            (first_q, second_q), (first, second) = neighbours(q), neighbours(whole)
            (first_state, second_state), (first_y, second_y) = neighbours(states), neighbours(y)
            (first_w, second_w) = neighbours(weights)
            share = second_w[:, :, (second_q.shape[1] - 1).bit_length() + 1, None]
            second_y = second_y + share * dot(second_q, first_state.mT, q.dtype)
            join = lambda a, b: jnp.concatenate([a, b], axis=1)
            y, weights = join(first_y, second_y), join(first_w, second_w)
            q = join(first_q, first[:, None, None] * second_q)
            states = second[:, None, None] * first_state + second_state
            whole = first * second
        return y[0, :time]

    by_head = jax.vmap(one, in_axes=1, out_axes=1)
    y = jax.vmap(by_head)(*(x.astype(wide) for x in (q, k, v, weights, retention)))
    return y.astype(q.dtype)


def segment_weights(connector: jax.Array, keys: jax.Array) -> jax.Array:
    """λ of Log-Linear++: softmax over a token's levels of ⟨u_t, mean of the segment's keys⟩, without 1/√d.

    Args:
      connector: u, [batch, time ≥ 1, heads, key_dim].
      keys: k, like u.

    Returns:
      [batch, time, heads, num_levels(time)], in at least float32; zero at levels that a token does not have.
    """
    wide = jnp.promote_types(connector.dtype, jnp.float32)
    time = connector.shape[1]
    levels, size = num_levels(time), 1 << (time - 1).bit_length()

    def one(u: jax.Array, k: jax.Array) -> jax.Array:
        pad = lambda x: jnp.pad(x, ((0, size - time), (0, 0)))
        u, k = pad(u), pad(k)
        scores = [jnp.sum(u * k, axis=-1)]
        for level in range(1, levels):
            length = 1 << (level - 1)
            means = jnp.mean(k.reshape(-1, length, k.shape[-1]), axis=1)
            before = jnp.concatenate([jnp.zeros_like(means[:1]), means[:-1]])
            rows = u.reshape(-1, length, u.shape[-1])
            scores.append(jnp.einsum("ptd,pd->pt", rows, before, precision=jax.lax.Precision.HIGHEST).reshape(-1))
        return jnp.stack(scores, axis=-1)[:time]

    by_head = jax.vmap(one, in_axes=1, out_axes=1)
    scores = jax.vmap(by_head)(connector.astype(wide), keys.astype(wide))
    return _softmax(scores, jnp.arange(time)[None, :, None, None])


def _softmax(scores: jax.Array, t: jax.Array) -> jax.Array:
    """Over the levels that token t has: 0, and ℓ where bit ℓ − 1 of t is set; scores [..., levels], t [..., 1]."""
    level = jnp.arange(scores.shape[-1])
    has = (level == 0) | (jnp.right_shift(t, jnp.maximum(level - 1, 0)) & 1 == 1)
    return jax.nn.softmax(jnp.where(has, scores, -jnp.inf), axis=-1)


def init_state(batch_size: int, heads: int, key_dim: int, value_dim: int, max_length: int) -> LogLinearState:
    """The state before the first token, for at most `max_length` tokens: a level more for each doubling.

    Raises:
      ValueError: max_length < 1.
    """
    levels = num_levels(max_length)
    return LogLinearState(
        states=jnp.zeros((batch_size, heads, levels, value_dim, key_dim)),
        key_sums=jnp.zeros((batch_size, heads, levels, key_dim)),
        position=jnp.zeros((batch_size,), jnp.int32),
    )


def step(
    state: LogLinearState,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    weights: jax.Array | None = None,
    retention: jax.Array | None = None,
    connector: jax.Array | None = None,
) -> tuple[jax.Array, LogLinearState]:
    """One token of a stream.

    Args:
      state: from `init_state` or the last step.
      q, k: [batch, heads, key_dim]; v: [batch, heads, value_dim].
      weights: λ, [batch, heads, levels]; levels beyond the state's are not used. Or
      connector: u of Log-Linear++, [batch, heads, key_dim], from which λ is formed. One of the two.
      retention: α, [batch, heads]; None: no decay.

    Returns:
      y: [batch, heads, value_dim], NaN beyond the state's max_length, and the next state.

    Raises:
      ValueError: both or none of weights and connector, or too few levels.
    """
    if (weights is None) == (connector is None):
        raise ValueError("log_linear.step: give either weights or connector.")
    levels, t = state.states.shape[2], state.position
    if weights is not None and weights.shape[-1] < levels:
        raise ValueError(f"log_linear.step: weights has {weights.shape[-1]} levels, should have {levels}.")
    wide = state.states.dtype
    q_, k_, v_ = (x.astype(wide) for x in (q, k, v))
    # Token t closes the segments below its lowest set bit n: they become the segment of level n + 1.
    lowest = jnp.where(t > 0, 31 - jax.lax.clz(t & -t), -1)
    level = jnp.arange(levels)
    below, at = level <= lowest[:, None], (level == lowest[:, None] + 1) & (t > 0)[:, None]

    def merge(x: jax.Array) -> jax.Array:
        """[batch, heads, levels, …]: lower levels into one."""
        expand = lambda mask: mask.reshape(mask.shape[0], 1, levels, *(1,) * (x.ndim - 3))
        merged = jnp.sum(jnp.where(expand(below), x, 0.0), axis=2, keepdims=True)
        return jnp.where(expand(at), merged, jnp.where(expand(below), 0.0, x))

    states, sums = merge(state.states), merge(state.key_sums)
    if retention is not None:
        states = retention.astype(wide)[:, :, None, None, None] * states
    states = states.at[:, :, 0].set(v_[..., :, None] * k_[..., None, :])
    sums = sums.at[:, :, 0].set(k_)
    if connector is not None:
        length = jnp.left_shift(1, jnp.maximum(level - 1, 0))
        scores = jnp.einsum("bhd,bhld->bhl", connector.astype(wide), sums, precision=jax.lax.Precision.HIGHEST)
        shares = _softmax(scores / length, t[:, None, None])
    else:
        assert weights is not None
        shares = weights[..., :levels].astype(wide)
    reads = jnp.einsum("bhlvk,bhk->bhlv", states, q_, precision=jax.lax.Precision.HIGHEST)
    y = jnp.einsum("bhl,bhlv->bhv", shares, reads, precision=jax.lax.Precision.HIGHEST)
    beyond = t >= 1 << (levels - 1)
    y = jnp.where(beyond[:, None, None], jnp.nan, y)
    return y.astype(q.dtype), LogLinearState(states, sums, t + 1)
