"""Parts of the kernels: precisions and derivatives of products, systems, norms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.memory.bounds import within_norm
from pallas_kernels import blocks, triangular
from pallas_kernels.chunk_memory import bound
from pallas_kernels.chunk_program import Lanes
from pallas_kernels.newton_schulz import newton_schulz
from tests.marks import some_slow

AXES = [(1, 0), (1, 1), (0, 0), (0, 1)]
Precision = jax.lax.Precision


def random(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


def factors(x_axis, y_axis):
    """[24, 40] and [40, 16], or their transposes."""
    x, y = random(24, 40), random(40, 16)
    return (x if x_axis else x.T), (y.T if y_axis else y)


@pytest.mark.parametrize(("x_axis", "y_axis"), AXES)
@pytest.mark.parametrize(("precision", "error"), [(Precision.HIGHEST, 1e-6), (Precision.HIGH, 2**-14)])
def test_a_product_and_its_derivatives(precision, error, x_axis, y_axis):
    x, y = factors(x_axis, y_axis)
    d = random(24, 16)

    def of(product):
        out, pull = jax.vjp(product, x, y)
        return out, *pull(d)

    ours = of(lambda x, y: blocks.product(x, y, x_axis, y_axis, precision))
    with jax.default_matmul_precision("highest"):
        expected = of(lambda x, y: (x if x_axis else x.T) @ (y.T if y_axis else y))
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=error * float(jnp.abs(b).max()))


def test_three_passes_are_between_one_and_exact():
    """The products of the halves, with each rounded to bfloat16 as a matrix unit does."""
    x, y = factors(1, 0)
    exact = np.asarray(x, np.float64) @ np.asarray(y, np.float64)
    error = lambda found: float(np.abs(np.asarray(found, np.float64) - exact).max() / np.abs(exact).max())
    rounded = functools.partial(jax.lax.reduce_precision, exponent_bits=8, mantissa_bits=7)
    one = error(jnp.matmul(rounded(x), rounded(y), precision=Precision.HIGHEST))
    three = error(jax.jit(lambda x, y: blocks.product(x, y, 1, 0, Precision.HIGH))(x, y))
    assert 1e-7 < three < one / 100


@pytest.mark.parametrize(
    ("heads", "wanted", "width", "together", "padded"),
    [
        (16, 8, 64, 8, False),
        (12, 8, 96, 4, False),
        (4, 2, 96, 4, False),  # fills whole tiles
        (9, 8, 64, 9, False),  # all channels
        (11, 8, 64, 11, False),
        (13, 8, 64, 1, True),  # vector memory has no space for all of them
        (15, 8, 64, 5, True),
        (17, 8, 64, 1, True),
        (13, 8, 8, 13, False),  # in one tile
        (7, 4, 64, 1, True),
        (16, 1, 64, 1, True),
    ],
)
def test_the_heads_of_a_program(heads, wanted, width, together, padded):
    assert Lanes.of(heads, wanted, {width}) == Lanes(together, padded)


@pytest.mark.parametrize(("x_axis", "y_axis"), AXES)
def test_a_selection_is_exact(x_axis, y_axis):
    x, _ = factors(x_axis, y_axis)
    place = np.random.default_rng(0).permutation(40)[:16]
    mask = jnp.zeros((40, 16)).at[place, np.arange(16)].set(1.0)
    select = lambda x: blocks.selected(x, mask.T if y_axis else mask, x_axis, y_axis)
    expected = (x if x_axis else x.T)[:, place]
    out, pull = jax.vjp(jax.jit(select), x)
    np.testing.assert_array_equal(out, expected)
    d = random(24, 16)
    back = jnp.zeros((24, 40)).at[:, place].set(d)
    np.testing.assert_allclose(pull(d)[0], back if x_axis else back.T, rtol=1e-6)


@pytest.mark.parametrize("beta", some_slow([0.5, 1.0, 1.9], [0.5]))
@pytest.mark.parametrize("alike", some_slow([0.0, 0.9, 1.0], [0.0]))
def test_a_system_in_three_passes_is_finer_than_the_rounding_of_its_solution(beta, alike):
    """Delta rules read U in one pass of bfloat16, also where a chunk has one key, or removes more than there is.

    Each of ten systems; with β = 1.9 and similar keys, where the error of one is up to twice as large or half of it, their mean.
    """
    rng, ratios = np.random.default_rng(0), []
    for _ in range(10):
        k, v = rng.standard_normal((64, 48), np.float32), rng.standard_normal((64, 32), np.float32)
        k = alike * k[:1] + (1 - alike) * k
        k /= np.linalg.norm(k, axis=1, keepdims=True)
        lower = np.tril(beta * k @ k.T, -1)
        expected = np.linalg.solve(np.eye(64) + lower.astype(np.float64), beta * v.astype(np.float64))
        inverse = triangular.unit_lower_inverse(jnp.asarray(lower), 1, Precision.HIGH)
        solved = triangular.solve(jnp.asarray(lower), jnp.asarray(beta * v), inverse, None, 1, Precision.HIGH)
        rounding = np.abs(np.asarray(jnp.asarray(expected, jnp.bfloat16), np.float64) - expected).max()
        ratios.append(np.abs(solved - expected).max() / rounding)
    found = np.mean(ratios) if beta > 1 and 0 < alike < 1 else np.max(ratios)
    assert found < 1 / 10


def test_newton_schulz_in_three_passes():
    low_rank = random(16, 2) @ random(2, 64)
    run = functools.partial(newton_schulz, implementation="pallas_tpu", interpret=True)
    for s in (random(16, 64), low_rank):
        exact = newton_schulz(s)
        found = run(s, precision=Precision.HIGH)
        assert 0 < float(jnp.abs(found - exact).max()) < 1e-3 * float(jnp.abs(exact).max())
    d = random(16, 64)
    s = random(16, 64)
    expected = jax.vjp(newton_schulz, s)[1](d)[0]
    found = jax.vjp(lambda s: run(s, precision=Precision.HIGH), s)[1](d)[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 1e4, 1e15, 1e30])
def test_a_norm_is_limited_at_any_size(size):
    """`memory.bounds.within_norm`, of which the kernel takes the factor and its derivative."""
    w, d = size * random(130, 24), random(24, 130).T + random(131, 24)[1:]
    most = 8.0 * 130**0.5
    expected, pulled = jax.vjp(lambda w: within_norm(8.0, {"w": w})["w"], w)
    found, pull = jax.vjp(lambda w: bound.within_norm(most, w) * w, w)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=0)
    (gradient,), (ours,) = pulled(d), pull(d)
    if size < 1e10:  # of larger ones a part is below the smallest float32
        np.testing.assert_allclose(ours, gradient, rtol=0, atol=2e-6 * float(jnp.abs(gradient).max()))
    assert np.isfinite(ours).all()
