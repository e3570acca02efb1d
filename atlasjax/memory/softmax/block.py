"""One block of one head: one read of the cache before the block, then its chunks one after another.

Within a block, the earlier cache changes only by decay and momentum. So its sums for all keys and queries of the block are computed
once, at the block's start, and advanced in time with two scalars. Each chunk then only has to sum over the block's own entries.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax.memory import meshes
from atlasjax.memory.blocks import Factors, applied, dot, outer
from atlasjax.memory.gates import Weights
from atlasjax.memory.limits import toward_target
from atlasjax.memory.softmax import sums
from atlasjax.memory.softmax.coefficients import Coefficients, Transition, bounded
from atlasjax.memory.softmax.spec import SoftmaxSpec
from atlasjax.memory.softmax.sums import Partial
from atlasjax.memory.softmax.tape import Cache


class Sizes(NamedTuple):
    """Static sizes of a call: tokens per chunk, chunks per block, number of blocks, and the dtype of products."""

    chunk: int
    chunks: int
    blocks: int
    dtype: jnp.dtype

    @property
    def block(self) -> int:
        return self.chunk * self.chunks


class Carry(NamedTuple):
    """State of one head between blocks: the c − 1 newest entries without their keys, which steps may change, and the weights."""

    coefficients: jax.Array
    momentum: jax.Array | None
    decay: jax.Array
    weights: Weights
    weights_momentum: Weights | None


class BlockTokens(NamedTuple):
    """A block's tokens: q [block, key_dim]; k, v [c − 1 + block, …] including the window before it; coefficients by chunk."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    coefficients: Coefficients
    start: Transition  # [chunks], from the block's start to each chunk's start


class Places(NamedTuple):
    """real and segment: [c − 1 + block], segment None if there is only one; reset: [chunks], whether the memory is reset before
    the chunk, None if never."""

    real: jax.Array
    segment: jax.Array | None
    reset: jax.Array | None


# The chunk's number, q, coefficients and start; the sums over the earlier cache for its keys and queries; whether it resets.
_ChunkInputs = tuple[
    jax.Array | np.ndarray, jax.Array, Coefficients, Transition, Partial | None, Partial, jax.Array | None
]


def visible(
    rule: SoftmaxSpec,
    read_at: jax.Array | np.ndarray,
    read_segment: jax.Array | None,
    entry: jax.Array | np.ndarray,
    real: jax.Array,
    segment: jax.Array | None,
) -> jax.Array:
    """Whether a read sees an entry, [r or 1, n]: it must be real, not later, within the cache's window and of the same segment.

    read_at: [r], position of the last token written; read_segment: [r]; entry: [n], positions; real, segment: [n].
    """
    sees = real[None] & (entry[None] <= read_at[:, None])
    if rule.cache_window is not None:
        sees = sees & (entry[None] > read_at[:, None] - rule.cache_window)
    if segment is not None:
        assert read_segment is not None
        sees = sees & (segment[None] == read_segment[:, None])
    return sees


def read_rows(rule: SoftmaxSpec, sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """The reads of the cache before a block: (token whose key is read, position of the last token written before the read).

    Tokens and positions are counted as in `BlockTokens.k`. Without a cache window all reads of the block see the same earlier
    entries, so every key is read once. With a cache window it is read once for every chunk that takes its gradient.
    """
    c, E = rule.window, rule.window - 1 + sizes.chunk
    if rule.has_constant_gradient:
        return np.zeros(0, int), np.zeros(0, int)
    if rule.cache_window is None:
        tokens = np.arange(c - 1 + sizes.block)
        return tokens, np.full_like(tokens, c - 2)
    tokens = (np.arange(sizes.chunks)[:, None] * sizes.chunk + np.arange(E)).reshape(-1)
    return tokens, np.repeat(np.arange(sizes.chunks) * sizes.chunk + c - 2, E)


def _by_chunk(rule: SoftmaxSpec, sizes: Sizes, part: Partial) -> tuple[Partial | None, Partial]:
    """Splits the rows of a block's reads, [keys + queries], by chunk: [chunks, E, …] and [chunks, b, …]."""
    keys = len(read_rows(rule, sizes)[0])
    stack = lambda x: x.reshape(sizes.chunks, -1, *x.shape[1:])
    queries = jax.tree.map(lambda x: stack(x[keys:]), part)
    if not keys:
        return None, queries
    if rule.window == 1 or rule.cache_window is not None:
        return jax.tree.map(lambda x: stack(x[:keys]), part), queries
    rows = np.arange(sizes.chunks)[:, None] * sizes.chunk + np.arange(rule.window - 1 + sizes.chunk)
    return jax.tree.map(lambda x: x[:keys][rows], part), queries


def gradients(
    rule: SoftmaxSpec, weights: Weights, h: jax.Array, k: jax.Array, v: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, dict[str, Factors], jax.Array]:
    """From h(k) [n, width]: ∂ℓ/∂h of each token, [n, width]; ∇ℓ of every other weight as outer products; M(k)."""

    def total_loss(change: jax.Array, zeros: Weights) -> tuple[jax.Array, tuple[Weights, jax.Array]]:
        inputs: Weights = {}

        def linear(name: str, x: jax.Array) -> jax.Array:
            if name == rule.inner:
                return h + change
            inputs[name] = x
            return applied(x, weights[name], dtype) + zeros[name]

        out = rule.structure.apply(linear, k, k, None)
        return jnp.sum(rule.objective.loss(out, v)), (inputs, out)

    zeros = {name: jnp.zeros((k.shape[0], w.shape[0]), h.dtype) for name, w in weights.items()}
    at = meshes.vary_like((jnp.zeros_like(h), zeros), h, weights, k, v)
    (left_h, left), (inputs, out) = jax.grad(total_loss, argnums=(0, 1), has_aux=True)(*at)
    return left_h, {name: Factors(left[name], inputs[name]) for name in weights}, out


def with_bound(
    rule: SoftmaxSpec, coefficients: Coefficients, left: jax.Array, factors: dict[str, Factors], out: jax.Array, v: jax.Array
) -> Coefficients:  # fmt: skip
    """`coefficients.bounded` from the results of `gradients`."""
    if coefficients.writes is None:
        return coefficients
    square = lambda x: jnp.sum(x * x, axis=-1)
    others = [square(f.left) * square(f.inputs) for f in factors.values()]
    decrease = jnp.maximum(jnp.sum(toward_target(rule.objective, out, v, None), axis=-1), 0.0)
    return bounded(coefficients, decrease, square(left) + rule.chunk_size * sum(others, jnp.zeros_like(decrease)))


def moved(x: jax.Array, s: jax.Array | None, by: Transition) -> jax.Array:
    """A memory x with momentum s, advanced by a transition (scalars)."""
    return by.decay * x if s is None or by.momentum is None else by.decay * x + by.momentum * s


def write_weights(
    weights: Weights, momentum: Weights | None, factors: dict[str, Factors], c: Coefficients
) -> tuple[Weights, Weights | None]:
    """The ordinary weights and their momentum after a chunk."""
    # In the state's dtype also where tokens are bfloat16: what is rounded here stays in the memory, and later steps enlarge it.
    weighed = lambda f, by: outer(f.left * by[:, None], f.inputs, f.left.dtype)
    new = {
        name: moved(w, None if momentum is None else momentum[name], c.end) + weighed(factors[name], c.end_gradients)
        for name, w in weights.items()
    }
    if momentum is None:
        return new, None
    assert c.end.momentum_decay is not None
    assert c.end_momentum is not None
    return new, {n: c.end.momentum_decay * s + weighed(factors[n], c.end_momentum) for n, s in momentum.items()}


def read_out(
    rule: SoftmaxSpec, h: jax.Array, q: jax.Array, weights: Weights, momentum: Weights | None,
    factors: dict[str, Factors], A: jax.Array, s: jax.Array | None, C: jax.Array, dtype: jnp.dtype,
) -> jax.Array:  # fmt: skip
    """y from h(q) [r, width]. The other weights of each read, A W + s S + Σ_i C[:, i] ∇_i with A, s: [r], are never formed."""

    def linear(name: str, x: jax.Array) -> jax.Array:
        if name == rule.inner:
            return h
        out = A[:, None] * applied(x, weights[name], dtype)
        if momentum is not None and s is not None:
            out = out + s[:, None] * applied(x, momentum[name], dtype)
        left, inputs = factors[name]
        return out + dot(applied(x, inputs, dtype) * C, left, dtype)

    return rule.structure.apply(linear, q, q, None)


def run_block(
    rule: SoftmaxSpec, sizes: Sizes, initial: Weights, carry: Carry, part: Partial, tokens: BlockTokens, places: Places
) -> tuple[Carry, Cache, jax.Array]:
    """One block of one head.

    Args:
      rule, sizes: static.
      initial: the weights of a fresh memory.
      carry: the carry before the block.
      part: sums over the entries before those of `carry`. Rows are those of `read_rows`, followed by the queries.
      tokens, places: those of the block.

    Returns:
      The carry after the block; the entries that no later step changes, without their keys; y [block, value_dim].
    """
    c, b, dtype = rule.window, sizes.chunk, sizes.dtype
    E, old = (
        c - 1 + b,
        c - 1 + sizes.block - b,
    )  # entries of a chunk including its window; entries that may precede a chunk
    wide = carry.decay.dtype
    q, k, v = (x.astype(wide) for x in (tokens.q, tokens.k, tokens.v))
    grow = lambda x: jnp.pad(x, ((0, sizes.block), *((0, 0),) * (x.ndim - 1)))
    key_part, query_part = _by_chunk(rule, sizes, part)
    entry = jnp.arange(c - 1 + sizes.block)

    def chunk(carry: Carry, xs: _ChunkInputs) -> tuple[Carry, jax.Array]:
        n, q, coef, start, key_part, query_part, reset = xs
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, n * b, E)
        put = lambda x, new, at: jax.lax.dynamic_update_slice_in_dim(x, new, at, 0)
        weights, weights_momentum = carry.weights, carry.weights_momentum
        if reset is not None:
            weights = jax.tree.map(lambda w, i: jnp.where(reset, i, w), weights, initial)
            weights_momentum = jax.tree.map(lambda s: jnp.where(reset, 0.0, s), weights_momentum)
        k_chunk, v_chunk, first = cut(k), cut(v), n * b + c - 1  # first: the chunk's first entry
        segment = None if places.segment is None else cut(places.segment)
        old_segment = None if places.segment is None else places.segment[:old]
        old_real = places.real[:old] & (entry[:old] < first)
        a_old, rho_old = carry.coefficients[:old], carry.decay[:old]

        if key_part is None:  # the gradient does not depend on the memory
            h = jnp.zeros((E, carry.coefficients.shape[1]), wide)
        else:
            sees = visible(rule, jnp.full((E,), first - 1), segment, entry[:old], old_real, old_segment)
            kappa, value, mass = sums.join(
                rule,
                key_part,
                start.decay,
                start.momentum,
                sums.scores(rule, k_chunk, k[:old], dtype),
                rho_old[None],
                sees,
            )
            h = sums.divide(value + dot(kappa, a_old, dtype), mass)
        left, factors, out = gradients(rule, weights, h, k_chunk, v_chunk, dtype)
        coef = with_bound(rule, coef, left, factors, out, v_chunk)

        # Reads: the entries before the chunk, then those of the chunk and its window, including what this chunk's steps add.
        A, s = coef.decay, coef.momentum
        at = first + jnp.arange(b)
        own_segment = None if segment is None else segment[c - 1 :]
        sees = jnp.concatenate(
            [
                visible(rule, at, own_segment, entry[:old], old_real, old_segment),
                visible(rule, at, own_segment, n * b + jnp.arange(E), cut(places.real), segment),
            ],
            axis=1,
        )
        weight = jnp.concatenate([A[:, None] * rho_old[None], jnp.zeros((b, c - 1), wide), coef.entries], axis=1)
        raw = sums.scores(rule, q, jnp.concatenate([k[:old], k_chunk]), dtype)
        decay, momentum = A * start.decay, None
        if s is not None:
            assert start.momentum is not None
            assert start.momentum_decay is not None
            momentum = A * start.momentum + s * start.momentum_decay
        kappa, value, mass = sums.join(rule, query_part, decay, momentum, raw, weight, sees)
        kappa_old, kappa = kappa[:, :old], kappa[:, old:]
        if old:
            value = value + A[:, None] * dot(kappa_old, a_old, dtype)
            if s is not None and carry.momentum is not None:
                value = value + s[:, None] * dot(kappa_old, carry.momentum[:old], dtype)
        h = sums.divide(value + dot(kappa * coef.gradients, left, dtype), mass)
        y = read_out(rule, h, q, weights, weights_momentum, factors, A, s, coef.gradients, dtype)

        # Commit.
        a = moved(carry.coefficients, carry.momentum, coef.end)
        a = put(a, cut(a) + coef.end_gradients[:, None] * left, n * b)
        momentum = None
        if carry.momentum is not None:
            assert coef.end_momentum is not None
            assert coef.end.momentum_decay is not None
            momentum = coef.end.momentum_decay * carry.momentum
            momentum = put(momentum, cut(momentum) + coef.end_momentum[:, None] * left, n * b)
        rho = put(coef.end.decay * carry.decay, coef.end_entries, first)
        weights, weights_momentum = write_weights(weights, weights_momentum, factors, coef)
        return Carry(a, momentum, rho, weights, weights_momentum), y

    local = carry._replace(
        coefficients=grow(carry.coefficients),
        momentum=None if carry.momentum is None else grow(carry.momentum),
        decay=grow(carry.decay),
    )
    stacked = q.reshape(sizes.chunks, b, -1)
    xs = (np.arange(sizes.chunks), stacked, tokens.coefficients, tokens.start, key_part, query_part, places.reset)
    if sizes.chunks == 1:
        local, y = chunk(local, jax.tree.map(lambda x: x[0], xs))
    else:
        local, y = meshes.scan(chunk, local, xs)
        y = y.reshape(sizes.block, -1)
    done = lambda x: None if x is None else x[: sizes.block]
    left_open = lambda x: None if x is None else x[sizes.block :]
    finished = Cache(k[:0], local.coefficients[: sizes.block], done(local.momentum), local.decay[: sizes.block])
    carry = local._replace(
        coefficients=local.coefficients[sizes.block :],
        momentum=left_open(local.momentum),
        decay=local.decay[sizes.block :],
    )
    return carry, finished, y
