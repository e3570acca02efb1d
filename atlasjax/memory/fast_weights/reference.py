"""The definition: the memory recurrence token by token, with inner gradients from `jax.grad`.

Slow and simple on purpose. Every engine, kernel, cache and sharded run is tested against it. SEMANTICS section 1.
"""

import functools

import jax
import jax.numpy as jnp

from atlasjax.memory import bounds, meshes
from atlasjax.memory.axes.objectives import OwnKeys
from atlasjax.memory.blocks import capped
from atlasjax.memory.fast_weights.init import init_state
from atlasjax.memory.fast_weights.spec import MemorySpec
from atlasjax.memory.fast_weights.state import MemoryParams, MemoryState
from atlasjax.memory.part_checks import PartsWithFeatures
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.tokens import Tokens


def read_one(rule: MemorySpec, params: MemoryParams, stored: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """M(φ(x)) of one head: x [key_dim] → [value_dim]. `stored` is the memory as stored in a state."""
    return read_weights(rule, params, rule.weights(stored), x)


def read_weights(
    rule: PartsWithFeatures, params: MemoryParams, weights: dict[str, jax.Array], x: jax.Array
) -> jax.Array:
    """M(φ(x)) of one head, from the memory's weights."""
    features = rule.features.apply(params.coefficients, x)
    skip = rule.features.degree_one(params.coefficients, x) if rule.structure.residual else None
    return rule.structure.apply(lambda name, h: weights[name] @ h, features, skip, params.norm)


def _gradient(
    rule: MemorySpec, params: MemoryParams, weights: dict, own: OwnKeys, keys: jax.Array, values: jax.Array,
    thresholds: jax.Array, gamma: jax.Array,
) -> dict:  # fmt: skip
    """g_t: the gradient of the window's losses, weighted by γ, at the memory `weights`."""
    reads = lambda weights: lambda x: read_weights(rule, params, weights, x)
    # Not differentiated: what delta keys remove is read at the memory, but is no variable of the loss.
    constant = reads(weights)

    def loss(weights: dict, k: jax.Array, v: jax.Array, threshold: jax.Array) -> jax.Array:
        return rule.limited_objective.token_loss(reads(weights), constant, k, v, threshold, own)

    gradients = jax.vmap(jax.grad(loss), (None, 0, 0, 0))(weights, keys, values, thresholds)
    return jax.tree.map(lambda x: jnp.tensordot(gamma, x, 1), gradients)


def _bounded(
    rule: MemorySpec, params: MemoryParams, before: dict, S: dict, origin: dict, g: dict, eta: jax.Array,
    theta: jax.Array, keys: jax.Array, values: jax.Array, thresholds: jax.Array, gamma: jax.Array,
) -> jax.Array:  # fmt: skip
    """η'_t from the step size η_t, see `bounds`. before: M_{t−1} and origin: M_{t'}, both as stored in a state."""
    assert rule.step_bound is not None
    outputs = jax.vmap(lambda k: read_one(rule, params, origin, k))(keys)
    decreases = bounds.toward_target(rule.limited_objective, outputs, values, thresholds)  # [c, value_dim]
    empty = bounds.toward_target(rule.limited_objective, jnp.zeros_like(outputs), values, thresholds)
    total = lambda x: jnp.sum(gamma * jnp.maximum(jnp.sum(x, axis=-1), 0.0))
    decrease, scale = total(decreases), bounds.softened(total(decreases), total(empty))

    if rule.optimizer.per_channel:
        (gradient,) = g.values()
        eta = capped(rule.step_bound, eta, decreases[0], jnp.sum(gradient * gradient, axis=-1))
    else:
        eta = capped(rule.step_bound / rule.horizon, eta, decrease, rule.change_along(origin, g))
    if rule.optimizer.has_momentum:
        before = jax.tree.map(lambda x, s: x + rule.horizon * theta * s, before, S)
    change = jax.tree.map(jnp.subtract, rule.weights(before), rule.weights(origin))
    return eta * bounds.left_over(sum((jnp.sum(g[name] * change[name]) for name in g), jnp.zeros((), eta.dtype)), scale)


def _minimizer(rule: MemorySpec, params: MemoryParams, W: jax.Array, token: dict) -> jax.Array:
    """argmin_M ½‖M − W‖² + ½ Σ_c β_c (M φ(k) − v)_c², from one linear system with the matrix I + β_c k kᵀ for each row c."""
    k, beta = rule.features.apply(params.coefficients, token["k"]), token["step_size"]

    def row(w: jax.Array, v: jax.Array, beta: jax.Array) -> jax.Array:
        return jnp.linalg.solve(jnp.eye(k.size, dtype=k.dtype) + beta * jnp.outer(k, k), w + beta * v * k)

    return jax.vmap(row)(W, token["v"], jnp.broadcast_to(beta, W.shape[:1]))


def _token(rule: MemorySpec, params: MemoryParams, initial: dict, carry: dict, token: dict) -> tuple[dict, jax.Array]:
    """One token of one head of one batch element."""
    carry = dict(carry)
    if "segment" in token:
        carry |= _restarted(rule, initial, carry, token["segment"])

    starts_chunk = carry["position"] == 0
    for name, begun in {"M": rule.begin_chunk(carry["M"]), "S": rule.begin_momentum(carry["S"])}.items():
        carry[name] = jax.tree.map(lambda new, old: jnp.where(starts_chunk, new, old), begun, carry[name])
    at_start = jax.tree.map(lambda m, g: jnp.where(starts_chunk, m, g), carry["M"], carry["chunk_start"])
    alpha, theta, eta = token["retention"], token["momentum_decay"], token["step_size"]
    if rule.step_bound is not None and rule.optimizer.has_momentum:
        theta = jnp.minimum(theta, 1.0 - 1.0 / rule.horizon)
    decay = lambda weights: {name: rule.retention.decay(w, alpha) for name, w in weights.items()}
    origin = decay(at_start) if rule.retention.decay_first else at_start

    # Entry j of the window holds token t − j.
    keys = jnp.concatenate([token["k"][None], carry["keys"]])
    values = jnp.concatenate([token["v"][None], carry["values"]])
    thresholds = jnp.concatenate([token["threshold"][None], carry["thresholds"]])
    # `count` tokens of the segment precede this one, which is entry 0.
    real = jnp.arange(rule.window) <= carry["count"]

    gamma = jnp.where(real, token["window_weights"], 0.0)
    window = (keys, values, thresholds, gamma)
    own: OwnKeys = {
        name: token[name] for name in rule.objective.own_keys
    }  # of this token: such rules have a window of one
    if own and rule.bound is not None and rule.bound.step is not None:
        own, eta = rule.objective.within(rule.bound.step, token["k"], own, eta)
    g = _gradient(rule, params, rule.weights(origin), own, *window)

    if rule.step_bound is not None:
        before = decay(carry["M"]) if rule.retention.decay_first else carry["M"]
        eta = _bounded(rule, params, before, carry["S"], origin, g, eta, theta, *window)
    if rule.optimizer.is_implicit:
        S, M = carry["S"], {"W": _minimizer(rule, params, decay(carry["M"])["W"], token)}
    else:
        # Counted from the chunk's start, so the last token of a chunk writes whenever `every` divides its size.
        writes = (carry["position"] + 1) % rule.optimizer.every == 0
        eta = jnp.where(writes, eta, 0.0)
        key = rule.features.apply(params.coefficients, token["k"])
        M, S = rule.write(carry["M"], carry["S"], g, alpha, eta, theta, token["write_size"], key)

    carry.update(
        M=M,
        S=S,
        chunk_start=at_start,
        keys=keys[: rule.window - 1],
        values=values[: rule.window - 1],
        thresholds=thresholds[: rule.window - 1],
        count=jnp.minimum(carry["count"] + 1, rule.window - 1),
        position=(carry["position"] + 1) % rule.chunk_size,
    )
    return carry, read_one(rule, params, M, token["q"])


def _restarted(rule: MemorySpec, initial: dict, carry: dict, segment: jax.Array) -> dict:
    """The parts of the carry that change where a token's segment is another one than that of the token before it."""
    new = (segment != carry["segment"]) & (carry["segment"] >= 0)
    # Wide parameters leave a narrow state as it is, as in `scan`.
    choose = lambda fresh, old: jax.tree.map(lambda f, o: jnp.where(new, f.astype(o.dtype), o), fresh, old)
    return {
        "M": choose(initial, carry["M"]),
        "S": choose(rule.optimizer.init(initial), carry["S"]),
        "position": jnp.where(new, 0, carry["position"]),
        "count": jnp.where(new, 0, carry["count"]),
        "segment": segment,
    }


def _by_token(tokens: Tokens, dtype: jnp.dtype) -> dict[str, jax.Array]:
    """The inputs of each token of a head, name → [batch, time, heads, …]. Gates that the rule does not use are ones."""
    q, k, v, gates, _ = tokens
    wide = lambda x: x.astype(wide_dtype(x.dtype, dtype))
    ones = jnp.ones(q.shape[:3], dtype)
    found = {
        "q": wide(q),
        "k": wide(k),
        "v": wide(v),
        "retention": ones if gates.retention is None else wide(gates.retention),
        "step_size": ones if gates.step_size is None else wide(gates.step_size),
        "momentum_decay": ones if gates.momentum_decay is None else wide(gates.momentum_decay),
        "write_size": ones if gates.write_size is None else wide(gates.write_size),
        "window_weights": ones[..., None] if gates.window_weights is None else wide(gates.window_weights),
        "threshold": ones if gates.threshold is None else wide(gates.threshold),
    }
    own = {"removal_key": gates.removal_key, "removal": gates.removal}
    return found | {name: wide(x) for name, x in own.items() if x is not None}


def _state_after(rule: MemorySpec, state: MemoryState, last: dict, segmented: bool) -> MemoryState:
    """The state after a call, from the state before it and the last carry of `_token`, [batch, heads, …]."""
    position = last["position"][:, 0]
    ends_chunk = (position == 0)[:, None, None, None]
    windowed = rule.window > 1
    return MemoryState(
        memory=last["M"],
        # At the end of a chunk, this is the start of the next one.
        chunk_start=None
        if state.chunk_start is None
        else jax.tree.map(lambda m, g: jnp.where(ends_chunk, m, g), last["M"], last["chunk_start"]),
        momentum=None if state.momentum is None else last["S"],
        window_keys=last["keys"][:, :, ::-1] if windowed else None,
        window_values=last["values"][:, :, ::-1] if windowed else None,
        window_thresholds=None if state.window_thresholds is None else last["thresholds"][:, :, ::-1],
        window_count=last["count"][:, 0] if windowed else None,
        position=None if state.position is None else position,
        segment=last["segment"][:, 0] if segmented else state.segment,
    )


@functools.partial(jax.jit, static_argnames=("rule",))
def reference_scan(
    rule: MemorySpec,
    params: MemoryParams,
    state: MemoryState | None,
    tokens: Tokens,
) -> tuple[jax.Array, MemoryState]:
    """The recurrence over a sequence. Arguments as in `memory.scan`, already checked."""
    q, k, v, _, segment_ids = tokens
    dtype = wide_dtype(q.dtype)
    batch, _, heads, _ = q.shape
    wide = lambda x: x.astype(wide_dtype(x.dtype, dtype))
    if state is None:
        state = init_state(rule, params, batch_size=batch)
    params = jax.tree.map(wide, params)
    state = jax.tree.map(lambda x: wide(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)
    by_batch: dict[str, jax.Array] = {}
    if segment_ids is not None:
        by_batch["segment"] = segment_ids
    zeros = lambda *shape: jnp.zeros((batch, heads, *shape), dtype)
    carry_heads = {
        "M": state.memory,
        "S": state.momentum,
        "chunk_start": state.memory if state.chunk_start is None else state.chunk_start,
        "keys": zeros(0, k.shape[-1]) if state.window_keys is None else state.window_keys[:, :, ::-1],
        "values": zeros(0, v.shape[-1]) if state.window_values is None else state.window_values[:, :, ::-1],
        "thresholds": zeros(rule.window - 1)
        if state.window_thresholds is None
        else state.window_thresholds[:, :, ::-1],
    }
    none_read = jnp.zeros((batch,), jnp.int32)
    carry_batch = {
        "count": none_read if state.window_count is None else state.window_count,
        "position": none_read if state.position is None else state.position,
        "segment": state.segment,
    }

    def one_head(params, initial, carry_h, carry_b, tokens_h, tokens_b):
        body = lambda c, x: _token(rule, params, initial, c, x)
        last, y = meshes.scan(body, {**carry_h, **carry_b}, {**tokens_h, **tokens_b})
        return y, last

    over_heads = jax.vmap(one_head, in_axes=(0, 0, 0, None, 1, None), out_axes=(1, 0))
    over_batch = jax.vmap(over_heads, in_axes=(None, None, 0, 0, 0, 0))
    y, last = over_batch(
        params, rule.start(params.weights), carry_heads, carry_batch, _by_token(tokens, dtype), by_batch
    )

    return y.astype(q.dtype), _state_after(rule, state, last, segment_ids is not None)
