"""Log-linear attention over whole sequences, by merging adjacent segments."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlasjax.memory import grid
from atlasjax.memory.blocks import decay_products, dot, exact, neighbours
from atlasjax.memory.check import check_ids
from atlasjax.memory.products import wide_dtype
from atlasjax.mixers.log_linear.check import check_segment_weights, check_whole
from atlasjax.mixers.log_linear.levels import has_level, level_of, num_levels, softmax

_BLOCK = 16  # tokens whose pairwise scores are formed; a power of two


class _Layout(NamedTuple):
    """A layout of packed segments. Each starts at a multiple of its own length rounded up to a power of two, so merges align.

    Attributes:
      size: number of places, a power of two < 4 time; static.
      place: place of each token, [batch, time].
      position: position of each token in its segment, [batch, time].
    """

    size: int
    place: jax.Array
    position: jax.Array

    def lay(self, x: jax.Array, fill: float = 0.0) -> jax.Array:
        """[batch, time, …] → [batch, size, …]."""
        return grid.lay(x, self.size, self.place, fill)

    def gather(self, x: jax.Array) -> jax.Array:
        """The inverse of `lay`."""
        return grid.pick(x, self.place.shape[1], self.place)


def _layout(segment_ids: jax.Array) -> _Layout:
    """Places the segments in order of rounded length, the longest first, so that each starts at a multiple of its own."""
    time = segment_ids.shape[1]
    t = jnp.arange(time)[None]
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    segment = jnp.cumsum(starts, axis=1) - 1
    lengths = jax.vmap(lambda segment: jnp.zeros(time, jnp.int32).at[segment].add(1))(segment)
    # The next power of two, by the number of leading zeros: no float, so no rounding of large lengths.
    rounded = jnp.where(lengths > 0, jnp.left_shift(1, 32 - jax.lax.clz(jnp.maximum(lengths - 1, 0))), 0)
    # Longest first: the sum of longer powers of two is a multiple of each shorter one, so no gaps are needed.
    order = jnp.argsort(-rounded, axis=1)
    ordered = jnp.take_along_axis(rounded, order, axis=1)
    begin = grid.lay(jnp.cumsum(ordered, axis=1) - ordered, time, order)
    position = t - jax.lax.cummax(jnp.where(starts, t, 0), axis=1)
    # A length n is rounded up to at most 2n − 1.
    size = 1 << (2 * time - 2).bit_length()
    return _Layout(size, jnp.take_along_axis(begin, segment, axis=1) + position, position)


def attention(
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time heads key_dim"],
    v: Float[Array, "batch time heads value_dim"],
    weights: Float[Array, "batch time heads levels"],
    retention: Float[Array, "batch time heads"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
) -> Float[Array, "batch time heads value_dim"]:
    """Log-linear attention over whole sequences.

    Args:
      q, k: [batch, time ≥ 1, heads, key_dim], floating point.
      v: [batch, time, heads, value_dim].
      weights: λ, [batch, time, heads, levels] with at least `num_levels(time)` levels.
      retention: α ∈ [0, 1], [batch, time, heads]. None means no decay.
      segment_ids: integers [batch, time] for packed documents. Positions and states are reset where the id changes.

    Returns:
      [batch, time, heads, value_dim], in q's dtype.

    Raises:
      TypeError, ValueError: invalid arguments.
    """
    where = "log_linear.attention"
    check_whole(where, q, k, v, weights, retention)
    if segment_ids is not None:
        check_ids(segment_ids, q.shape[:2], where)
    return _whole(q, k, v, weights, retention, segment_ids)


@jax.jit
def _whole(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    weights: jax.Array,
    retention: jax.Array | None,
    segment_ids: jax.Array | None,
) -> jax.Array:
    if segment_ids is not None:
        layout = _layout(segment_ids)
        # Tokens before the segment are at levels that the token does not have.
        reached = has_level(jnp.arange(weights.shape[-1])[None, None, None], layout.position[..., None, None])
        own = layout.lay(jnp.where(reached, weights, 0.0))
        more = num_levels(layout.size) - own.shape[-1]
        own = jnp.pad(own, ((0, 0),) * 3 + ((0, max(more, 0)),))
        decay = None if retention is None else layout.lay(retention, 1.0)
        return layout.gather(_whole(layout.lay(q), layout.lay(k), layout.lay(v), own, decay, None))
    wide = wide_dtype(q.dtype)
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
        level = level_of(jnp.arange(block)[:, None], jnp.arange(block)[None])
        shares = jnp.take_along_axis(weights, jnp.broadcast_to(level, (q.shape[0], block, block)), axis=2)
        y = dot(exact(q, k.mT) * pairwise * shares, v, q.dtype)
        states = dot((v * pairwise[:, -1, :, None]).mT, k, q.dtype)  # [parts, value_dim, key_dim]
        whole = start[:, -1]
        # q is decayed from its part's start, states to their part's end; `whole` is the decay over a part.
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


def segment_weights(
    connector: Float[Array, "batch time heads key_dim"],
    keys: Float[Array, "batch time heads key_dim"],
    segment_ids: Int[Array, "batch time"] | None = None,
) -> Float[Array, "batch time heads levels"]:
    """λ of Log-Linear++: softmax of ⟨u_t, mean of the segment's keys⟩ over a token's levels, without 1/√d.

    Args:
      connector: u, [batch, time ≥ 1, heads, key_dim].
      keys: k, like u.
      segment_ids: as in `attention`.

    Returns:
      [batch, time, heads, num_levels(time)], at least float32. Zero at levels that a token does not have.

    Raises:
      TypeError, ValueError: invalid arguments.
    """
    where = "log_linear.segment_weights"
    check_segment_weights(where, connector, keys)
    if segment_ids is not None:
        check_ids(segment_ids, connector.shape[:2], where)
    return _segment_weights(connector, keys, segment_ids)


@jax.jit
def _segment_weights(connector: jax.Array, keys: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    time = connector.shape[1]
    if segment_ids is not None:
        layout = _layout(segment_ids)
        scores = layout.gather(_segment_scores(layout.lay(connector), layout.lay(keys)))[..., : num_levels(time)]
        return softmax(scores, layout.position[:, :, None, None])
    return softmax(_segment_scores(connector, keys), jnp.arange(time)[None, :, None, None])


def _segment_scores(connector: jax.Array, keys: jax.Array) -> jax.Array:
    """⟨u_t, mean of the keys of the segment before t's own⟩ for each level, [batch, time, heads, num_levels(time)]."""
    wide = wide_dtype(connector.dtype)
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
    return jax.vmap(by_head)(connector.astype(wide), keys.astype(wide))
