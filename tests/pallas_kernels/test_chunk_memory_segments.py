"""Packed segments and the tokens before a call in the chunkwise memory's kernels, against the definition, in interpret mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.arguments import BEGINS, CONTINUES, EMPTY, Segments, Window
from pallas_kernels.chunk_memory import chunk_memory
from pallas_kernels.newton_schulz import SCHEDULES, coefficients
from tests.marks import if_slow
from tests.pallas_kernels.test_chunk_memory import GATED, L2, MATRIX, MLP, close, inputs

# Two rows of five chunks: the first goes on with the memory that it is given, the second begins a segment at once.
MARKS = np.array([[CONTINUES, BEGINS, CONTINUES, BEGINS, EMPTY], [BEGINS, BEGINS, CONTINUES, EMPTY, EMPTY]])
BOTH = ("retention", "momentum_decay")


def packed(structure, size, heads, dim, gates, window, chunk_size):
    """Arrays, gates, the tokens before the call, and segments whose last chunks are not full."""
    batch, chunks = MARKS.shape
    time = chunks * chunk_size
    arrays, values = inputs(structure, batch, time, heads, dim, gates=gates, window=window)
    later = np.pad(MARKS[:, 1:], ((0, 0), (0, 1)), constant_values=EMPTY)
    tokens = np.where(MARKS == EMPTY, 0, np.where(later == CONTINUES, chunk_size, size))
    place = np.arange(time) % chunk_size
    real = place < np.repeat(tokens, chunk_size, axis=1)
    rng = np.random.default_rng(3)
    start = {name: 0.5 + 0.1 * w[0] for name, w in arrays[0].items()}
    past = None
    if window > 1:
        normal = lambda: jnp.asarray(rng.standard_normal((batch, heads, window - 1, dim)), jnp.float32) / dim**0.5
        past = Window(normal(), normal(), jnp.asarray([window - 2, 1], jnp.int32))
    segments = Segments(jnp.asarray(MARKS, jnp.int32), start, jnp.asarray(real, jnp.float32))
    return arrays, values, past, segments


def run(structure, arrays, values, past, segments, **options):
    """Outputs of real tokens, the memory, and gradients of all arguments."""

    real = segments.real[:, :, None] > 0
    chunk, time = options["chunk_size"], segments.real.shape[1]
    begun = (jnp.repeat(segments.marks == BEGINS, chunk, axis=1)) & (jnp.arange(time) % chunk == 0)
    age = jnp.arange(time) - jax.lax.cummax(jnp.where(begun, jnp.arange(time), -time), axis=1)
    fills = {"step_size": 0.0, "retention": 1.0, "momentum_decay": 1.0}

    def f(arrays, values, past, start):
        values = values | {name: jnp.where(real, values[name], fill) for name, fill in fills.items() if name in values}
        if past is not None:
            gamma = values["window_weights"]
            inside = jnp.arange(gamma.shape[-1]) <= age[:, :, None, None]
            values["window_weights"] = jnp.where(inside & real[..., None], gamma, 0.0)
        y, *state = chunk_memory(
            structure, L2, *arrays, **values, window=past, segments=segments._replace(start=start), **options
        )
        return jnp.where(real[..., None], y, 0.0), *state

    floating = lambda past: None if past is None else past._replace(num_real=None)
    restored = lambda x: None if past is None else x._replace(num_real=past.num_real)
    g = lambda arrays, values, x, start: f(arrays, values, restored(x), start)
    out, pullback = jax.vjp(jax.jit(g), arrays, values, floating(past), segments.start)
    rng = np.random.default_rng(1)
    random = lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype)
    return out, pullback(jax.tree.map(random, out))


CASES = [
    (MLP, BOTH, 5, {}),
    (MATRIX, (), 1, {}),
    (GATED, BOTH, 12, {}),
    (MATRIX, ("retention",), 20, {}),  # the window is longer than a chunk
    (MATRIX, BOTH, 3, {"norm_bound": 0.4}),
]
# On GPUs the cheapest case with a window, momenta and norms; a matrix without any is one of `test_bounded`.
DEFAULT = [("pallas_tpu", *CASES[0]), ("pallas_tpu", *CASES[1]), ("pallas_gpu", *CASES[4])]
EVERY = [(name, *case) for name in ("pallas_tpu", "pallas_gpu") for case in CASES]


@pytest.mark.parametrize(
    ("implementation", "structure", "gates", "window", "options"),
    [case if case in DEFAULT else if_slow(*case) for case in EVERY],
    ids=str,
)
def test_values_and_gradients(implementation, structure, gates, window, options):
    size = 8 if implementation == "pallas_tpu" else 16
    arguments = packed(structure, size - 3, 2, 8, gates, window, size)
    expected = run(structure, *arguments, chunk_size=size, implementation="reference", **options)
    found = run(structure, *arguments, chunk_size=size, implementation=implementation, interpret=True, **options)
    close(found, expected, 2e-5)


@pytest.mark.parametrize("window", [1, if_slow(5)])
@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
def test_bounded(window, implementation):
    size = 8 if implementation == "pallas_tpu" else 16
    arrays, values, past, segments = packed(MATRIX, size - 3, 1, 4, BOTH, window, size)
    floor = jnp.asarray(np.random.default_rng(2).uniform(0.0, 0.1, values["step_size"].shape), jnp.float32)
    values |= {"step_size": 20.0 * values["step_size"], "floor": floor}
    if past is not None:
        past = past._replace(floor=0.1 * jnp.abs(past.keys[..., 0]))
    options = {"chunk_size": size, "step_bound": 0.7, "horizon": 4.0, "norm_bound": 0.5}
    expected = run(MATRIX, arrays, values, past, segments, **options, implementation="reference")
    found = run(MATRIX, arrays, values, past, segments, **options, implementation=implementation, interpret=True)
    close(found, expected, 2e-5)


@pytest.mark.parametrize("implementation", ["pallas_tpu", if_slow("pallas_gpu")])
def test_muon(implementation):
    """Chunks of two blocks of four writes each."""
    arguments = packed(MATRIX, 13, 1, 8, BOTH, 3, 16)
    options = {"chunk_size": 16, "every": 2, "newton_schulz": coefficients(SCHEDULES["standard"], 2)}
    expected = run(MATRIX, *arguments, **options, implementation="reference")
    found = run(MATRIX, *arguments, **options, implementation=implementation, interpret=True)
    close(found, expected, 2e-4)


def test_bad_input():
    (weights, momenta, q, k, v), values, past, segments = packed(MATRIX, 5, 1, 4, BOTH, 3, 8)
    call = lambda **options: chunk_memory(
        MATRIX, L2, weights, momenta, q, k, v, **values, chunk_size=8, interpret=True, **options
    )
    with pytest.raises(ValueError, match=r"segments.marks has shape \(2, 4\), must be \(2, 5\)"):
        call(segments=segments._replace(marks=segments.marks[:, 1:]))
    with pytest.raises(ValueError, match=r"window.keys has shape \(2, 1, 1, 4\), must be \(2, 1, 2, 4\)"):
        call(window=past._replace(keys=past.keys[:, :, 1:]))
