"""Some tokens of one chunk: their reads and what they write, as a few large products; and the write at the chunk's end."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from atlasjax.memory.blocks import applied, outer
from atlasjax.memory.fast_weights.chunk import gradient_factors
from atlasjax.memory.fast_weights.newton_schulz import orthogonalized
from atlasjax.memory.fast_weights.state import MemoryParams
from atlasjax.memory.gates import Weights
from atlasjax.memory.large_chunk.spec import LargeChunkSpec

EPSILON = 1e-5  # added to the length of a row, as published


class Piece(NamedTuple):
    """Tokens of one chunk, [batch, n, heads, …]. Zeros are padding: their step size writes nothing."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    step_size: jax.Array
    momentum_decay: jax.Array | None
    threshold: jax.Array | None


class Written(NamedTuple):
    """The writes of a chunk's tokens so far: G, name → [batch, heads, out, in], and the sum of θ [batch, heads] or None."""

    sums: Weights
    decay_sum: jax.Array | None


def read_head(
    rule: LargeChunkSpec, params: MemoryParams, weights: Weights, q: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """M(q) of one head: q [n, key_dim] → [n, value_dim]. dtype: of the products' inputs."""
    skip = q if rule.structure.residual else None
    return rule.structure.apply(lambda name, h: applied(h, weights[name], dtype), q, skip, params.norm)


def run_piece(
    rule: LargeChunkSpec, dtype: jnp.dtype, params: MemoryParams, memory: Weights, piece: Piece
) -> tuple[jax.Array, Written]:
    """y [batch, n, heads, value_dim], and what these tokens write.

    params: at least float32. memory: M_{t'}, [batch, heads, out, in]. dtype: of the products' inputs.
    """
    wide = next(iter(memory.values())).dtype

    def head(params: MemoryParams, weights: Weights, piece: Piece) -> tuple[jax.Array, Written]:
        q, k, v = (x.astype(wide) for x in piece[:3])
        y = read_head(rule, params, weights, q, dtype)
        factors, _, _ = gradient_factors(rule, params, weights, k, v, piece.threshold, dtype)
        sums = {}
        for i, name in enumerate(rule.names):
            left, inputs = factors[name]
            # The sum over tokens is inside the product: no gradient of a single token is formed.
            sums[name] = outer(-piece.step_size[:, i : i + 1] * left, inputs, dtype)
        return y, Written(sums, None if piece.momentum_decay is None else jnp.sum(piece.momentum_decay))

    by_head = jax.vmap(head, in_axes=(0, 0, 1), out_axes=(1, 0))
    return jax.vmap(by_head, in_axes=(None, 0, 0))(params, memory, piece)


def add(a: Written, b: Written) -> Written:
    return jax.tree.map(jnp.add, a, b)


def write(
    rule: LargeChunkSpec, start: Weights, memory: Weights, momentum: Weights | None, written: Written
) -> tuple[Weights, Weights | None]:
    """The memory after a whole chunk, and its G, of which the next chunk takes a part.

    start: M_0, [heads, out, in]. memory, momentum, written: [batch, heads, …].
    """
    total = written.sums
    if rule.momentum:
        assert momentum is not None
        assert written.decay_sum is not None
        theta = (written.decay_sum / rule.chunk_size)[..., None, None]
        # One θ for the whole chunk, the mean of its tokens', because the momentum takes part in one write only.
        total = {name: g + theta * momentum[name] for name, g in total.items()}
    triples, after = rule.triples, {}
    for name, g in total.items():
        after[name] = memory[name] + (g if triples is None else orthogonalized(g, triples))
        # Rows keep the lengths of M_0, so the memory cannot grow whatever is written.
        if rule.row_norm:
            lengths = row_lengths(after[name])
            after[name] = after[name] / (lengths + EPSILON) * row_lengths(start[name])[None]
    return after, total if rule.momentum else None


def row_lengths(w: jax.Array) -> jax.Array:
    """The lengths of the rows of matrices [..., out, in] → [..., out, 1]. A row of zeros has derivative zero, not NaN."""
    square = jnp.sum(w * w, axis=-1, keepdims=True)
    nonzero = square > 0
    return jnp.where(nonzero, jnp.sqrt(jnp.where(nonzero, square, 1.0)), 0.0)
