"""The definition of a hierarchical memory: token by token, with P as a matrix. Slow on purpose; SEMANTICS 4.9."""

from typing import TypedDict

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from atlasjax.memory import meshes
from atlasjax.memory.caching.state import in_segment
from atlasjax.memory.grid import widened
from atlasjax.memory.hierarchical.init import init_state
from atlasjax.memory.hierarchical.spec import HierarchicalSpec
from atlasjax.memory.hierarchical.state import HierarchicalParams, HierarchicalState
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.tokens import Tokens


class _Carry(TypedDict):
    """Between tokens of one row: all memories, the global one first, P, and the place in shard and document."""

    memories: tuple[PyTree, ...]
    projection: jax.Array
    position: jax.Array
    document: jax.Array


def reference_scan(
    rule: HierarchicalSpec, params: HierarchicalParams, state: HierarchicalState | None, tokens: Tokens
) -> tuple[jax.Array, HierarchicalState]:
    """The recurrence over a sequence. Arguments as in `memory.scan`, already checked."""
    q, _, v, _, ids = tokens
    (batch, time, heads, key_dim), dtype = q.shape, wide_dtype(q.dtype)
    params = widened(params, dtype)
    tokens = widened(tokens._replace(segment_ids=None), dtype)
    state = widened(init_state(rule, params, batch_size=batch) if state is None else state, dtype)
    documents = jnp.broadcast_to(state.segment[:, None], (batch, time)) if ids is None else ids.astype(jnp.int32)
    fresh = init_state(rule, params, batch_size=1)
    fresh_memories = (fresh.global_memory, *fresh.local_memories)
    all_params = (params.global_memory, *params.local_memories)
    when = lambda condition, a, b: jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)

    def token(carry: _Carry, xs: tuple[Tokens, jax.Array]) -> tuple[_Carry, jax.Array]:
        one, document = xs
        new = (carry["document"] >= 0) & (document != carry["document"])
        restarts = new | (carry["position"] == rule.restart)
        projection = jnp.where(restarts, 0.0, carry["projection"])
        square = jnp.sum(one.k**2, axis=-1)[:, None, None]
        outer = one.k[:, :, None] * one.k[:, None, :]
        projection = projection + jnp.where(square > 0, outer / jnp.where(square > 0, square, 1.0), 0.0)
        local_q = jnp.einsum("hij,hj->hi", projection, one.q, precision="highest") if rule.projected else one.q
        gates = rule.split_gates(one.gates, key_dim, v.shape[-1])
        y, after = jnp.zeros_like(one.v), []
        for i, member in enumerate(rule.members):
            memory = when(restarts if i else new, fresh_memories[i], carry["memories"][i])
            own = one._replace(q=local_q if i else one.q, gates=gates[i])
            own_y, memory = member.reference(all_params[i], memory, *jax.tree.map(lambda x: x[None, None], own))
            y = y + own_y[0, 0]
            after.append(memory)
        position = jnp.where(restarts, 1, carry["position"] + 1)
        return {"memories": tuple(after), "projection": projection, "position": position, "document": document}, y

    def row(start: HierarchicalState, tokens: Tokens, documents: jax.Array) -> tuple[jax.Array, _Carry]:
        memories = jax.tree.map(lambda x: x[None], (start.global_memory, *start.local_memories))
        projection = jnp.zeros((heads, key_dim, key_dim), dtype) if start.projection is None else start.projection
        first: _Carry = {
            "memories": memories,
            "projection": projection,
            "position": start.position,
            "document": start.segment,
        }
        last, y = meshes.scan(token, first, (tokens, documents))
        return y, last

    y, last = jax.vmap(row)(state, tokens, documents)
    global_memory, *local_memories = jax.tree.map(lambda x: x[:, 0], last["memories"])
    if ids is not None:
        global_memory = in_segment(global_memory, documents[:, -1])
    after = HierarchicalState(
        global_memory,
        tuple(local_memories),
        last["projection"] if rule.projected else None,
        last["position"],
        last["document"],
    )
    return y.astype(q.dtype), after
