"""The selective scan and the state space dual against their definitions: values, gradients, streams, segments, extreme steps."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.mixers import mamba, mamba2
from tests.comparisons import close
from tests.marks import some_slow
from tests.streams import streamed

BATCH, CHANNELS, STATE, HEADS, GROUPS = 2, 5, 3, 4, 2
IMPLEMENTATIONS = ["sequential", "associative"]


pytestmark = pytest.mark.usefixtures("compile_fast")


def mamba_inputs(time, seed=0, dtype=jnp.float32):
    """x, Δ (softplus of normal numbers, with a zero and a huge one), A, B, C, D."""
    rng = np.random.default_rng(seed)
    delta = np.log1p(np.exp(rng.normal(size=(BATCH, time, CHANNELS)) - 1))
    delta[0, time // 2], delta[1, time // 3] = 0.0, 1e4
    x, B, C = (rng.normal(size=(BATCH, time, n)) for n in (CHANNELS, STATE, STATE))
    A, D = -rng.uniform(0.1, 3, size=(CHANNELS, STATE)), rng.normal(size=CHANNELS)
    return tuple(jnp.asarray(z, dtype) for z in (x, delta, A, B, C, D))


def ssd_inputs(time, seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    delta = np.log1p(np.exp(rng.normal(size=(BATCH, time, HEADS)) - 1))
    delta[0, time // 2], delta[1, time // 3] = 0.0, 1e4
    x = rng.normal(size=(BATCH, time, HEADS, CHANNELS))
    B, C = (rng.normal(size=(BATCH, time, GROUPS, STATE)) for _ in range(2))
    A, D = -rng.uniform(0.1, 3, size=HEADS), rng.normal(size=HEADS)
    return tuple(jnp.asarray(z, dtype) for z in (x, delta, A, B, C, D))


def loop_mamba(x, delta, A, B, C, D):
    """numpy, one row: the equations of `mamba` as they are written."""
    h, ys = np.zeros(A.shape), []
    for t in range(len(x)):
        h = np.exp(delta[t][:, None] * A) * h + np.outer(delta[t] * x[t], B[t])
        ys.append(h @ C[t] + D * x[t])
    return np.array(ys), h


def scan(implementation):
    return lambda *inputs: mamba.selective_scan(*inputs, implementation=implementation)


def test_references_are_the_equations():
    inputs = mamba_inputs(9)
    y, h = mamba.reference(*inputs)
    for row in range(BATCH):
        x, delta, A, B, C, D = (np.asarray(z, np.float64) for z in inputs)
        expected, last = loop_mamba(x[row], delta[row], A, B[row], C[row], D)
        close((y[row], h[row]), (expected, last.T), 1e-5)
    # A scalar A for a head is a constant A over its channels and states.
    x, delta, A, B, C, D = ssd_inputs(9)
    y, h = mamba2.reference(x, delta, A, B, C, D)
    for head in range(HEADS):
        group = head * GROUPS // HEADS
        wide = jnp.broadcast_to(delta[:, :, head, None], (*x.shape[:2], CHANNELS))
        expected, last = mamba.reference(
            x[:, :, head], wide, jnp.full((CHANNELS, STATE), A[head]), B[:, :, group], C[:, :, group],
            jnp.full(CHANNELS, D[head]),
        )  # fmt: skip
        close((y[:, :, head], h[:, head]), (expected, jnp.swapaxes(last, 1, 2)), 1e-5)


def loss_and_gradients(function, inputs):
    def loss(*inputs):
        y, _ = function(*inputs)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape)))

    return jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(inputs)))))(*inputs)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("time", some_slow([1, 7, 131], [7]))
def test_selective_scan_is_its_reference(time, implementation):
    inputs = mamba_inputs(time)
    close(jax.jit(scan(implementation))(*inputs), mamba.reference(*inputs), 1e-5)
    if time > 1:
        close(loss_and_gradients(scan(implementation), inputs), loss_and_gradients(mamba.reference, inputs), 2e-5)


@pytest.mark.parametrize("time", [1, 131])
def test_ssd_is_its_reference(time):
    inputs = ssd_inputs(time)
    y, state = jax.jit(mamba2.ssd)(*inputs)
    close((y, state.memory["W"]), mamba2.reference(*inputs), 1e-5)
    if time > 1:
        close(loss_and_gradients(mamba2.ssd, inputs), loss_and_gradients(mamba2.reference, inputs), 2e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_ssd_is_its_reference_in_narrow_types(dtype):
    inputs = ssd_inputs(19)
    x, delta, A, B, C, D = inputs
    narrow = (x.astype(dtype), delta, A, B.astype(dtype), C.astype(dtype), D)
    found, expected = mamba2.ssd(*narrow), mamba2.reference(*narrow)
    assert found[0].dtype == expected[0].dtype == dtype
    assert expected[1].dtype == jnp.float32
    wide = lambda y: jax.tree.map(lambda z: z.astype(jnp.float32), y)
    close(wide((found[0], found[1].memory["W"])), wide(expected), 3e-2)


def test_default_is_the_sequential_form_on_a_cpu():
    inputs = mamba_inputs(70)
    y, h = mamba.selective_scan(*inputs)
    expected, last = scan("sequential")(*inputs)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(h, last)


def test_bfloat16_keeps_a_float32_state():
    for function, make in ((mamba.selective_scan, mamba_inputs), (mamba2.ssd, ssd_inputs)):
        x, delta, A, B, C, D = make(80)
        half = [z.astype(jnp.bfloat16) for z in (x, B, C)]
        function = jax.jit(function)
        y, state = function(half[0], delta, A, *half[1:], D)
        expected, _ = function(*(z.astype(jnp.float32) for z in (half[0], delta, A, *half[1:], D)))
        assert y.dtype == jnp.bfloat16
        assert all(leaf.dtype != jnp.bfloat16 for leaf in jax.tree.leaves(state))
        close(y, expected, 2**-7)


def cut(inputs, start, stop):
    x, delta, A, B, C, D = inputs
    return x[:, start:stop], delta[:, start:stop], A, B[:, start:stop], C[:, start:stop], D


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_selective_scan_streams_at_every_split(implementation):
    time = 7
    inputs = mamba_inputs(time)
    expected = scan(implementation)(*inputs)
    for split in range(1, time):
        first, state = mamba.selective_scan(*cut(inputs, 0, split), implementation=implementation)
        second, state = mamba.selective_scan(*cut(inputs, split, time), state=state, implementation=implementation)
        close((jnp.concatenate([first, second], axis=1), state), expected, 1e-5)


@pytest.mark.parametrize("cuts", [range(10), (0, 1, 4, 9), (0, 8, 9)])
def test_ssd_streams(cuts):
    inputs = ssd_inputs(9)
    expected, last = jax.jit(mamba2.ssd)(*inputs)
    x, delta, A, B, C, D = inputs
    extend = jax.jit(lambda z, state: mamba2.ssd(*z[:2], A, *z[2:], D, state=state))
    y, state = streamed(extend, (x, delta, B, C), mamba2.init_state(BATCH, HEADS, CHANNELS, STATE), cuts)
    close((y, state.memory), (expected, last.memory), 1e-5)


TIME, STARTS = 70, (0, 1, 66)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_resets_forget_exactly(implementation):
    inputs = mamba_inputs(TIME)
    resets = jnp.zeros((BATCH, TIME), bool).at[:, jnp.array(STARTS)].set(True)
    poison = jnp.full((BATCH, STATE, CHANNELS), 1e6)  # forgotten at token 0
    y, last = mamba.selective_scan(*inputs, state=poison, resets=resets, implementation=implementation)
    close((y, last), mamba.reference(*inputs, state=poison, resets=resets), 1e-5)
    alone = [mamba.reference(*cut(inputs, a, b)) for a, b in itertools.pairwise((*STARTS, TIME))]
    close((y, last), (jnp.concatenate([y for y, _ in alone], axis=1), alone[-1][1]), 1e-5)


def test_ssd_segments_are_alone():
    inputs = ssd_inputs(TIME)
    ids = jnp.zeros((BATCH, TIME), jnp.int32).at[:, jnp.array(STARTS[1:])].set(1).cumsum(axis=1)
    y, _ = jax.jit(lambda ids, *z: mamba2.ssd(*z, segment_ids=ids, max_segments=3))(ids, *inputs)
    alone = [mamba2.reference(*cut(inputs, a, b))[0] for a, b in itertools.pairwise((*STARTS, TIME))]
    close(y, jnp.concatenate(alone, axis=1), 1e-5)


def test_memory_of_the_backward_pass_is_chunk_boundaries():
    """Twice the tokens cost the inputs and boundary states of twice the chunks, far from a state for each token."""

    def temporary(time):
        inputs = tuple(
            jax.ShapeDtypeStruct(s, jnp.float32)
            for s in ((1, time, 64), (1, time, 64), (64, 16), (1, time, 16), (1, time, 16))
        )
        loss = jax.grad(lambda *z: mamba.selective_scan(*z)[0].sum(), argnums=(0, 1, 2, 3, 4))
        return jax.jit(loss).lower(*inputs).compile().memory_analysis().temp_size_in_bytes

    extra = temporary(4096) - temporary(2048)
    assert extra < 0.25 * 2048 * 64 * 16 * 4


def test_bad_arguments_are_named():
    x, delta, A, B, C, D = mamba_inputs(4)
    with pytest.raises(ValueError, match=r"selective_scan: delta has shape \(2, 3, 5\), must be \[batch=2, time=4"):
        mamba.selective_scan(x, delta[:, :3], A, B, C, D)
    with pytest.raises(ValueError, match=r"selective_scan: A has shape \(3, 5\)"):
        mamba.selective_scan(x, delta, A.T, B, C, D)
    with pytest.raises(TypeError, match="resets must be boolean, got float32"):
        mamba.selective_scan(x, delta, A, B, C, D, resets=jnp.zeros((2, 4)))
    for where, function in (("selective_scan", mamba.selective_scan), ("mamba.reference", mamba.reference)):
        with pytest.raises(TypeError, match=rf"{where}: resets must be an array of shape \[2, 4\], got list"):
            function(x, delta, A, B, C, D, resets=[[True]])
        with pytest.raises(ValueError, match=rf"{where}: resets has shape \(2, 3\), must be \[2, 4\]"):
            function(x, delta, A, B, C, D, resets=jnp.zeros((2, 3), bool))
    with pytest.raises(ValueError, match=r"mamba\.init_state: batch_size must be an integer ≥ 1, got -1"):
        mamba.init_state(-1, 5, 3)
    with pytest.raises(TypeError, match="x must be floating point, got int32"):
        mamba.selective_scan(jnp.ones((2, 4, 5), jnp.int32), delta, A, B, C, D)
    with pytest.raises(ValueError, match="Did you mean 'associative'"):
        mamba.selective_scan(x, delta, A, B, C, D, implementation="asociative")
    x, delta, A, B, C, D = ssd_inputs(4)
    with pytest.raises(ValueError, match="ssd: B has 3 groups, which do not divide the 4 heads"):
        mamba2.ssd(x, delta, A, *(jnp.ones((2, 4, 3, 2)),) * 2, D)
    with pytest.raises(ValueError, match=r"mamba2\.reference: B has 3 groups"):
        mamba2.reference(x, delta, A, jnp.ones((2, 4, 3, 3)), jnp.ones((2, 4, 3, 3)))
    with pytest.raises(ValueError, match="ssd: gates must be a Gates, got None"):
        mamba2.ssd(x, delta, A, B, C, gates=None)
    with pytest.raises(ValueError, match=r"mamba2\.init_state: heads must be an integer ≥ 1, got 0"):
        mamba2.init_state(2, 0, 5, 3)
