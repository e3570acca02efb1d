"""The linear rules' kernel, with decays for each channel, against their definition, token by token, in interpret mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from atlasjax.plan.libtpu import ACCELERATORS
from pallas_kernels import blocks
from pallas_kernels.arguments import BEGINS, CONTINUES, EMPTY, Segments
from pallas_kernels.layout import matrix_unit
from pallas_kernels.linear_rule import api, linear_rule
from pallas_kernels.residuals import RESIDUALS
from tests.marks import if_slow, some_slow
from tests.pallas_kernels.test_delta_rule import close

# Name → whether the removal is at k, and whether it has keys of its own.
RULES = {"linear attention": (False, False), "delta rule": (True, False), "RWKV-7": (False, True)}


# RWKV-7 has the parts of the others: where these differ in no other way, they run with `-m slow`.
each_rule = pytest.mark.parametrize("rule", some_slow(RULES, {"linear attention", "delta rule"}))
SHAPES = [
    ((2, 37, 2, 8, 16), 16, False),  # two heads side by side
    ((1, 37, 6, 16, 8), 32, True),  # two heads side by side, and three such groups
    ((1, 37, 3, 8, 8), 8, False),
    ((1, 40, 4, 8, 128), 32, False),  # heads that fill a tile
    ((1, 16, 1, 16, 8), 16, True),
    ((1, 64, 1, 32, 32), 32, False),
    ((1, 100, 2, 64, 64), 64, True),
]
# Each rule in the first shape, and each of the next four for one rule.
DEFAULT = {(0, rule) for rule in RULES} | {(1, "delta rule"), (2, "RWKV-7"), (3, "linear attention"), (4, "RWKV-7")}


def inputs(batch, time, heads, key_dim, value_dim, *, same_keys=False, dtype="float32"):
    """q, k, v, α, β, (r, s), W_0."""
    rng = np.random.default_rng(0)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    q, k, r = unit(rng.standard_normal((3, batch, time, heads, key_dim)))
    if same_keys:  # where powers of the system would overflow
        k, r = (np.broadcast_to(x[:, :1], x.shape) for x in (k, r))
    v = rng.standard_normal((batch, time, heads, value_dim))
    decay = rng.uniform(0.0, 1.0, q.shape) * (rng.random(q.shape) > 0.2)  # some are zero
    beta = rng.uniform(0.2, 1.0, q.shape[:3])
    s = r * rng.uniform(0.0, 1.0, q.shape)
    initial = rng.standard_normal((batch, heads, value_dim, key_dim))
    wide = lambda *arrays: tuple(jnp.asarray(x, jnp.float32) for x in arrays)
    tokens = (jnp.asarray(x, dtype) for x in (q, k, v))
    return (*tokens, *wide(decay, beta), wide(r, s), *wide(initial))


def run(rule, args, **options):
    """Outputs and gradients of every argument for random cotangents."""
    delta, removes = RULES[rule]

    def f(q, k, v, decay, beta, removal, initial):
        return linear_rule(q, k, v, decay, beta, removal if removes else None, initial, delta=delta, **options)

    out, pullback = jax.vjp(jax.jit(f), *args)
    rng = np.random.default_rng(1)
    cotangents = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), out)
    return jax.tree.leaves((out, pullback(cotangents)))


@pytest.mark.parametrize(
    ("shape", "chunk_size", "decay_first", "rule"),
    [
        (*case, rule) if (i, rule) in DEFAULT else if_slow(*case, rule)
        for i, case in enumerate(SHAPES)
        for rule in RULES
    ],
)
def test_values_and_gradients(shape, chunk_size, decay_first, rule):
    args = inputs(*shape)
    expected = run(rule, args, implementation="reference", decay_first=decay_first)
    found = run(rule, args, chunk_size=chunk_size, decay_first=decay_first, interpret=True)
    close(found, expected, 2e-6)


REMOVALS = pytest.mark.parametrize("rule", ["delta rule", "RWKV-7"])
KEPT = pytest.mark.parametrize("residuals", ["inverse", "all"])


@pytest.mark.parametrize(
    ("rule", "residuals"),
    [("linear attention", "all"), *((rule, kept) for rule in ("delta rule", "RWKV-7") for kept in ("inverse", "all"))],
)
def test_values_that_are_kept(rule, residuals):
    args = inputs(1, 37, 4, 16, 8)
    expected = run(rule, args, implementation="reference", decay_first=True)
    close(run(rule, args, chunk_size=16, decay_first=True, interpret=True, residuals=residuals), expected, 2e-6)


@pytest.mark.slow
@REMOVALS
@KEPT
@pytest.mark.parametrize("dim", [64, 128])
def test_values_that_are_kept_of_whole_tiles(rule, residuals, dim):
    args = inputs(1, 130, 2, dim, dim)
    expected = run(rule, args, implementation="reference")
    close(run(rule, args, interpret=True, residuals=residuals), expected, 2e-6)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((128, 128, 64, 1, 2), "all"),
        ((64, 64, 64, 1, 2), "inverse"),
        ((64, 64, 64, 1, 4), "recompute"),
        ((128, 128, 64, 2, 2), "all"),
        ((64, 64, 64, 0, 2), "all"),
        ((32, 32, 64, 0, 2), "recompute"),
    ],
)
def test_default_residuals(sizes, expected):
    assert api._most_residuals(*sizes) == expected


@pytest.mark.parametrize("residuals", [*RESIDUALS])
def test_one_bfloat16_pass(residuals, monkeypatch):
    """Products with tokens as large matrix units round their operands."""
    monkeypatch.setattr(blocks, "matrix_unit", lambda: 256)
    args = inputs(1, 40, 2, 16, 16, dtype="bfloat16")
    exact = run("delta rule", jax.tree.map(lambda x: x.astype(jnp.float32), args), implementation="reference")
    found = run("delta rule", args, chunk_size=16, interpret=True, residuals=residuals)
    close([x.astype(jnp.float32) for x in found], exact, 2e-2)


@pytest.mark.parametrize(("chip", "edge"), [("v5e", 128), ("v5p", 128), ("v6e", 256)])
def test_matrix_unit_of_a_chip(chip, edge):
    assert matrix_unit() == 128  # of the interpreter
    device = jax.sharding.AbstractDevice(ACCELERATORS[chip].kind, num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("chip",), abstract_device=device)):
        assert matrix_unit() == edge


@each_rule
def test_equal_keys(rule):
    args = inputs(1, 64, 1, 8, 8, same_keys=True)
    close(run(rule, args, interpret=True), run(rule, args, implementation="reference"), 2e-5)


@each_rule
def test_bfloat16_inputs(rule):
    args = inputs(1, 40, 2, 16, 16, dtype="bfloat16")
    exact = run(rule, jax.tree.map(lambda x: x.astype(jnp.float32), args), implementation="reference")
    found = run(rule, args, chunk_size=16, interpret=True)
    close([x.astype(jnp.float32) for x in found], exact, 2e-2)


@each_rule
def test_split_anywhere(rule):
    delta, removes = RULES[rule]
    *tokens, initial = inputs(1, 29, 2, 8, 8)
    tokens[-1] = tokens[-1] if removes else None
    scan = functools.partial(linear_rule, delta=delta, chunk_size=8, interpret=True)
    y, final = scan(*tokens, initial)
    for cut in (1, 13, 16, 28):
        first, second = (
            jax.tree.map(lambda x, part=part: x[:, part], tokens) for part in (slice(cut), slice(cut, None))
        )
        y1, state = scan(*first, initial)
        y2, state = scan(*second, state)
        close([jnp.concatenate([y1, y2], axis=1), state], [y, final], 2e-6)


@pytest.mark.parametrize("residuals", ["all", if_slow("recompute")])
@each_rule
def test_packed_segments(rule, residuals):
    marks = jnp.array([[CONTINUES, BEGINS, CONTINUES, EMPTY], [BEGINS, BEGINS, EMPTY, EMPTY]], jnp.int32)
    q, k, v, decay, beta, removal, initial = inputs(2, 32, 2, 8, 8)
    real = (jnp.arange(32) % 8 < 6)[None] & (jnp.repeat(marks, 8, axis=1) != EMPTY)
    segments = Segments(marks, 0.5 * initial[0], real.astype(jnp.float32))
    args = q, k, v, decay, beta, removal, initial
    delta, removes = RULES[rule]

    def loss(args, start, **options):
        q, k, v, decay, beta, removal, initial = args
        at = segments._replace(start=start)
        decay, beta = jnp.where(real[..., None, None], decay, 1.0), jnp.where(real[..., None], beta, 0.0)
        y, final = linear_rule(
            q,
            k,
            v,
            decay,
            beta,
            removal if removes else None,
            initial,
            delta=delta,
            chunk_size=8,
            segments=at,
            **options,
        )
        return jnp.sum(jnp.where(real[..., None, None], jnp.sin(y), 0.0)) + jnp.sum(jnp.sin(final)), final

    results = [
        jax.tree.leaves(
            jax.jit(jax.grad(functools.partial(loss, **options), argnums=(0, 1), has_aux=True))(args, segments.start)
        )
        for options in ({"interpret": True, "residuals": residuals}, {"implementation": "reference"})
    ]
    close(*results, 2e-6)


@pytest.mark.slow  # `chunk_scan` maps over rows for the delta rule too, which has this test by default
def test_vmap_and_remat():
    args = inputs(2, 16, 1, 8, 8)
    scan = functools.partial(linear_rule, chunk_size=8, interpret=True)
    loss = lambda f: jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args)[0])), argnums=tuple(range(7)))
    expected = loss(scan)(*args)
    rows = jax.vmap(loss(scan))(*jax.tree.map(lambda x: x[:, None], args))
    close([x[:, 0] for x in jax.tree.leaves(rows)], jax.tree.leaves(expected), 1e-6)
    close(*map(jax.tree.leaves, (jax.jit(loss(jax.checkpoint(scan)))(*args), expected)), 1e-6)


def test_no_race_and_no_unwritten_memory():
    args = inputs(2, 24, 1, 8, 128)
    interpret = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    expected = run("RWKV-7", args, implementation="reference")
    close(run("RWKV-7", args, chunk_size=8, interpret=interpret, residuals="all"), expected, 2e-5)


def test_bad_input():
    q, k, v, decay, beta, removal, initial = inputs(1, 8, 2, 4, 4)
    wide = jnp.ones((1, 8, 2, 300))
    for message, arguments, options in [
        (r"decay has shape \(1, 8, 2\), must be \(1, 8, 2, 4\)", (q, k, v, beta, beta), {}),
        (r"beta has shape \(1, 8\), must be \(1, 8, 2\)", (q, k, v, decay, beta[..., 0]), {}),
        (r"removal\[1\] has shape .*, must be \(1, 8, 2, 4\)", (q, k, v, decay, beta, (q, beta)), {}),
        (r"initial has shape .*, must be \(1, 2, 4, 4\)", (q, k, v, decay, beta, None, initial[:, :1]), {}),
        ("should all be float32 or all bfloat16", (q, k.astype(jnp.bfloat16), v, decay, beta), {}),
        ("removal must be None", (q, k, v, decay, beta, removal), {"delta": True}),
        ("chunk_size=24, must be a power of two", (q, k, v, decay, beta), {"chunk_size": 24}),
        ("residuals='some', must be one of", (q, k, v, decay, beta), {"residuals": "some"}),
        ("implementation='gpu', must be one of", (q, k, v, decay, beta), {"implementation": "gpu"}),
        ("head dimensions up to 256", (wide, wide, v, wide, beta), {}),
    ]:
        with pytest.raises(ValueError, match=message):
            linear_rule(*arguments, **options)
