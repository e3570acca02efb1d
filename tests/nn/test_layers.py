"""Norms and the causal convolution against numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax.nn.layers import GELU, CausalConv, LayerNorm, Linear, RMSNorm, SwiGLU, dropout, l2_normalize
from atlasjax.nn.parameters import param


def test_rms_norm_is_float32_inside():
    norm = RMSNorm((4,), ("embed",), 1e-6)
    norm.scale[...] = jnp.array([1.0, 2.0, 3.0, 4.0])
    x = np.array([[300.0, -1.0, 0.5, 7.0]])
    expected = x / np.sqrt((x**2).mean()) * [1, 2, 3, 4]
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32)), expected, rtol=1e-6)
    half = norm(jnp.asarray(x, jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(half, np.float32), expected, rtol=2**-8)


def test_layer_norm_is_float32_inside():
    norm = LayerNorm((4,), ("embed",), 1e-5)
    norm.scale[...], norm.bias[...] = jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.array([0.5, -1.0, 0.0, 2.0])
    x = np.array([[1300.0, 1299.0, 1300.5, 1307.0], [0.1, -1.0, 0.5, 7.0]])
    centred = x - x.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * [1, 2, 3, 4] + [0.5, -1, 0, 2]
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32)), expected, rtol=1e-5, atol=1e-5)
    half = norm(jnp.asarray(x[1:], jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(half, np.float32), expected[1:], rtol=2**-6, atol=2**-6)


def test_l2_normalize_at_zero_and_far_from_it():
    assert np.all(l2_normalize(jnp.zeros(5)) == 0)
    assert np.all(np.isfinite(jax.grad(lambda x: l2_normalize(x).sum())(jnp.zeros(5))))
    np.testing.assert_allclose(jnp.linalg.norm(l2_normalize(jnp.arange(1.0, 6.0))), 1.0, rtol=1e-6)


def test_swiglu_is_its_formula():
    mlp = SwiGLU(3, 5, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 3))
    gate, wide = x @ mlp.gate_and_wide.kernel[:, 0], x @ mlp.gate_and_wide.kernel[:, 1]
    expected = (gate / (1 + jnp.exp(-gate)) * wide) @ mlp.out.kernel[...]
    np.testing.assert_allclose(mlp(x), expected, rtol=1e-5, atol=1e-6)


def test_gelu_is_its_formula_with_biases():
    mlp = GELU(3, 5, rngs=nnx.Rngs(0))
    mlp.wide.bias[...], mlp.out.bias[...] = jnp.linspace(-1, 1, 5), jnp.array([0.1, 0.2, -0.3])
    x = np.random.default_rng(1).normal(size=(2, 3)).astype(np.float32)
    h = np.asarray(x @ mlp.wide.kernel[...] + mlp.wide.bias[...], np.float64)
    h = h * (1 + np.vectorize(math.erf)(h / np.sqrt(2))) / 2
    np.testing.assert_allclose(mlp(x), h @ mlp.out.kernel[...] + mlp.out.bias[...], rtol=1e-5, atol=1e-6)
    assert Linear((3, 5), ("embed", "mlp"), rngs=nnx.Rngs(0)).bias is None


def test_dropout_keeps_the_mean_and_each_row_has_its_own_key():
    keys, x = jax.random.split(jax.random.key(0), 3), jnp.full((3, 40, 50), 2.0)
    y = np.asarray(dropout(x, 0.25, keys))
    assert set(np.unique(y)) == {0.0, np.float32(2 / 0.75)}
    assert abs((y == 0).mean() - 0.25) < 0.02  # 6,000 draws: a standard deviation of 0.006
    assert not np.array_equal(y[0], y[1])
    np.testing.assert_array_equal(dropout(x[1:], 0.25, keys[1:]), y[1:])
    np.testing.assert_array_equal(dropout(x, 0.25, None), x)
    np.testing.assert_array_equal(dropout(x, 0.0, keys), x)
    half = dropout(x.astype(jnp.bfloat16), 0.25, keys)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half == 0, y == 0)


def _convolve(kernel, x):
    """The definition, for one row [time, channels]."""
    width = len(kernel)
    return np.array([sum(kernel[width - 1 - j] * x[t - j] for j in range(width) if t - j >= 0) for t in range(len(x))])


@pytest.mark.parametrize("width", [1, 2, 4])
def test_convolution_and_its_streaming(width):
    conv = CausalConv(width, (3,), ("heads",), rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(2, 9, 3)).astype(np.float32)
    expected = np.stack([_convolve(np.asarray(conv.kernel[...]), row) for row in x])
    y, _ = conv(jnp.asarray(x), conv.init_state(2, jnp.float32))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    state = conv.init_state(2, jnp.float32)
    for start, stop in [(0, 1), (1, 2), (2, 7), (7, 9)]:
        y, state = conv(jnp.asarray(x[:, start:stop]), state)
        np.testing.assert_allclose(y, expected[:, start:stop], rtol=1e-5, atol=1e-6)


def test_convolution_stops_at_segments_even_if_an_id_returns():
    conv = CausalConv(4, (3,), ("heads",), rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(1, 9, 3)).astype(np.float32)
    ids = jnp.array([[0, 0, 1, 0, 0, 0, 0, 2, 2]])
    y, _ = conv(jnp.asarray(x), conv.init_state(1, jnp.float32), ids)
    kernel = np.asarray(conv.kernel[...])
    alone = [_convolve(kernel, x[0, a:b]) for a, b in [(0, 2), (2, 3), (3, 7), (7, 9)]]
    np.testing.assert_allclose(y[0], np.concatenate(alone), rtol=1e-5, atol=1e-6)


def test_param_refuses_names_that_do_not_fit():
    with pytest.raises(ValueError, match="embedd"):
        param(jnp.zeros((2, 3)), "embedd", None)
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        param(jnp.zeros((2, 3)), "embed")
