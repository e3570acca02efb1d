"""The blocks of one head, one after another, with a backward pass whose memory is linear in the length.

The cache only grows, and finished entries never change (later decay and momentum are scalars, `since_commit`). So the backward pass
does not need a copy of the cache at each block, which differentiating the loop would store: the final cache serves every block,
with later entries masked. A block stores only its carry and its sums over the cache, not the scores.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax.memory import meshes
from atlasjax.memory.gates import Weights
from atlasjax.memory.grid import Tree
from atlasjax.memory.softmax.block import BlockTokens, Carry, Places, Sizes, read_rows, run_block, visible
from atlasjax.memory.softmax.coefficients import Transition
from atlasjax.memory.softmax.spec import SoftmaxSpec
from atlasjax.memory.softmax.sums import Partial, partial_sums
from atlasjax.memory.softmax.tape import Cache

_PHASES = 4  # number of static prefix lengths in which the cache is read: more phases read fewer unwritten entries, compile longer


class Xs(NamedTuple):
    """The loop's inputs for every block, [blocks, …]: tokens, and transitions from the ends of earlier blocks (None: no change)."""

    tokens: BlockTokens
    since: Transition | None


class Indices(NamedTuple):
    """Flags and integers. real, segment: [before + places], for all entries including those before the tape, segment None if there
    is only one. reset: [blocks, chunks], None if never."""

    real: jax.Array
    segment: jax.Array | None
    reset: jax.Array | None


class Span(NamedTuple):
    """The finished entries that blocks first … stop − 1 read: the first `size` entries, or the last ones. Static."""

    first: int
    stop: int
    size: int
    last: bool


def _spans(rule: SoftmaxSpec, sizes: Sizes, finished_before: int) -> list[Span]:
    if rule.cache_window is not None:
        # With a window each block reads as many entries as the first, those right before it.
        return [Span(0, sizes.blocks, finished_before, True)]
    # Shapes must be static, so blocks of one phase read as many entries as the last of them needs, and mask the rest.
    edges = np.unique(np.linspace(0, sizes.blocks, min(sizes.blocks, _PHASES) + 1).round().astype(int))
    return [
        Span(int(i), int(j), finished_before + (int(j) - 1) * sizes.block, False) for i, j in itertools.pairwise(edges)
    ]


def _cut(x: jax.Array, g: jax.Array, sizes: Sizes, span: Span) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, g * sizes.block, span.size) if span.last else x[: span.size]


def _add(x: jax.Array, part: jax.Array, g: jax.Array, sizes: Sizes, span: Span) -> jax.Array:
    if not span.last:
        return x.at[: span.size].add(part)
    return jax.lax.dynamic_update_slice_in_dim(x, _cut(x, g, sizes, span) + part, g * sizes.block, 0)


def _moved(sizes: Sizes, span: Span, cache: Cache, since: Transition | None) -> Cache:
    """Finished entries at a block's start: a, s and ρ advanced from the end of their own block."""
    if since is None:
        return cache
    if span.last:
        each = lambda x: jnp.repeat(x, sizes.block)[x.shape[0] * sizes.block - span.size :]
    else:
        start = span.size - (span.stop - 1) * sizes.block
        each = lambda x: jnp.concatenate([jnp.broadcast_to(x[:1], (start,)), jnp.repeat(x[1 : span.stop], sizes.block)])
    decay, momentum, momentum_decay = jax.tree.map(each, since)
    a = decay[:, None] * cache.coefficients
    if cache.momentum is None:
        return Cache(cache.keys, a, None, decay * cache.decay)
    a = a + momentum[:, None] * cache.momentum
    return Cache(cache.keys, a, momentum_decay[:, None] * cache.momentum, decay * cache.decay)


def _read(
    rule: SoftmaxSpec, sizes: Sizes, span: Span, tokens: BlockTokens, cache: Cache, since: Transition | None,
    indices: Indices, g: jax.Array,
) -> Partial:  # fmt: skip
    """A block's reads of the finished entries before it, with its keys (in the order of `read_rows`) and its queries."""
    c, wide = rule.window, cache.decay.dtype
    rows, read_at = read_rows(rule, sizes)
    keys = tokens.k if len(rows) == tokens.k.shape[0] else tokens.k[rows]
    x = jnp.concatenate([keys, tokens.q]).astype(wide)
    first = indices.real.shape[0] - sizes.blocks * sizes.block - (c - 1) + g * sizes.block  # first of the window
    entry = jnp.arange(span.size) + (g * sizes.block if span.last else 0)
    real = _cut(indices.real, g, sizes, span) & (entry < first)
    if rule.cache_window is None and indices.segment is None:
        sees = real[None]
    else:
        at = first + np.concatenate([read_at, c - 1 + np.arange(sizes.block)])
        segment = read_segment = None
        if indices.segment is not None:
            segment = _cut(indices.segment, g, sizes, span)
            own = jax.lax.dynamic_slice_in_dim(indices.segment, first, c - 1 + sizes.block)
            read_segment = jnp.concatenate([own[rows], own[c - 1 :]])
        sees = visible(rule, at, read_segment, entry, real, segment)
    return partial_sums(rule, x, _moved(sizes, span, cache, since), sees, sizes.dtype)


def _places(rule: SoftmaxSpec, sizes: Sizes, indices: Indices, g: jax.Array) -> Places:
    window = rule.window - 1
    first = indices.real.shape[0] - sizes.blocks * sizes.block - window + g * sizes.block
    cut = lambda x: jax.lax.dynamic_slice_in_dim(x, first, window + sizes.block)
    return Places(
        cut(indices.real),
        None if indices.segment is None else cut(indices.segment),
        None if indices.reset is None else indices.reset[g],
    )


def _in_span(spans: list[Span], g: jax.Array, function: Callable[..., Tree], *args: object) -> Tree:
    """`function(span, *args)` with the span of block g. The rest of a block is the same in all spans, and compiled once."""
    if len(spans) == 1:
        return function(spans[0], *args)
    number = jnp.sum(g >= np.asarray([span.stop for span in spans[:-1]]))
    return jax.lax.switch(number, [functools.partial(function, span) for span in spans], *args)


def _forward(
    rule: SoftmaxSpec, sizes: Sizes, initial: Weights, carry: Carry, cache: Cache, xs: Xs, indices: Indices
) -> tuple[jax.Array, Carry, Cache, tuple[Carry, Partial]]:
    before = cache.decay.shape[0] - sizes.blocks * sizes.block
    spans = _spans(rule, sizes, before)

    def read(span: Span, tokens: BlockTokens, cache: Cache, since: Transition | None, g: jax.Array) -> Partial:
        prefix = jax.tree.map(lambda x: _cut(x, g, sizes, span), cache)
        return _read(rule, sizes, span, tokens, prefix, since, indices, g)

    def body(
        state: tuple[Carry, Cache], x: tuple[Xs, jax.Array]
    ) -> tuple[tuple[Carry, Cache], tuple[jax.Array, Carry, Partial]]:
        (carry, cache), (block, g) = state, x
        part = _in_span(spans, g, read, block.tokens, cache, block.since, g)
        after, done, y = run_block(rule, sizes, initial, carry, part, block.tokens, _places(rule, sizes, indices, g))
        put = lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, before + g * sizes.block, 0)
        # In place, as a loop's carry: the keys are there already and are not written again.
        cache = Cache(cache.keys, *jax.tree.map(put, cache[1:], done[1:]))
        return (after, cache), (y, carry, part)

    (carry, cache), (y, carries, parts) = meshes.scan(body, (carry, cache), (xs, jnp.arange(sizes.blocks)))
    return y, carry, cache, (carries, parts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def run_blocks(
    rule: SoftmaxSpec, sizes: Sizes, initial: Weights, carry: Carry, cache: Cache, xs: Xs, indices: Indices
) -> tuple[jax.Array, Carry, Cache]:
    """All blocks of one head.

    Args:
      rule, sizes: static.
      initial: the weights of a fresh memory.
      carry: the carry before the first block.
      cache: the finished entries before the tape, followed by space for those of the tape, whose keys are already stored.
      xs: inputs by block.
      indices: flags by entry.

    Returns:
      y: [blocks, block, value_dim]; the carry after the last block; the cache, with every entry at the end of its block.
    """
    y, carry, cache, _ = _forward(rule, sizes, initial, carry, cache, xs, indices)
    return y, carry, cache


def _run_forward(rule, sizes, initial, carry, cache, xs, indices):  # type: ignore[no-untyped-def]
    y, carry, cache, kept = _forward(rule, sizes, initial, carry, cache, xs, indices)
    return (y, carry, cache), (initial, cache, xs, indices, kept)


def _run_backward(rule, sizes, saved, cotangents):  # type: ignore[no-untyped-def]
    initial, cache, xs, indices, (carries, parts) = saved
    ct_y, ct_carry, ct_cache = cotangents
    before = cache.decay.shape[0] - sizes.blocks * sizes.block
    add = lambda a, b: jax.tree.map(jnp.add, a, b)
    spans = _spans(rule, sizes, before)

    def unread(
        span: Span, tokens: BlockTokens, since: Transition | None, ct_part: Partial, ct_cache: Cache, g: jax.Array
    ) -> tuple[BlockTokens, Transition | None, Cache]:
        prefix = jax.tree.map(lambda x: _cut(x, g, sizes, span), cache)
        read = lambda tokens, prefix, since: _read(rule, sizes, span, tokens, prefix, since, indices, g)
        _, pull = jax.vjp(read, tokens, prefix, since)
        ct_tokens, ct_prefix, ct_since = pull(ct_part)
        return ct_tokens, ct_since, jax.tree.map(lambda x, part: _add(x, part, g, sizes, span), ct_cache, ct_prefix)

    def body(
        state: tuple[Weights, Carry, Cache], x: tuple[Xs, Carry, Partial, jax.Array, jax.Array]
    ) -> tuple[tuple[Weights, Carry, Cache], Xs]:
        ct_initial, ct_carry, ct_cache = state
        block, carry, part, ct_y, g = x
        run = lambda initial, carry, part, tokens: run_block(
            rule, sizes, initial, carry, part, tokens, _places(rule, sizes, indices, g)
        )
        take = lambda x: jax.lax.dynamic_slice_in_dim(x, before + g * sizes.block, sizes.block)
        # The cotangents of the block's own entries are complete here: only later blocks read them, and these went first.
        ct_done = Cache(ct_cache.keys[:0], *jax.tree.map(take, ct_cache[1:]))
        # Computes the block again; only its carry and its sums over the cache were stored.
        _, pull = jax.vjp(run, initial, carry, part, block.tokens)
        more, ct_carry, ct_part, ct_tokens = pull((ct_carry, ct_done, ct_y))
        read_tokens, ct_since, ct_cache = _in_span(spans, g, unread, block.tokens, block.since, ct_part, ct_cache, g)
        return (add(ct_initial, more), ct_carry, ct_cache), Xs(add(ct_tokens, read_tokens), ct_since)

    state = (jax.tree.map(jnp.zeros_like, initial), ct_carry, ct_cache)
    x = (xs, carries, parts, ct_y, jnp.arange(sizes.blocks))
    (ct_initial, ct_carry, ct_cache), ct_xs = meshes.scan(body, state, x, reverse=True)
    # Only the entries before the tape are inputs. The rest was space that the blocks overwrote.
    ct_cache = Cache(ct_cache.keys, *jax.tree.map(lambda x: x.at[before:].set(0.0), ct_cache[1:]))
    return ct_initial, ct_carry, ct_cache, ct_xs, None


run_blocks.defvjp(_run_forward, _run_backward)
