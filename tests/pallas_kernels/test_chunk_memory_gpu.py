"""The chunkwise memory's GPU kernels against its definition, token by token, in interpret mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.memory import objectives, structures
from pallas_kernels.chunk_memory import chunk_memory, gpu_step
from pallas_kernels.chunk_memory import gpu as parallel
from pallas_kernels.newton_schulz import SCHEDULES, coefficients
from tests.marks import if_slow, some_slow
from tests.pallas_kernels.test_chunk_memory import DOT, GATED, L2, MATRIX, MLP, close, inputs, run

NARROW = structures.MLP(expansion=1)
GPU = {"chunk_size": 16, "implementation": "pallas_gpu", "interpret": True}


@pytest.mark.parametrize(
    ("structure", "objective", "shape", "gates", "window"),
    [
        # Two tiles of padding in the last chunk; the window is longer than a chunk.
        (NARROW, L2, (1, 37, 2, 16), ("retention", "momentum_decay"), 20),
        if_slow(MLP, L2, (1, 37, 1, 8), ("retention",), 20),
        if_slow(GATED, L2, (1, 33, 1, 16), ("momentum_decay",), 1),  # below, with bounded norms
        # Tokens are padded to 16.
        if_slow(MATRIX, objectives.Lp(4.0), (1, 37, 1, 8), ("retention",), 20),
        (structures.MLP(depth=1), DOT, (1, 20, 1, 24), (), 1),
        (MATRIX, L2, (1, 20, 1, 16), ("retention", "momentum_decay", "write_size"), 1),
    ],
    ids=str,
)
def test_values_and_gradients(structure, objective, shape, gates, window):
    arrays, values = inputs(structure, *shape, gates=gates, window=window)
    expected = run(structure, objective, arrays, values, chunk_size=16, implementation="reference")
    close(run(structure, objective, arrays, values, **GPU), expected, 2e-5)


@pytest.mark.parametrize(
    ("structure", "shape", "gates", "window"),
    [
        if_slow(NARROW, (1, 69, 2, 16), ("retention", "momentum_decay"), 5),
        (GATED, (2, 50, 1, 8), (), 1),
        (MATRIX, (1, 40, 1, 4), ("momentum_decay",), 1),
    ],
    ids=str,
)
def test_norm_bound(structure, shape, gates, window):
    """Small enough that the first state and most later ones are scaled, of weights and of momenta; channels are padded."""
    arrays, values = inputs(structure, *shape, gates=gates, window=window)
    expected = run(structure, L2, arrays, values, chunk_size=16, norm_bound=0.3, implementation="reference")
    close(run(structure, L2, arrays, values, norm_bound=0.3, **GPU), expected, 2e-5)


def large_steps(structure, shape, gates, window):
    """Steps far too large for keys that are nearly one."""
    arrays, values = inputs(structure, *shape, gates=gates, window=window)
    weights, momenta, q, k, v = arrays
    floor = jnp.asarray(np.random.default_rng(2).uniform(0.0, 0.1, shape[:3]), jnp.float32)
    values |= {"step_size": 20.0 * values["step_size"], "floor": floor}
    return (weights, momenta, q, k[:, :1] + 0.1 * k, v), values


@pytest.mark.parametrize(
    ("structure", "objective", "shape", "gates", "window", "chunk_size"),
    [
        (NARROW, L2, (1, 20, 1, 16), ("retention", "momentum_decay"), 5, 16),
        if_slow(MATRIX, L2, (2, 20, 1, 8), (), 1, 16),
        if_slow(
            MATRIX, objectives.Lp(3.0), (1, 37, 1, 16), ("retention", "momentum_decay"), 20, 16
        ),  # longer than a chunk
        if_slow(GATED, L2, (1, 37, 1, 16), ("momentum_decay",), 20, 16),
        (MATRIX, objectives.Huber(), (1, 20, 1, 8), ("retention", "threshold"), 1, 16),
        if_slow(MATRIX, L2, (1, 37, 1, 16), ("retention", "momentum_decay", "write_size"), 3, 16),
        # Blocks of 32 tokens, without and with those of a window.
        if_slow(NARROW, L2, (1, 70, 1, 16), ("retention", "momentum_decay"), 1, 64),
        if_slow(NARROW, L2, (1, 70, 1, 16), ("retention",), 40, 64),
    ],
    ids=str,
)
def test_bounded(structure, objective, shape, gates, window, chunk_size):
    arrays, values = large_steps(structure, shape, gates, window)
    options = {"chunk_size": chunk_size, "step_bound": 0.7, "horizon": 4.0, "norm_bound": 0.5}
    expected = run(structure, objective, arrays, values, **options, implementation="reference")
    close(run(structure, objective, arrays, values, **{**GPU, **options}), expected, 2e-5)


def test_bounded_in_bfloat16():
    arrays, values = large_steps(MATRIX, (1, 36, 1, 16), ("retention", "momentum_decay"), 1)
    arrays = (*arrays[:2], *(x.astype(jnp.bfloat16) for x in arrays[2:]))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    options = {"chunk_size": 16, "step_bound": 1.0, "horizon": 32.0}
    expected = run(MATRIX, L2, wide, values, **options, implementation="reference")[0]
    f = jax.jit(lambda arrays, gates: chunk_memory(MATRIX, L2, *arrays, **gates, **{**GPU, **options}))
    close(f(arrays, values), expected, 3e-2)


@pytest.mark.slow  # blocks of 16 are above
@pytest.mark.parametrize("structure", [MATRIX, NARROW], ids=str)
def test_many_blocks_of_tokens(structure, monkeypatch):
    """Chunks of 64 in blocks of 32, a window of 40 in two more; sums of some blocks apart, as where tokens have many channels."""
    monkeypatch.setattr(gpu_step, "_TOGETHER", 0)
    arrays, values = inputs(structure, 1, 70, 1, 16, gates=("retention",), window=40)
    expected = run(structure, L2, arrays, values, chunk_size=64, implementation="reference")
    close(run(structure, L2, arrays, values, **{**GPU, "chunk_size": 64}), expected, 2e-5)


def test_bfloat16_inputs():
    arrays, values = inputs(MATRIX, 1, 36, 1, 16, gates=("retention", "momentum_decay"), dtype="bfloat16")
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    expected = run(MATRIX, L2, wide, values, chunk_size=16, implementation="reference")
    found = run(MATRIX, L2, arrays, values, **GPU)
    assert found[0][0].dtype == jnp.bfloat16
    assert found[0][1]["W"].dtype == jnp.float32
    close(found, expected, 3e-2)


@pytest.mark.parametrize("structure", some_slow([MATRIX, NARROW], [NARROW]), ids=str)
def test_muon(structure):
    """A chunk of two blocks of eight writes, not full; the kernel's rows are writes of all heads."""
    arrays, values = inputs(structure, 1, 21, 2, 8, gates=("retention", "momentum_decay"), window=3)
    options = {"chunk_size": 32, "every": 2, "newton_schulz": coefficients(SCHEDULES["standard"], 2)}
    expected = run(structure, L2, arrays, values, **options, implementation="reference")
    close(run(structure, L2, arrays, values, **{**GPU, **options}), expected, 2e-4)


def test_rows_in_groups(monkeypatch):
    """Where all chunks at once would take too much memory, rows go through the parallel parts in groups; vmapped rows are rows."""
    arrays, values = inputs(MATRIX, 3, 20, 1, 4, gates=("retention",), window=2)
    f = jax.jit(lambda arrays, gates: chunk_memory(MATRIX, L2, *arrays, **gates, **GPU)[0])
    expected = f(arrays, values)
    monkeypatch.setattr(parallel, "_TOGETHER", 2 * 32 * 16 * 4)
    jax.clear_caches()
    close(f(arrays, values), expected, 1e-6)
    one = jax.tree.map(lambda x: x[:, None], (arrays, values))
    close(jax.vmap(f)(*one)[:, 0], expected, 1e-6)


def test_what_it_does_not_serve():
    (weights, momenta, q, k, v), values = inputs(MLP, 1, 16, 1, 8, gates=("momentum_decay",))
    scan = functools.partial(chunk_memory, weights=weights, momenta=momenta, q=q, k=k, v=v, objective=L2, **values)
    for message, structure, options in [
        ("chunk_size=8, must be at least 16", MLP, {"chunk_size": 8}),
        ("more than one hidden layer", structures.MLP(depth=3, expansion=2), {}),
        ("chunk_size=128 with bounded steps", MLP, {"step_bound": 1.0, "horizon": 32.0, "chunk_size": 128}),
    ]:
        with pytest.raises(ValueError, match=message):
            scan(structure, **{**GPU, **options})
    (weights, momenta, q, k, v), values = inputs(NARROW, 1, 16, 1, 24, gates=())
    with pytest.raises(ValueError, match="the hidden width 24 is not a multiple of 16"):
        chunk_memory(NARROW, L2, weights, momenta, q, k, v, **values, **GPU)
    arrays, values = jax.eval_shape(lambda: inputs(MLP, 1, 16, 1, 520, gates=("momentum_decay",)))
    muon = functools.partial(chunk_memory, MLP, L2, newton_schulz=SCHEDULES["standard"], **GPU)
    with pytest.raises(ValueError, match=r"up to 256 × 1,024, weights are \{'W1': \(520, 1040\)"):
        jax.eval_shape(lambda arrays, gates: muon(*arrays, **gates), arrays, values)
    wide = jax.eval_shape(lambda: inputs(NARROW, 1, 16, 1, 144, gates=()))
    with pytest.raises(ValueError, match="keys or values of float32 have 144 channels, more than 128"):
        jax.eval_shape(lambda arrays, gates: chunk_memory(NARROW, L2, *arrays, **gates, **GPU), *wide)
