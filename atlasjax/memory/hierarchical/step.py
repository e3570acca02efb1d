"""A hierarchical memory for one token, and read without a write."""

import functools

import jax
import jax.numpy as jnp

from atlasjax.memory.grid import choose
from atlasjax.memory.hierarchical import projection
from atlasjax.memory.hierarchical.init import restarted
from atlasjax.memory.hierarchical.spec import HierarchicalSpec
from atlasjax.memory.hierarchical.state import HierarchicalParams, HierarchicalState
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.tokens import Tokens


@functools.partial(jax.jit, static_argnames=("rule",), inline=True)
def xla_step(
    rule: HierarchicalSpec, params: HierarchicalParams, state: HierarchicalState, tokens: Tokens
) -> tuple[jax.Array, HierarchicalState]:
    """`Rule.step`."""
    q, k, v, gates, _ = tokens
    dtype, wide = q.dtype, wide_dtype(q.dtype)
    own_gates = rule.split_gates(gates, q.shape[-1], v.shape[-1])
    # A restart waits for the token after it, so that `read` at a shard's end still finds the shard's memories.
    begins = state.position == rule.restart
    memories = choose(begins, restarted(rule, params, state), state.local_memories)
    y, global_memory = rule.global_rule.step(params.global_memory, state.global_memory, q, k, v, own_gates[0])
    summed = state.projection
    if summed is not None:
        q, summed = projection.project_token(choose(begins, jnp.zeros_like(summed), summed), q, k)
    y, after = y.astype(wide), []
    for one, own, memory, gate in zip(rule.local_rules, params.local_memories, memories, own_gates[1:], strict=True):
        local_y, memory = one.step(own, memory, q, k, v, gate)
        y = y + local_y.astype(wide)
        after.append(memory)
    position = jnp.where(begins, 1, state.position + 1)
    return y.astype(dtype), HierarchicalState(global_memory, tuple(after), summed, position, state.segment)


@functools.partial(jax.jit, static_argnames=("rule",), inline=True)
def read_state(rule: HierarchicalSpec, params: HierarchicalParams, state: HierarchicalState, q: jax.Array) -> jax.Array:
    """`Rule.read`: a read as by the last token, with P after it."""
    dtype, wide = q.dtype, wide_dtype(q.dtype)
    y = rule.global_rule.read(params.global_memory, state.global_memory, q).astype(wide)
    if state.projection is not None:
        q = projection.read(state.projection, q)
    for one, own, memory in zip(rule.local_rules, params.local_memories, state.local_memories, strict=True):
        y = y + one.read(own, memory, q).astype(wide)
    return y.astype(dtype)
