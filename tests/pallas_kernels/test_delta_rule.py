"""The delta rule's kernels against their definition, token by token, in interpret mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import blocks
from pallas_kernels.arguments import BEGINS, CONTINUES, EMPTY, Segments
from pallas_kernels.delta_rule import delta_rule
from pallas_kernels.delta_rule.state_pass import state_pass
from pallas_kernels.delta_rule.tiles import Chunks
from pallas_kernels.residuals import RESIDUALS
from tests.marks import if_slow, some_slow

KERNELS = ("pallas_tpu", "pallas_gpu")


def inputs(batch, time, heads, key_dim, value_dim, *, gated, same_keys=False, dtype="float32"):
    rng = np.random.default_rng(0)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    q, k = unit(rng.standard_normal((2, batch, time, heads, key_dim)))
    if same_keys:  # where powers of the system would overflow
        k = np.broadcast_to(k[:, :1], k.shape)
    v = rng.standard_normal((batch, time, heads, value_dim))
    beta = rng.uniform(0.2, 1.0, (batch, time, heads))
    decay = rng.uniform(0.0, 1.0, (batch, time, heads)) * (rng.random((batch, time, heads)) > 0.2)  # some are zero
    decay = np.where(rng.random((batch, time, heads)) > 0.8, 1.0, decay)  # and some one, such as the first
    decay[:, :2] = 1.0
    initial = rng.standard_normal((batch, heads, value_dim, key_dim))
    arrays = [jnp.asarray(x, dtype) for x in (q, k, v)]
    return (*arrays, *(jnp.asarray(x, jnp.float32) for x in (beta, *((decay,) if gated else ()), initial)))


def run(gated, args, **options):
    """Outputs and gradients of every argument for random cotangents."""

    def f(*args):
        decay, initial = (args[4], args[5]) if gated else (None, args[4])
        return delta_rule(*args[:4], decay, initial, **options)

    (y, final), pullback = jax.vjp(jax.jit(f), *args)
    rng = np.random.default_rng(1)
    random = lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype)
    return y, final, *pullback((random(y), random(final)))


def close(found, expected, tolerance):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(), rtol=0)


SHAPES = [
    ("pallas_tpu", (2, 37, 2, 8, 16), 16),
    ("pallas_tpu", (1, 16, 1, 16, 8), 16),
    ("pallas_tpu", (1, 5, 1, 4, 4), 8),
    ("pallas_tpu", (1, 64, 1, 32, 32), 32),
    ("pallas_tpu", (1, 37, 6, 16, 8), 32),  # two heads side by side, and three such groups, which 4 does not divide
    ("pallas_tpu", (1, 37, 4, 16, 16), 16),  # four heads side by side
    ("pallas_tpu", (1, 37, 3, 8, 8), 8),  # heads that share no factor with 16
    ("pallas_tpu", (1, 16, 13, 16, 16), 16),  # so many of these that each has its own program
    ("pallas_tpu", (1, 70, 2, 8, 64), 64),  # heads that fill a tile
    ("pallas_tpu", (1, 40, 4, 128, 8), 32),
    ("pallas_tpu", (1, 20, 8, 16, 16), 16),
    ("pallas_gpu", (2, 37, 2, 8, 16), 16),
    ("pallas_gpu", (1, 70, 1, 96, 40), 64),  # several parts of keys and of values
    ("pallas_gpu", (1, 5, 1, 4, 20), 8),
]


# How heads lie side by side is in test_side_by_side.py too.
LIKE_ANOTHER = [(1, 16, 1, 16, 8), (1, 64, 1, 32, 32), (1, 37, 4, 16, 16), (1, 40, 4, 128, 8), (1, 20, 8, 16, 16)]


def by_default(shape, gated):
    return shape[0] > 1 or (gated and shape not in LIKE_ANOTHER)


@pytest.mark.parametrize(
    ("implementation", "shape", "chunk_size", "gated"),
    [
        (*case, gated) if by_default(case[1], gated) else if_slow(*case, gated)
        for case in SHAPES
        for gated in (False, True)
    ],
)
def test_values_and_gradients(implementation, shape, chunk_size, gated):
    args = inputs(*shape, gated=gated)
    expected = run(gated, args, implementation="reference")
    close(run(gated, args, implementation=implementation, chunk_size=chunk_size, interpret=True), expected, 2e-5)


@pytest.mark.parametrize("residuals", RESIDUALS)
def test_values_that_are_kept(residuals):
    args = inputs(1, 37, 2, 8, 16, gated=True)
    expected = run(True, args, implementation="reference")
    close(run(True, args, chunk_size=16, interpret=True, residuals=residuals), expected, 2e-6)


@pytest.mark.parametrize("residuals", [if_slow("inverse"), "all"])
def test_values_that_are_kept_in_bfloat16(residuals):
    args = inputs(1, 40, 2, 16, 16, gated=True, dtype="bfloat16")
    exact = run(True, [x.astype(jnp.float32) for x in args], implementation="reference")
    found = run(True, args, chunk_size=16, interpret=True, residuals=residuals)
    close([x.astype(jnp.float32) for x in found], exact, 2e-2)


def test_values_that_are_kept_of_packed_segments():
    marks = jnp.array([[CONTINUES, BEGINS, CONTINUES, EMPTY], [BEGINS, BEGINS, EMPTY, EMPTY]], jnp.int32)
    *tokens, initial = inputs(2, 32, 2, 8, 8, gated=True)
    real = (jnp.arange(32) % 8 < 6)[None] & (jnp.repeat(marks, 8, axis=1) != EMPTY)
    here = lambda x, otherwise: jnp.where(jnp.expand_dims(real, tuple(range(2, x.ndim))), x, otherwise)

    def loss(args, start, **options):
        (q, k, v, beta, decay), initial = args
        segments = Segments(marks, start, real.astype(jnp.float32))
        gates = here(beta, 0.0), here(decay, 1.0)
        y, final = delta_rule(q, k, v, *gates, initial, chunk_size=8, segments=segments, **options)
        return jnp.sum(here(jnp.sin(y), 0.0)) + jnp.sum(jnp.sin(final)), final

    gradients = lambda **options: jax.jit(jax.grad(functools.partial(loss, **options), argnums=(0, 1), has_aux=True))
    found, expected = (
        jax.tree.leaves(gradients(**options)((tokens, initial), 0.5 * initial[0]))
        for options in ({"interpret": True, "residuals": "all"}, {"implementation": "reference"})
    )
    close(found, expected, 2e-6)


@pytest.mark.parametrize("implementation", KERNELS)
def test_equal_keys(implementation):
    args = inputs(1, 64, 1, 8, 8, gated=False, same_keys=True)
    found = run(False, args, implementation=implementation, interpret=True)
    close(found, run(False, args, implementation="reference"), 2e-5)


@pytest.mark.parametrize(
    ("implementation", "shape", "chunk_size"),
    [("pallas_tpu", (1, 40, 2, 16, 16), 16), ("pallas_gpu", (1, 100, 2, 80, 16), 64)],
)
def test_bfloat16_inputs(implementation, shape, chunk_size):
    args = inputs(*shape, gated=True, dtype="bfloat16")
    exact = run(True, [x.astype(jnp.float32) for x in args], implementation="reference")
    found = run(True, args, implementation=implementation, chunk_size=chunk_size, interpret=True)
    close([x.astype(jnp.float32) for x in found], exact, 2e-2)


@pytest.mark.parametrize("gated", [if_slow(False), True])
def test_bfloat16_operands_of_wide_matrix_units(gated, monkeypatch):
    args = inputs(1, 70, 2, 16, 16, gated=gated, dtype="bfloat16")
    exact = run(gated, [x.astype(jnp.float32) for x in args], implementation="reference")
    narrow = run(gated, args, interpret=True)
    monkeypatch.setattr(blocks, "matrix_unit", lambda: 256)
    found = run(gated, args, interpret=True)
    close([x.astype(jnp.float32) for x in found], exact, 2e-2)
    assert any(bool(jnp.any(x != y)) for x, y in zip(narrow, found))  # the interpreter's products are exact otherwise


@pytest.mark.parametrize(("implementation", "cuts"), [("pallas_tpu", (1, 28, 13, 16)), ("pallas_gpu", (13, 16))])
def test_split_anywhere(implementation, cuts):
    *tokens, initial = inputs(1, 29, 2, 8, 8, gated=True)
    scan = functools.partial(delta_rule, implementation=implementation, chunk_size=8, interpret=True)
    y, final = scan(*tokens, initial)
    for cut in cuts:
        y1, state = scan(*(x[:, :cut] for x in tokens), initial)
        y2, state = scan(*(x[:, cut:] for x in tokens), state)
        close([jnp.concatenate([y1, y2], axis=1), state], [y, final], 2e-6)


# Rows are folded by one function for all GPU kernels: test_chunk_memory_gpu.py.
@pytest.mark.parametrize("implementation", some_slow(KERNELS, ["pallas_gpu"]))
def test_vmap_and_remat(implementation):
    args = inputs(2, 16, 1, 8, 8, gated=True)
    scan = functools.partial(delta_rule, implementation=implementation, chunk_size=8, interpret=True)
    loss = lambda f: jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args)[0])), argnums=(0, 1, 2, 3, 4, 5))
    rows = tuple(x[:, None] for x in args)
    expected = loss(scan)(*args)
    close([x[:, 0] for x in jax.vmap(loss(scan))(*rows)], expected, 1e-6)
    close(jax.jit(loss(jax.checkpoint(scan)))(*args), expected, 1e-6)


@pytest.mark.parametrize("gated", [False, True])
def test_state_pass_is_its_own_adjoint(gated):
    batch, count, size, heads, key_dim, value_dim = 1, 3, 16, 2, 128, 64
    rng = np.random.default_rng(0)
    random = lambda *shape: jnp.asarray(rng.standard_normal(shape) / 8, jnp.float32)
    tokens = lambda n: random(batch, count * size, heads, n)
    decay = jnp.asarray(rng.uniform(0.0, 1.0, (heads, count)), jnp.float32).at[0, 1].set(0.0) if gated else None
    a, b, c, first = tokens(value_dim), tokens(key_dim), tokens(key_dim), random(heads, value_dim, key_dim)

    def definition(a, first):
        product = functools.partial(jnp.einsum, precision="highest")
        by_chunk = lambda x: jnp.moveaxis(x[0].reshape(count, size, heads, -1), 2, 1)

        def step(x, chunk):
            a, b, c, decay = chunk
            z = a - product("rtk,rvk->rtv", b, x)
            return decay[:, None, None] * x + product("rtv,rtk->rvk", z, c), (x, z)

        gamma = jnp.ones((heads, count)) if decay is None else decay
        last, (x, z) = jax.lax.scan(step, first, (by_chunk(a), by_chunk(b), by_chunk(c), gamma.T))
        return jnp.moveaxis(x, 0, 1), jnp.moveaxis(z, 1, 2).reshape(a.shape), last

    chunks = Chunks(heads, size)
    expected, pullback = jax.vjp(definition, a, first)
    close(state_pass(chunks, a, b, c, None, decay, first, True), expected, 2e-6)
    dx, dz, dlast = (random(*x.shape) for x in expected)
    _, da, dfirst = state_pass(chunks, dz, c, b, dx, decay, dlast, True, reverse=True)
    close((da, dfirst), pullback((dx, dz, dlast)), 2e-6)


def test_no_race_and_no_unwritten_memory():
    args = inputs(2, 24, 1, 8, 128, gated=True)
    interpret = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    expected = run(True, args, implementation="reference")
    close(run(True, args, chunk_size=8, interpret=interpret), expected, 2e-5)


def test_bad_input():
    q, k, v, beta, initial = inputs(1, 8, 2, 4, 4, gated=False)
    for message, arguments, options in [
        (r"beta has shape \(1, 8\), must be \(1, 8, 2\)", (q, k, v, beta[..., 0]), {}),
        (r"initial has shape .*, must be \(1, 2, 4, 4\)", (q, k, v, beta, None, initial[:, :1]), {}),
        ("should all be float32 or all bfloat16", (q, k.astype(jnp.bfloat16), v, beta), {}),
        ("chunk_size=24, must be a power of two", (q, k, v, beta), {"chunk_size": 24}),
        ("residuals='some', must be one of", (q, k, v, beta), {"residuals": "some"}),
        ("implementation='gpu', must be one of", (q, k, v, beta), {"implementation": "gpu"}),
        ("head dimensions up to 256", (jnp.ones((1, 8, 2, 300)), jnp.ones((1, 8, 2, 300)), v, beta), {}),
    ]:
        with pytest.raises(ValueError, match=message):
            delta_rule(*arguments, **options)
