"""The definition of a large-chunk memory: token by token, with inner gradients from `jax.grad`. Slow on purpose; SEMANTICS 3.6."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from atlasjax.memory import meshes
from atlasjax.memory.fast_weights.reference import read_weights
from atlasjax.memory.fast_weights.state import MemoryParams
from atlasjax.memory.gates import Weights
from atlasjax.memory.large_chunk.init import init_state
from atlasjax.memory.large_chunk.spec import NEWTON_SCHULZ_STEPS, LargeChunkSpec
from atlasjax.memory.large_chunk.state import LargeChunkState
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.tokens import Tokens
from pallas_kernels.newton_schulz import SCHEDULES, newton_schulz


def _length(row: jax.Array) -> jax.Array:
    """‖row‖, with derivative zero at zero."""
    is_zero = jnp.all(row == 0)
    return jnp.where(is_zero, 0.0, jnp.linalg.norm(jnp.where(is_zero, jnp.ones_like(row), row)))


def _end_chunk(rule: LargeChunkSpec, start: Weights, carry: dict[str, Any]) -> dict[str, Any]:
    """The carry after a chunk's last token, from that with the sums over all its tokens. start: M_0 of the head."""
    memory, total = {}, {}
    for name, w in carry["memory"].items():
        g = carry["sums"][name]
        if rule.momentum:
            g = g + carry["decay_sum"] / rule.chunk_size * carry["momentum"][name]
        total[name] = g
        if rule.schedule is not None:
            g = newton_schulz(g, NEWTON_SCHULZ_STEPS, SCHEDULES[rule.schedule])
        memory[name] = w + g
        if rule.row_norm:
            rescale = lambda row, first: row / (_length(row) + 1e-5) * _length(first)
            memory[name] = jax.vmap(rescale)(memory[name], start[name])
    zeros = jax.tree.map(jnp.zeros_like, carry["sums"])
    return carry | {
        "memory": memory, "sums": zeros, "momentum": total, "decay_sum": jnp.zeros_like(carry["decay_sum"]),
        "position": jnp.zeros_like(carry["position"]),
    }  # fmt: skip


def _token(
    rule: LargeChunkSpec, params: MemoryParams, fresh: dict[str, Any], carry: dict[str, Any], token: dict[str, Any]
) -> tuple[dict[str, Any], jax.Array]:
    """One token of one head of one batch element. fresh: the carry before the first token of a segment."""
    choose = lambda condition, a, b: jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)
    if "segment" in token:
        new = (token["segment"] != carry["segment"]) & (carry["segment"] >= 0)
        carry = choose(new, fresh, carry) | {"segment": token["segment"]}
    y = read_weights(rule, params, carry["memory"], token["q"])

    def loss(weights: Weights) -> jax.Array:
        return rule.objective.loss(read_weights(rule, params, weights, token["k"]), token["v"], token["threshold"])

    gradient = jax.grad(loss)(carry["memory"])
    sums = {name: carry["sums"][name] - token["step_size"][i] * gradient[name] for i, name in enumerate(rule.names)}
    carry = carry | {
        "sums": sums, "decay_sum": carry["decay_sum"] + token["momentum_decay"], "position": carry["position"] + 1
    }  # fmt: skip
    ends = carry["position"] == rule.chunk_size
    return choose(ends, _end_chunk(rule, params.weights, carry), carry), y


@functools.partial(jax.jit, static_argnames=("rule",))
def reference_scan(
    rule: LargeChunkSpec, params: MemoryParams, state: LargeChunkState | None, tokens: Tokens
) -> tuple[jax.Array, LargeChunkState]:
    """The recurrence over a sequence. Arguments as in `memory.scan`, already checked."""
    q, k, v, gates, segment_ids = tokens
    dtype = wide_dtype(q.dtype)
    wide = lambda x: x.astype(wide_dtype(x.dtype, dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x
    params = jax.tree.map(wide, params)
    fresh = _carry(init_state(rule, params, batch_size=1))
    before = init_state(rule, params, batch_size=q.shape[0]) if state is None else jax.tree.map(wide, state)
    ones = jnp.ones(q.shape[:3], dtype)
    of_token = {
        "q": wide(q), "k": wide(k), "v": wide(v), "step_size": wide(gates.step_size),
        "momentum_decay": ones if gates.momentum_decay is None else wide(gates.momentum_decay),
        "threshold": ones if gates.threshold is None else wide(gates.threshold),
    }  # fmt: skip
    of_row = {} if segment_ids is None else {"segment": segment_ids}
    per_row = ("position", "segment")
    part = lambda tree, rows: {name: x for name, x in tree.items() if (name in per_row) == rows}

    def head(params, fresh, carry, row, tokens, tokens_of_row):
        body = functools.partial(_token, rule, params, fresh)
        return meshes.scan(body, {**carry, **row}, {**tokens, **tokens_of_row})[::-1]

    one = jax.tree.map(lambda x: x[0], fresh)
    of_heads = {name: None if name in per_row else 0 for name in one}
    over_heads = jax.vmap(head, in_axes=(0, of_heads, 0, None, 1, None), out_axes=(1, 0))
    over_batch = jax.vmap(over_heads, in_axes=(None, None, 0, 0, 0, 0))
    carry = _carry(before)
    y, last = over_batch(params, one, part(carry, False), part(carry, True), of_token, of_row)
    return y.astype(q.dtype), LargeChunkState(
        memory=last["memory"],
        sums=last["sums"],
        momentum=last["momentum"] if rule.momentum else None,
        decay_sum=last["decay_sum"] if rule.momentum else None,
        position=last["position"][:, 0],
        segment=last["segment"][:, 0],
    )


def _carry(state: LargeChunkState) -> dict[str, Any]:
    """A state as what is carried from token to token. Without momentum, G and θ of it are kept too, and have no effect."""
    carry = state._asdict()
    if state.momentum is None:
        heads = next(iter(state.memory.values()))
        carry |= {"momentum": jax.tree.map(jnp.zeros_like, state.sums), "decay_sum": jnp.zeros_like(heads[..., 0, 0])}
    return carry
