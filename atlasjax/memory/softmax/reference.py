"""The definition of softmax memories: token by token, with explicit sums over all entries and inner gradients from `jax.grad`.

Slow and simple on purpose. SEMANTICS sections 1 and 2.
"""

import functools

import jax
import jax.numpy as jnp

from atlasjax.memory import bounds, meshes
from atlasjax.memory.blocks import capped
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.softmax.init import empty_state
from atlasjax.memory.softmax.spec import SoftmaxSpec
from atlasjax.memory.softmax.state import SoftmaxParams, SoftmaxState
from atlasjax.memory.softmax.tape import Cache, Tape, cut_tail, ordered_cache, stored_cache, tail_places, tape_of
from atlasjax.memory.tokens import Tokens


def memory_sum(rule: SoftmaxSpec, memory: dict, x: jax.Array) -> jax.Array:
    """h(x) = Σ_i a_i κ(k_i, x), divided by Z(x) = Σ_i ρ_i κ(k_i, x) if normalized. x: [key_dim], the result [width]."""
    scores = jnp.where(memory["present"], rule.score_scale(x.size) * (memory["keys"] @ x), 0.0)
    if not rule.normalized:
        return jnp.where(memory["present"], jnp.exp(scores), 0.0) @ memory["a"]
    # A common factor in both sums cancels; this one keeps them from overflowing.
    top = jnp.max(jnp.where(memory["present"], scores, -jnp.inf))
    scores = scores - jax.lax.stop_gradient(jnp.where(jnp.any(memory["present"]), top, 0.0))
    scores = jnp.where(memory["present"], scores, 0.0)
    kappa = jnp.where(memory["present"], jnp.exp(scores), 0.0)
    Z = kappa @ memory["rho"]
    return jnp.where(Z > 0, kappa @ memory["a"] / jnp.where(Z > 0, Z, 1.0), 0.0)


def read_one(rule: SoftmaxSpec, memory: dict, x: jax.Array) -> jax.Array:
    """M(φ*(x)) of one head. x: [key_dim], the result [value_dim]."""
    linear = lambda name, u: memory_sum(rule, memory, x) if name == rule.inner else memory["weights"][name] @ u
    return rule.structure.apply(linear, x, x, None)


def _loss(rule: SoftmaxSpec, memory: dict, change: jax.Array, weights: dict, k: jax.Array, v: jax.Array) -> jax.Array:
    """ℓ(M; k, v) with the sum replaced by h(k) + change, and with the given other weights."""
    h = memory_sum(rule, memory, k)
    linear = lambda name, u: h + change if name == rule.inner else weights[name] @ u
    return rule.objective.loss(rule.structure.apply(linear, k, k, None), v)


def _forget(carry: dict, initial: dict, new: jax.Array) -> dict:
    """Resets the memory where a new segment begins."""
    memory = {
        **carry["memory"],
        "present": carry["memory"]["present"] & ~new,
        "weights": jax.tree.map(lambda w, m: jnp.where(new, w, m), initial, carry["memory"]["weights"]),
    }
    zero = lambda x: jnp.where(new, 0.0, x)
    memory |= {name: zero(memory[name]) for name in ("a", "s", "rho")}
    memory["weights_s"] = jax.tree.map(zero, memory["weights_s"])
    restart = {name: jnp.where(new, 0, carry[name]) for name in ("position", "count")}
    return {**carry, "memory": memory, **restart}


def _token(rule: SoftmaxSpec, initial: dict, carry: dict, token: dict) -> tuple[dict, jax.Array]:
    """One token of one head of one batch element. Entry `index` of the arrays is the token's."""
    before = carry
    new = (token["segment"] != carry["segment"]) & (carry["segment"] >= 0)
    carry = _forget(carry, initial, new)
    memory, index = dict(carry["memory"]), token["index"]
    start = jax.tree.map(lambda m, g: jnp.where(carry["position"] == 0, m, g), memory, carry["start"])
    alpha, theta, eta = token["retention"], token["momentum_decay"], token["step_size"]

    # Row j of the window holds token t − j.
    keys = jnp.concatenate([token["k"][None], carry["window_keys"]])
    values = jnp.concatenate([token["v"][None], carry["window_values"]])
    gamma = jnp.where(jnp.arange(rule.window) <= carry["count"], token["window_weights"], 0.0)
    change = meshes.vary_like(jnp.zeros((rule.window, memory["a"].shape[1]), memory["a"].dtype), keys, values, start)
    gradient = lambda change, k, v: jax.grad(_loss, (2, 3))(rule, start, change, start["weights"], k, v)
    g_a, g_weights = jax.vmap(gradient)(change, keys, values)
    if rule.step_bound is not None and rule.is_bounded:
        outputs = jax.vmap(lambda k: read_one(rule, start, k))(keys)
        decrease = jnp.maximum(jnp.sum(bounds.toward_target(rule.objective, outputs, values, None), axis=-1), 0.0)
        squares = jax.tree.map(lambda g: jnp.sum(g * g, axis=(1, 2)), g_weights)
        square = jnp.sum(g_a * g_a, axis=1) + rule.chunk_size * sum(squares.values(), jnp.zeros_like(decrease))
        horizon = bounds.HORIZON if rule.optimizer.has_momentum else 1.0
        theta = jnp.minimum(theta, 1.0 - 1.0 / horizon)
        eta = capped(
            rule.step_bound / horizon, eta, jnp.sum(gamma * decrease), jnp.sum(gamma) * jnp.sum(gamma * square)
        )
    if not rule.optimizer.has_momentum:
        theta = 0.0
    memory["keys"] = memory["keys"].at[index].set(token["k"])
    # A window reaches back before the chunk. Where it reaches before the first token γ is 0.
    memory["s"] = (theta * memory["s"]).at[index - jnp.arange(rule.window)].add(-eta * gamma[:, None] * g_a)
    memory["a"] = alpha * memory["a"] + memory["s"]
    memory["rho"] = (alpha * memory["rho"]).at[index].set(1.0)
    memory["weights_s"] = jax.tree.map(
        lambda s, g: theta * s - eta * jnp.tensordot(gamma, g, 1), memory["weights_s"], g_weights
    )
    memory["weights"] = jax.tree.map(lambda w, s: alpha * w + s, memory["weights"], memory["weights_s"])
    memory["present"] = memory["present"].at[index].set(True)
    if rule.cache_window is not None:
        memory["present"] = memory["present"] & (jnp.arange(len(memory["present"])) > index - rule.cache_window)

    position = (carry["position"] + 1) % (rule.pending + 1)
    y = read_one(rule, memory, token["q"])
    carry = {
        "memory": memory,
        "start": start,
        "window_keys": keys[: rule.window - 1],
        "window_values": values[: rule.window - 1],
        "position": position,
        "count": carry["count"] + 1,
        "segment": token["segment"],
    }
    return jax.tree.map(lambda a, b: jnp.where(token["real"], a, b), carry, before), y


@functools.partial(jax.jit, static_argnames=("rule",))
def reference_scan(
    rule: SoftmaxSpec,
    params: SoftmaxParams,
    state: SoftmaxState | None,
    tokens: Tokens,
) -> tuple[jax.Array, SoftmaxState]:
    """The recurrence over a sequence. Arguments as in `scan`, already checked."""
    dtype = wide_dtype(tokens.q.dtype)
    batch, time, heads, _ = tokens.q.shape
    wide = lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    y_dtype = tokens.q.dtype
    params, tokens = jax.tree.map(wide, (params, tokens))
    entries = time if state is None else state.keys.shape[2]
    state = empty_state(rule, params, batch, heads, 0, dtype) if state is None else jax.tree.map(wide, state)
    place = state.position[:, None] + jnp.arange(time)[None]
    tape = tape_of(rule, state, tokens, place, rule.pending + time)

    y, last, end = _over_tokens(rule, params, state, tape)
    y = jnp.take_along_axis(y, place[:, :, None, None], axis=1)
    if rule.cache_window is None:
        index = _entry_of_each_token(state, tokens.segment_ids, place)
        y = jnp.where((index < entries)[:, :, None, None], y, jnp.nan)
    new = _state_after(rule, state, tape, last, end, entries if rule.cache_window is None else rule.cache_window)
    return y.astype(y_dtype), new if tokens.segment_ids is None else new._replace(segment=tokens.segment_ids[:, -1])


def _over_tokens(
    rule: SoftmaxSpec, params: SoftmaxParams, state: SoftmaxState, tape: Tape
) -> tuple[jax.Array, dict, jax.Array]:
    """y of every place of the tape; the last carry; [batch], the index of the first entry after t'."""
    memory = _memory(rule, state, tape.real.shape[1])
    newest_first = lambda x: x[:, :, : rule.window - 1][:, :, ::-1]
    per_head = {
        "memory": memory,
        "start": memory,
        "window_keys": newest_first(state.tail.keys),
        "window_values": newest_first(state.tail.values),
    }
    # The tape begins with the tokens of the unfinished chunk, so reading starts at its start: position 0.
    per_batch = {"position": jnp.zeros_like(state.position), "count": state.num_tokens, "segment": state.segment}
    before = memory["rho"].shape[2] - tape.real.shape[1]

    def one_head(
        initial: dict, per_head: dict, per_batch: dict, tokens: dict, in_batch: dict
    ) -> tuple[jax.Array, dict, jax.Array]:
        index = before + jnp.cumsum(in_batch["real"]) - 1
        body = lambda c, x: _token(rule, initial, c, x)
        last, y = meshes.scan(body, {**per_head, **per_batch}, {**tokens, **in_batch, "index": index})
        done = last["position"] == 0
        last["start"] = jax.tree.map(lambda m, g: jnp.where(done, m, g), last["memory"], last["start"])
        return y, last, before + jnp.sum(in_batch["real"]) - last["position"]

    by_token = {name: x for name, x in tape._asdict().items() if name not in ("real", "segment")}
    in_batch = {"real": tape.real, "segment": tape.segment}
    over_heads = jax.vmap(one_head, in_axes=(0, 0, None, 1, None), out_axes=(1, 0, None))
    over_batch = jax.vmap(over_heads, in_axes=(None, 0, 0, 0, 0))
    return over_batch(params.weights, per_head, per_batch, by_token, in_batch)


def _memory(rule: SoftmaxSpec, state: SoftmaxState, places: int) -> dict:
    """The memory of a state, with room for the entries of so many places after its own."""
    old = ordered_cache(rule, state)
    batch, heads, before = old.decay.shape
    grow = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, places), *((0, 0),) * (x.ndim - 3)))
    count = jnp.minimum(state.num_tokens, before)
    entry = jnp.arange(before + places)[None]
    present = (entry >= before - count[:, None]) & (entry < before)
    return {
        "keys": grow(old.keys),
        "a": grow(old.coefficients),
        "s": grow(jnp.zeros_like(old.coefficients) if old.momentum is None else old.momentum),
        "rho": grow(old.decay),
        "present": jnp.broadcast_to(present[:, None], (batch, heads, before + places)),
        "weights": state.weights,
        "weights_s": jax.tree.map(jnp.zeros_like, state.weights) if state.weights_momentum is None else state.weights_momentum,
    }  # fmt: skip


def _entry_of_each_token(state: SoftmaxState, segment_ids: jax.Array | None, place: jax.Array) -> jax.Array:
    """[batch, time], how many entries of its segment precede a token. A state's entries are of the first segment."""
    t = jnp.arange(place.shape[1])[None]
    starts = jnp.zeros(place.shape, bool)
    if segment_ids is not None:
        starts = jnp.concatenate([state.segment[:, None], segment_ids[:, :-1]], 1) != segment_ids
        starts = starts & ~((t == 0) & (state.segment[:, None] < 0))  # −1: no token had a segment yet, so none ends
    since = jax.lax.cummax(jnp.where(starts, t, -1), axis=1)
    return jnp.where(since < 0, state.num_tokens[:, None] + place, t - since)


def _state_after(
    rule: SoftmaxSpec, state: SoftmaxState, tape: Tape, last: dict, end: jax.Array, entries: int
) -> SoftmaxState:
    """The state after a call, whose cache has room for so many entries; with the segment before the call."""
    start, total, position = last["start"], last["count"][:, 0], last["position"][:, 0]
    committed = total - position
    if rule.cache_window is not None:
        committed = jnp.minimum(committed, rule.cache_window)
    momentum = start["s"] if state.momentum is not None else None
    cache = stored_cache(rule, Cache(start["keys"], start["a"], momentum, start["rho"]), end, committed, entries)
    before = start["rho"].shape[2] - tape.real.shape[1]
    tail = cut_tail(rule, state, tape, end - before, committed, position)
    if not rule.has_constant_gradient:
        h = jax.vmap(jax.vmap(jax.vmap(lambda m, x: memory_sum(rule, m, x), (None, 0))))(start, tail.keys)
        held = tail_places(rule, committed, position)[:, None, :, None]
        tail = tail._replace(preactivations=jnp.where(held, h, 0.0))
    return SoftmaxState(
        keys=cache.keys,
        coefficients=cache.coefficients,
        momentum=cache.momentum,
        decay=cache.decay,
        num_tokens=committed,
        weights=start["weights"],
        weights_momentum=None if state.weights_momentum is None else start["weights_s"],
        tail=tail,
        position=position,
        segment=state.segment,
    )
