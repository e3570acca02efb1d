"""Coefficients that depend only on the gates: memories as combinations of the previous memory, its momentum and inner gradients.

Within a chunk that starts with memory M and momentum S, and has gradients ∇_i of E = c − 1 + b tokens,

    M_t = A_t M + s_t S + Σ_i C[t,i] ∇_i        ρ_i(t) = A_t ρ_i, and T_α[t,i] for the chunk's own entries

(see `atlasjax.memory.blocks`). Products of decays are computed by multiplication, so values and derivatives are exact at 0.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from atlasjax.memory import meshes
from atlasjax.memory.blocks import decay_products, divisible, window_matrix
from atlasjax.memory.bounds import HORIZON, within_horizon
from atlasjax.memory.softmax.spec import SoftmaxSpec


class Transition(NamedTuple):
    """(M, S) ↦ (decay M + momentum S, momentum_decay S). The last two fields are None without momentum. Any shape."""

    decay: jax.Array
    momentum: jax.Array | None
    momentum_decay: jax.Array | None


class Writes(NamedTuple):
    """The parts of the coefficients of a chunk's gradients, for a rule whose steps are bounded.

    Attributes:
      steps: η_t γ_{t,j}, [b, E].
      limit: step / H, [b], where H is `bounds.HORIZON` with momentum and 1 without.
      momentum: T_θ, [b, b], None without momentum.
      commit: 1 if the chunk is committed, otherwise 0.
    """

    steps: jax.Array
    limit: jax.Array
    momentum: jax.Array | None
    commit: jax.Array


class Coefficients(NamedTuple):
    """The coefficients of one chunk.

    Attributes:
      decay: A_t, [b].
      momentum: s_t, [b], None without momentum.
      gradients: C, [b, E].
      entries: T_α, [b, b].
      end: the transition over the whole chunk, scalars; the identity if the chunk is not committed.
      end_gradients: [E], weight of each gradient in the memory at the chunk's end; end_momentum: [E], its weight in the momentum.
      end_entries: [b], ρ of the chunk's entries at its end. The last three are zero if the chunk is not committed.
      writes: for a rule with bounded steps, otherwise None. Then `gradients`, `end_gradients` and `end_momentum` are those of the
        steps without their bound, until `bounded`.
    """

    decay: jax.Array
    momentum: jax.Array | None
    gradients: jax.Array
    entries: jax.Array
    end: Transition
    end_gradients: jax.Array
    end_momentum: jax.Array | None
    end_entries: jax.Array
    writes: Writes | None


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def coefficients(
    rule: SoftmaxSpec,
    retention: jax.Array,
    step_size: jax.Array,
    momentum_decay: jax.Array,
    window_weights: jax.Array,
    counts: jax.Array,
    real: jax.Array,
    commit: jax.Array,
) -> Coefficients:
    """The coefficients of one chunk of one head.

    Args:
      rule: the rule.
      retention, step_size, momentum_decay: gates, [b]; window_weights: [b, c].
      counts: [b, E], whether a token's window may contain a gradient: it must be real and of the token's segment.
      real: [b], whether the token exists.
      commit: [], whether the chunk changes the memory. An unfinished chunk is read, but not committed.
    """
    b = step_size.shape[0]
    # A window that reaches back into another segment, or before the first token, has no gradient there.
    D = jnp.where(counts, -step_size[:, None] * window_matrix(window_weights), 0.0)
    beta = s = pairwise = None
    step_bound = rule.step_bound if rule.is_bounded else None
    steps = -D
    if rule.optimizer.has_momentum:
        if step_bound is not None:
            momentum_decay, step_bound = within_horizon(HORIZON, momentum_decay), step_bound / HORIZON
        beta, pairwise = decay_products(momentum_decay)
        D = _product(pairwise, D)
    if rule.retention.gate is None:
        A, between = jnp.ones_like(step_size), jnp.tril(jnp.ones((b, b), step_size.dtype))
    else:
        A, between = decay_products(retention)
    between = jnp.where(real, between, 0.0)  # padding must not add S again
    C = _product(between, D)
    if beta is not None:
        s = _product(between, beta)
    # An unfinished chunk is read with all its coefficients, and passes the memory on unchanged.
    last = lambda x, otherwise: jnp.where(commit, x[-1], otherwise)
    end, end_momentum = Transition(last(A, 1.0), None, None), None
    if beta is not None:
        end, end_momentum = Transition(last(A, 1.0), last(s, 0.0), last(beta, 1.0)), last(D, 0.0)
    writes = None
    if step_bound is not None:
        writes = Writes(steps, jnp.full_like(step_size, step_bound), pairwise, commit.astype(steps.dtype))
    return Coefficients(A, s, C, between, end, last(C, 0.0), end_momentum, last(between, 0.0), writes)


def bounded(coefficients: Coefficients, decrease: jax.Array, square: jax.Array) -> Coefficients:
    """The coefficients with the bounded steps of `SoftmaxRule.step_bound`. Unchanged if they have no bound.

    decrease, square: a_j and n_j of the chunk's tokens and of the window before it, [E].
    """
    writes = coefficients.writes
    if writes is None:
        return coefficients
    decreases = _product(writes.steps, decrease)
    most = jnp.sum(writes.steps, axis=1) * _product(writes.steps, square)
    valid = divisible(most)
    share = jnp.where(valid, jnp.minimum(1.0, writes.limit * decreases / jnp.where(valid, most, 1.0)), 1.0)
    D, end_momentum = -share[:, None] * writes.steps, None
    if writes.momentum is not None:
        D = _product(writes.momentum, D)
        end_momentum = writes.commit * D[-1]
    C = _product(coefficients.entries, D)
    return coefficients._replace(
        gradients=C, end_gradients=writes.commit * C[-1], end_momentum=end_momentum, writes=None
    )


def compose(second: Transition, first: Transition) -> Transition:
    """The transition `first` followed by `second`."""
    decay = second.decay * first.decay
    if first.momentum is None or second.momentum is None or second.momentum_decay is None:
        return Transition(decay, None, None)
    assert first.momentum_decay is not None
    momentum = second.decay * first.momentum + second.momentum * first.momentum_decay
    return Transition(decay, momentum, second.momentum_decay * first.momentum_decay)


def identity_like(x: Transition) -> Transition:
    zeros = None if x.momentum is None else jnp.zeros_like(x.momentum)
    ones = None if x.momentum_decay is None else jnp.ones_like(x.momentum_decay)
    return Transition(jnp.ones_like(x.decay), zeros, ones)


def before_each(parts: Transition) -> tuple[Transition, Transition]:
    """From transitions of consecutive parts, [n]: those from the beginning to each part's start, [n], and the total one, []."""
    start = identity_like(jax.tree.map(lambda x: x[0], parts))
    whole, starts = meshes.scan(lambda sofar, part: (compose(part, sofar), sofar), start, parts)
    return starts, whole


def after_each(parts: Transition) -> Transition:
    """From transitions of consecutive parts, [n]: those from the beginning of part 0 and from each part's end to the end of the
    last part, [n + 1]."""
    end = identity_like(jax.tree.map(lambda x: x[0], parts))
    whole, after = meshes.scan(lambda later, part: (compose(later, part), later), end, parts, reverse=True)
    return jax.tree.map(lambda w, x: jnp.concatenate([w[None], x]), whole, after)


def since_commit(parts: Transition, columns: int | None) -> Transition:
    """Transitions from the end of an earlier part to the start of each part.

    Args:
      parts: transitions of consecutive parts, [n].
      columns: None returns [n, n + 1], where column 0 stands for everything before part 0 and column m + 1 for part m (the identity
        for m + 1 > row). Otherwise returns only the last `columns` parts before each, in order, [n, columns]; columns before
        part 0 are parts without effect.
    """
    n = parts.decay.shape[0]
    one = identity_like(jax.tree.map(lambda x: x[:1], parts))
    wide = n + 1 if columns is None else columns
    fresh = jax.tree.map(lambda x: jnp.broadcast_to(x, (wide,)), one)

    def body(row: Transition, xs: tuple[Transition, jax.Array]) -> tuple[Transition, Transition]:
        part, i = xs
        moved = compose(part, row)
        if columns is None:
            return jax.tree.map(lambda new, old: jnp.where(jnp.arange(wide) <= i, new, old), moved, row), row
        return jax.tree.map(lambda new, first: jnp.concatenate([new[1:], first]), moved, one), row

    return meshes.scan(body, fresh, (parts, jnp.arange(n)))[1]
