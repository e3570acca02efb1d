"""Melodi's short-term memory against its definition, block by block: values, gradients, streams, documents, dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.mixers import attention as softmax
from atlasjax.mixers import melodi as M
from atlasjax.mixers.rotary import rotate
from tests.comparisons import close
from tests.marks import if_slow
from tests.streams import check_rows_apart, streamed

BATCH, DIM, HEADS, KEY, VALUE, THETA, SIZE, SUMMARY = 2, 6, 2, 4, 3, 100.0, 5, 3
EPS = 1e-6


pytestmark = pytest.mark.usefixtures("compile_fast")


def weights(size=SIZE, summary=SUMMARY):
    shapes = M.Weights(
        (DIM, HEADS, 2 * KEY + VALUE), (HEADS * VALUE, DIM), (summary, DIM), (size + summary, summary), (summary,),
        (DIM,), (DIM,), (DIM,),
    )  # fmt: skip
    keys = jax.random.split(jax.random.key(3), len(shapes))
    values = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes)]
    values[3] /= (size + summary) ** 0.5
    return M.Weights(*values)


def tokens(time, seed=0):
    return jax.random.normal(jax.random.key(seed), (BATCH, time, DIM))


def definition(x, w):
    """Block by block: memory, block and summary as one sequence under one causal mask; no grid, no sum carried along."""
    summary, size = w.summary.shape[0], w.mixing.shape[0] - w.summary.shape[0]
    norm = lambda x, scale: scale * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + EPS)
    memory, outputs = None, []
    for start in range(0, x.shape[1], size):
        block = x[:, start : start + size]
        length, full = block.shape[1], block.shape[1] == size
        parts, places = [block], [np.arange(length)]
        if memory is not None:
            parts, places = [norm(memory, w.memory_norm), *parts], [np.arange(-summary, 0), *places]
        if full:
            u = jnp.broadcast_to(w.summary, (x.shape[0], summary, DIM))
            parts, places = [*parts, u], [*places, size + np.arange(summary)]
        sequence, place = jnp.concatenate(parts, axis=1), np.concatenate(places)
        q, k, v = jnp.split(jnp.einsum("btd,dhk->bthk", sequence, w.inputs), (KEY, 2 * KEY), axis=-1)
        place = jnp.broadcast_to(place, sequence.shape[:2])
        logits = jnp.einsum("bthk,bshk->bhts", rotate(q, place, THETA), rotate(k, place, THETA)) / KEY**0.5
        logits = jnp.where(np.tri(sequence.shape[1], dtype=bool), logits, -jnp.inf)
        read = jnp.einsum("bhts,bshv->bthv", jax.nn.softmax(logits, axis=-1), v)
        o = read.reshape(*sequence.shape[:2], -1) @ w.out
        before = 0 if memory is None else summary
        o_x, o_u = o[:, before : before + length], o[:, before + length :]
        outputs.append(o_x)
        if full:
            h_x, h_u = block + o_x, u + o_u
            mixed = jnp.concatenate([norm(h_x, w.context_norm), norm(h_u, w.summary_norm)], axis=1)
            memory = h_u + jnp.swapaxes(jnp.swapaxes(mixed, 1, 2) @ w.mixing + w.mixing_bias, 1, 2)
    return jnp.concatenate(outputs, axis=1)


def parallel(x, w, **options):
    return M.attention(x, w, rope_theta=THETA, norm_eps=EPS, **options)


@pytest.mark.parametrize(("time", "sizes"), [if_slow(3, (5, 3)), (12, (5, 3)), (10, (5, 7)), if_slow(3, (1, 1))])
def test_values_and_gradients(time, sizes):
    x, w = tokens(time), weights(*sizes)
    along = jax.random.normal(jax.random.key(9), x.shape)
    run = lambda f: jax.jit(
        jax.value_and_grad(lambda x, w: (lambda y: (jnp.sum(along * y), y))(f(x, w)), (0, 1), has_aux=True)
    )(x, w)
    (_, expected), (expected_x, expected_w) = run(definition)
    (_, y), (got_x, got_w) = run(parallel)
    close(y, expected)
    close(got_x, expected_x, 2e-5)
    for name, got, want in zip(M.Weights._fields, got_w, expected_w):
        if time <= sizes[0]:  # one block alone
            assert bool(jnp.any(got != 0)) == (name in ("inputs", "out")), name
        close(got, want, 2e-5)


def test_gradients_cross_blocks_and_the_future_is_unseen():
    x, w = tokens(17), weights()
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(parallel(x, w)[:, 12] ** 2)))(x)
    size = np.abs(np.asarray(gradient)).max((0, 2))
    assert np.all(size[:13] > 1e-4)
    assert not size[13:].any()


def test_the_first_block_is_local_attention_alone():
    x, w = tokens(10), weights()
    q, k, v = jnp.split(jnp.einsum("btd,dhk->bthk", x, w.inputs), (KEY, 2 * KEY), axis=-1)
    local = softmax.attention(*(a[:, :SIZE] for a in (q, k, v)), rope_theta=THETA).reshape(BATCH, SIZE, -1) @ w.out
    y = parallel(x, w)
    close(y[:, :SIZE], local)
    other = parallel(x, w._replace(summary=2 * w.summary))
    np.testing.assert_array_equal(y[:, :SIZE], other[:, :SIZE])
    assert np.abs(np.asarray(y - other))[:, SIZE:].max() > 0.1


@jax.jit
def extend(x, state):
    return M.extend(x, weights(), state, rope_theta=THETA, norm_eps=EPS)


def fresh():
    return M.init_state(BATCH, weights(), jnp.float32)


def test_streamed_is_parallel_at_every_split():
    x = tokens(12)
    expected = parallel(x, weights())
    states = []
    # Each length of a piece is a compilation: one of 7 tokens begins at every place in a block.
    pieces_of_seven = ([*range(cut + 1), *range(cut + 7, 13)] for cut in range(6))
    for cuts in [range(13), [0, 12], [0, 1, 4, 5, 6, 12], *pieces_of_seven]:
        y, state = streamed(extend, x, fresh(), cuts)
        close(y, expected)
        states.append(state)
    for state in states[1:]:
        close(state.memory.keys, states[0].memory.keys)
        close(state.mixed, states[0].mixed)
        close(state.block.keys[:, :2], states[0].block.keys[:, :2])


def test_rows_of_a_stream_may_have_read_different_numbers_of_tokens():
    x = tokens(16)
    check_rows_apart(extend, x, parallel(x, weights()), fresh(), [3, 8], [[0, 8], range(9)])


def test_documents():
    """Where the id changes memory and blocks start afresh; an id may return."""
    ids = np.repeat([[5, 0, 5, 2], [1, 2, 3, 4]], [6, 1, 12, 4], axis=1)
    x, w = tokens(23), weights()
    run = lambda x, ids: parallel(x, w, segment_ids=ids, max_segments=4)
    y = jax.jit(run)(x, jnp.asarray(ids))
    alone = jax.jit(parallel)
    for start, stop in ((0, 6), (6, 7), (7, 19), (19, 23)):
        close(y[:, start:stop], alone(x[:, start:stop], w))
    gradient = jax.jit(jax.grad(lambda x, ids: jnp.sum(run(x, ids)[:, 7:19] ** 2)))(x, jnp.asarray(ids))
    close(gradient[:, 7:19], jax.jit(jax.grad(lambda x: jnp.sum(parallel(x, w) ** 2)))(x[:, 7:19]), 2e-5)
    assert not np.delete(np.asarray(gradient), np.arange(7, 19), axis=1).any()


def test_bfloat16():
    x, w = tokens(40).astype(jnp.bfloat16), weights(size=16)
    run = jax.jit(parallel)
    y = run(x, w)
    assert y.dtype == jnp.bfloat16
    rounded = jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(jnp.float32), w)
    exact = np.asarray(run(x.astype(jnp.float32), rounded))
    assert np.sqrt(np.mean((np.asarray(y, np.float32) - exact) ** 2)) < 0.02 * exact.std()
    state = M.init_state(BATCH, w, jnp.bfloat16)
    _, after = jax.eval_shape(M.extend, x, w, state)
    assert jax.tree.map(lambda a: a.dtype, after) == jax.tree.map(lambda a: a.dtype, state)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, w: parallel(x[..., :4], w), r"weights.inputs has shape .*must be \[dim=4"),
        (lambda x, w: parallel(x, w._replace(summary=w.summary[:0])), r"weights.summary has shape \(0, 6\).*with no empty axis"),
        (lambda x, w: parallel(x, w._replace(mixing=w.mixing[:SUMMARY])), r"mixing has shape \(3, 3\).*block_size ≥ 1"),
        (lambda x, w: parallel(x, w._replace(inputs=w.inputs[..., :-1])), r"weights.inputs has shape .*2·key_dim"),
        (lambda x, w: parallel(x, w._replace(inputs=w.inputs[..., :-2])), "key_dim is 3, must be even"),
        (lambda x, w: M.extend(x, weights(summary=2), fresh()), r"state.memory.keys has shape .*must be \[batch=2, summary=2"),
        (lambda x, w: M.extend(x, w, None), "melodi.extend: state must be a MelodiState, got None"),
        (lambda x, w: M.extend(x, w, (1, 2, 3, 4)), "melodi.extend: state must be a MelodiState"),
        (lambda x, w: M.extend(x, w, fresh()._replace(block=(1, 2))), r"state.block.keys must be an array \[.*got NoneType"),
        (lambda x, w: M.extend(x[:1], w, fresh()), r"state.memory.keys has shape .*must be \[batch=1"),
        (lambda x, w: M.extend(x, w, fresh()._replace(position=jnp.zeros(2))), "state.position must be integers"),
        (lambda x, w: parallel(x, None), "melodi.attention: weights must be a Weights, got None"),
        (lambda x, w: parallel(None, w), r"melodi.attention: x must be an array \[batch, time, dim\], got NoneType"),
        (lambda x, w: M.attention(x, w, norm_eps="x"), "melodi.attention: norm_eps must be a number > 0, got 'x'"),
        (lambda x, w: M.attention(x, w, rope_theta=-1), "melodi.attention: rope_theta must be a number > 0 or None, got -1"),
        (lambda x, w: M.init_state(-1, w, jnp.float32), "melodi.init_state: batch_size must be an integer ≥ 1, got -1"),
        (lambda x, w: M.init_state(2, None, jnp.float32), "melodi.init_state: weights must be a Weights, got None"),
        (lambda x, w: M.init_state(2, w, jnp.int32), "melodi.init_state: dtype must be floating point, got int32"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call(tokens(10), weights())
