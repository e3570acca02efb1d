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
from atlasjax.memory.bounds import toward_target
from atlasjax.memory.gates import Weights
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


class _Chunk(NamedTuple):
    """A chunk of a block including its window, E = c − 1 + b entries, and the entries of the block that may precede it.

    Attributes:
      start: its place among the entries of the block, of which `first` is the one after the window.
      k, v, real, segment: of its entries, [E, …]; segment None if there is only one.
      all_k: keys of all entries of the block.
      old: number of earlier ones, static. old_coefficients, old_momentum, old_decay, old_real, old_segment: [old, …].
    """

    start: jax.Array | np.ndarray
    first: jax.Array | np.ndarray
    k: jax.Array
    v: jax.Array
    real: jax.Array
    segment: jax.Array | None
    all_k: jax.Array
    old: int
    old_coefficients: jax.Array
    old_momentum: jax.Array | None
    old_decay: jax.Array
    old_real: jax.Array
    old_segment: jax.Array | None

    @property
    def old_k(self) -> jax.Array:
        return self.all_k[: self.old]

    def sees_old(self, rule: SoftmaxSpec, at: jax.Array | np.ndarray, segment: jax.Array | None) -> jax.Array:
        """Whether reads at some positions see the entries before the chunk, [reads, old]."""
        return visible(rule, at, segment, jnp.arange(self.old), self.old_real, self.old_segment)


def _chunk_of(
    rule: SoftmaxSpec, sizes: Sizes, carry: Carry, k: jax.Array, v: jax.Array, places: Places, n: jax.Array | np.ndarray
) -> _Chunk:
    """Chunk number n. carry: that of `run_block` before the chunk, with places for the block's entries; k, v: of all entries."""
    old, start = rule.window - 1 + sizes.block - sizes.chunk, n * sizes.chunk
    cut = lambda x: jax.lax.dynamic_slice_in_dim(x, start, rule.window - 1 + sizes.chunk)
    first = start + rule.window - 1
    return _Chunk(
        start=start,
        first=first,
        k=cut(k),
        v=cut(v),
        real=cut(places.real),
        segment=None if places.segment is None else cut(places.segment),
        all_k=k,
        old=old,
        old_coefficients=carry.coefficients[:old],
        old_momentum=None if carry.momentum is None else carry.momentum[:old],
        old_decay=carry.decay[:old],
        old_real=places.real[:old] & (jnp.arange(old) < first),
        old_segment=None if places.segment is None else places.segment[:old],
    )


def _hidden(
    rule: SoftmaxSpec, chunk: _Chunk, part: Partial | None, start: Transition, width: int, dtype: jnp.dtype
) -> jax.Array:
    """h of the chunk's keys, [E, width]. part: their sums over the earlier cache. None: gradients do not depend on the memory."""
    if part is None:
        return jnp.zeros((chunk.k.shape[0], width), chunk.k.dtype)
    sees = chunk.sees_old(rule, jnp.full(chunk.k.shape[:1], chunk.first - 1), chunk.segment)
    raw = sums.scores(rule, chunk.k, chunk.old_k, dtype)
    kappa, value, mass = sums.join(rule, part, start.decay, start.momentum, raw, chunk.old_decay[None], sees)
    return sums.divide(value + dot(kappa, chunk.old_coefficients, dtype), mass)


def _hidden_of_queries(
    rule: SoftmaxSpec, chunk: _Chunk, part: Partial, start: Transition, q: jax.Array, coef: Coefficients, left: jax.Array,
    dtype: jnp.dtype,
) -> jax.Array:  # fmt: skip
    """h of the chunk's queries, [b, width]: the earlier cache (`part`), the entries before the chunk, and those of the chunk and
    its window, with what the chunk's own steps add to them (`left`, ∂ℓ/∂h)."""
    (b, _), E, old = q.shape, chunk.k.shape[0], chunk.old
    A, s = coef.decay, coef.momentum
    at = chunk.first + jnp.arange(b)
    segment = None if chunk.segment is None else chunk.segment[E - b :]
    own = visible(rule, at, segment, chunk.start + jnp.arange(E), chunk.real, chunk.segment)
    sees = jnp.concatenate([chunk.sees_old(rule, at, segment), own], axis=1)
    weight = jnp.concatenate([A[:, None] * chunk.old_decay[None], jnp.zeros((b, E - b), A.dtype), coef.entries], axis=1)
    raw = sums.scores(rule, q, jnp.concatenate([chunk.old_k, chunk.k]), dtype)
    decay, momentum = A * start.decay, None
    if s is not None:
        assert start.momentum is not None
        assert start.momentum_decay is not None
        momentum = A * start.momentum + s * start.momentum_decay
    kappa, value, mass = sums.join(rule, part, decay, momentum, raw, weight, sees)
    kappa_old, kappa = kappa[:, :old], kappa[:, old:]
    if old:
        value = value + A[:, None] * dot(kappa_old, chunk.old_coefficients, dtype)
        if s is not None and chunk.old_momentum is not None:
            value = value + s[:, None] * dot(kappa_old, chunk.old_momentum, dtype)
    return sums.divide(value + dot(kappa * coef.gradients, left, dtype), mass)


def _committed(carry: Carry, chunk: _Chunk, coef: Coefficients, left: jax.Array, factors: dict[str, Factors]) -> Carry:
    """The carry after a chunk. carry: that before it, with the weights that its tokens read."""
    put = lambda x, new, at: jax.lax.dynamic_update_slice_in_dim(x, new, at, 0)
    add = lambda x, by: put(
        x, jax.lax.dynamic_slice_in_dim(x, chunk.start, left.shape[0]) + by[:, None] * left, chunk.start
    )
    a = add(moved(carry.coefficients, carry.momentum, coef.end), coef.end_gradients)
    momentum = None
    if carry.momentum is not None:
        assert coef.end_momentum is not None
        assert coef.end.momentum_decay is not None
        momentum = add(coef.end.momentum_decay * carry.momentum, coef.end_momentum)
    rho = put(coef.end.decay * carry.decay, coef.end_entries, chunk.first)
    weights, weights_momentum = write_weights(carry.weights, carry.weights_momentum, factors, coef)
    return Carry(a, momentum, rho, weights, weights_momentum)


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
    dtype, wide = sizes.dtype, carry.decay.dtype
    q, k, v = (x.astype(wide) for x in (tokens.q, tokens.k, tokens.v))
    # Room for the entries of all chunks: their places are static, and a chunk adds to what is there.
    grow = lambda x: jnp.pad(x, ((0, sizes.block), *((0, 0),) * (x.ndim - 1)))
    key_part, query_part = _by_chunk(rule, sizes, part)

    def run_chunk(carry: Carry, xs: _ChunkInputs) -> tuple[Carry, jax.Array]:
        n, q, coef, start, key_part, query_part, reset = xs
        if reset is not None:
            carry = carry._replace(
                weights=jax.tree.map(lambda w, i: jnp.where(reset, i, w), carry.weights, initial),
                weights_momentum=jax.tree.map(lambda s: jnp.where(reset, 0.0, s), carry.weights_momentum),
            )
        chunk = _chunk_of(rule, sizes, carry, k, v, places, n)
        h = _hidden(rule, chunk, key_part, start, carry.coefficients.shape[1], dtype)
        left, factors, out = gradients(rule, carry.weights, h, chunk.k, chunk.v, dtype)
        # Between gradients and reads: the bound needs the gradients, and the reads need the bounded steps.
        coef = with_bound(rule, coef, left, factors, out, chunk.v)
        h = _hidden_of_queries(rule, chunk, query_part, start, q, coef, left, dtype)
        at = coef.decay, coef.momentum, coef.gradients
        y = read_out(rule, h, q, carry.weights, carry.weights_momentum, factors, *at, dtype)
        return _committed(carry, chunk, coef, left, factors), y

    coefficients, momentum, decay = jax.tree.map(grow, (carry.coefficients, carry.momentum, carry.decay))
    local = Carry(coefficients, momentum, decay, carry.weights, carry.weights_momentum)
    stacked = q.reshape(sizes.chunks, sizes.chunk, -1)
    xs = (np.arange(sizes.chunks), stacked, tokens.coefficients, tokens.start, key_part, query_part, places.reset)
    if sizes.chunks == 1:
        local, y = run_chunk(local, jax.tree.map(lambda x: x[0], xs))
    else:
        local, y = meshes.scan(run_chunk, local, xs)
        y = y.reshape(sizes.block, -1)
    entries = (local.coefficients, local.momentum, local.decay)
    done = jax.tree.map(lambda x: x[: sizes.block], entries)
    # The last c − 1 entries: tokens of the next block may still write to them.
    left_open = jax.tree.map(lambda x: x[sizes.block :], entries)
    coefficients, momentum, decay = left_open
    carry = Carry(coefficients, momentum, decay, local.weights, local.weights_momentum)
    return carry, Cache(k[:0], *done), y
