"""The definition of Memory Caching: token by token, with every memory kept and every soup formed. Slow on purpose; SEMANTICS 4."""

from typing import TypedDict

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from atlasjax.memory import meshes
from atlasjax.memory.caching.init import fresh_memory
from atlasjax.memory.caching.spec import CachedSpec
from atlasjax.memory.caching.state import CachedTokens
from atlasjax.memory.gates import Weights
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.rule import Params


def _gates(
    rule: CachedSpec[Params], scores: jax.Array, own: jax.Array, visible: jax.Array, blend: jax.Array | None
) -> jax.Array:
    """γ of one token and head, [1 + n], with the token's own memory first."""
    gates = _unblended(rule, scores, own, visible)
    if blend is None:
        return gates
    alone = jnp.zeros_like(gates).at[0].set(1.0)
    return (1 - blend) * alone + blend * gates


def _unblended(rule: CachedSpec[Params], scores: jax.Array, own: jax.Array, visible: jax.Array) -> jax.Array:
    every = jnp.concatenate([own[None], scores])
    read = jnp.concatenate([jnp.ones(1, bool), visible])
    if rule.aggregation == "residual":
        return jnp.where(read, 1.0, 0.0)
    if rule.aggregation == "ssc":
        # Stable, so that ties go to the older memory, as in `gates.select`.
        order = jnp.argsort(jnp.where(visible, -scores, jnp.inf), stable=True)
        rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
        read = jnp.concatenate([jnp.ones(1, bool), visible & (rank < rule.top_k)])
    if rule.gate == "ones":
        return jnp.where(read, 1.0, 0.0)
    if rule.gate == "softmax":
        return jax.nn.softmax(jnp.where(read, every, -jnp.inf))
    return jnp.where(read, jax.nn.sigmoid(every) if rule.gate == "sigmoid" else every, 0.0)


def _read(
    rule: CachedSpec[Params], params: Params, memories: dict, gamma: jax.Array, x: jax.Array, own_read: jax.Array
) -> jax.Array:
    """One token of one head: memories [1 + n, …], the token's own first; gamma [1 + n], x [key_dim], own_read M_t(x)."""
    one = rule.rule
    if rule.aggregation == "soup":
        return one.reference_read(params, jax.tree.map(lambda w: jnp.tensordot(gamma, w, 1), memories), x)
    skip = one.residual(params, x)
    skip = jnp.zeros_like(own_read) if skip is None else skip
    cached = jax.tree.map(lambda w: w[1:], memories)
    others = jax.vmap(lambda w: one.reference_read(params, w, x) - skip)(cached)
    return skip + gamma[0] * (own_read - skip) + jnp.tensordot(gamma[1:], others, 1)


class _Carry(TypedDict):
    """Between tokens of one row. The cache has a place for every segment. Places `first` to `last` − 1 are of this document."""

    online: PyTree
    thetas: Weights
    keys: jax.Array
    key_sum: jax.Array
    position: jax.Array
    first: jax.Array
    last: jax.Array
    document: jax.Array


def reference_cached(
    rule: CachedSpec[Params], params: Params, tokens: CachedTokens, segment_ids: jax.Array | None = None
) -> jax.Array:
    """y of a call from a fresh memory, [batch, time, heads, value_dim]. Tokens as in `parallel_scan`."""
    dtype = wide_dtype(tokens.tokens.q.dtype)
    wide = lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    batch, time, heads, key_dim = tokens.tokens.q.shape
    params, tokens = jax.tree.map(wide, (params, tokens))
    fresh = jax.tree.map(wide, fresh_memory(rule, params, 1))
    ids = jnp.zeros((batch, time), jnp.int32) if segment_ids is None else segment_ids
    most = time // rule.segment_size + 1
    carry: _Carry = {
        "online": fresh,
        "thetas": {name: jnp.zeros((most, *w.shape[1:]), dtype) for name, w in rule.rule.cached_weights(fresh).items()},
        "keys": jnp.zeros((most, heads, key_dim), dtype),
        "key_sum": jnp.zeros((heads, key_dim), dtype),
        "position": jnp.zeros((), jnp.int32),
        "first": jnp.zeros((), jnp.int32),
        "last": jnp.zeros((), jnp.int32),
        "document": jnp.full((), -1, jnp.int32),
    }

    def token(carry: _Carry, xs: tuple[CachedTokens, jax.Array]) -> tuple[_Carry, jax.Array]:
        """One token of one row."""
        token, document = xs
        c = _before_token(rule, fresh, carry, document)
        one = jax.tree.map(lambda x: x[None, None], token.tokens)
        own_read, c["online"] = rule.rule.reference(params, c["online"], *one)
        c["key_sum"] = c["key_sum"] + token.tokens.k
        return c, _reads(rule, params, c, token, own_read[0, 0])

    return jax.vmap(lambda tokens, ids: meshes.scan(token, carry, (tokens, ids))[1])(tokens, ids)


def _before_token(rule: CachedSpec[Params], fresh: PyTree, carry: _Carry, document: jax.Array) -> _Carry:
    """Where a segment is full, its memory moves to the cache; where a document begins, what came before is left behind."""
    c = carry.copy()
    begins = (document != c["document"]) & (c["document"] >= 0)
    # A document may end in the middle of a segment, whose memory nobody reads. So it does not move.
    full = (c["position"] == rule.segment_size) & ~begins
    done = rule.rule.cached_weights(c["online"])
    if rule.stop_gradient:
        done = jax.lax.stop_gradient(done)
    put = lambda old, new: jnp.where(full, old.at[c["last"]].set(new), old)
    c["thetas"] = {name: put(old, done[name][0]) for name, old in c["thetas"].items()}
    c["keys"] = put(c["keys"], _pool(rule, c["key_sum"], c["position"]))
    c["last"] = c["last"] + full
    c["first"] = jnp.where(begins, c["last"], c["first"])
    anew = begins | full if rule.start == "fresh" else begins
    c["online"] = jax.tree.map(lambda x, y: jnp.where(anew, x, y), fresh, c["online"])
    c["key_sum"] = jnp.where(begins | full, 0.0, c["key_sum"])
    c["position"] = jnp.where(begins | full, 0, c["position"]) + 1
    c["document"] = document
    return c


def _reads(rule: CachedSpec[Params], params: Params, c: _Carry, token: CachedTokens, own_read: jax.Array) -> jax.Array:
    """y of one token, [heads, value_dim], after its write. own_read: [heads, value_dim], of the online memory."""
    most = len(c["keys"])
    number = jnp.arange(most)
    visible = (number >= c["first"]) & (number < c["last"])
    if rule.capacity is not None:
        visible &= number >= c["last"] - rule.capacity
    own = rule.rule.cached_weights(c["online"])
    together = {name: jnp.concatenate([own[name], c["thetas"][name]]) for name in own}  # [1 + most, heads, out, in]
    pooled = jnp.concatenate([_pool(rule, c["key_sum"], c["position"])[None], c["keys"]])

    def head(
        params: Params, memories: dict, pooled: jax.Array, q: jax.Array, u: jax.Array | None, blend: jax.Array | None,
        own_read: jax.Array,
    ) -> jax.Array:  # fmt: skip
        if u is None:
            scores = jnp.zeros(1 + most, q.dtype)
        elif rule.connector == "age":
            age = jnp.concatenate([jnp.zeros(1, int), jnp.clip(c["last"] - number, 0, u.size - 1)])
            scores = u[age]
        else:
            scores = pooled @ u
        gamma = _gates(rule, scores[1:], scores[0], visible, blend)
        return _read(rule, params, memories, gamma, q, own_read)

    return jax.vmap(head, in_axes=(0, 1, 1, 0, 0, 0, 0))(
        params, together, pooled, token.tokens.q, token.connector, token.blend, own_read
    )


def _pool(rule: CachedSpec[Params], total: jax.Array, count: jax.Array) -> jax.Array:
    return total / jnp.maximum(count, 1) if rule.pooling == "mean" else total
