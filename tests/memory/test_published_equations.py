"""Equations of ATLAS (A) and Memory Caching (M) as NumPy loops with gradients by hand: the engine against what is printed.

`test_closed_forms` has the rows of A Table 1 for a matrix memory, one token at a time. Here are chunks, momenta and Muon, deep
memories, and the aggregations of cached memories. Nothing here uses the reference or automatic differentiation. docs/equations.md.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.memory import CachedRule, MemoryRule, features, objectives, optimizers, structures
from tests.memory.cases import assert_close, make_inputs

TIME, DIM, CHUNK, WINDOW, SEGMENT = 13, 3, 4, 3, 4
EXACT = 1e-11


def one_head(rule):
    """Arguments of `memory.scan`; q, k, v [time, dim], the gates and M_0 of the only head in NumPy."""
    params, q, k, v, gates = make_inputs(
        rule, batch=1, time=TIME, heads=1, key_dim=DIM, value_dim=DIM, dtype=jnp.float64
    )
    of_head = lambda x: np.asarray(x)[0, :, 0]
    named = {name: of_head(x) for name, x in gates._asdict().items() if x is not None}
    weights = {name: np.asarray(x)[0] for name, x in params.weights.items()}
    return (params, None, q, k, v, gates), (of_head(q), of_head(k), of_head(v)), named, weights


def window_gradient(M, phi, v, t, gamma):
    """Σ_{i=t−c+1}^t γ_i^{(t)} ∇ ½‖M φ(k_i) − v_i‖² of a matrix: the Omega rule's gradient (A Eq. 8 and 9)."""
    tokens = [(gamma[j], t - j) for j in range(len(gamma)) if t - j >= 0]
    return sum(weight * np.outer(M @ phi[i] - v[i], phi[i]) for weight, i in tokens)


def product(decay, first, last):
    """decay_last … decay_{first+1}, the quotient (decay_last … )/(decay_first …) of the papers, without a division."""
    return np.prod(decay[first + 1 : last + 1])


@pytest.mark.parametrize("momentum", [False, True])
def test_a_chunk_is_the_printed_sum(momentum, x64):
    """A Eq. 16 with windows; with momentum A Eq. 36–39: S_t in closed form from the chunk's start."""
    optimizer = optimizers.Momentum() if momentum else optimizers.GradientDescent()
    rule = MemoryRule(
        structures.Matrix(), objectives.L2(), optimizer=optimizer, window=WINDOW, chunk_size=CHUNK
    ).unbounded()
    args, (q, k, v), gates, weights = one_head(rule)
    alpha, eta, gamma = gates["retention"], gates["step_size"], gates["window_weights"]
    M, S, expected = weights["W"], np.zeros((DIM, DIM)), []
    for start in range(0, TIME, CHUNK):
        tokens = range(start, min(start + CHUNK, TIME))
        origin, begun = M, S
        u = {t: window_gradient(origin, k, v, t, gamma[t]) for t in tokens}
        for t in tokens:
            if momentum:
                theta = gates["momentum_decay"]
                S = product(theta, start - 1, t) * begun
                S = S - sum(product(theta, i, t) * eta[i] * u[i] for i in range(start, t + 1))
                M = alpha[t] * M + S
            else:
                M = product(alpha, start - 1, t) * origin
                M = M - sum(product(alpha, n, t) * eta[n] * u[n] for n in range(start, t + 1))
            expected.append(M @ q[t])
    assert_close(memory.scan(rule, *args)[0][0, :, 0], np.stack(expected), EXACT)


def newton_schulz(S, steps=5):
    X = S / (np.linalg.norm(S) + 1e-7)
    if X.shape[0] > X.shape[1]:
        return newton_schulz(S.T, steps).T
    for _ in range(steps):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X


def polynomial(x, c):
    """φ_2(x) with φ(q)·φ(k) = c_0² + c_1² q·k + c_2² (q·k)² (A Eq. 5)."""
    pairs = [(1 if i == j else 2**0.5) * x[i] * x[j] for i in range(DIM) for j in range(i, DIM)]
    return np.concatenate([[c[0]], c[1] * x, c[2] * np.array(pairs)])


def test_atlas_is_muon_on_the_window_of_polynomial_features(x64):
    """A Eq. 32 and 33 (57 and 58) by descent, with the gradients of a chunk at its start and NS of each S_t (Eq. 40 and 41)."""
    rule = rules.atlas(CHUNK, WINDOW, structures.Matrix(), features.Polynomial(2))
    args, (q, k, v), gates, weights = one_head(rule)
    c = np.asarray(args[0].coefficients)[0]
    phi, phi_q = (np.stack([polynomial(x, c) for x in row]) for row in (k, q))
    M, S, expected = weights["W"], 0.0, []
    for t in range(TIME):
        if t % CHUNK == 0:
            origin = M
        S = gates["momentum_decay"][t] * S - window_gradient(origin, phi, v, t, gates["window_weights"][t])
        M = gates["retention"][t] * M + gates["step_size"][t] * newton_schulz(S)
        expected.append(M @ phi_q[t])
    assert_close(memory.scan(rule, *args)[0][0, :, 0], np.stack(expected), 1e-9)


# Deep memories.


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_slope(x):
    t = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)


def branch(W, x):
    """M(x) − x: W1 σ(W2 x) (A Eq. 42), or W1 (σ(W2 x) ⊙ W3 x) with a W3 (A Eq. 43)."""
    return W["W1"] @ (gelu(W["W2"] @ x) * (W["W3"] @ x if "W3" in W else 1.0))


def deep_gradient(W, k, left):
    """The gradient of a loss whose derivative with respect to M(k) is `left`."""
    a, gate = W["W2"] @ k, W["W3"] @ k if "W3" in W else 1.0
    back = W["W1"].T @ left
    gradient = {"W1": np.outer(left, gelu(a) * gate), "W2": np.outer(back * gelu_slope(a) * gate, k)}
    return gradient | ({"W3": np.outer(back * gelu(a), k)} if "W3" in W else {})


def descend(W, k, v, alpha, eta, left):
    return {name: alpha * W[name] - eta * g for name, g in deep_gradient(W, k, left).items()}


@pytest.mark.parametrize(
    "structure", [structures.MLP(expansion=2), structures.GatedMLP(expansion=2)], ids=["mlp", "gated"]
)
def test_deep_linear_attention_and_titans_without_momentum(structure, x64):
    """−⟨M(k), v⟩ is A Eq. 19 and 50 (DLA); ½‖M(k) − v‖² is Table 1's row. In pairs, so that both are one program."""
    both = [make(1, structure).unbounded() for make in (rules.dla, rules.titans_no_momentum)]
    args, (q, k, v), gates, weights = one_head(both[0])
    alpha, eta = gates["retention"], gates["step_size"]
    found = jax.jit(lambda *x: [memory.scan(rule, x[0], None, *x[1:])[0] for rule in both])(args[0], *args[2:])
    for y, slope in zip(found, (lambda out, v: -v, lambda out, v: out - v), strict=True):
        W, expected = weights, []
        for t in range(TIME):
            W = descend(W, k[t], v[t], alpha[t], eta[t], slope(k[t] + branch(W, k[t]), v[t]))
            expected.append(q[t] + branch(W, q[t]))
        assert_close(y[0, :, 0], np.stack(expected), EXACT)


@pytest.mark.parametrize("aggregation", ["residual", "grm", "soup", "ssc"])
def test_aggregations_of_cached_deep_memories(aggregation, x64):
    """M Eq. 7 and 10, 8 and 9, 13, 14 and 15, with γ the score itself (Eq. 9 as printed). The residual x is added once."""
    rule = CachedRule(rules.dla(1, structures.MLP(expansion=2)), aggregation, SEGMENT, top_k=1, gate="raw")
    args, (q, k, v), gates, fresh = one_head(rule.rule)
    u = np.random.default_rng(5).standard_normal((TIME, DIM))
    inputs = args[5]._replace(connector=None if aggregation == "residual" else jnp.asarray(u)[None, :, None])
    W, cached, expected = fresh, [], []
    for t in range(TIME):
        if t % SEGMENT == 0 and t:
            cached.append((W, k[t - SEGMENT : t].mean(axis=0)))
        if t % SEGMENT == 0:
            W = fresh
        W = descend(W, k[t], v[t], gates["retention"][t], gates["step_size"][t], -v[t])
        now = k[t - t % SEGMENT : t + 1].mean(axis=0)  # of the keys so far: the segment's mean would see the future
        read = cached
        if aggregation == "ssc" and cached:
            read = [max(cached, key=lambda memory: u[t] @ memory[1])]
        weighed = [(1.0 if aggregation == "residual" else u[t] @ pooled, one) for one, pooled in [(W, now), *read]]
        if aggregation == "soup":
            y = branch({name: sum(gamma * one[name] for gamma, one in weighed) for name in W}, q[t])
        else:
            y = sum(gamma * branch(one, q[t]) for gamma, one in weighed)
        expected.append(q[t] + y)
    assert_close(memory.scan(rule, *args[:5], inputs)[0][0, :, 0], np.stack(expected), EXACT)
