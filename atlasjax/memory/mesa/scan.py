"""The engine of mesa memories: a sequence in chunks, one token, and reads without a write.

A chunk of tokens adds outer products to H and G. So the sums at the start of every chunk come from a short loop over chunks, and
all reads follow from them in parallel: the solution x_t of `solve`, and

    y_t = G_t x_t = a_t G_0 x_t + Σ_{i≤t} P[t,i] β_i (k_i · x_t) v_i

Where a packed segment begins, the decay is 0, so that a_t and P[t,i] are 0 across it, and W_0 Diag(λ) is added with the decays
since then. Sums and solves are at least float32, in full precision: by default a TPU rounds the factors of a product to bfloat16.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from atlasjax.memory import grid, meshes
from atlasjax.memory.blocks import applied, decay_products, exact
from atlasjax.memory.gates import Weights
from atlasjax.memory.mesa.init import init_state, ridge_of, start_sums
from atlasjax.memory.mesa.solve import solve
from atlasjax.memory.mesa.spec import MesaSpec
from atlasjax.memory.mesa.state import MesaParams, MesaState
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.tokens import Tokens

# Tokens of a chunk, and of the chunks that are read together. They never change a result. "exact" forms a matrix for each of the
# latter.
_CHUNK = {"conjugate_gradient": 64, "exact": 16}
_TOGETHER = {"conjugate_gradient": 512, "exact": 16}
_HIGHEST = jax.lax.Precision.HIGHEST


class _Chunk(NamedTuple):
    """The tokens of a chunk of one head, [m, …]. weight: β. begins: 1 where a segment starts, else 0."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    decay: jax.Array
    weight: jax.Array
    begins: jax.Array


class _Sums(NamedTuple):
    """H and G of one head before a chunk."""

    keys: jax.Array
    values: jax.Array


class _Shares(NamedTuple):
    """Shares in H_t and G_t of a chunk's tokens: a_t of the sums before it, [m], P β of its own tokens, [m, m], and the share of
    W_0 Diag(λ), [m]."""

    before: jax.Array
    own: jax.Array
    fresh: jax.Array


def _shares(chunk: _Chunk) -> _Shares:
    # A segment's first token forgets all sums, as a decay of zero does; W_0 then comes back as `fresh`.
    continued = chunk.decay * (1.0 - chunk.begins)
    before, pairwise = decay_products(continued)
    return _Shares(before, pairwise * chunk.weight[None], exact(pairwise, chunk.decay * chunk.begins))


def _advance(start: jax.Array, sums: _Sums, chunk: _Chunk) -> _Sums:
    """The sums after a chunk. start: W_0 Diag(λ)."""
    shares = _shares(chunk)
    last, scaled = shares.before[-1], shares.own[-1][:, None] * chunk.k
    return _Sums(
        last * sums.keys + exact(scaled.T, chunk.k),
        last * sums.values + shares.fresh[-1] * start + exact(chunk.v.T, scaled),
    )


def _read(rule: MesaSpec, ridge: jax.Array, start: jax.Array, sums: _Sums, chunk: _Chunk) -> jax.Array:
    """y of the tokens of a chunk of one head."""
    shares, k = _shares(chunk), chunk.k
    scores = lambda x: shares.own * applied(x, k, k.dtype, _HIGHEST)
    # H_t x without H_t: the part before the chunk is one matrix for all tokens, the chunk's own is a sum over its keys.
    image = lambda x: applied(shares.before[:, None] * x, sums.keys, k.dtype, _HIGHEST) + exact(scores(x), k)

    def form() -> jax.Array:
        own = jnp.einsum("ti,ia,ib->tab", shares.own, k, k, precision=_HIGHEST)
        return shares.before[:, None, None] * sums.keys[None] + own + jnp.diag(ridge)[None]

    x = solve(rule, lambda p: image(p) + ridge[None] * p, form, chunk.q)
    y = applied(shares.before[:, None] * x, sums.values, k.dtype, _HIGHEST) + exact(scores(x), chunk.v)
    return y + applied(shares.fresh[:, None] * x, start, k.dtype, _HIGHEST)


def _chunks(tokens: Tokens, begins: jax.Array, lengths: jax.Array | None, size: int, dtype: jnp.dtype) -> _Chunk:
    """All tokens as [chunks, batch, heads, size, …]. Padding neither decays nor writes."""
    q, k, v, gates, _ = tokens
    alpha, beta, begins = gates.retention, gates.step_size, jnp.broadcast_to(begins[..., None], q.shape[:3])
    assert alpha is not None
    assert beta is not None
    if lengths is not None:
        real = (jnp.arange(q.shape[1]) < lengths[:, None])[..., None]
        alpha, beta, begins = jnp.where(real, alpha, 1.0), jnp.where(real, beta, 0.0), real & begins
    count = -(-q.shape[1] // size)
    lay = lambda x, fill=0.0: jnp.moveaxis(grid.lay_chunks(x.astype(dtype), count, size, fill=fill), 3, 2)
    return _Chunk(lay(q), lay(k), lay(v), lay(alpha, 1.0), lay(beta), lay(begins))


@functools.partial(jax.jit, static_argnames=("rule", "max_segments"))
def xla_scan(
    rule: MesaSpec,
    params: MesaParams,
    state: MesaState | None,
    tokens: Tokens,
    max_segments: int | None = None,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, MesaState]:
    """`Rule.scan`. Any number of segments fits: `max_segments` has no effect."""
    batch, time = tokens.q.shape[:2]
    dtype, ids = wide_dtype(tokens.q.dtype), tokens.segment_ids
    state = init_state(rule, params, batch_size=batch, dtype=dtype) if state is None else grid.widened(state, dtype)
    begins, segment = jnp.zeros((batch, time), bool), state.segment
    if ids is not None:
        # A state without an id is continued by the first segment, whatever its id.
        before = jnp.where(segment < 0, ids[:, 0], segment)
        begins, segment = ids != jnp.concatenate([before[:, None], ids[:, :-1]], axis=1), ids[:, -1]
    size = min(_CHUNK[rule.solver], time)
    chunks = _chunks(tokens, begins, lengths, size, dtype)
    ridge, start = ridge_of(rule, params, dtype), start_sums(rule, params, dtype)
    advance = jax.vmap(jax.vmap(_advance), in_axes=(None, 0, 0))

    def following(sums: _Sums, chunk: _Chunk) -> tuple[_Sums, _Sums]:
        return advance(start, sums, chunk), sums

    last, sums = meshes.scan(following, _Sums(state.key_sums, state.value_sums), chunks)
    read = jax.vmap(jax.vmap(functools.partial(_read, rule)), in_axes=(None, None, 0, 0))
    # All chunks at once would hold their directions and residuals at the same time.
    together = max(1, _TOGETHER[rule.solver] // size)
    y = jax.lax.map(lambda xs: read(ridge, start, *xs), (sums, chunks), batch_size=together)
    y = grid.pick_chunks(jnp.moveaxis(y, 2, 3), time)
    return y.astype(tokens.q.dtype), MesaState(*last, segment)


# Inlined into the program of a traced caller. A scan is not: every gradient outside `jit` would compile its transposed loop again.
@functools.partial(jax.jit, static_argnames=("rule",), inline=True)
def xla_step(rule: MesaSpec, params: MesaParams, state: MesaState, tokens: Tokens) -> tuple[jax.Array, MesaState]:
    """`Rule.step`."""
    dtype = wide_dtype(tokens.q.dtype)
    state = grid.widened(state, dtype)
    k, v = tokens.k.astype(dtype), tokens.v.astype(dtype)
    alpha, beta = tokens.gates.retention, tokens.gates.step_size
    assert alpha is not None
    assert beta is not None
    decay, scaled = alpha.astype(dtype)[..., None, None], beta.astype(dtype)[..., None] * k
    after = state._replace(
        key_sums=decay * state.key_sums + scaled[..., :, None] * k[..., None, :],
        value_sums=decay * state.value_sums + v[..., :, None] * scaled[..., None, :],
    )
    return read_state(rule, params, after, tokens.q[:, None])[:, 0], after


@functools.partial(jax.jit, static_argnames=("rule",), inline=True)
def read_state(rule: MesaSpec, params: MesaParams, state: MesaState, q: jax.Array) -> jax.Array:
    """`Rule.read`."""
    dtype = wide_dtype(q.dtype)
    sums, x = grid.widened(_Sums(state.key_sums, state.value_sums), dtype), jnp.swapaxes(q.astype(dtype), 1, 2)
    read = jax.vmap(jax.vmap(functools.partial(read_sums, rule)), in_axes=(None, 0, 0))
    return jnp.swapaxes(read(ridge_of(rule, params, dtype), sums, x), 1, 2).astype(q.dtype)


def read_sums(rule: MesaSpec, ridge: jax.Array, sums: _Sums, q: jax.Array) -> jax.Array:
    """The read of one head, [tokens, value_dim], by queries [tokens, key_dim] of one memory."""
    image = lambda p: applied(p, sums.keys, p.dtype, _HIGHEST) + ridge[None] * p
    x = solve(rule, image, lambda: (sums.keys + jnp.diag(ridge))[None], q)
    return applied(x, sums.values, x.dtype, _HIGHEST)


def read_cached(rule: MesaSpec, dtype: jnp.dtype, params: MesaParams, weights: Weights, q: jax.Array) -> jax.Array:
    """`Rule.read_cached`."""
    wide = wide_dtype(dtype, q.dtype)
    sums = grid.widened(_Sums(weights["key_sums"], weights["value_sums"]), wide)
    return read_sums(rule, ridge_of(rule, params, wide), sums, q.astype(wide))
