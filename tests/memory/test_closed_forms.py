"""Rows of A Table 1 as explicit loops: each rule's engine against the published recurrence with gradients written by hand.

NumPy in float64, one head of one sequence; nothing here uses the reference or automatic differentiation (SEMANTICS 3).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.memory import features, objectives, optimizers, retention, structures
from atlasjax.memory.fast_weights.rule import MemoryRule
from tests.memory.cases import assert_close, make_inputs
from tests.memory.conftest import forget_traces

TIME, KEY, VALUE = 23, 5, 3
MATRIX = structures.Matrix()


class Token:
    """Everything one token brings, as NumPy arrays: q, k, v and the gates that the rule has."""

    def __init__(self, t, q, k, v, gates):
        self.t, self.q, self.k, self.v = t, q[t], k[t], v[t]
        self.__dict__.update({name: g[t] for name, g in gates.items()})


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def linear_attention(W, x, past):
    return W + x.step_size * np.outer(x.v, x.k)


def retnet(W, x, past):
    return x.retention * W + x.step_size * np.outer(x.v, x.k)


def gla(W, x, past):
    return W @ np.diag(x.retention) + x.step_size * np.outer(x.v, x.k)


def mamba3(W, x, past):
    """`window_weights` as they are for λ = γ_0, but not tied to α."""
    own, old = x.window_weights
    before = np.outer(past[-1].v, past[-1].k) if past else 0.0
    return x.retention * W + x.step_size * (own * np.outer(x.v, x.k) + old * before)


def delta_rule(W, x, past):
    return W @ (np.eye(KEY) - x.step_size * np.outer(x.k, x.k)) + x.step_size * np.outer(x.v, x.k)


def longhorn(W, x, past):
    delta = x.step_size / (1 + x.step_size * (x.k @ x.k))
    return W @ (np.eye(KEY) - delta * np.outer(x.k, x.k)) + delta * np.outer(x.v, x.k)


def longhorn_channel(W, x, past):
    delta = x.step_size / (1 + x.step_size * (x.k @ x.k))  # [VALUE]
    return W + delta[:, None] * np.outer(x.v - W @ x.k, x.k)


def gated_delta_rule(W, x, past):
    return x.retention * W @ (np.eye(KEY) - x.step_size * np.outer(x.k, x.k)) + x.step_size * np.outer(x.v, x.k)


def kda(W, x, past):
    decayed = W @ np.diag(x.retention)
    return decayed + x.step_size * np.outer(x.v - decayed @ x.k, x.k)


def rwkv7(W, x, past):
    transition = np.diag(x.retention) - np.outer(x.removal_key, x.removal * x.removal_key)
    return W @ transition + np.outer(x.v, x.k)


def rwkv7_one_key(W, x, past):
    return W @ (np.diag(x.retention) - x.step_size * np.outer(x.k, x.k)) + x.step_size * np.outer(x.v, x.k)


def gdn2(W, x, past):
    W = W @ np.diag(x.retention)
    return W + x.step_size * np.outer(x.v - W @ x.removal_key, x.k)


def comba(W, x, past):
    return x.retention * W + x.step_size * np.outer(x.v - W @ x.removal_key, x.k)


def pgdn(W, x, past):
    W = x.retention * W
    return W + x.step_size * np.outer(x.v - W @ x.removal_key, x.k)


def titans_no_momentum(W, x, past):
    return x.retention * W - x.step_size * np.outer(W @ x.k - x.v, x.k)


def moneta_row(W, x, past):
    error = W @ x.k - x.v
    return x.retention * W - x.step_size * np.outer(np.sign(error) * np.abs(error) ** 2, x.k)


def yaad(W, x, past):
    error = W @ x.k - x.v
    size = np.linalg.norm(error)
    gradient = error if size <= x.threshold else x.threshold * error / size
    return x.retention * W - x.step_size * np.outer(gradient, x.k)


def swla(W, x, past):
    tokens = [x, *past[::-1]][: x.window_weights.size]
    update = sum(gamma * np.outer(p.v, p.k) for gamma, p in zip(x.window_weights, tokens))
    return x.retention * W + x.step_size * update


def omega(W, x, past):
    tokens = [x, *past[::-1]][: x.window_weights.size]
    gradient = sum(gamma * np.outer(W @ p.k - p.v, p.k) for gamma, p in zip(x.window_weights, tokens))
    return x.retention * W - x.step_size * gradient


def dgd(W, x, _):
    toward_k = x.retention * np.eye(len(x.k)) - x.step_size * np.outer(x.k, x.k)
    return W @ toward_k - x.step_size * np.outer(W @ x.k - x.v, x.k)


GD = optimizers.GradientDescent()
ROWS = {
    "linear_attention": (rules.linear_attention(), linear_attention),
    "retnet": (rules.retnet(), retnet),
    "gla": (rules.gla(), gla),
    "mamba3": (rules.mamba3(), mamba3),
    "delta_rule": (rules.delta_rule(), delta_rule),
    "longhorn": (rules.longhorn(), longhorn),
    "longhorn_channel": (rules.longhorn_channel(), longhorn_channel),
    "gated_delta_rule": (rules.gated_delta_rule(), gated_delta_rule),
    "kda": (rules.kda(), kda),
    "rwkv7": (rules.rwkv7(), rwkv7),
    "rwkv7_one_key": (rules.rwkv7_one_key(), rwkv7_one_key),
    "gdn2": (rules.gdn2().unbounded(), gdn2),
    "comba": (rules.comba().unbounded(), comba),
    "pgdn": (rules.pgdn().unbounded(), pgdn),
    "titans_no_momentum": (rules.titans_no_momentum(1, MATRIX), titans_no_momentum),
    "dgd": (rules.dgd(1, MATRIX).unbounded(), dgd),
    "moneta_row": (rules.moneta(1, q=2.0, structure=MATRIX), moneta_row),
    "yaad": (rules.yaad(1, MATRIX), yaad),
    "dla": (rules.dla(64, MATRIX), retnet),
    "swla": (rules.swla(64, 4), swla),
    "omega": (rules.omeganet(1, 4, MATRIX, features.Identity()), omega),
}


def inputs(rule, **kwargs):
    """Arguments of `scan`, and the tokens in NumPy; M_0 too."""
    params, q, k, v, gates = make_inputs(
        rule, batch=1, time=TIME, heads=1, key_dim=KEY, value_dim=VALUE, dtype=jnp.float64, **kwargs
    )
    one = lambda x: np.asarray(x)[0, :, 0]
    named = {name: one(g) for name, g in gates._asdict().items() if g is not None}
    tokens = [Token(t, one(q), one(k), one(v), named) for t in range(TIME)]
    return (params, None, q, k, v, gates), tokens, np.asarray(params.weights["W"])[0]


@pytest.mark.parametrize("name", ROWS)
def test_engine_is_the_published_recurrence(name, x64):
    rule, update = ROWS[name]
    args, tokens, W = inputs(rule)
    expected = []
    for t, x in enumerate(tokens):
        W = update(W, x, tokens[:t])
        expected.append(W @ x.q)
    y, state = memory.scan(rule, *args)
    assert_close(y[0, :, 0], np.stack(expected), 1e-12)
    assert_close(state.memory["W"][0, 0], W, 1e-12)


@pytest.mark.parametrize("first", [True, False], ids=["decay_first", "decay_beside"])
def test_momentum_delta(first, x64):
    """Momentum DeltaNet's recurrence; its steps of up to 2 are not cut."""
    rule = rules.momentum_delta(decay_first=first)
    args, tokens, W = inputs(rule, step_size=2.0)
    S, expected = np.zeros_like(W), []
    for x in tokens:
        read = x.retention * W if first else W
        S = x.momentum_decay * S - x.step_size * np.outer(read @ x.k - x.v, x.k)
        W = x.retention * W + x.write_size * S
        expected.append(W @ x.q)
    y, state = memory.scan(rule, *args)
    assert_close(y[0, :, 0], np.stack(expected), 1e-11)
    assert_close((state.memory["W"][0, 0], state.momentum["W"][0, 0]), (W, S), 1e-11)


def test_deep_delta_gradient_descent(x64):
    """HOPE's memory M(x) = x + W1 σ(W2 x): gradients at the chunk's start, and only W2 is forgotten along the key."""
    rule, chunk = rules.dgd(4, structures.MLP(expansion=1, activation="silu")).unbounded(), 4
    params, q, k, v, gates = make_inputs(rule, batch=1, time=TIME, heads=1, key_dim=3, value_dim=3, dtype=jnp.float64)
    W1, W2 = (np.asarray(params.weights[name])[0] for name in ("W1", "W2"))
    expected = []
    phi = lambda z: 1.0 / (1.0 + np.exp(-z))
    slope = lambda z: phi(z) + z * phi(z) * (1.0 - phi(z))
    for t in range(TIME):
        if t % chunk == 0:
            A1, A2 = W1, W2
        key, value, query = (np.asarray(x)[0, t, 0] for x in (k, v, q))
        alpha, eta = (float(g[0, t, 0]) for g in (gates.retention, gates.step_size))
        z = A2 @ key
        error = key + A1 @ (z * phi(z)) - value
        W1 = alpha * W1 - eta * np.outer(error, z * phi(z))
        W2 = W2 @ (alpha * np.eye(3) - eta * np.outer(key, key)) - eta * np.outer(slope(z) * (A1.T @ error), key)
        z = W2 @ query
        expected.append(query + W1 @ (z * phi(z)))
    y, state = memory.scan(rule, params, None, q, k, v, gates)
    assert_close(y[0, :, 0], np.stack(expected), 1e-12)
    assert_close((state.memory["W1"][0, 0], state.memory["W2"][0, 0]), (W1, W2), 1e-12)


def test_titans_with_momentum(x64):
    rule = rules.titans(1, MATRIX).unbounded()
    args, tokens, W = inputs(rule)
    S, expected = np.zeros_like(W), []
    for x in tokens:
        S = x.momentum_decay * S - x.step_size * np.outer(W @ x.k - x.v, x.k)
        W = x.retention * W + S
        expected.append(W @ x.q)
    assert_close(memory.scan(rule, *args)[0][0, :, 0], np.stack(expected), 1e-12)


def test_polysketch_is_attention_with_a_polynomial_kernel(x64):
    """Linear attention with φ(q)·φ(k) = Σ_i c_i² (q·k)^i, from M_0 = 0."""
    rule = rules.polysketch()
    (params, _, q, k, v, gates), tokens, _ = inputs(rule)
    params = params._replace(weights=jax.tree.map(jnp.zeros_like, params.weights))
    c = np.asarray(params.coefficients)[0]
    expected = []
    for t, x in enumerate(tokens):
        kernel = lambda p, x=x: sum(c[i] ** 2 * (x.q @ p.k) ** i for i in range(3))
        expected.append(sum(p.step_size * kernel(p) * p.v for p in tokens[: t + 1]))
    assert_close(memory.scan(rule, params, None, q, k, v, gates)[0][0, :, 0], np.stack(expected), 1e-12)


def test_memora_is_mirror_descent_on_rows(x64):
    rule = rules.memora(1, MATRIX)
    args, tokens, logits = inputs(rule)
    M, expected = softmax(logits), []
    for x in tokens:
        M = softmax(x.retention * np.log(M) - x.step_size * np.outer(M @ x.k - x.v, x.k))
        expected.append(M @ x.q)
    y, state = memory.scan(rule, *args)
    assert_close(y[0, :, 0], np.stack(expected), 1e-12)
    assert_close(rule.weights(state.memory)["W"][0, 0], M, 1e-12)
    np.testing.assert_allclose(M.sum(axis=1), 1.0, rtol=1e-12)


@pytest.mark.parametrize("q", [2.5, 4.0])
def test_moneta_divides_by_its_norm(q, x64):
    """The map as it is printed."""
    rule = rules.moneta(1, p=3.0, structure=MATRIX).unbounded()
    rule = dataclasses.replace(rule, retention=retention.Lq(q, published=True))
    args, tokens, A = inputs(rule)
    size = lambda A: (np.abs(A) ** q).sum() ** ((q - 2) / q)
    expected = []
    for x in tokens:
        error = A @ x.k / size(A) - x.v
        A = x.retention * A - x.step_size * np.outer(np.sign(error) * np.abs(error) ** 2, x.k)
        expected.append(A @ x.q / size(A))
    assert_close(memory.scan(rule, *args)[0][0, :, 0], np.stack(expected), 1e-11)


@pytest.mark.parametrize("q", [2.0, 2.5, 4.0])
def test_monetas_map_is_a_gradient_and_has_the_size_of_its_accumulator(q, x64):
    A = jnp.asarray(np.random.default_rng(0).standard_normal((3, 5)))
    half_square = lambda A: 0.5 * jnp.sum(jnp.abs(A) ** q) ** (2 / q)
    mapped = retention.Lq(q).map(A)
    assert_close(mapped, jax.grad(half_square)(A), 1e-12)
    assert_close(retention.Lq(q).map(1e-30 * A), 1e-30 * mapped, 1e-12)
    assert_close(retention.Lq(q, published=True).map(A), A / jnp.sum(jnp.abs(A) ** q) ** ((q - 2) / q), 1e-12)
    assert not retention.Lq(q).map(0 * A).any()


def test_gated_delta_rule_is_section_one_with_scaled_gates(x64):
    """Decay first = the recurrence of section 1 with η = αβ and target v/α."""
    rule = rules.gated_delta_rule()
    params, q, k, v, gates = make_inputs(rule, dtype=jnp.float64)
    plain = MemoryRule(MATRIX, objectives.L2(), optimizer=GD, retention=retention.Scalar(), chunk_size=1)
    alpha, beta = gates.retention, gates.step_size
    expected = memory.reference(plain, params, None, q, k, v / alpha[..., None], gates._replace(step_size=alpha * beta))
    assert_close(memory.scan(rule, params, None, q, k, v, gates), expected, 1e-12)


def test_removal_with_one_key_and_one_rate_is_the_one_key_row(x64):
    """RWKV-7 with κ̂ = k, a = η in every channel and replacement ηk is A Table 1's row."""
    one = rules.rwkv7_one_key()
    params, q, k, v, gates = make_inputs(one, dtype=jnp.float64)
    eta = gates.step_size[..., None]
    two = memory.Gates(retention=gates.retention, removal_key=k, removal=jnp.broadcast_to(eta, k.shape))
    y, state = memory.scan(rules.rwkv7(), params, None, q, eta * k, v, two)
    assert_close(
        (y, state.memory), (lambda r: (r[0], r[1].memory))(memory.scan(one, params, None, q, k, v, gates)), 1e-12
    )


@pytest.mark.parametrize("first", [True, False], ids=["decay_first", "decay_beside"])
def test_steps_beyond_the_target_need_a_bound_of_two(first, x64):
    """η‖k‖² = 1.7 of a delta rule with a decay per channel: as published with step=2, another rule with the default bound."""
    decay = retention.Channel(decay_first=first)
    rule = MemoryRule(
        MATRIX, objectives.L2(), optimizer=GD, retention=decay, chunk_size=1, bound=memory.Bound(step=2.0)
    )
    args, tokens, W = inputs(rule, step_size=1.7)
    expected = []
    for x in tokens:
        decayed = W * x.retention
        W = decayed + x.step_size * np.outer(x.v - (decayed if first else W) @ x.k, x.k)
        expected.append(W @ x.q)
    assert_close(memory.scan(rule, *args)[0][0, :, 0], np.stack(expected), 1e-11)
    cut = memory.scan(dataclasses.replace(rule, bound=memory.Bound()), *args)[0][0, :, 0]
    assert np.abs(cut - np.stack(expected)).max() > 0.1 * np.abs(expected).max()


def test_longhorn_never_overshoots(x64):
    """β → ∞ writes the pair exactly, where a gradient step of that size would diverge."""
    rule = rules.longhorn()
    params, _, k, v, gates = make_inputs(rule, dtype=jnp.float64, step_size=1e9)
    y, _ = memory.scan(rule, params, None, k, k, v, gates)
    assert_close(y, v, 1e-6)


QUICK = ("gated_delta_rule", "gla", "rwkv7")  # a decay of the matrix, of channels, and removal with a key of its own


@pytest.mark.parametrize(
    ("name", "block"),
    [
        pytest.param(
            name,
            block,
            marks=[] if (block == 7 and name in QUICK) or (block, name) == (1, QUICK[0]) else pytest.mark.slow,
        )
        for name in ("linear_attention", "gla", "delta_rule", "longhorn_channel", "gated_delta_rule", "rwkv7")
        for block in (1, 7, 64)
    ],
)
def test_block_length_changes_nothing(name, block, x64, monkeypatch):
    from atlasjax.memory.fast_weights import chunk

    rule, _ = ROWS[name]
    params, q, k, v, gates = make_inputs(rule, dtype=jnp.float64)
    expected = memory.scan(rule, params, None, q, k, v, gates)
    for constant in ("_FREE_BLOCK", "_SYSTEM_BLOCK", "_CHANNEL_SYSTEM"):
        monkeypatch.setattr(chunk, constant, block)
    forget_traces()
    assert_close(memory.scan(rule, params, None, q, k, v, gates), expected, 1e-12)
