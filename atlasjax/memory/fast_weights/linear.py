"""Linear and delta rules of a matrix memory in exact block-parallel form.

    W_t = W_{t−1} Diag(α_t) + u_t s_tᵀ + v_t k_tᵀ        u_t = rate_t (target_t − W̃_t r_t)

with W̃_t = W_{t−1}, or W_{t−1} Diag(α_t) if the decay comes first. Linear attention and its variants have only the last term. The
delta rule has r = s = φ(k), target = v and rate = η, and no last term. Longhorn's rate is β/(1 + β‖φ(k)‖²). Delta rules with a read
key of their own have s = k and that r. RWKV-7 has r = κ̂, s = a ⊙ κ̂, target = 0 and rate = 1. With A_t = α_1 … α_t and P[t,i] =
α_{i+1} … α_t (both per channel), all u of a block solve one unit lower-triangular system (the WY / UT form; Yang et al. 2024),

    (I + diag(rate) L) U = diag(rate) (target − (Ã ⊙ R) W_0ᵀ − L' V)

    L[t,i] = Σ_d P̃[t,i,d] r_t[d] s_i[d] for i < t,  L' likewise with k_i instead of s_i

where Ã and P̃ are products of the decays up to t − 1 (or t if the decay comes first). The solution is affine in W_0. So the systems
of all blocks are solved in parallel, the recurrence is one product per block, and then all reads are computed in parallel:
U = Ũ − R̃ W_0ᵀ, W_end = W_0 Diag(A_end) + Uᵀ S̃ + Vᵀ K̃. The block length does not affect the result.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from atlasjax.memory import bounds, meshes
from atlasjax.memory.axes.objectives import OwnKeys
from atlasjax.memory.blocks import (
    applied,
    decay_products,
    dot,
    exact,
    neighbours,
    outer,
    product_dtype,
    row_sums,
    scaled_columns,
    scaled_rows,
    spread,
    unit_lower_inverse,
)
from atlasjax.memory.fast_weights.chunk import Slot
from atlasjax.memory.fast_weights.linear_scores import Mask, channel_scores, head_scores
from atlasjax.memory.fast_weights.spec import MemorySpec
from atlasjax.memory.fast_weights.state import MemoryParams
from atlasjax.memory.gates import Weights
from atlasjax.memory.grid import Tree
from atlasjax.memory.products import wide_dtype

# Number of tokens whose blocks are prepared and read together: enough work per operation, but small enough for a CPU's cache. The
# backward pass stores one memory per group.
_GROUP_TOKENS = 256


class Removal(NamedTuple):
    """The term u sᵀ. key r and write s: [m, D]; rate: [m] or [m, value_dim]; target: [m, value_dim], None for zero."""

    key: jax.Array
    write: jax.Array
    rate: jax.Array
    target: jax.Array | None


class Added(NamedTuple):
    """The term v kᵀ: key [m, D], value [m, value_dim]."""

    key: jax.Array
    value: jax.Array


class LinearTokens(NamedTuple):
    """The m tokens of a block of one head, in the notation of the module docstring. query: [m, D]; decay: [m], [m, D] or None."""

    query: jax.Array
    decay: jax.Array | None
    removal: Removal | None
    added: Added | None


class Scored(NamedTuple):
    """Scores of some queries, [m, m], with the keys of u sᵀ and of v kᵀ. None for a term that there is not."""

    written: jax.Array | None
    added: jax.Array | None


class Scores(NamedTuple):
    """Scores of a block: those of its reads, and those of its system, L and L', or None without a removal."""

    read: Scored
    system: Scored | None


class Prepared(NamedTuple):
    """The parts of a block that do not depend on W_0.

    removed: R̃ [m, D], and written: Ũ [m, value_dim], or None. system: (L, rate) for `_substitute`, only for rates per channel.
    write_end: S̃ [m, D] or None. added: Vᵀ K̃ [value_dim, D] or None. decay: A_end [] or [D], or None.
    """

    removed: jax.Array | None
    written: jax.Array | None
    system: tuple[jax.Array, jax.Array] | None
    write_end: jax.Array | None
    added: jax.Array | None
    decay: jax.Array | None


def tokens_of(rule: MemorySpec, params: MemoryParams, slot: Slot) -> LinearTokens:
    """The tokens of a slot of one head, for a rule with `is_linear`."""
    wide = wide_dtype(slot.q.dtype)
    query, key = (rule.features.apply(params.coefficients, x.astype(wide)) for x in (slot.q, slot.k))
    v, decay, step_size = slot.v.astype(wide), slot.retention, slot.step_size
    removal = removal_of(rule, key, step_size, {name: getattr(slot, name) for name in rule.objective.own_keys})
    if removal is None:
        assert step_size is not None
        scaled = v * step_size if step_size.ndim == 2 else scaled_rows(step_size, v)
        return LinearTokens(query, decay, None, Added(key, scaled))
    # `is` and not ==: `removal_of` returns the same array, and then one term has both removal and value.
    if removal.write is key:
        return LinearTokens(query, decay, removal._replace(target=v), None)
    added = Added(key, v if step_size is None else scaled_rows(removal.rate, v))
    return LinearTokens(query, decay, removal, added)


def removal_of(rule: MemorySpec, key: jax.Array, step_size: jax.Array | None, own: OwnKeys) -> Removal | None:
    """The removal by tokens of a rule with `is_linear`, within the rule's bound; None for linear attention.

    Args:
      key: φ(k), [..., D].
      step_size: [...] or [..., value_dim]. None for an objective without step sizes, whose rate is 1.
      own: gates of `Objective.own_keys`.

    Returns:
      A `Removal` without a target, whose `write` is `key` itself if the value is written there too.
    """
    objective, bound = rule.objective, rule.bound
    if objective.gradient_is_value:
        return None
    rate = jnp.ones(key.shape[:-1], key.dtype) if step_size is None else step_size
    if objective.writes_at_own_keys:
        if bound is not None and bound.step is not None:
            own, rate = objective.within(bound.step, key, own, rate)
        return Removal(own["removal_key"], objective.removed_at(key, own), rate, None)
    if rule.optimizer.is_implicit:
        square = row_sums(key * key)
        rate = rate / (1.0 + rate * (square if rate.ndim < key.ndim else square[..., None]))
    if rule.step_bound is not None:
        rate = bounds.capped_delta(rule.step_bound, rate, key)
    return Removal(key, key, rate, None)


def scores_of(rule: MemorySpec, tokens: LinearTokens) -> Scores:
    """All scores of a block together, in few and large products, so that each query and each key is decayed once."""
    queries, masks, keys = [tokens.query], [Mask(strict=False, shift=False)], []
    if tokens.removal is not None:
        queries.append(tokens.removal.key)
        masks.append(Mask(strict=True, shift=not rule.retention.decay_first))
        keys.append(tokens.removal.write)
    if tokens.added is not None:
        keys.append(tokens.added.key)
    if tokens.decay is not None and tokens.decay.ndim == 2:
        scores = channel_scores(queries, keys, tokens.decay, masks)
    else:
        scores = head_scores(queries, keys, tokens.decay, masks)
    by_term = [
        Scored(None if tokens.removal is None else row[0], None if tokens.added is None else row[-1]) for row in scores
    ]
    return Scores(by_term[0], None if tokens.removal is None else by_term[1])


def prepare(rule: MemorySpec, dtype: jnp.dtype, tokens: LinearTokens, scores: Scored | None) -> Prepared:
    """The parts of a block that do not depend on W_0.

    Args:
      dtype: dtype of the inputs of products if there is no system to solve.
      scores: L and L'. None without a removal.
    """
    (start, end), (_, _, removal, pair) = _from_start_and_to_end(tokens.decay), tokens
    last = None if start is None else start[-1]
    key_end = None if pair is None else _times(end, pair.key)
    if removal is None:
        assert pair is not None
        assert key_end is not None
        return Prepared(None, None, None, None, outer(pair.value, key_end, dtype), last)

    before, shift = start, not rule.retention.decay_first
    if start is not None and shift:
        # Ã_t: the error is taken before the token's own decay.
        before = jnp.concatenate([jnp.ones_like(start[:1]), start[:-1]])
    assert scores is not None
    assert scores.written is not None
    right, added = removal.target, None
    if pair is not None and key_end is not None:
        assert scores.added is not None
        given = -exact(scores.added, pair.value)
        right = given if right is None else right + given
        added = outer(pair.value, key_end, key_end.dtype)
    assert right is not None
    removed, lower, write_end = _times(before, removal.key), scores.written, _times(end, removal.write)
    if removal.rate.ndim == 2:
        return Prepared(removed, right, (lower, removal.rate), write_end, added, last)
    # A single token (decoding) has no system to solve.
    inverse = jnp.ones_like(lower) if lower.shape[0] == 1 else unit_lower_inverse(scaled_rows(removal.rate, lower))
    # (I + diag(rate) L)⁻¹ diag(rate), so that both right sides need one product.
    inverse = scaled_columns(removal.rate, inverse)
    return Prepared(exact(inverse, removed), exact(inverse, right), None, write_end, added, last)


def advance(W: jax.Array, block: Prepared) -> tuple[jax.Array, jax.Array | None]:
    """W after the block, and U [m, value_dim] or None, from W [value_dim, D] before it."""
    u = None
    after = _times(block.decay if block.decay is None or block.decay.ndim == 0 else block.decay[None], W)
    if block.removed is not None:
        assert block.written is not None
        assert block.write_end is not None
        u = block.written - applied(block.removed, W, W.dtype)
        # Each channel of the value has a system of its own, and inverses of all would be [value_dim, m, m]; so U is solved for
        # here.
        if block.system is not None:
            u = _substitute(*block.system, u)
        after = after + outer(u, block.write_end, W.dtype)
    if block.added is not None:
        after = after + block.added
    return after, u


def read(dtype: jnp.dtype, tokens: LinearTokens, scores: Scored, W: jax.Array, u: jax.Array | None) -> jax.Array:
    """y of the block's queries, [m, value_dim], from W before the block."""
    y = _read_start(_times(_from_start_and_to_end(tokens.decay)[0], tokens.query), W, dtype)
    if scores.written is not None and u is not None:
        y = y + dot(scores.written, u, u.dtype)
    if scores.added is not None and tokens.added is not None:
        y = y + dot(scores.added, tokens.added.value, dtype)
    return y


def _read_start(query: jax.Array, W: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """query Wᵀ as `applied`. For one 16-bit token a CPU does not round W: it has no such products, and would write a rounded copy
    of every memory, which takes longer than all else that the token does with it."""
    if query.shape[0] > 1 or dtype == W.dtype:
        return applied(query, W, dtype)
    wide = lambda query, W: applied(query.astype(dtype), W, wide_dtype(dtype))
    return jax.lax.platform_dependent(query, W, cpu=wide, default=lambda query, W: applied(query, W, dtype))


def _times(decay: jax.Array | None, x: jax.Array) -> jax.Array:
    """x [m, D] multiplied by decays: [] of all entries, [m] of rows, [1, D] of columns, or [m, D]. None: x."""
    if decay is None:
        return x
    if decay.ndim == 1:
        decay = spread(decay[:, None], x.shape[1], -1)
    elif decay.ndim == 2 and decay.shape[0] == 1:
        decay = spread(decay, x.shape[0], -2)
    return decay * x


def _from_start_and_to_end(decay: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
    """A_t, the products of the decays up to t, and the products of the decays after t, by recursive halving."""
    if decay is None:
        return None, None
    if decay.ndim == 1:
        start, pairwise = decay_products(decay)
        return start, pairwise[-1]
    m = decay.shape[0]
    # Decays of 1 after the last token change no product.
    padded = 1 << (m - 1).bit_length()
    start = jnp.pad(decay, ((0, padded - m), (0, 0)), constant_values=1.0)[:, None]
    end, whole = jnp.ones_like(start), start
    while start.shape[0] > 1:
        (first_start, second_start), (first_end, second_end), (first, second) = map(neighbours, (start, end, whole))
        length = first_start.shape[1]  # of a part, in tokens
        start = jnp.concatenate([first_start, spread(first, length, 1) * second_start], axis=1)
        end = jnp.concatenate([spread(second, length, 1) * first_end, second_end], axis=1)
        whole = first * second
    return start[0, :m], end[0, :m]


def decayed_to_end(key: jax.Array, decay: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Keys [m, D] decayed to the block's end, and the decay of the whole block, None without decays."""
    start, end = _from_start_and_to_end(decay)
    return _times(end, key), None if start is None else start[-1]


def _substitute(lower: jax.Array, rate: jax.Array, right: jax.Array) -> jax.Array:
    """Solves (I + diag(rate_c) L) U_c = diag(rate_c) right_c for each channel c of the value, token by token.

    There is one system per channel. Each row is computed for all channels together, as a product with the rows before it. Blocks
    are short, and their rows are unrolled. lower: [m, m]; rate, right: [m, value_dim].
    """
    rows: list[jax.Array] = []
    for t in range(rate.shape[0]):
        known = right[t] - lower[t, :t] @ jnp.stack(rows) if rows else right[t]
        rows.append(rate[t] * known)
    return jnp.stack(rows)


def linear_scan(
    rule: MemorySpec, dtype: jnp.dtype, params: MemoryParams, memory: Weights, slots: Slot, resets: jax.Array | None
) -> tuple[jax.Array, Weights]:
    """All slots of a call of a rule with `is_linear`.

    Args:
      rule, dtype: static; dtype of the outputs.
      params: in the state's dtype.
      memory: {"W": [batch, heads, value_dim, D]} before the first slot.
      slots: [slots, batch, heads, block, …]. Padding must have no effect (α = 1, η = 0, a = 0, k and v zero).
      resets: [slots, batch], whether a slot begins with a fresh memory. None if none does.

    Returns:
      y [slots, batch, heads, block, value_dim], and the memory after the last slot.
    """
    start = rule.start(params.weights)["W"]

    def prepare_slot(params: MemoryParams, slot: Slot) -> tuple[Prepared, LinearTokens, Scored]:
        tokens = tokens_of(rule, params, slot)
        scores = scores_of(rule, tokens)
        return prepare(rule, product_dtype(dtype), tokens, scores.system), tokens, scores.read

    def read_slot(tokens: LinearTokens, scores: Scored, W: jax.Array, u: jax.Array | None) -> jax.Array:
        return read(product_dtype(dtype), tokens, scores, W, u).astype(dtype)

    def step(
        W: jax.Array, xs: tuple[Prepared, jax.Array | None]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
        block, reset = xs
        if reset is not None:
            W = jnp.where(reset[:, None, None, None], start, W)
        after, u = jax.vmap(jax.vmap(advance))(W, block)
        return after, (W, u)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def group(W: jax.Array, xs: tuple[Slot, jax.Array | None]) -> tuple[jax.Array, jax.Array]:
        slots, resets = xs
        blocks, tokens, scores = over_slots(prepare_slot)(params, slots)
        last, (before, u) = meshes.scan(step, W, (blocks, resets))
        return last, jax.vmap(jax.vmap(jax.vmap(read_slot)))(tokens, scores, before, u)

    W, y = in_groups(group, memory["W"], (slots, resets))
    return y, {"W": W}


def over_slots(function: Callable[..., Tree]) -> Callable[..., Tree]:
    """A function of one head's params and of a slot's arrays, over params [heads, …] and arrays [slots, batch, heads, …]."""

    def mapped(params: MemoryParams, *arrays: object) -> Tree:
        shared = (None, *(0 for _ in arrays))  # rows and slots have the same params
        return jax.vmap(jax.vmap(jax.vmap(function), in_axes=shared), in_axes=shared)(params, *arrays)

    return mapped


_Slots = tuple[Slot, jax.Array | None]  # and whether each begins with a fresh memory


def in_groups(
    group: Callable[[Tree, _Slots], tuple[Tree, jax.Array]], carry: Tree, xs: _Slots
) -> tuple[Tree, jax.Array]:
    """All slots of a call, some at a time: `group` of a carry and some slots returns the carry after them and their y."""
    num_slots, size = xs[0].q.shape[0], xs[0].q.shape[3]
    size = min(max(1, _GROUP_TOKENS // size), num_slots)
    whole = num_slots // size * size
    grouped = jax.tree.map(lambda x: x[:whole].reshape(-1, size, *x.shape[1:]), xs)
    carry, y = meshes.scan(group, carry, grouped)
    y = y.reshape(whole, *y.shape[2:])
    if whole < num_slots:
        carry, rest = group(carry, jax.tree.map(lambda x: x[whole:], xs))
        y = jnp.concatenate([y, rest])
    return carry, y
