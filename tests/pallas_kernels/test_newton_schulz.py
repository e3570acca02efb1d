"""Newton–Schulz against its definition on singular values; forms and kernels against it, with gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.gpu import products
from pallas_kernels.newton_schulz import EPSILON, SCHEDULES, coefficients, gpu, newton_schulz, tiles
from tests.marks import some_slow


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


def with_gradient(s, weights, **options):
    f = lambda s: (lambda y: (jnp.sum(weights * y), y))(newton_schulz(s, **options))
    (_, y), gradient = jax.jit(jax.value_and_grad(f, has_aux=True))(s)
    return y, gradient


def close(actual, expected, tolerance):
    np.testing.assert_allclose(actual, expected, atol=tolerance * np.abs(expected).max(), rtol=0)


def check(shape, steps, **options):
    """Of full rank, of rank one as a momentum after its first token, and zero.

    The Gram form squares singular values, so small ones have half their digits: and rounding in a null space
    grows by the square of what it grows by in the direct form: after five steps results are good to 3e-4.
    """
    rng = np.random.default_rng(4)
    s, weights = rng.standard_normal((2, *shape))
    s = np.stack([s, s[..., :1] * s[..., :1, :], np.zeros(shape)])
    weights = np.stack([weights] * 3)
    with jax.enable_x64(True):
        expected, gradient = with_gradient(jnp.asarray(s), jnp.asarray(weights), form="direct", steps=steps)
    y, g = with_gradient(jnp.asarray(s, jnp.float32), jnp.asarray(weights, jnp.float32), steps=steps, **options)
    for i, tolerance in enumerate((3e-4, 3e-4, 0) if options["form"] == "gram" else (1e-5, 1e-4, 0)):
        close(y[i], expected[i], tolerance)
        close(g[i], gradient[i], 10 * tolerance)


# Shape → number of steps by default.
SHAPES = {(3, 16, 64): 5, (2, 64, 24): 5, (2, 3, 9, 9): 5, (1, 5): 0}


@pytest.mark.parametrize(
    ("shape", "steps"),
    [
        pytest.param(shape, steps, marks=[] if SHAPES[shape] == steps else pytest.mark.slow)
        for shape in SHAPES
        for steps in (0, 1, 5)
    ],
)
@pytest.mark.parametrize("options", [
    {"form": "gram"},
    {"form": "gram", "implementation": "pallas_tpu", "interpret": True},
    {"form": "direct", "implementation": "pallas_tpu", "interpret": True},
], ids=["xla-gram", "tpu-gram", "tpu-direct"])  # fmt: skip
def test_forms_and_kernels(shape, steps, options):
    check(shape, steps, **options)


# Tiles of 64, 32 and 16; several along both sides and one; filled up and whole; a program with several matrices. → form by default.
TILED = {((70, 130), 5): "gram", ((24, 40), 1): "direct", ((3, 40, 16), 5): "direct", ((1, 5), 0): "gram"}


@pytest.mark.parametrize(
    ("shape", "steps", "form"),
    [
        pytest.param(*case, form, marks=[] if TILED[case] == form else pytest.mark.slow)
        for case in TILED
        for form in ("gram", "direct")
    ],
)
def test_gpu_kernel(shape, steps, form, monkeypatch):
    monkeypatch.setattr(gpu, "_ALL_WARPS", 4)
    check(shape, steps, form=form, implementation="pallas_gpu", interpret=True)


@pytest.mark.parametrize("form", ["gram", "direct"])
def test_three_passes_of_tf32_are_exact_enough(form, monkeypatch):
    """A GPU's products, as float32 products of what their rounding leaves; one pass would miss by factors of 10 to 10,000."""

    def rounded(x):
        bits = jax.lax.bitcast_convert_type(x, jnp.int32)
        return jax.lax.bitcast_convert_type((bits + 0x1000) & ~0x1FFF, jnp.float32)  # 10 bits of mantissa

    def emulated(dtype, interpret):
        dot = products(dtype, interpret)

        def product(x, y, *axes):
            x_large, y_large = rounded(x), rounded(y)
            x_small, y_small = rounded(x - x_large), rounded(y - y_large)
            return dot(x_small, y_large, *axes) + dot(x_large, y_small, *axes) + dot(x_large, y_large, *axes)

        return product

    monkeypatch.setattr(tiles, "products", emulated)
    check((9, 24), 5, form=form, implementation="pallas_gpu", interpret=True)


def test_gpu_kernel_of_nothing_and_with_64_bits():
    kernel = lambda s: jnp.sum(newton_schulz(s, implementation="pallas_gpu", interpret=True))
    assert jax.grad(kernel)(jnp.zeros((0, 8, 16))).shape == (0, 8, 16)
    with jax.enable_x64(True):
        assert jax.eval_shape(jax.grad(kernel), jnp.zeros((2, 8, 16), jnp.float32)).dtype == jnp.float32


class Phases:
    """An array of matrices that fails where a phase reads what it writes, writes it twice, or reads what nobody wrote."""

    def __init__(self, array=None, shape=None):
        self.array = np.zeros(shape, np.float32) if array is None else np.array(array)
        self.shape = self.array.shape
        self.known = np.full(self.shape, array is not None)
        self.barrier()

    def barrier(self):
        self.written, self.read = np.zeros((2, *self.shape), bool)

    def __getitem__(self, index):
        place = self._place(index)
        assert self.known[place].all(), "reads what nobody wrote"
        assert not self.written[place].any(), "reads what this phase writes"
        self.read[place] = True
        return jnp.asarray(self.array[place])

    def __setitem__(self, index, value):
        place = self._place(index)
        assert not (self.read | self.written)[place].any(), "writes what this phase reads or writes"
        self.written[place] = self.known[place] = True
        self.array[place] = value

    def _place(self, index):
        slices = (slice(int(x.start), int(x.start) + x.size) if isinstance(x, pl.Slice) else x for x in index)
        return tuple(x if isinstance(x, slice) else int(x) for x in slices)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("form", ["gram", "direct"])
def test_gpu_kernel_waits_for_what_it_reads(form, backward):
    """Interpret mode has one thread; here are the kernels' phases as they are, and the barriers between them."""
    steps, tile, (rows, columns) = 3, 16, (32, 48)
    s, weights = np.random.default_rng(7).standard_normal((2, 1, rows, columns)).astype(np.float32)
    squares, wides = gpu._places(form, steps, backward=backward)
    result = Phases(shape=s.shape)
    refs = [Phases(s), *([Phases(weights)] if backward else []), result]
    workspaces = [Phases(shape=(squares, rows, rows)), Phases(shape=(wides, rows, columns))]
    barrier = lambda: [ref.barrier() for ref in (*refs, *workspaces)]
    arithmetic = tiles.Arithmetic(products(jnp.float32, True), barrier, 1)
    triples = jnp.asarray(coefficients(SCHEDULES["polar_express"], steps))
    with jax.disable_jit():
        call = gpu._Call(arithmetic, triples, steps, tile, *workspaces)
        gpu._KERNELS[form, backward](call, *(tiles.Matrix(ref, 0, tile) for ref in refs))
    assert not any(ref.written.any() for ref in (*refs, *workspaces))  # the last phase ended too
    expected = with_gradient(jnp.asarray(s), jnp.asarray(weights), steps=steps, schedule=SCHEDULES["polar_express"])
    close(result.array, expected[backward], 1e-4)


# Batching is the same function's for both kernels, `rows_folded`.
@pytest.mark.parametrize("implementation", some_slow(["pallas_tpu", "pallas_gpu"], ["pallas_gpu"]))
def test_kernel_with_every_batching_and_bfloat16(implementation):
    s = np.random.default_rng(5).standard_normal((2, 3, 8, 16)).astype(np.float32)
    kernel = lambda s: newton_schulz(s, form="gram", implementation=implementation, interpret=True)
    expected = newton_schulz(jnp.asarray(s), form="gram")
    np.testing.assert_allclose(jax.vmap(jax.vmap(kernel))(s), expected, atol=1e-5)
    np.testing.assert_allclose(jax.lax.map(kernel, s), expected, atol=1e-5)
    loss = lambda f: jax.grad(lambda s: jnp.sum(jnp.sin(f(s))))
    np.testing.assert_allclose(jax.vmap(loss(kernel))(s), loss(newton_schulz)(jnp.asarray(s)), atol=1e-4)
    remat = jax.checkpoint(kernel)
    np.testing.assert_allclose(jax.jit(loss(remat))(s), loss(newton_schulz)(jnp.asarray(s)), atol=1e-4)
    half = jnp.asarray(s, jnp.bfloat16)
    np.testing.assert_allclose(kernel(half), kernel(half.astype(jnp.float32)), atol=1e-6)
    assert loss(kernel)(half).dtype == jnp.bfloat16


def test_kernel_reads_no_memory_that_it_did_not_write():
    s = jnp.asarray(np.random.default_rng(6).standard_normal((5, 16, 128)), jnp.float32)
    interpret = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    loss = lambda s, **options: jnp.sum(newton_schulz(s, form="gram", **options) ** 3)
    found = jax.value_and_grad(loss)(s, implementation="pallas_tpu", interpret=interpret)
    expected = jax.value_and_grad(loss)(s)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    close(found[1], expected[1], 1e-4)


def test_bad_input():
    s = jnp.ones((2, 8, 16))
    for message, arguments in {
        "form='grams'": {"form": "grams"},
        "at most 7 steps, got 8": {"form": "gram", "steps": 8},
        "implementation='tpu', must be one of": {"implementation": "tpu"},
    }.items():
        with pytest.raises(ValueError, match=message):
            newton_schulz(s, **arguments)
    for message, shape, dtype in (
        (r"256 × 1,024, s has shape \(512, 600\)", (512, 600), jnp.float32),
        (r"float32 and bfloat16, s is float16 with shape \(4, 4\)", (4, 4), jnp.float16),
    ):
        for implementation in ("pallas_tpu", "pallas_gpu"):
            with pytest.raises(ValueError, match=f"{implementation}' .*{message}"):
                newton_schulz(jnp.ones(shape, dtype), implementation=implementation)
