"""Newton–Schulz against its definition on singular values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.newton_schulz import EPSILON, SCHEDULES, coefficients, newton_schulz


def on_singular_values(s, steps, schedule):
    """The same odd polynomial, applied to singular values in float64."""
    u, sigma, vt = np.linalg.svd(s, full_matrices=False)
    sigma = sigma / (np.linalg.norm(s) + EPSILON)
    for a, b, c in coefficients(schedule, steps):
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return (u * sigma) @ vt


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [0, 1, 5, 7])
@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (9, 9), (1, 5)])
def test_values(shape, steps, schedule):
    s = np.random.default_rng(1).standard_normal(shape)
    with jax.enable_x64(True):
        actual = newton_schulz(jnp.asarray(s), steps, SCHEDULES[schedule])
        np.testing.assert_allclose(actual, on_singular_values(s, steps, SCHEDULES[schedule]), atol=1e-9)
    single = newton_schulz(jnp.asarray(s, jnp.float32), steps, SCHEDULES[schedule])
    assert single.dtype == jnp.float32
    np.testing.assert_allclose(single, on_singular_values(s, steps, SCHEDULES[schedule]), atol=1e-3)


def test_standard_wanders_and_polar_express_converges():
    s = np.random.default_rng(2).standard_normal((16, 48))
    spectrum = lambda name, steps: np.linalg.svd(newton_schulz(jnp.asarray(s), steps, SCHEDULES[name]))[1]
    standard = spectrum("standard", 6)
    assert standard.min() > 0.6
    assert standard.max() < 1.3
    assert standard.std() > 0.01
    np.testing.assert_allclose(spectrum("polar_express", 10), 1.0, atol=1e-5)


def test_zero_matrix_and_its_derivative():
    zero = jnp.zeros((3, 6))
    np.testing.assert_array_equal(newton_schulz(zero), 0)
    np.testing.assert_array_equal(jax.jacrev(newton_schulz)(zero), 0)


def test_bfloat16_is_computed_in_float32():
    s = jnp.asarray(np.random.default_rng(3).standard_normal((4, 8)), jnp.bfloat16)
    np.testing.assert_array_equal(newton_schulz(s), newton_schulz(s.astype(jnp.float32)))
