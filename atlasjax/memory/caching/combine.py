"""Weighted sums of reads of many memories, without forming weights for each token.

A read here is one without the residual: M(φ(q)) − r(q).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from atlasjax.memory import meshes
from atlasjax.memory.blocks import product_dtype
from atlasjax.memory.fast_weights.chunk import Soup
from atlasjax.memory.gates import Weights
from atlasjax.memory.rule import Params, Rule

_BLOCK = 128  # tokens that read one memory together in `read_selected`


class MixingRule(Protocol):
    """The methods that a `CachedRule` with `mixes_weights` needs of the rule inside it.

    Arguments as in `Rule`; call: the fields of `Tokens`.
    """

    def scan(
        self,
        params: PyTree,
        state: PyTree | None,
        *call: Any,
        lengths: jax.Array | None = None,
        soup: Soup | None = None,
    ) -> tuple[jax.Array, PyTree]: ...

    def step(self, params: PyTree, state: PyTree, *call: Any, soup: Soup | None = None) -> tuple[jax.Array, PyTree]: ...

    def read_mixed(
        self, dtype: jnp.dtype, params: PyTree, weights: Weights, q: jax.Array, gamma: jax.Array
    ) -> jax.Array:
        """Reads of one head, q [tokens, key_dim], from weights [1 + n, …] mixed by gamma [tokens, 1 + n]."""


def mixing(rule: Rule) -> MixingRule:
    """A rule as one whose reads mix weights; for the rule of a `CachedRule` with `mixes_weights`."""
    return rule  # type: ignore[return-value]


def residual(rule: Rule[Params, PyTree], params: Params, q: jax.Array) -> jax.Array | None:
    """`Rule.residual` for [..., heads, tokens, …]."""
    return jax.vmap(rule.residual, in_axes=(0, -3), out_axes=-3)(params, q)


def join(
    rule: Rule,
    params: Params,
    q: jax.Array,
    own_read: jax.Array,
    mine: jax.Array,
    others: jax.Array,
) -> jax.Array:
    """Adds the residual term once to the weighted branches; all [..., heads, tokens, …]."""
    skip = residual(rule, params, q)
    if skip is None:
        return mine[..., None] * own_read + others
    return skip + mine[..., None] * (own_read - skip) + others


def over_heads(rule: Rule, dtype: jnp.dtype) -> Callable[..., jax.Array]:
    """`Rule.read_cached` for [batch, heads, …]."""
    one = functools.partial(rule.read_cached, product_dtype(dtype))
    return jax.vmap(jax.vmap(one), in_axes=(None, 0, 0))


def read_earlier(
    rule: Rule,
    dtype: jnp.dtype,
    params: Params,
    memories: Weights,
    q: jax.Array,
    gamma: jax.Array,
    reach: int,
) -> jax.Array:
    """Every segment s reads the memories of earlier segments: Σ_{i<s} γ_i M^(i)(q), one pair of segments after another.

    Args:
      rule, dtype: static. `dtype` is that of the products' inputs.
      params: every leaf [heads, …].
      memories: [segments, batch, heads, out, in].
      q: [segments, batch, heads, tokens, key_dim].
      gamma: [segments, batch, heads, tokens, segments], zero for memories that are not read.
      reach: static; only the last `reach` memories are read.

    Returns:
      [segments, batch, heads, tokens, value_dim].
    """
    segments = q.shape[0]
    # In numpy: the pairs are static, and the loop has as many steps as there are pairs.
    reader, earlier = np.tril_indices(segments, -1)
    near = reader - earlier <= reach
    reader, earlier = reader[near], earlier[near]
    y = jnp.zeros((*q.shape[:-1], rule.sizes(params).value_dim), q.dtype)
    if not len(reader):
        return y
    run = over_heads(rule, dtype)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def weighed(params, memories, q, s, i, gamma):
        return gamma[..., None] * run(params, jax.tree.map(lambda w: w[i], memories), q[s])

    def pair(y, xs):
        s, i, gamma = xs
        return y.at[s].add(weighed(params, memories, q, s, i, gamma)), None

    return meshes.scan(pair, y, (jnp.asarray(reader), jnp.asarray(earlier), gamma[reader, ..., earlier]))[0]


def read_all(
    rule: Rule,
    dtype: jnp.dtype,
    params: Params,
    memories: Weights,
    q: jax.Array,
    gamma: jax.Array,
) -> jax.Array:
    """Every token reads every memory, one memory after another: Σ_i γ_i M^(i)(q).

    memories: [batch, heads, n, out, in]; q: [batch, heads, tokens, key_dim]; gamma: [batch, heads, tokens, n].
    """
    # The backward pass computes the activations of one memory at a time again, and keeps those of none.
    run = jax.checkpoint(over_heads(rule, dtype), prevent_cse=False)

    def one(y, xs):
        weights, gamma = xs
        return y + gamma[..., None] * run(params, weights, q), None

    first = lambda x, axis: jnp.moveaxis(x, axis, 0)
    y = jnp.zeros((*q.shape[:-1], rule.sizes(params).value_dim), q.dtype)
    return meshes.scan(one, y, (jax.tree.map(lambda w: first(w, 2), memories), first(gamma, -1)))[0]


def read_layer(
    rule: Rule, dtype: jnp.dtype, params: Params, memories: Weights, layer: jax.Array, q: jax.Array, gamma: jax.Array
) -> jax.Array:
    """`read_all` of one layer's memories, where they lie in those of all layers, [layers, batch, heads, n, out, in]."""
    run = over_heads(rule, dtype)

    def one(y, xs):
        i, gamma = xs
        return y + gamma[..., None] * run(params, jax.tree.map(lambda w: w[layer, :, :, i], memories), q), None

    y = jnp.zeros((*q.shape[:-1], rule.sizes(params).value_dim), q.dtype)
    return meshes.scan(one, y, (jnp.arange(gamma.shape[-1]), jnp.moveaxis(gamma, -1, 0)))[0]


def _laid(count: int, size: int, blocks: int, index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The reads of one head in blocks that read one memory each.

    Args:
      count, size, blocks: numbers of memories, of places in a block, and of blocks; static.
      index: [tokens, k], as in `read_selected`.

    Returns:
      The token of each place [blocks · size], the memory of each block, and the place of each read [tokens · k].
    """
    reads, k = index.size, index.shape[1]
    flat = index.reshape(-1)
    # Reads of one memory stand together then, and fill its blocks from the front.
    order = jnp.argsort(flat, stable=True)
    number = jnp.zeros(count + 1, jnp.int32).at[flat].add(1)[:count]
    needed = -(-number // size)
    ends = jnp.cumsum(needed)
    start = jnp.concatenate([jnp.cumsum(number) - number, jnp.zeros(1, jnp.int32)])
    rank = jnp.arange(reads, dtype=jnp.int32) - start[flat[order]]
    first = jnp.concatenate([(ends - needed) * size, jnp.full(1, blocks * size, jnp.int32)])
    target = jnp.where(flat[order] < count, first[flat[order]] + rank, blocks * size)
    place = jnp.zeros(reads, jnp.int32).at[order].set(target.astype(jnp.int32))
    token = jnp.zeros(blocks * size, jnp.int32).at[place].set(jnp.arange(reads, dtype=jnp.int32) // k, mode="drop")
    return token, jnp.minimum(jnp.searchsorted(ends, jnp.arange(blocks), side="right"), count - 1), place


def read_selected(
    rule: Rule,
    dtype: jnp.dtype,
    params: Params,
    memories: Weights,
    q: jax.Array,
    index: jax.Array,
    gamma: jax.Array,
) -> jax.Array:
    """Every token reads the k memories that it selected: Σ_j γ_j M^(index_j)(q).

    The reads are sorted by memory and grouped into blocks of tokens that read the same memory, so the work grows with k and not
    with the number of memories.

    Args:
      rule, dtype, params: as in `read_earlier`.
      memories: [n, batch, heads, out, in].
      q: [batch, heads, tokens, key_dim].
      index: integers [batch, heads, tokens, k]; n stands for no read.
      gamma: [batch, heads, tokens, k].

    Returns:
      [batch, heads, tokens, value_dim].
    """
    count = next(iter(memories.values())).shape[0]
    batch, heads, tokens, k = index.shape
    if not tokens:
        return jnp.zeros((batch, heads, 0, rule.sizes(params).value_dim), q.dtype)
    size = min(_BLOCK, tokens)
    # Each memory may leave one block partly empty, hence one more for each.
    blocks = math.ceil(tokens * k / size) + count

    lay = functools.partial(_laid, count, size, blocks)
    token, which, place = jax.vmap(jax.vmap(lay))(index)
    rows = jnp.take_along_axis(q, token[..., None], axis=2).reshape(batch, heads, blocks, size, -1)
    run = over_heads(rule, dtype)
    by_row = jax.tree.map(lambda w: jnp.moveaxis(w, 0, 2), memories)  # [batch, heads, n, out, in]
    pick = jax.vmap(jax.vmap(lambda w, i: w[i]))  # XLA keeps mapped axes divided over devices

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def block(params, by_row, rows, which):
        return run(params, jax.tree.map(lambda w: pick(w, which), by_row), rows)

    xs = (jnp.moveaxis(rows, 2, 0), jnp.moveaxis(which, 2, 0))
    _, out = meshes.scan(lambda _, x: (None, block(params, by_row, *x)), None, xs)
    out = jnp.moveaxis(out, 0, 2).reshape(batch, heads, blocks * size, -1)
    # Empty reads have no place and get zeros.
    read = jax.vmap(jax.vmap(lambda x, p: x.at[p].get(mode="fill", fill_value=0.0)))(out, place)
    return jnp.einsum("bhtk,bhtkv->bhtv", gamma, read.reshape(batch, heads, tokens, k, -1))


def read_mixed(
    rule: Rule, dtype: jnp.dtype, params: Params, memories: Weights, q: jax.Array, gamma: jax.Array
) -> jax.Array:
    """Reads of a memory soup, with layers mixed for each token. Arguments as in `read_all`; the rule is a `MixingRule`."""
    one = functools.partial(mixing(rule).read_mixed, product_dtype(dtype))
    return jax.vmap(jax.vmap(one), in_axes=(None, 0, 0, 0))(params, memories, q, gamma)
