"""Block recurrence against its definition, token by token: values, gradients, streams, documents, dtypes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.mixers import attention as softmax
from atlasjax.mixers import block_recurrence as B
from atlasjax.mixers.rotary import rotate
from tests.comparisons import close, close_with_gradients
from tests.streams import check_rows_apart, streamed

BATCH, HEADS, KEY, VALUE, THETA, SIZE = 2, 2, 4, 6, 100.0, 5


pytestmark = pytest.mark.usefixtures("compile_fast")


def arrays(time, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return tuple(2 * jax.random.normal(key, (BATCH, time, HEADS, dim)) for key, dim in zip(keys, (KEY, KEY, VALUE)))


def definition(q, k, v, size=SIZE, stop=False):
    """Block by block, a token at a time: keys unrotated in the cache, rotated by their distance from its first token."""
    outputs = []
    cache = k[:, :0], v[:, :0]
    for start in range(0, q.shape[1], size):
        block = slice(start, start + size)
        if stop:
            cache = jax.lax.stop_gradient(cache)
        keys, values = (jnp.concatenate([old, x[:, block]], axis=1) for old, x in zip(cache, (k, v)))
        held = cache[0].shape[1]
        places = jnp.broadcast_to(jnp.arange(keys.shape[1]) - held, keys.shape[:2])
        rotated, asked = rotate(keys, places, THETA), rotate(q[:, block], places[:, held:], THETA)
        for t in range(asked.shape[1]):
            seen = held + t + 1
            logits = jnp.einsum("bhd,bshd->bhs", asked[:, t], rotated[:, :seen]) / KEY**0.5
            outputs.append(jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(logits, axis=-1), values[:, :seen]))
        cache = k[:, block], v[:, block]
    return jnp.stack(outputs, axis=1)


def parallel(q, k, v, size=SIZE, stop=False, **options):
    return B.attention(q, k, v, block_size=size, rope_theta=THETA, stop_gradient=stop, **options)


@pytest.mark.parametrize(("time", "options"), [(3, {}), (12, {}), (11, {"stop": True}), (3, {"size": 1})])
def test_values_and_gradients(time, options):
    x = arrays(time)
    with_options = lambda f: lambda *x: f(*x, **options)
    close_with_gradients(with_options(parallel), with_options(definition), x, (BATCH, time, HEADS, VALUE))


def test_what_a_token_sees():
    """The block before and its own up to itself, and nothing else; the gradient into the block before can be stopped."""
    x = arrays(17)

    def reaches(stop):
        gradient = jax.jit(jax.grad(lambda v: jnp.sum(parallel(*x[:2], v, stop=stop)[:, 12] ** 2)))(x[2])
        return np.flatnonzero(np.asarray(gradient).any((0, 2, 3)))

    assert reaches(False).tolist() == list(range(5, 13))
    assert reaches(True).tolist() == [10, 11, 12]


def test_the_first_two_blocks_are_causal_attention():
    x = arrays(17)
    expected = softmax.attention(*(a[:, : 2 * SIZE] for a in x), rope_theta=THETA)
    close(parallel(*x)[:, : 2 * SIZE], expected)


@jax.jit
def extend(x, state):
    return B.extend(*x, state, rope_theta=THETA)


def fresh():
    return B.init_state(BATCH, SIZE, HEADS, KEY, VALUE, jnp.float32)


def test_streamed_is_parallel_at_every_split():
    x = arrays(12)
    expected = parallel(*x)
    # Each length of a piece is a compilation: one of 7 tokens begins at every place in a block.
    pieces_of_seven = ([*range(cut + 1), *range(cut + 7, 13)] for cut in range(6))
    for cuts in [range(13), [0, 12], [0, 1, 4, 5, 6, 12], *pieces_of_seven]:
        y, _ = streamed(extend, x, fresh(), cuts)
        close(y, expected)


def test_rows_of_a_stream_may_have_read_different_numbers_of_tokens():
    x = arrays(16)
    check_rows_apart(extend, x, parallel(*x), fresh(), [3, 8], [[0, 8], range(9)])


def test_documents():
    """Where the id changes a first block begins; an id may return."""
    ids = np.repeat([[5, 0, 5, 2], [1, 2, 3, 4]], [6, 1, 12, 4], axis=1)
    x = arrays(23)
    y = jax.jit(lambda *x: parallel(*x, segment_ids=jnp.asarray(ids), max_segments=4))(*x)
    alone = jax.jit(parallel)
    for start, stop in ((0, 6), (6, 7), (7, 19), (19, 23)):
        close(y[:, start:stop], alone(*(a[:, start:stop] for a in x)))


def test_bfloat16():
    x = tuple(a.astype(jnp.bfloat16) for a in arrays(70))
    run = jax.jit(functools.partial(parallel, size=32))
    y = run(*x)
    assert y.dtype == jnp.bfloat16
    exact = np.asarray(run(*(a.astype(jnp.float32) for a in x)))
    assert np.sqrt(np.mean((np.asarray(y, np.float32) - exact) ** 2)) < 0.01 * exact.std()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda q, k, v: parallel(q, k[:, :3], v), r"k has shape .*must be .*time=10"),
        (lambda q, k, v: parallel(q[..., :3], k[..., :3], v), "key_dim is 3, must be even"),
        (lambda q, k, v: parallel(q, k, v, size=0), "block_size must be an integer ≥ 1, got 0"),
        (lambda q, k, v: B.extend(q, k, v[..., :4], fresh()), r"state.values has shape .*must be \[batch=2, 2, block_size=5"),
        (lambda q, k, v: B.extend(q, k, v, None), "block_recurrence.extend: state must be a BlockRecurrenceState, got None"),
        (lambda q, k, v: B.extend(q, k, v, fresh()._replace(keys=None)), r"state.keys must be an array \[.*got NoneType"),
        (lambda q, k, v: B.extend(q[:1], k[:1], v[:1], fresh()), r"state.keys has shape .*must be \[batch=1, 2"),
        (lambda q, k, v: B.extend(q, k, v, fresh()._replace(position=jnp.zeros(2))), "state.position must be integers"),
        (lambda q, k, v: parallel(q, k, v, stop=1), "stop_gradient must be True or False, got 1"),
        (lambda q, k, v: B.attention(q, k, v, block_size=5, rope_theta="x"), "rope_theta must be a number > 0 or None"),
        (lambda q, k, v: B.init_state(2, 2.5, 2, 4, 4, jnp.float32), "block_size must be an integer ≥ 1, got 2.5"),
        (lambda q, k, v: B.init_state(-1, 5, 2, 4, 4, jnp.float32), "block_recurrence.init_state: batch_size .* got -1"),
        (lambda q, k, v: B.init_state(2, 5, 2, 4, 4, int), "block_recurrence.init_state: dtype must be floating point"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call(*arrays(10))
