"""HiPPO-LegS matrices against integration, matrix exponentials, single steps, and the published numbers."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.polynomial import legendre
from scipy.linalg import expm

from atlasjax.mixers.elastic import hippo, sampling


def matrices(order):
    """A and B of t c' = −A c + B f."""
    n = np.arange(order)
    b = np.sqrt(2 * n + 1.0)
    return np.tril(np.outer(b, b), -1) + np.diag(n + 1.0), b


def g(n, u):
    return np.sqrt(2 * n + 1) * legendre.legval(2 * u - 1, np.eye(n + 1)[n])


@pytest.mark.parametrize("order", [1, 2, 7, 12])
def test_transition_is_a_power_of_the_matrix(order):
    a, _ = matrices(order)
    for start, stop in ((1, 2), (3, 17), (500, 501)):
        p = hippo.transition(order, start, stop)
        assert p.shape == (order, order)
        np.testing.assert_allclose(p, expm(a * np.log(start / stop)), atol=1e-13)
    assert not hippo.transition(order, 0, 5).any()
    legacy = hippo.transition(order, 4, 9, legacy_hippo=True)
    np.testing.assert_allclose(legacy, expm(a * np.log(5 / 10)), atol=1e-13)


def test_kernel_is_an_integral():
    nodes, weights = legendre.leggauss(20)
    for start, stop, shift in ((0, 3, 0), (5, 9, 0), (5, 9, 1)):
        k = hippo.kernel(6, start, stop, legacy_hippo=bool(shift))
        assert k.shape == (6, stop - start)
        for n in range(6):
            for j in range(stop - start):
                low, high = (start + j + shift) / (stop + shift), (start + j + 1 + shift) / (stop + shift)
                u = (low + high) / 2 + (high - low) / 2 * nodes
                assert k[n, j] == pytest.approx((high - low) / 2 * weights @ g(n, u), abs=1e-14)


def test_a_block_is_its_tokens_one_after_another():
    """E Eq. 4, 22 and 25 token by token are Eq. 6: P_i is the product of the Ā_k (Eq. 5), K_i has the columns of Eq. 27."""
    order, start, stop = 6, 3, 8
    a, b = matrices(order)
    p, k = np.eye(order), np.zeros((order, 0))
    for token in range(start, stop):
        step = expm(-a * np.log((token + 1) / token))
        p, k = step @ p, np.column_stack([step @ k, np.linalg.solve(a, (np.eye(order) - step) @ b)])
    np.testing.assert_allclose(hippo.transition(order, start, stop), p, atol=1e-12)
    np.testing.assert_allclose(hippo.kernel(order, start, stop), k, atol=1e-12)


def test_large_order_is_exact():
    """Orthonormal at ratio → 1, composes, and its first column is an integral with a closed form; N = 1,080."""
    nodes, weights = hippo._quadrature(1080)
    basis = hippo._basis(1080, nodes)
    np.testing.assert_allclose((basis * weights) @ basis.T, np.eye(1080), atol=1e-11)
    p = hippo.transition(1080, 3, 5)
    high, low = (hippo._antiderivatives(1080, np.array([u]))[:, 0] for u in (3 / 5, 0.0))
    np.testing.assert_allclose(p[:, 0], high - low, atol=1e-12)
    np.testing.assert_allclose(np.diag(p)[:40], (3 / 5) ** np.arange(1, 41.0), atol=1e-12)
    f = np.random.default_rng(0).normal(size=(5 * 8, 3))
    through = p @ hippo.kernel(1080, 0, 24) @ f[:24] + hippo.kernel(1080, 24, 40) @ f[24:]
    np.testing.assert_allclose(through, hippo.kernel(1080, 0, 40) @ f, atol=1e-11)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("discretization", ["forward", "backward", "bilinear"])
def test_steps_of_the_other_discretizations(discretization, legacy):
    """Against the recurrence token by token with dense solves."""
    order, start, stop = 5, 0, 23
    a, b = matrices(order)
    f = np.random.default_rng(1).normal(size=stop)
    c, states, eye = np.zeros(order), {}, np.eye(order)
    for k in range(start, stop):
        states[k] = c
        t0, t1 = (k + 1, k + 1) if legacy else (k, k + 1)
        if t0 == 0:
            c = f[0] * eye[0]
        elif discretization == "forward":
            c = c + (-a @ c + b * f[k]) / t0
        elif discretization == "backward":
            c = np.linalg.solve(eye + a / t1, c + b * f[k] / t1)
        else:
            c = np.linalg.solve(eye + a / (2 * t1), c - a @ c / (2 * t0) + b * f[k] * (1 / t0 + 1 / t1) / 2)
    options = {"discretization": discretization, "legacy_hippo": legacy}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.testing.assert_allclose(hippo.kernel(order, 0, stop, **options) @ f, c, atol=1e-12)
        p, k = hippo.block(order, 9, stop, **options)
        np.testing.assert_allclose(p @ states[9] + k @ f[9:], c, atol=1e-12)
    long = hippo.transition(order, 400, 1200, discretization=discretization)
    np.testing.assert_allclose(long, hippo.transition(order, 400, 1200), atol=0.02)


def sines(count):
    x = np.arange(1024) / 1024
    return sum(np.sin(2 * np.pi * omega * x) for omega in range(1, count + 1))


@pytest.mark.parametrize(
    ("count", "discretization", "published"),
    [
        (1, "zoh", "1.187e-05"),
        (3, "zoh", "2.267e-04"),
        (5, "zoh", "9.849e-04"),
        (5, "forward", "3.338e-03"),
        (5, "backward", "2.946e-03"),
        (5, "bilinear", "4.783e-04"),
    ],
)
def test_published_reconstruction_errors(count, discretization, published):
    """E Table 12. The paper prints two digits; these are four of our own results, which round to them."""
    f = sines(count)
    c = hippo.kernel(32, 0, 1024, discretization=discretization, legacy_hippo=True) @ f
    read = hippo.reconstruction(32, np.linspace(0, 1, 1024)) @ c
    assert f"{np.mean((read - f) ** 2):.3e}" == published


def test_compress_and_reconstruct():
    f = jnp.asarray(np.stack([sines(3), sines(1)], axis=-1)[None], jnp.float32)
    run = jax.jit(lambda f: hippo.compress(f, 64))
    c = run(f)
    assert c.shape == (1, 64, 2)
    middle = np.arange(1024) + 0.5
    exact = hippo.reconstruction(64, middle, 1024) @ hippo.kernel(64, 0, 1024) @ np.asarray(f[0], np.float64)
    read = hippo.reconstruct(c, middle, 1024)
    np.testing.assert_allclose(read[0], exact, atol=5e-6)
    assert np.mean((read - f) ** 2) < 1e-5
    split = hippo.compress(f[:, 700:], 64, coefficients=hippo.compress(f[:, :700], 64), start=700)
    np.testing.assert_allclose(split, c, atol=2e-6)
    # Projection: ⟨compress(f), c⟩ is the inner product of f with the polynomial, so its gradient is the kernel.
    gradient = jax.grad(lambda f: run(f)[0, 5, 1])(f)
    np.testing.assert_allclose(gradient[0, :, 1], hippo.kernel(64, 0, 1024)[5], atol=1e-7)
    assert not np.asarray(gradient[0, :, 0]).any()
    half = hippo.compress(f.astype(jnp.bfloat16), 64)
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, c, atol=0.01)


def test_forward_euler_warns_where_it_explodes():
    with pytest.warns(RuntimeWarning, match=r"'forward' with order=96 is unstable over tokens 0 to 64.*Use 'zoh'"):
        hippo.kernel(96, 0, 64, discretization="forward")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hippo.kernel(32, 0, 1024, discretization="forward", legacy_hippo=True)
        hippo.kernel(96, 0, 64, discretization="backward")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: hippo.transition(0, 1, 2), "order must be an integer ≥ 1, got 0"),
        (lambda: hippo.transition(4, 2, 2), "stop must be an integer ≥ 3, got 2"),
        (lambda: hippo.kernel(4, -1, 2), "start must be an integer ≥ 0, got -1"),
        (lambda: hippo.kernel(4, 0, 2, discretization="zho"), "discretization 'zho'. Did you mean 'zoh'"),
        (lambda: hippo.reconstruction(4, [0.5, 1.1]), r"positions must lie in \[0, 1.0\], got 1.1 at index 1"),
        (lambda: hippo.reconstruction(4, [np.nan]), "must lie in"),
        (lambda: hippo.reconstruction(4, [1.0], 0), "length must be a number > 0, got 0"),
        (lambda: hippo.compress(jnp.zeros((5, 2)), 4, start=3), "start=3 with coefficients None"),
        (lambda: hippo.compress(jnp.zeros(5), 4), r"signal has shape \(5,\)"),
        (lambda: hippo.compress(None, 4), r"signal must be an array \[..., time ≥ 1, channels\], got NoneType"),
        (lambda: hippo.compress(jnp.zeros((5, 2), int), 4), "signal must be floating point, got int32"),
        (lambda: hippo.compress(jnp.zeros((5, 2)), None), "order must be an integer ≥ 1, got None"),
        (lambda: hippo.compress(jnp.zeros((5, 2)), 4, start=None), "start must be an integer ≥ 0, got None"),
        (lambda: hippo.compress(jnp.zeros((5, 2)), 4, coefficients=[0], start=1), "coefficients must be an array"),
        (lambda: hippo.compress(jnp.zeros((5, 2)), 4, legacy_hippo=None), "legacy_hippo must be True or False, got None"),
        (lambda: hippo.reconstruct([[0.0]], [0.5]), "coefficients must be an array"),
        (lambda: hippo.reconstruct(jnp.zeros((4, 2), bool), [0.5]), "coefficients must be floating point, got bool"),
        (lambda: hippo.reconstruct(jnp.zeros((4, 2)), "x"), "positions must be numbers"),
        (lambda: hippo.reconstruction(4, [[1.0], [1.0, 2.0]]), "positions must be numbers"),
        (lambda: hippo.reconstruction(4, [1.0], None), "length must be a number > 0, got None"),
        (lambda: hippo.kernel(4, 0, 2, discretization=None), "Unknown discretization None"),
        (lambda: sampling.positions("exponental", 4, 8), "sampling 'exponental'. Did you mean 'exponential'"),
        (lambda: sampling.positions("uniform", 4, None), "length must be a number > 0, got None"),
        (lambda: sampling.uniform(0, 8), "samples must be an integer ≥ 1, got 0"),
        (lambda: sampling.uniform_mid(4, -1), "length must be a number > 0, got -1"),
        (lambda: sampling.exponential(4, 8, alpha="x"), "alpha must be a number .* got 'x'"),
        (lambda: sampling.positions("uniform", 0, 8), "samples must be an integer ≥ 1, got 0"),
        (lambda: sampling.positions(lambda n, t: np.arange(n) - 1.0, 4, 8), r"must lie in \[0, 8\], got -1.0 at index 0"),
        (lambda: sampling.positions(lambda n, t: [t], 4, 8), "gave 1 positions, must be 4"),
        (lambda: sampling.exponential(4, 8, alpha=1.0), r"alpha must be a number in \(0, 1\) or None, got 1.0"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, words):
    with pytest.raises((TypeError, ValueError), match=words) as error:
        call()
    assert len(str(error.value).splitlines()) == 1


def test_samplings():
    np.testing.assert_allclose(sampling.positions("uniform", 4, 8), [0, 2, 4, 6])
    np.testing.assert_allclose(sampling.positions("uniform_mid", 4, 8), [1, 3, 5, 7])
    x = sampling.positions("exponential", 540, 4096)
    assert x[0] == 0
    assert x[-1] == pytest.approx(4096 - 0.5)
    assert np.all(np.diff(x, 2) < 0)
    np.testing.assert_allclose(sampling.exponential(3, 8, alpha=0.5), [0, 4, 6])
    matrix = sampling.sampled_reconstruction(6, lambda count, length: np.linspace(0, length, count), 3, 10.0)
    assert matrix.dtype == np.float32
    np.testing.assert_allclose(matrix[:, 2], [g(2, u) for u in (0, 0.5, 1)], rtol=1e-6)
