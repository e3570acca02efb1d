"""The identities of SEMANTICS section 2: softmax memories that are known functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.memory.softmax import SoftmaxRule
from tests.marks import some_slow
from tests.memory.cases import assert_close
from tests.memory.softmax.cases import FULL, L2, MATRIX, make_inputs

FUNCTIONS = ["reference", "scan"]
# `scan` is compared with the reference in test_streaming.py.
each_function = pytest.mark.parametrize("function", some_slow(FUNCTIONS, ["scan"]))
ROUNDING = 2e-6  # float32


def outputs(function, rule, *args):
    params, *inputs = args
    return jax.jit(lambda *inputs: getattr(memory, function)(rule, params, None, *inputs)[0])(*inputs)


def attention(q, k, v, **kwargs):
    return jax.nn.dot_product_attention(q, k, v, **kwargs)


@each_function
@pytest.mark.parametrize("chunk_size", some_slow([1, 5, 64], [1, 64]))
def test_deep_transformer_is_softmax_attention(function, chunk_size):
    rule = SoftmaxRule(MATRIX, retention=FULL, chunk_size=chunk_size)
    params, q, k, v, gates = make_inputs(rule, key_dim=8, value_dim=6, step_size=1.0)
    q, k = 3 * q, 3 * k
    expected = attention(q, k, jnp.pad(v, ((0, 0),) * 3 + ((0, 2),)), is_causal=True)[..., :6]
    assert_close(outputs(function, rule, params, q, k, v, gates), expected, ROUNDING)


@each_function
@pytest.mark.parametrize(
    ("chunk_size", "cache_window"),
    [pytest.param(1, 4, marks=pytest.mark.slow), (16, 4), (3, 7), pytest.param(8, 40, marks=pytest.mark.slow)],
)
def test_swdt_is_sliding_window_attention(function, chunk_size, cache_window):
    rule = SoftmaxRule(MATRIX, retention=FULL, chunk_size=chunk_size, cache_window=cache_window)
    params, q, k, v, gates = make_inputs(rule, key_dim=8, value_dim=8, step_size=1.0)
    q, k = 3 * q, 3 * k
    expected = attention(q, k, v, is_causal=True, local_window_size=(cache_window - 1, 0))
    assert_close(outputs(function, rule, params, q, k, v, gates), expected, ROUNDING)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_retention_is_a_log_decay_bias(function):
    rule = SoftmaxRule(MATRIX)
    params, q, k, v, gates = make_inputs(rule, key_dim=8, value_dim=8, step_size=1.0)
    log = jnp.cumsum(jnp.log(gates.retention), axis=1).swapaxes(1, 2)  # [batch, heads, time]
    expected = attention(q, k, v, bias=log[..., :, None] - log[..., None, :], is_causal=True)
    assert_close(outputs(function, rule, params, q, k, v, gates), expected, ROUNDING)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_large_scores_do_not_overflow(function):
    """Scores up to about 1,000: a running maximum, as in softmax attention."""
    rule = SoftmaxRule(MATRIX, retention=FULL)
    params, q, k, v, gates = make_inputs(rule, key_dim=8, value_dim=8, step_size=1.0)
    q, k = 60 * q, 60 * k
    assert_close(outputs(function, rule, params, q, k, v, gates), attention(q, k, v, is_causal=True), 1e-4)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_unit_keys_are_scored_like_attention_on_longer_ones(function):
    """√d k·x for keys of unit length = k·x / √d for the same keys with a length of √d."""
    rule = SoftmaxRule(MATRIX, retention=FULL)
    params, q, k, v, gates = make_inputs(rule, key_dim=16, value_dim=16, step_size=1.0)
    found = outputs(function, rule.for_unit_keys(16), params, q, k, v, gates)
    assert_close(found, attention(4 * q, 4 * k, v, is_causal=True), 1e-5)


def test_who_keeps_its_scale():
    unnormalized, own = SoftmaxRule(MATRIX, normalized=False), SoftmaxRule(scale=1.0)
    assert unnormalized.for_unit_keys(64) == unnormalized
    assert own.for_unit_keys(64) == own
    assert SoftmaxRule().for_unit_keys(64).score_scale(64) == 8
    assert memory.CachedRule(SoftmaxRule()).for_unit_keys(64).rule.scale == 8
    assert rules.titans().for_unit_keys(64) == rules.titans()
    with pytest.raises(ValueError, match="scale must be a number > 0 or None, got 0"):
        SoftmaxRule(scale=0.0)


@each_function
def test_unnormalized_dot_is_the_delta_rule_in_kernel_space(function, x64):
    """W_t φ*(x) = W_{t−1} φ*(x) + η_t (v_t − W_{t−1} φ*(k_t)) κ(k_t, x), by the closed recurrence on coefficients (A Eq. 30–31)."""
    rule = SoftmaxRule(MATRIX, L2, retention=FULL, normalized=False, chunk_size=1)
    params, q, k, v, gates = make_inputs(rule, batch=1, heads=1, value_dim=3, dtype=jnp.float64)
    keys, queries, values, eta = (np.asarray(x)[0, :, 0] for x in (k, q, v, gates.step_size))
    kernel = lambda x, y: np.exp(x @ y.T / 2.0)  # √key_dim = 2
    a = np.zeros_like(values)
    expected = np.zeros_like(values)
    for t in range(len(keys)):
        a[t] = eta[t] * (values[t] - kernel(keys[t], keys[:t]) @ a[:t])
        expected[t] = kernel(queries[t], keys[: t + 1]) @ a[: t + 1]
    assert_close(outputs(function, rule, params, q, k, v, gates)[0, :, 0], expected, 1e-12)


def test_unnormalized_dot_is_the_omega_rule_in_kernel_space(x64):
    """A Eq. 28 and 29 by descent: W_t φ*(x) = W_{t−1} φ*(x) + η_t Σ_{j<c} γ_j (v_i − W_{t−1} φ*(k_i)) κ(k_i, x), i = t − j."""
    rule = SoftmaxRule(MATRIX, L2, retention=FULL, normalized=False, window=3, chunk_size=1)
    params, q, k, v, gates = make_inputs(rule, batch=1, heads=1, value_dim=3, dtype=jnp.float64)
    keys, queries, values, eta, gamma = (
        np.asarray(x)[0, :, 0] for x in (k, q, v, gates.step_size, gates.window_weights)
    )
    kernel = lambda x, y: np.exp(x @ y.T / 2.0)  # √key_dim = 2
    a = np.zeros_like(values)
    expected = np.zeros_like(values)
    for t in range(len(keys)):
        window = range(max(0, t - 2), t + 1)
        a += sum(
            eta[t] * gamma[t, t - i] * np.outer(np.arange(len(a)) == i, values[i] - kernel(keys[i], keys) @ a)
            for i in window
        )
        expected[t] = kernel(queries[t], keys) @ a
    assert_close(outputs("scan", rule, params, q, k, v, gates)[0, :, 0], expected, 1e-12)


@each_function
def test_a_coefficient_is_one_gradient_step(function, x64):
    """After one token, a_1 = −η γ σ'(h) ⊙ (W1ᵀ ∂ℓ/∂out) at the empty cache, and W1 took the outer product's step."""
    rule = SoftmaxRule(objective=L2, window=2, chunk_size=1)
    params, q, k, v, gates = make_inputs(rule, batch=1, heads=1, time=1, dtype=jnp.float64)
    _, state = jax.jit(lambda *x: getattr(memory, function)(rule, params, None, *x))(q, k, v, gates)
    W1 = np.asarray(params.weights["W1"])[0]
    step = float(gates.step_size[0, 0, 0] * gates.window_weights[0, 0, 0, 0])
    error = np.asarray(k - v)[0, 0, 0]  # h = 0 and σ(0) = 0: the output is the residual, k
    np.testing.assert_allclose(state.coefficients[0, 0, 0], -step * 0.5 * (W1.T @ error), rtol=1e-12)  # σ'(0) = ½
    np.testing.assert_allclose(state.weights["W1"][0, 0], gates.retention[0, 0, 0] * W1, rtol=1e-12)


@each_function
def test_first_output_of_a_deep_memory(function, x64):
    """One token, written out: the empty cache gives 0 (not 0/0), then y_1 = q + W1 σ(a_1), for κ/Z = 1 with a single entry."""
    rule = SoftmaxRule(chunk_size=4)
    params, q, k, v, gates = make_inputs(rule, batch=1, heads=1, time=1, dtype=jnp.float64)
    W1, eta = np.asarray(params.weights["W1"])[0], float(gates.step_size[0, 0, 0])
    alpha = float(gates.retention[0, 0, 0])
    a = eta * 0.5 * (W1.T @ np.asarray(v)[0, 0, 0])
    expected = np.asarray(q)[0, 0, 0] + alpha * W1 @ np.asarray(jax.nn.gelu(jnp.asarray(a), approximate=True))
    np.testing.assert_allclose(outputs(function, rule, params, q, k, v, gates)[0, 0, 0], expected, rtol=1e-12)
    gradient = jax.jit(jax.grad(lambda k: getattr(memory, function)(rule, params, None, q, k, v, gates)[0].sum()))(k)
    assert np.isfinite(np.asarray(gradient)).all()
