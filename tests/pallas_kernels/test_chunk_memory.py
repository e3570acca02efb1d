"""The chunkwise memory's kernel against its definition, token by token, in interpret mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from atlasjax.memory import objectives, structures
from pallas_kernels import blocks
from pallas_kernels.chunk_memory import api, chunk_memory
from pallas_kernels.newton_schulz import SCHEDULES, coefficients
from tests.marks import if_slow

MLP, GATED, MATRIX = structures.MLP(expansion=2), structures.GatedMLP(expansion=2), structures.Matrix()
L2, DOT = objectives.L2(), objectives.DotProduct()


def inputs(structure, batch, time, heads, dim, *, gates, window=1, dtype="float32", seed=0):
    """(weights, momenta or None, q, k, v) and the gates that are asked for."""
    rng = np.random.default_rng(seed)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    tokens = (batch, time, heads)
    q, k = unit(rng.standard_normal((2, *tokens, dim)))
    v = rng.standard_normal((*tokens, dim))
    shapes = structure.weight_shapes(dim, dim)
    normal = lambda scale: {
        name: jnp.asarray(scale * rng.standard_normal((batch, heads, *s)) / s[1] ** 0.5, jnp.float32)
        for name, s in shapes.items()
    }
    weights, momenta = normal(1.0), normal(0.1) if "momentum_decay" in gates else None
    ranges = {"step_size": (0.01, 0.1), "retention": (0.0, 1.0), "momentum_decay": (0.0, 0.9), "threshold": (0.1, 1.0)}
    ranges["write_size"] = (0.0, 1.0)
    values = {name: rng.uniform(*ranges[name], tokens) for name in ("step_size", *gates)}
    if window > 1:
        values["window_weights"] = rng.uniform(0, 1, (*tokens, window))
    cast = lambda x: jnp.asarray(x, dtype)
    return (weights, momenta, cast(q), cast(k), cast(v)), {n: jnp.asarray(x, jnp.float32) for n, x in values.items()}


def run(structure, objective, arrays, gates, **options):
    """Outputs, and gradients of every argument for random cotangents."""
    f = lambda arrays, gates: chunk_memory(structure, objective, *arrays, **gates, **options)
    out, pullback = jax.vjp(jax.jit(f), arrays, gates)
    rng = np.random.default_rng(1)
    random = lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype)
    return out, pullback(jax.tree.map(random, out))


def close(found, expected, tolerance):
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    for (path, a), b in pairs:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(), rtol=0, err_msg=name)


@pytest.mark.parametrize(
    ("structure", "objective", "shape", "gates", "window"),
    [
        (MLP, L2, (2, 37, 2, 4), ("retention", "momentum_decay"), 5),
        if_slow(MLP, L2, (1, 16, 1, 8), (), 1),
        if_slow(MLP, L2, (1, 21, 1, 4), ("momentum_decay",), 1),
        (MATRIX, L2, (1, 21, 1, 4), ("retention", "momentum_decay", "write_size"), 2),
        if_slow(MLP, L2, (1, 21, 1, 4), ("retention",), 12),
        (GATED, L2, (1, 19, 1, 4), ("retention", "momentum_decay"), 3),
        (structures.MLP(depth=3, expansion=1), DOT, (1, 9, 1, 4), ("retention", "momentum_decay"), 1),
        (MATRIX, DOT, (1, 21, 1, 4), ("retention",), 12),  # longer than a chunk
        if_slow(MATRIX, objectives.Lp(4.0), (1, 11, 1, 4), (), 2),  # below, bounded
    ],
    ids=str,
)
def test_values_and_gradients(structure, objective, shape, gates, window):
    arrays, values = inputs(structure, *shape, gates=gates, window=window)
    expected = run(structure, objective, arrays, values, chunk_size=8, implementation="reference")
    close(run(structure, objective, arrays, values, chunk_size=8, interpret=True), expected, 2e-5)


@pytest.mark.parametrize(
    ("structure", "objective", "shape", "gates", "window"),
    [
        if_slow(MLP, L2, (2, 21, 2, 4), ("retention", "momentum_decay"), 5),
        (MATRIX, objectives.Lp(3.0), (2, 21, 2, 4), ("retention", "momentum_decay"), 5),  # the last chunk is not full
        if_slow(GATED, L2, (1, 16, 1, 4), ("momentum_decay",), 12),  # the window is longer than a chunk
        if_slow(structures.MLP(depth=3, expansion=1), L2, (1, 17, 1, 4), ("retention",), 1),
        (MATRIX, objectives.Huber(), (1, 21, 2, 4), ("retention", "threshold"), 1),
        if_slow(MLP, objectives.Huber(), (1, 21, 2, 4), ("momentum_decay", "write_size", "threshold"), 1),
    ],
    ids=str,
)
def test_bounded(structure, objective, shape, gates, window):
    """Steps far too large for keys that are nearly one, and weights and momenta at their norms."""
    arrays, values = inputs(structure, *shape, gates=gates, window=window)
    weights, momenta, q, k, v = arrays
    arrays = weights, momenta, q, k[:, :1] + 0.1 * k, v
    floor = jnp.asarray(np.random.default_rng(2).uniform(0.0, 0.1, shape[:3]), jnp.float32)
    values |= {"step_size": 20.0 * values["step_size"], "floor": floor}
    options = {"chunk_size": 8, "step_bound": 0.7, "horizon": 4.0, "norm_bound": 0.5}
    expected = run(structure, objective, arrays, values, **options, implementation="reference")
    close(run(structure, objective, arrays, values, **options, interpret=True), expected, 2e-5)


@pytest.mark.parametrize("bounded", [if_slow(False), True])
def test_heads_that_fill_a_tile(bounded):
    arrays, values = inputs(MLP, 1, 40, 4, 4, gates=("retention", "momentum_decay"))
    options = {"chunk_size": 32}
    if bounded:
        values["floor"] = jnp.full((1, 40, 4), 0.05)
        options |= {"step_bound": 0.7, "horizon": 4.0, "norm_bound": 0.5}
    expected = run(MLP, L2, arrays, values, **options, implementation="reference")
    close(run(MLP, L2, arrays, values, **options, interpret=True), expected, 2e-5)


def test_bfloat16_operands_of_wide_matrix_units(monkeypatch):
    arrays, values = inputs(MLP, 1, 40, 4, 16, gates=("retention", "momentum_decay"), dtype="bfloat16")
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    expected = run(MLP, L2, wide, values, chunk_size=32, implementation="reference")
    monkeypatch.setattr(blocks, "matrix_unit", lambda: 256)
    close(run(MLP, L2, arrays, values, chunk_size=32, interpret=True), expected, 3e-2)


def test_a_bound_that_does_not_act():
    """Far from every limit the recurrence is the unbounded one: chunks of one write each, so that nothing is pending."""
    (weights, _, q, k, v), values = inputs(MLP, 1, 16, 1, 4, gates=())
    values["step_size"] = jnp.where(jnp.arange(16)[None, :, None] % 8 == 0, values["step_size"], 0.0)
    scan = functools.partial(chunk_memory, MLP, L2, weights, None, q, k, v, **values, chunk_size=8, interpret=True)
    close(scan(step_bound=100.0, norm_bound=1024.0), scan(), 1e-6)


def test_bfloat16_inputs():
    arrays, values = inputs(MLP, 1, 20, 2, 16, gates=("retention", "momentum_decay"), dtype="bfloat16")
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    expected = run(MLP, L2, wide, values, chunk_size=8, implementation="reference")
    found = run(MLP, L2, arrays, values, chunk_size=8, interpret=True)
    assert found[0][0].dtype == jnp.bfloat16
    assert found[0][1]["W1"].dtype == jnp.float32
    close(found, expected, 3e-2)


def test_chunks_continue():
    """A sequence cut where a chunk ends goes on from the weights and momenta; a window would have to be carried too."""
    (weights, momenta, *tokens), values = inputs(MATRIX, 1, 32, 1, 4, gates=("retention", "momentum_decay"))
    scan = functools.partial(chunk_memory, MATRIX, L2, chunk_size=8, interpret=True)
    y, w, s = scan(weights, momenta, *tokens, **values)
    part = lambda x, which: jax.tree.map(lambda x: x[:, which], x)
    first, rest = slice(0, 16), slice(16, None)
    y1, w1, s1 = scan(weights, momenta, *part(tokens, first), **part(values, first))
    y2, w2, s2 = scan(w1, s1, *part(tokens, rest), **part(values, rest))
    close((jnp.concatenate([y1, y2], axis=1), w2, s2), (y, w, s), 2e-6)


def test_no_race_and_no_unwritten_memory(capsys):
    arrays, values = inputs(MLP, 2, 16, 1, 8, gates=("momentum_decay",), window=2)
    expected = run(MLP, L2, arrays, values, chunk_size=8, implementation="reference")
    interpret = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    close(run(MLP, L2, arrays, values, chunk_size=8, interpret=interpret), expected, 2e-5)
    assert "RACE DETECTED" not in capsys.readouterr().out


def test_bad_input():
    (weights, momenta, q, k, v), values = inputs(MLP, 1, 8, 2, 4, gates=("momentum_decay",))
    scan = functools.partial(chunk_memory, MLP, L2)
    for message, arguments, options in [
        (r"k has shape \(1, 8, 2, 3\), must be \(1, 8, 2, 4\)", (weights, momenta, q, k[..., :3], v), {}),
        (r"window_weights has shape \(1, 8, 2\)", (weights, momenta, q, k, v), {"window_weights": values["step_size"]}),
        ("should all be float32 or all bfloat16", (weights, momenta, q, k.astype(jnp.bfloat16), v), {}),
        ("give both momenta S and momentum_decay θ", (weights, None, q, k, v), {}),
        (
            "write_size β needs momenta S",
            (weights, None, q, k, v),
            {"momentum_decay": None, "write_size": values["step_size"]},
        ),
        (r"momenta\['W1'\] is missing", (weights, {"W2": momenta["W2"]}, q, k, v), {}),
        (r"weights\['W1'\] has shape", (jax.tree.map(lambda w: w[:, :1], weights), momenta, q, k, v), {}),
        (r"floor has shape \(1, 8\), must be", (weights, momenta, q, k, v), {"floor": jnp.zeros((1, 8))}),
        (
            "step_bound is for gradient steps",
            (weights, momenta, q, k, v),
            {"step_bound": 1.0, "newton_schulz": SCHEDULES["standard"]},
        ),
        ("horizon=None, must be a number ≥ 1 with step_bound", (weights, momenta, q, k, v), {"step_bound": 1.0}),
        ("horizon=0.5, must be a number ≥ 1", (weights, momenta, q, k, v), {"step_bound": 1.0, "horizon": 0.5}),
        ("chunk_size=12, must be a power of two", (weights, momenta, q, k, v), {"chunk_size": 12}),
        ("implementation='cuda', must be one of", (weights, momenta, q, k, v), {"implementation": "cuda"}),
    ]:
        with pytest.raises(ValueError, match=message):
            scan(*arguments, **{**values, **options})


@pytest.mark.parametrize(
    ("structure", "gates", "window", "chunk_size", "every", "writes"),
    [
        (MATRIX, ("retention", "momentum_decay"), 3, 16, 1, 4),
        (MATRIX, ("momentum_decay",), 1, 8, 4, 8),
        if_slow(MLP, ("retention", "momentum_decay"), 3, 16, 1, 4),
        if_slow(GATED, ("retention", "momentum_decay"), 1, 32, 2, 8),
    ],
    ids=str,
)
def test_muon(structure, gates, window, chunk_size, every, writes, monkeypatch):
    """Chunks of one and of several blocks, of four writes as those of large memories are and of eight; the last one is not full."""
    monkeypatch.setattr(api, "writes", lambda numbers, dtype: writes)
    arrays, values = inputs(structure, 1, 21, 2, 4, gates=gates, window=window)
    options = {"chunk_size": chunk_size, "every": every, "newton_schulz": coefficients(SCHEDULES["standard"], 2)}
    expected = run(structure, L2, arrays, values, **options, implementation="reference")
    close(run(structure, L2, arrays, values, **options, interpret=True), expected, 2e-4)


def test_muon_without_race_and_unwritten_memory(capsys):
    """Forward: the backward pass is under a `checkpoint`, which does not take this interpreter's callbacks."""
    arrays, values = inputs(MATRIX, 1, 8, 1, 4, gates=("momentum_decay",), window=2)
    options = {"chunk_size": 8, "every": 2, "newton_schulz": coefficients(SCHEDULES["standard"], 2)}
    scan = functools.partial(chunk_memory, MATRIX, L2, *arrays, **values, **options)
    interpret = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    close(scan(interpret=interpret), scan(implementation="reference"), 2e-4)
    assert "RACE DETECTED" not in capsys.readouterr().out
