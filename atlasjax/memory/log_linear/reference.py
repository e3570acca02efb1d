"""The definition of a log-linear memory: token by token, with every level written from its first segment. Slow on purpose;
SEMANTICS 4.8."""

from typing import TypedDict

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from atlasjax.memory import meshes
from atlasjax.memory.log_linear.init import fresh_memory
from atlasjax.memory.log_linear.spec import LogLinearSpec
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.rule import Params
from atlasjax.memory.tokens import Tokens


class _Carry(TypedDict):
    """Between tokens of one row: the memory of its segment, those of each span, and its place in its document."""

    own: PyTree
    before: list[PyTree]
    now: list[PyTree]
    position: jax.Array
    document: jax.Array


def reference_outputs(
    rule: LogLinearSpec[Params],
    params: Params,
    tokens: Tokens,
) -> jax.Array:
    """y of a call from a fresh memory, [batch, time, heads, value_dim], at least float32."""
    dtype = wide_dtype(tokens.q.dtype)
    wide = lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    batch, time = tokens.q.shape[:2]
    ids = jnp.zeros((batch, time), jnp.int32) if tokens.segment_ids is None else tokens.segment_ids
    params, tokens = jax.tree.map(wide, (params, tokens._replace(segment_ids=None)))
    fresh = jax.tree.map(wide, fresh_memory(rule, params, 1))
    spans = [rule.segment_size << j for j in range(rule.count_levels(time))]
    when = lambda condition, a, b: jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)

    def token(carry: _Carry, xs: tuple[Tokens, jax.Array]) -> tuple[_Carry, jax.Array]:
        """One token of one row. For each span, `now` is the memory of the current 2^j segments, `before` that of the last."""
        token, document = xs
        q, connector = token.q, token.gates.connector
        position = jnp.where(document == carry["document"], carry["position"], 0)
        inner = token._replace(gates=token.gates._replace(connector=None))
        one = jax.tree.map(lambda x: x[None, None], inner)
        own = when(position % rule.segment_size == 0, fresh, carry["own"])
        own_read, own = rule.rule.reference(params, own, *one)
        before, now = [], []
        for span, was_before, was_now in zip(spans, carry["before"], carry["now"], strict=True):
            begins = position % span == 0
            before.append(when(begins, was_now, was_before))
            now.append(rule.rule.reference(params, when(begins, fresh, was_now), *one)[1])
        assert connector is not None
        weights = jax.nn.softplus(connector)  # [heads, 1 + levels]
        skip = jax.vmap(rule.rule.residual)(params, q[:, None])
        skip = jnp.zeros_like(own_read[0, 0]) if skip is None else skip[:, 0]
        y = skip + weights[:, :1] * (own_read[0, 0] - skip)
        for j, (span, memory) in enumerate(zip(spans, before, strict=True)):
            memory = jax.tree.map(lambda w: w[0], rule.rule.cached_weights(memory))
            read = jax.vmap(rule.rule.reference_read)(params, memory, q) - skip
            reads = position // span % 2 == 1  # bit j of the segment's number
            y = y + jnp.where(reads, weights[:, 1 + j, None] * read, 0.0)
        carry = {"own": own, "before": before, "now": now, "position": position + 1, "document": document}
        return carry, y

    start: _Carry = {
        "own": fresh,
        "before": [fresh] * len(spans),
        "now": [fresh] * len(spans),
        "position": jnp.zeros((), jnp.int32),
        "document": jnp.full((), -1, jnp.int32),
    }
    return jax.vmap(lambda tokens, ids: meshes.scan(token, start, (tokens, ids))[1])(tokens, ids)
