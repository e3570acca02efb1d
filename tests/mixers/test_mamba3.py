"""Mamba-3's recurrence: its definition against a complex state, and against its definition in every form that runs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.mixers import mamba2, mamba3
from tests.comparisons import close
from tests.nn import mamba3_formula

BATCH, HEADS, STATE, VALUE, ANGLES = 2, 2, 6, 3, 2

pytestmark = pytest.mark.usefixtures("compile_fast")


def make(time, rank=1, dtype=jnp.float32, seed=0):
    """x, Δ (to above 1, with a zero and a huge one), A, λ (with 0 and 1), B, C, D; keys and queries are not rotated."""
    rng = np.random.default_rng(seed)
    delta = np.log1p(np.exp(rng.normal(size=(BATCH, time, HEADS)) + 0.5))
    delta[0, time // 2], delta[1, time // 3] = 0.0, 1e4
    blend = rng.uniform(size=delta.shape)
    blend[0, 1::5], blend[1, 2::5] = 0.0, 1.0
    A = -rng.uniform(0.05, 2, size=delta.shape)
    x, B, C = (rng.normal(size=(BATCH, time, rank, HEADS, n)) for n in (VALUE, STATE, STATE))
    return tuple(jnp.asarray(z, dtype) for z in (x, delta, A, blend, B, C, rng.normal(size=HEADS)))


def rates(time, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(9).normal(size=(BATCH, time, ANGLES)), dtype)


def rotated(inputs, rate, start=None, segment_ids=None):
    """The inputs with rotated keys and queries, and the last angles."""
    x, delta, A, blend, B, C, D = inputs
    turns = mamba3.rotations(rate, delta, start, segment_ids)
    return (x, delta, A, blend, mamba3.rotate(B, turns), mamba3.rotate(C, turns), D), turns[:, -1]


def cut(inputs, start, stop):
    return tuple(z if z.ndim == 1 else z[:, start:stop] for z in inputs)


@pytest.mark.parametrize("rank", [1, 2])
def test_the_definition_is_a_complex_state(rank):
    """In float64: no cumulative angle, but a state that turns by the angle of each token."""
    with jax.enable_x64(True):
        inputs, rate = make(13, rank, jnp.float64), rates(13, jnp.float64)
        real, _ = rotated(inputs, rate)
        found, (ys, state) = mamba3.reference(*real), mamba3.trapezoidal_scan(*real)
        close((ys, state.memory["W"]), found, 1e-12)
        x, delta, A, blend, B, C, D = (np.asarray(z) for z in inputs)
        B, C = (mamba3_formula.complex_pairs(z, ANGLES, adjacent=rank == 1) for z in (B, C))
        for row, h in itertools.product(range(BATCH), range(HEADS)):
            turn = np.pi * delta[row, :, h, None] * np.tanh(rate[row])
            turn = np.pad(turn, ((0, 0), (0, STATE - 2 * ANGLES)))
            one = (z[row, ..., h] for z in (delta, A, blend))
            y, _ = mamba3_formula.recurrence(x[row, :, :, h], *one, B[row, :, :, h], C[row, :, :, h], D[h], turn)
            close(ys[row, :, :, h], y, 1e-11)


@pytest.mark.parametrize(("time", "rank"), [(1, 1), (131, 1), (1, 3), (45, 3)])
def test_scan_is_its_definition(time, rank):
    """Values, states and gradients by every input, at Δ from 0 to 10,000 and λ from 0 to 1."""
    inputs = make(time, rank)

    def loss(function):
        def total(*inputs):
            y, h = function(*inputs)
            weighted = [jnp.sum(z * jnp.cos(jnp.arange(z.size).reshape(z.shape))) for z in (y, h)]
            return sum(weighted), (y, h)

        return jax.jit(jax.value_and_grad(total, argnums=tuple(range(len(inputs))), has_aux=True))

    def scan(*inputs):
        y, state = mamba3.trapezoidal_scan(*inputs)
        return y, state.memory["W"]

    ((_, found), slopes), ((_, expected), wanted) = loss(scan)(*inputs), loss(mamba3.reference)(*inputs)
    close(found, expected, 1e-5)
    close(slopes, wanted, 3e-5)


def test_without_trapezoids_and_rotations_it_is_mamba2():
    x, delta, A, _, B, C, D = make(23)
    rate = A[0, 0]  # Mamba-2 has one for all tokens
    still = mamba3.rotate(B, mamba3.rotations(jnp.zeros((BATCH, 23, ANGLES)), delta))
    np.testing.assert_array_equal(still, B)
    y, state = mamba3.trapezoidal_scan(x, delta, jnp.broadcast_to(rate, A.shape), jnp.ones_like(A), B, C, D)
    expected = mamba2.reference(x[:, :, 0], delta, rate, B[:, :, 0], C[:, :, 0], D)
    close((y[:, :, 0], state.memory["W"]), expected, 1e-5)


@pytest.mark.parametrize("rank", [1, 2])
def test_streams_at_every_split(rank):
    """Angles, keys and values of the token before, and the memory go from piece to piece."""
    time = 5
    inputs, rate = make(time, rank), rates(time)

    @jax.jit
    def extend(inputs, rate, start, state):
        inputs, start = rotated(inputs, rate, start)
        return *mamba3.trapezoidal_scan(*inputs, state=state), start

    def stream(cuts):
        state, start, pieces = (
            mamba3.init_state(BATCH, HEADS, VALUE, STATE, rank),
            jnp.zeros((BATCH, HEADS, ANGLES)),
            [],
        )
        for a, b in itertools.pairwise(cuts):
            y, state, start = extend(cut(inputs, a, b), rate[:, a:b], start, state)
            pieces.append(y)
        return jnp.concatenate(pieces, axis=1), state.memory, start

    given, last = rotated(inputs, rate)
    y, state = mamba3.trapezoidal_scan(*given)
    assert state.window_keys.shape == (BATCH, HEADS, rank, STATE)
    for cuts in ([0, split, time] for split in range(1, time)):
        close(stream(cuts), (y, state.memory, last), 1e-5)
    close(stream(range(time + 1)), (y, state.memory, last), 1e-5)


@pytest.mark.parametrize("rank", [1, 2])
def test_segments_are_alone(rank):
    """Angle, memory and the token before begin anew: at token 1, and within and at the end of blocks."""
    time, starts = 70, (0, 1, 66)
    inputs, rate = make(time, rank), rates(time)
    ids = jnp.zeros((BATCH, time), jnp.int32).at[:, jnp.array(starts[1:])].set(1).cumsum(axis=1)

    @jax.jit
    def run(inputs, rate, ids):
        packed, _ = rotated(inputs, rate, segment_ids=ids)
        y, _ = mamba3.trapezoidal_scan(*packed, segment_ids=ids, max_segments=3)
        pieces = itertools.pairwise((*starts, time))
        return y, [mamba3.reference(*rotated(cut(inputs, a, b), rate[:, a:b])[0])[0] for a, b in pieces]

    y, alone = run(inputs, rate, ids)
    close(y, jnp.concatenate(alone, axis=1), 1e-5)


@pytest.mark.parametrize("rank", [1, 2])
def test_bfloat16_keeps_a_float32_state(rank):
    x, delta, A, blend, B, C, D = make(80, rank)
    half = [z.astype(jnp.bfloat16) for z in (x, B, C)]
    run = jax.jit(mamba3.trapezoidal_scan)
    y, state = run(half[0], delta, A, blend, *half[1:], D)
    expected, _ = run(*(z.astype(jnp.float32) for z in (half[0], delta, A, blend, *half[1:], D)))
    assert y.dtype == jnp.bfloat16
    assert all(leaf.dtype != jnp.bfloat16 for leaf in jax.tree.leaves(state))
    close(y, expected, 2**-7)


def test_angles_stay_accurate_over_long_streams():
    """2,048 steps of up to half a turn, and large ones: a sum in float64 modulo one turn. In one piece, and token by token."""
    rng = np.random.default_rng(1)
    rate, delta = rng.normal(1, 1, size=(1, 2048, 3)), rng.uniform(0, 1, size=(1, 2048, 1))
    delta[0, 100:110] = 1000 * delta[0, 100:110]
    rate, delta = (z.astype(np.float32) for z in (rate, delta))
    steps = np.asarray(0.5 * delta[..., None] * jnp.tanh(rate)[:, :, None])  # rounded, as the terms of the sum are
    exact = np.cumsum(steps, axis=1, dtype=np.float64)
    assert np.abs(exact).max() > 500

    def off(turns):
        difference = np.asarray(turns, np.float64) - exact
        return np.abs(difference - np.round(difference)).max()

    whole = mamba3.rotations(rate, delta)
    assert np.abs(whole).max() <= 0.5
    assert off(whole) < 2e-6
    token = lambda start, z: ((y := mamba3.rotations(z[0][:, None], z[1][:, None], start)[:, 0]), y)
    moved = tuple(jnp.moveaxis(z, 1, 0) for z in (rate, delta))
    _, streamed = jax.lax.scan(token, jnp.zeros((1, 1, 3)), moved)
    assert off(np.moveaxis(streamed, 0, 1)) < 1e-5


def test_angles_have_the_derivative_of_their_sum():
    rate, delta = rates(9), make(9)[1]
    total = lambda rate, delta: mamba3.rotations(rate, delta)[:, 4].sum()
    by_rate, by_delta = jax.jit(jax.grad(total, argnums=(0, 1)))(rate, delta)
    before = (np.arange(9) <= 4)[None, :, None]
    close(by_rate, before * 0.5 * delta.sum(2, keepdims=True) / np.cosh(rate) ** 2, 1e-5)
    close(by_delta, np.broadcast_to(before * 0.5 * np.tanh(rate).sum(2, keepdims=True), delta.shape), 1e-5)


def test_bad_arguments_are_named():
    x, delta, A, blend, B, C, D = make(4, 2)
    with pytest.raises(ValueError, match=r"trapezoidal_scan: A has shape \(2, 3, 2\), must be \[batch=2, time=4"):
        mamba3.trapezoidal_scan(x, delta, A[:, :3], blend, B, C, D)
    with pytest.raises(ValueError, match=r"trapezoidal_scan: B has shape \(2, 4, 1, 2, 6\), must be .*rank=2"):
        mamba3.trapezoidal_scan(x, delta, A, blend, B[:, :, :1], C, D)
    with pytest.raises(TypeError, match=r"trapezoidal_scan: segment_ids must be an array of shape \[2, 4\], got list"):
        mamba3.trapezoidal_scan(x, delta, A, blend, B, C, segment_ids=[[0] * 4] * 2)
    with pytest.raises(ValueError, match="trapezoidal_scan: rule must be None for x of rank 2"):
        mamba3.trapezoidal_scan(x, delta, A, blend, B, C, rule=rules.mamba3())
    with pytest.raises(ValueError, match="trapezoidal_scan: gates must be a Gates, got None"):
        mamba3.trapezoidal_scan(x, delta, A, blend, B, C, gates=None)
    with pytest.raises(ValueError, match=r"trapezoidal_scan: gates.retention is given; it must be None"):
        mamba3.trapezoidal_scan(x, delta, A, blend, B, C, gates=memory.Gates(retention=A))
    with pytest.raises(ValueError, match=r"mamba3\.reference: D has shape \(1,\), must be \[heads=2\]"):
        mamba3.reference(x, delta, A, blend, B, C, D[:1])
    with pytest.raises(ValueError, match=r"mamba3\.rotations: start has shape \(2, 2, 3\), must be .*angles=2"):
        mamba3.rotations(rates(4), delta, jnp.zeros((2, 2, 3)))
    with pytest.raises(ValueError, match=r"mamba3\.rotate: x has 3 channels, must be even and at least 2 · 2 angles"):
        mamba3.rotate(B[..., :3], mamba3.rotations(rates(4), delta))
    with pytest.raises(ValueError, match=r"mamba3\.init_state: rank must be an integer ≥ 1, got 0"):
        mamba3.init_state(2, 2, 3, 6, 0)
    with pytest.raises(ValueError, match=r"rules\.mamba3: rank must be an integer ≥ 1, got 0"):
        rules.mamba3(rank=0)
