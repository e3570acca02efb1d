"""Gated Associative Memory: its definition token by token, streaming, gradients, dtypes, and how far it sees."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.mixers import gam
from atlasjax.mixers.convolution import causal_convolution
from tests.comparisons import close
from tests.streams import streamed

BATCH, TIME, DIM, SLOTS = 2, 9, 5, 4
mix = jax.jit(gam.mix, static_argnames="fusion")  # operation by operation takes far longer


def make(fusion, width=3, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {
        "kernel": (width, DIM), "bias": (DIM,), "memory": (SLOTS, DIM), "gate_kernel": (DIM, 2, DIM), "gate_bias": (2, DIM),
    }  # fmt: skip
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return gam.Params(**{name: jnp.asarray(x) for name, x in arrays.items() if name in gam.FUSIONS[fusion]})


def inputs(seed=1, time=TIME):
    return np.random.default_rng(seed).normal(size=(BATCH, time, DIM)).astype(np.float32)


def definition(params, row, fusion):
    """G Eq. 1–6 for one row [time, dim], float64, one token after another."""
    p = {name: None if x is None else np.asarray(x, np.float64) for name, x in params._asdict().items()}
    outputs = []
    for t, x in enumerate(np.asarray(row, np.float64)):
        local = global_ = 0.0
        if p["kernel"] is not None:
            width, local = len(p["kernel"]), p["bias"].copy()
            for back in range(min(width, t + 1)):
                local += p["kernel"][width - 1 - back] * row[t - back]
        if p["memory"] is not None:
            weights = np.exp([slot @ x for slot in p["memory"]])
            global_ = sum(w * slot for w, slot in zip(weights / weights.sum(), p["memory"], strict=True))
        if fusion == "gated":
            gate, other = (1 / (1 + np.exp(-(x @ p["gate_kernel"][:, i] + p["gate_bias"][i]))) for i in range(2))
            local, global_ = gate * local, other * global_
        outputs.append(local + global_)
    return np.array(outputs)


@pytest.mark.parametrize("width", [1, 3, 4])
@pytest.mark.parametrize("fusion", gam.FUSIONS)
def test_definition(fusion, width):
    params, x = make(fusion, width), inputs()
    y, _ = mix(params, x, fusion=fusion)
    assert y.dtype == jnp.float32
    close(y, np.stack([definition(params, row, fusion) for row in x]))


@pytest.mark.parametrize("fusion", gam.FUSIONS)
def test_streaming_at_every_split(fusion):
    params, x = make(fusion, 4), inputs()
    whole, last = mix(params, x, fusion=fusion)
    width = 1 if fusion == "global" else 4
    extend, empty = functools.partial(mix, params, fusion=fusion), gam.init_state(BATCH, width, DIM, x.dtype)
    for cuts in (range(TIME + 1), *([0, split, TIME] for split in range(1, TIME))):
        y, state = streamed(extend, x, empty, cuts)
        close(y, whole, 1e-6)
        np.testing.assert_array_equal(state, last)
    assert state.shape == (BATCH, width - 1, DIM)


def test_packed_segments_are_their_own_sequences():
    params, x = make("gated"), inputs()
    ids = jnp.array([[0] * 4 + [1] * 3 + [0] * 2, [5] + [6] * 8])  # an id may return: still another segment
    packed, _ = mix(params, x, segment_ids=ids)
    packed = np.asarray(packed)
    for row, cuts in enumerate([(0, 4, 7, 9), (0, 1, 9)]):
        for start, stop in itertools.pairwise(cuts):
            close(packed[row, start:stop], definition(params, x[row, start:stop], "gated"))


def test_gradients_are_differences_of_the_definition():
    """By central differences in float64 of the definition: all parameters and the input."""
    params, x = make("gated"), inputs(time=4)
    weights = np.random.default_rng(3).normal(size=x.shape)
    loss = lambda params, x: jnp.sum(jnp.asarray(weights, jnp.float32) * gam.mix(params, x)[0])
    slow = lambda params, x: sum((w * definition(params, row, "gated")).sum() for w, row in zip(weights, x))
    arrays = [np.asarray(a, np.float64) for a in (*params, x)]
    found = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, jnp.asarray(x))
    for place, gradient in enumerate((*found[0], found[1])):
        expected = np.zeros(gradient.shape)
        for index in np.ndindex(*gradient.shape):
            values = []
            for step in (1e-5, -1e-5):
                changed = [a.copy() for a in arrays]
                changed[place][index] += step
                values.append(slow(gam.Params(*changed[:-1]), changed[-1]))
            expected[index] = (values[0] - values[1]) / 2e-5
        close(gradient, expected, 2e-5)


def test_bfloat16_is_close_to_float32():
    params, x = make("gated"), jnp.asarray(inputs())
    expected, _ = mix(params, x)
    y, state = mix(params, x.astype(jnp.bfloat16))
    assert y.dtype == state.dtype == jnp.bfloat16
    error = np.asarray(y, np.float32) - np.asarray(expected)
    assert np.sqrt(np.mean(error**2)) < 0.02 * np.asarray(expected).std()


def test_read_of_large_scores_is_the_nearest_slot():
    """No scale, so scores of a normal width are large; the softmax must not overflow."""
    memory = 100 * np.eye(SLOTS, DIM, dtype=np.float32)
    read = gam.associative_read(jnp.asarray(memory), jnp.asarray(memory))
    np.testing.assert_allclose(read, memory, rtol=1e-6)


@pytest.mark.parametrize(("fusion", "field"), [("gated", 13), ("sum", 13), ("local", 13), ("global", 1)])
def test_receptive_field_of_six_layers(fusion, field):
    """The derivative of the last output by every input: not one number outside the field, something at its end."""
    assert gam.receptive_field(6, 3, fusion) == field
    layers = [make(fusion, seed=seed) for seed in range(6)]

    def last(x):
        for params in layers:
            x = x + gam.mix(params, x, fusion=fusion)[0]
        return x[:, -1].sum()

    influence = np.abs(jax.jit(jax.grad(last))(jnp.asarray(0.1 * inputs(time=20)))).max(axis=(0, 2))
    np.testing.assert_array_equal(influence[:-field], 0)
    assert influence[-field] > 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p, x: gam.mix(p, x, fusion="gatd"), ["fusion", "Did you mean 'gated'"]),
        (lambda p, x: gam.mix(p, x, fusion="sum"), ["fusion 'sum'", "params.gate_kernel to be None", "(5, 2, 5)"]),
        (lambda p, x: gam.mix(p._replace(memory=None), x), ["params.memory to be an array", "None"]),
        (lambda p, x: gam.mix(p._replace(bias=jnp.zeros(4)), x), ["gam.mix", "bias", "(4,)", "dim=5"]),
        (lambda p, x: gam.mix(p, x[0]), ["gam.mix", "x has shape (9, 5)", "batch, time, dim"]),
        (lambda p, x: gam.mix(p, x, jnp.zeros((2, 3, 5))), ["state has shape (2, 3, 5)", "[2, 2, 5]"]),
        (lambda p, x: gam.mix(p, x, segment_ids=jnp.zeros((2, 8), int)), ["segment_ids", "(2, 8)", "[2, 9]"]),
        (
            lambda p, x: gam.mix(p._replace(gate_kernel=jnp.zeros((5, 3, 5)), gate_bias=jnp.zeros((3, 5))), x),
            ["gate_kernel", "(5, 3, 5)", "[dim=5, 2, dim=5]"],
        ),
        (lambda p, x: gam.mix(p, x, segment_ids=np.full((2, 9), 2**32)), ["segment_ids must be", "got 4294967296"]),
        (lambda p, x: gam.mix(p._asdict(), x), ["params must be a Params"]),
        (lambda p, x: gam.mix(p, x, fusion=["gated"]), ["Unknown fusion ['gated']"]),
        (lambda p, x: gam.associative_read(x[..., :3], p.memory), ["x is an array of shape (2, 9, 3)", "dim=5"]),
        (lambda p, x: gam.associative_read(None, p.memory), ["x is None"]),
        (lambda p, x: gam.init_state(2, 0, 5, x.dtype), ["width must be an integer ≥ 1, got 0"]),
        (lambda p, x: gam.init_state(-1, 3, 5, x.dtype), ["gam.init_state: batch_size", "got -1"]),
        (lambda p, x: causal_convolution(x, p.kernel[:, :3], x[:, :2]), ["kernel has shape (3, 3)", "[width, 5]"]),
        (lambda p, x: causal_convolution(x, p.kernel, x[:1, :2]), ["state has shape (1, 2, 5)", "[2, 2, 5]"]),
        (lambda p, x: causal_convolution(x[0, 0], p.kernel, x[:, :2]), ["causal_convolution: x has shape (5,)"]),
        (lambda p, x: gam.receptive_field(6, None), ["width must be an integer ≥ 1, got None"]),
        (lambda p, x: gam.receptive_field(6, 3, "globl"), ["Did you mean 'global'"]),
    ],
)
def test_errors_name_what_is_wrong(call, words):
    with pytest.raises(ValueError) as error:
        call(make("gated"), jnp.asarray(inputs()))
    for word in words:
        assert word in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    with pytest.raises(TypeError, match="x must be floating point, got int32"):
        gam.mix(make("gated"), jnp.zeros((2, 3, 5), jnp.int32))
    with pytest.raises(TypeError, match=r"gam\.init_state: dtype must be floating point, got int32"):
        gam.init_state(2, 3, 5, jnp.int32)
    with pytest.raises(TypeError, match="state must be an array"):
        gam.mix(make("gated"), jnp.zeros((2, 3, 5)), "x")
