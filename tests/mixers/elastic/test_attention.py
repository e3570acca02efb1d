"""Elastic block attention against its definition, token by token: values, gradients, streams, documents, dtypes."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.mixers.elastic import attention as A
from atlasjax.mixers.elastic import banks, hippo, sampling
from atlasjax.mixers.rotary import rotate
from tests.comparisons import close, close_with_gradients
from tests.marks import if_slow
from tests.streams import check_rows_apart, streamed

BATCH, HEADS, KEY, VALUE, THETA = 2, 2, 4, 6, 100.0
ORDER, SIZE, SAMPLES = 7, 5, 6
R = sampling.sampled_reconstruction(ORDER, "exponential", SAMPLES, 20.0)


pytestmark = pytest.mark.usefixtures("compile_fast")


@functools.cache
def bank(blocks, size=SIZE, discretization="zoh"):
    blocks = [
        hippo.block(ORDER, m * size, (m + 1) * size, discretization=discretization) for m in range(blocks)
    ]  # fmt: skip
    if not blocks:
        return banks.Bank(np.zeros((0, ORDER, ORDER)), np.zeros((0, ORDER, size)))
    return banks.Bank(*(np.stack(x) for x in zip(*blocks)))


def arrays(time, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return tuple(2 * jax.random.normal(key, (BATCH, time, HEADS, dim)) for key, dim in zip(keys, (KEY, KEY, VALUE)))


def definition(q, k, v, size=SIZE, r=R, discretization="zoh", rotated=True):
    """One token at a time. Memory is the whole history at once, integrated against the polynomials: no recurrence over blocks."""
    time = q.shape[1]
    place = jnp.broadcast_to(jnp.arange(time) % size, (BATCH, time))
    rq, rk = rotate(q, place, THETA), rotate(k, place, THETA)
    outputs = []
    for t in range(time):
        start = t // size * size
        logits = jnp.einsum("bhd,bshd->bhs", rq[:, t], rk[:, start : t + 1])
        values = v[:, start : t + 1]
        if start:
            whole = jnp.asarray(r @ hippo.kernel(ORDER, 0, start, discretization=discretization), jnp.float32)
            samples_k, samples_v = (
                jnp.einsum("st,bthd->bshd", whole, x[:, :start], precision="highest") for x in (k, v)
            )
            asked = rq if rotated else q
            logits = jnp.concatenate([jnp.einsum("bhd,bshd->bhs", asked[:, t], samples_k), logits], axis=-1)
            values = jnp.concatenate([samples_v, values], axis=1)
        outputs.append(jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(logits / KEY**0.5, axis=-1), values))
    return jnp.stack(outputs, axis=1)


def parallel(q, k, v, size=SIZE, r=R, discretization="zoh", rotated=True, **options):
    matrices = bank(A.blocks_needed(q.shape[1], size), size, discretization)
    return A.attention(q, k, v, matrices, r, rope_theta=THETA, rotate_memory_queries=rotated, **options)


@pytest.mark.parametrize(
    ("time", "options"),
    [if_slow(3, {}), (12, {}), (10, {"rotated": False}), (11, {"discretization": "backward"}), if_slow(4, {"size": 1})],
)
def test_values_and_gradients(time, options):
    x = arrays(time)
    with_options = lambda f: lambda *x: f(*x, **options)
    close_with_gradients(with_options(parallel), with_options(definition), x, (BATCH, time, HEADS, VALUE))


def test_gradients_cross_blocks_and_the_future_is_unseen():
    q, k, v = arrays(17)
    gradient = jax.jit(jax.grad(lambda v: jnp.sum(parallel(q, k, v)[:, 11:15] ** 2)))(v)
    assert np.all(np.abs(np.asarray(gradient)[:, :15]).max((2, 3)) > 1e-4)
    assert not np.asarray(gradient)[:, 15:].any()


def test_the_first_block_has_no_memory():
    q, k, v = arrays(10)
    y = parallel(q, k, v)
    other = parallel(q, k, v, r=100 * R)
    np.testing.assert_array_equal(y[:, :SIZE], other[:, :SIZE])
    assert np.abs(np.asarray(y - other))[:, SIZE:].max() > 0.1


@jax.jit
def extend(x, state):
    return A.extend(*x, state, bank(A.blocks_needed(state.max_length, SIZE)), R, rope_theta=THETA)


def fresh(length=17):
    return A.init_state(BATCH, length, SIZE, R, HEADS, KEY, VALUE, jnp.float32)


def test_streamed_is_parallel_at_every_split():
    x = arrays(12)
    expected = parallel(*x)
    states = []
    # Each length of a piece is a compilation: one of 7 tokens begins at every place in a block.
    pieces_of_seven = ([*range(cut + 1), *range(cut + 7, 13)] for cut in range(6))
    for cuts in [range(13), [0, 12], [0, 1, 4, 5, 6, 12], *pieces_of_seven]:
        y, state = streamed(extend, x, fresh(), cuts)
        close(y, expected)
        states.append(state)
    for state in states[1:]:
        close(state.coefficients, states[0].coefficients)
        close(state.memory_values, states[0].memory_values)
        np.testing.assert_array_equal(state.keys[:, :2], states[0].keys[:, :2])


def test_rows_of_a_stream_may_have_read_different_numbers_of_tokens():
    x = arrays(16)
    check_rows_apart(extend, x, parallel(*x), fresh(), [3, 8], [[0, 8], range(9)])


def test_another_reconstruction_is_used_from_the_next_block_on():
    """However the stream is split: the samples of the current block were taken when it began."""
    x, other = arrays(14), sampling.sampled_reconstruction(ORDER, "uniform", SAMPLES, 20.0)
    _, begun = streamed(extend, x, fresh(), [0, 7])
    with_r = jax.jit(lambda q, k, v, state, r: A.extend(q, k, v, state, bank(3), r, rope_theta=THETA))
    run = lambda start, stop, state, r=other: with_r(*(a[:, start:stop] for a in x), state, r)
    y, _ = run(7, 14, begun)
    old, _ = run(7, 10, begun, R)
    close(y[:, :3], old)
    whole, _ = run(7, 14, begun, R)
    assert np.abs(whole - y)[:, 3:].max() > 0.01
    state, pieces = begun, []
    for t in range(7, 14):
        piece, state = run(t, t + 1, state)
        pieces.append(piece)
    close(jnp.concatenate(pieces, axis=1), y)


def test_tokens_beyond_max_length_are_nan():
    x = arrays(17)
    for cuts in ([0, 17], range(18)):
        y, _ = streamed(extend, x, fresh(8), cuts)
        close(y[:, :8], parallel(*x)[:, :8])
        assert np.all(np.isnan(y[:, 8:]))


def test_documents():
    """Where the id changes memory and blocks start afresh; an id may return."""
    ids = np.repeat([[5, 0, 5, 2], [1, 2, 3, 4]], [6, 1, 12, 4], axis=1)
    x = arrays(23)
    y = jax.jit(lambda *x: parallel(*x, segment_ids=jnp.asarray(ids), max_segments=4))(*x)
    for start, stop in ((0, 6), (6, 7), (7, 19), (19, 23)):
        close(y[:, start:stop], parallel(*(a[:, start:stop] for a in x)))


def test_bfloat16_has_a_float32_memory():
    x = tuple(a.astype(jnp.bfloat16) for a in arrays(200))
    y = parallel(*x, size=32)
    assert y.dtype == jnp.bfloat16
    exact = parallel(*(a.astype(jnp.float32) for a in x), size=32)
    error = np.asarray(y, np.float32) - np.asarray(exact)
    assert np.sqrt(np.mean(error**2)) < 0.01 * np.asarray(exact).std()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda q, k, v: A.attention(q, k[:, :3], v, bank(1), R), r"k has shape .*must be .*time=10"),
        (lambda q, k, v: A.attention(q[..., :3], k[..., :3], v, bank(1), R), "key_dim is 3, must be even"),
        (lambda q, k, v: A.attention(q, k, v, bank(0), R),
         r"bank has 0 blocks of 5 tokens, but 10 tokens need 1. Load a longer one: banks.load"),
        (lambda q, k, v: A.attention(q, k, v, bank(1), R[:, :4]), r"reconstruction has shape .*must be \[samples, order=7"),
        (lambda q, k, v: A.attention(q, k, v, bank(1), None), r"reconstruction has shape \(0, 0\), must be"),
        (lambda q, k, v: A.attention(q, k, v, A.no_bank(1, 5), np.zeros((3, 0))), "order 0 with 3 samples"),
        (lambda q, k, v: A.extend(q, k, v, fresh(26), bank(4), R), "bank has 4 blocks of 5 tokens, but 26 tokens need 5"),
        (lambda q, k, v: A.extend(q, k, v, fresh(26), bank(5), R[:3]), r"memory_keys has shape .*must be \[batch=2, samples=3"),
        (lambda q, k, v: A.extend(q, k, v, None, bank(5), R), "elastic.extend: state must be a ElasticState, got None"),
        (lambda q, k, v: A.extend(q[:1], k[:1], v[:1], fresh(26), bank(5), R), r"coefficients has shape .*\[batch=1, order=7"),
        (lambda q, k, v: A.extend(q, k, v, replace(fresh(26), position=jnp.zeros(2)), bank(5), R),
         "state.position must be integers, got float32"),
        (lambda q, k, v: A.extend(q, k, v, replace(fresh(26), keys=None), bank(5), R),
         r"state.keys must be an array \[.*got NoneType"),
        (lambda q, k, v: A.extend(q, k, v, fresh(26), None, R), "elastic.extend: bank must be a Bank, got None"),
        (lambda q, k, v: A.attention(q, k, v, (1, 2), R), "elastic.attention: bank must be a Bank"),
        (lambda q, k, v: A.attention(q, k, v, bank(1), R.tolist()), "reconstruction must be an array .*, got list"),
        (lambda q, k, v: A.attention(q, k, v, bank(1), R, rope_theta="x"), "rope_theta must be a number > 0 or None, got 'x'"),
        (lambda q, k, v: A.attention(q, k, v, bank(1), R, rotate_memory_queries=None), "rotate_memory_queries must be True or"),
        (lambda q, k, v: A.attention(None, k, v, bank(1), R), r"elastic.attention: q must be an array \[batch, .*got NoneType"),
        (lambda q, k, v: A.init_state(1, 0, 5, R, 2, 4, 6, "float32"), "elastic.init_state: max_length .* ≥ 1, got 0"),
        (lambda q, k, v: A.init_state(-1, 9, 5, R, 2, 4, 6, "float32"), "elastic.init_state: batch_size must .* got -1"),
        (lambda q, k, v: A.init_state(1, 9, 5, [1.0], 2, 4, 6, "float32"), "elastic.init_state: reconstruction must be an array"),
        (lambda q, k, v: A.init_state(1, 9, 5, R, 2, 4, 6, int), "elastic.init_state: dtype must be floating point, got int"),
        (lambda q, k, v: A.no_bank(-1, 5), "elastic.no_bank: blocks must be an integer ≥ 0, got -1"),
        (lambda q, k, v: A.blocks_needed(5, 0), "elastic.blocks_needed: block_size must be an integer ≥ 1, got 0"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call(*arrays(10))
