"""Memorizing Transformer and Infini-attention against their definitions, token by token: values, gradients, streams, documents."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.mixers import attention, infini, memorizing
from atlasjax.mixers.rotary import rotate
from tests.comparisons import close, close_with_gradients
from tests.marks import if_slow, some_slow
from tests.streams import check_rows_apart, streamed

BATCH, HEADS, KEY, VALUE, THETA, EPS = 2, 2, 4, 6, 100.0, 1e-6
SIZE, LENGTH = 3, 4
GATE = jnp.array([-0.5, 1.0])
NAMES = ("memorizing", "infini")


pytestmark = pytest.mark.usefixtures("compile_fast")


def arrays(time, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return tuple(2 * jax.random.normal(key, (BATCH, time, HEADS, dim)) for key, dim in zip(keys, (KEY, KEY, VALUE)))


def queue_reads(q, k, v, size, length):
    """For each token its own softmax over the last `length` tokens before its block; None where there are none."""
    for t in range(q.shape[1]):
        start = t // size * size
        past = slice(max(0, start - length), start)
        weights = jax.nn.softmax(jnp.einsum("bhd,bshd->bhs", q[:, t], k[:, past]) / KEY**0.5, axis=-1)
        yield jnp.einsum("bhs,bshd->bhd", weights, v[:, past]) if start else None


def infini_reads(q, k, v, size, length):
    """Outer products are added one token at a time, to a copy, which takes memory's place at the end of the block."""
    phi = lambda x: jax.nn.elu(x) + 1
    matrix, normalizer = jnp.zeros((BATCH, HEADS, KEY, VALUE)), jnp.zeros((BATCH, HEADS, KEY))
    recall = lambda x: (
        jnp.einsum("bhk,bhkv->bhv", phi(x), matrix) / jnp.einsum("bhk,bhk->bh", phi(x), normalizer)[..., None]
    )
    new_matrix, new_normalizer = matrix, normalizer
    for t in range(q.shape[1]):
        if t and t % size == 0:
            matrix, normalizer = new_matrix, new_normalizer
        if t < size:
            yield None
            known = 0.0
        else:
            y = recall(q[:, t])
            yield y / jnp.sqrt(jnp.mean(y**2, axis=-1, keepdims=True) + EPS)
            known = recall(k[:, t])
        new_matrix = new_matrix + phi(k[:, t])[..., :, None] * (v[:, t] - known)[..., None, :]
        new_normalizer = new_normalizer + phi(k[:, t])


READS = {"memorizing": queue_reads, "infini": infini_reads}


def definition(name, q, k, v, gate, size=SIZE, length=LENGTH, theta=THETA):
    place = jnp.broadcast_to(jnp.arange(q.shape[1]) % size, q.shape[:2])
    rq, rk = rotate(q, place, theta), rotate(k, place, theta)
    share, outputs = jax.nn.sigmoid(gate)[:, None], []
    for t, past in enumerate(READS[name](q, k, v, size, length)):
        start = t // size * size
        logits = jnp.einsum("bhd,bshd->bhs", rq[:, t], rk[:, start : t + 1]) / KEY**0.5
        local = jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(logits, axis=-1), v[:, start : t + 1])
        outputs.append(local if past is None else (1 - share) * local + share * past)
    return jnp.stack(outputs, axis=1)


def parallel(name, q, k, v, gate=GATE, size=SIZE, length=LENGTH, theta=THETA, **options):
    if name == "memorizing":
        options["queue_length"] = length
    function = {"memorizing": memorizing.attention, "infini": infini.attention}[name]
    return function(q, k, v, gate, block_size=size, rope_theta=theta, **options)


@pytest.mark.parametrize(
    ("name", "time", "options"),
    [
        ("memorizing", 2, {}),
        ("memorizing", 10, {}),
        ("memorizing", 10, {"length": 2}),  # shorter than a block
        if_slow("memorizing", 9, {"length": 20, "theta": None}),  # more than there is
        if_slow("memorizing", 4, {"size": 1, "length": 2}),
        ("infini", 2, {}),
        ("infini", 10, {}),
        if_slow("infini", 4, {"size": 1}),
    ],
)
def test_values_and_gradients(name, time, options):
    x = (*arrays(time), GATE)
    with_options = lambda f: lambda *x: f(name, *x, **options)
    gradients = close_with_gradients(with_options(parallel), with_options(definition), x, (BATCH, time, HEADS, VALUE))
    assert np.abs(gradients[3]).max() > 0.01 or time == 2


@pytest.mark.parametrize(("name", "first"), [("memorizing", 2), ("infini", 0)])
def test_gradients_cross_blocks_and_the_future_is_unseen(name, first):
    """Also the past that has left the queue: tokens of the third block see the 4 before it."""
    q, k, v = arrays(11)
    gradient = jax.jit(jax.grad(lambda v: jnp.sum(parallel(name, q, k, v)[:, 7:9] ** 2)))(v)
    assert np.all(np.abs(np.asarray(gradient)[:, first:9]).max((0, 2, 3)) > 1e-4)
    assert not np.asarray(gradient)[:, :first].any()
    assert not np.asarray(gradient)[:, 9:].any()


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_memory_is_local_attention(name):
    q, k, v = arrays(8)
    y = jitted(name)(q, k, v, jnp.array([30.0, 30.0]))  # nothing but memory, where there is one
    block = lambda start: attention.attention(*(x[:, start : start + SIZE] for x in (q, k, v)), rope_theta=THETA)
    close(y[:, :SIZE], block(0), 1e-6)
    assert np.abs(y[:, SIZE : 2 * SIZE] - block(SIZE)).max() > 0.1
    closed = jitted(name)(q, k, v, jnp.array([-100.0, -100.0]))
    for start in (0, 3, 6):
        close(closed[:, start : start + SIZE], block(start), 1e-6)


@functools.cache
def jitted(name):
    return jax.jit(functools.partial(parallel, name))


@functools.cache
def jitted_extend(name):
    function = {"memorizing": memorizing.extend, "infini": infini.extend}[name]
    return jax.jit(lambda x, state: function(*x, GATE, state, rope_theta=THETA))


def fresh(name, dtype=jnp.float32):
    if name == "memorizing":
        return memorizing.init_state(BATCH, LENGTH, SIZE, HEADS, KEY, VALUE, dtype)
    return infini.init_state(BATCH, SIZE, HEADS, KEY, VALUE, dtype)


def narrow(name):
    state = fresh(name)
    return state._replace(memory=state.memory._replace(values=state.memory.values[..., :-1]))


@pytest.mark.parametrize("name", NAMES)
def test_streamed_is_parallel_at_every_split(name):
    x = arrays(7)
    expected = jitted(name)(*x)
    states = []
    for cuts in [range(8), [0, 7], [0, 2, 3, 4, 7], *([0, cut, 7] for cut in range(1, 7))]:
        y, state = streamed(jitted_extend(name), x, fresh(name), cuts)
        close(y, expected)
        states.append(state)
    for state in states[1:]:
        for a, b in zip(state.memory, states[0].memory):
            close(a, b)
        np.testing.assert_array_equal(state.block.keys[:, :1], states[0].block.keys[:, :1])


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_stream_may_have_read_different_numbers_of_tokens(name):
    x = arrays(14)
    check_rows_apart(jitted_extend(name), x, jitted(name)(*x), fresh(name), [2, 7], [[0, 7], range(8)])


@pytest.mark.parametrize("name", NAMES)
def test_documents(name):
    """Where the id changes memory and blocks start afresh; an id may return."""
    ids = np.repeat([[5, 0, 5, 2], [1, 2, 3, 4]], [4, 1, 7, 2], axis=1)
    x = arrays(14)
    y = jax.jit(lambda *x: parallel(name, *x, segment_ids=jnp.asarray(ids), max_segments=4))(*x)
    for start, stop in ((0, 4), (4, 5), (5, 12), (12, 14)):
        close(y[:, start:stop], jitted(name)(*(a[:, start:stop] for a in x)))


@pytest.mark.parametrize("name", some_slow(NAMES, ["memorizing"]))
def test_bfloat16(name):
    x = tuple(a.astype(jnp.bfloat16) for a in arrays(150))
    run = jax.jit(functools.partial(parallel, name, size=32, length=50))
    y = run(*x)
    assert y.dtype == jnp.bfloat16
    exact = run(*(a.astype(jnp.float32) for a in x))
    error = np.asarray(y, np.float32) - np.asarray(exact)
    assert np.sqrt(np.mean(error**2)) < 0.01 * np.asarray(exact).std()
    pieces, state = streamed(jitted_extend(name), x, fresh(name, jnp.bfloat16), [0, 4, 8])
    # Values are compared in bfloat16, whose steps are 2⁻⁸ of them.
    close(pieces, jitted(name)(*(a[:, :8] for a in x)), 2**-7)
    assert {leaf.dtype for leaf in state.memory} == {jnp.dtype("float32" if name == "infini" else "bfloat16")}


def test_infini_gives_back_what_it_stored():
    """Keys whose features are orthogonal: φ is one axis each, up to e⁻⁴⁰."""
    scale = jnp.array([2.0, 0.5, 3.0, 1.0])
    k = jnp.where(jnp.eye(KEY) > 0, scale, -40.0)[None, :, None]
    v = jax.random.normal(jax.random.key(1), (1, KEY, 1, VALUE))
    memory = infini.write(infini.init_memory(1, 1, KEY, VALUE), k, v)
    close(infini.read(memory, k), v, 1e-6)
    again = infini.write(memory, k, v)  # nothing new to store, but counted
    close(again.matrix, memory.matrix, 1e-6)
    close(again.normalizer, 2 * memory.normalizer, 1e-6)
    other = infini.write(memory, k[:, :1], 3 * v[:, :1])  # what is new is added: A = (v + 2 v) / 2
    close(infini.read(other, k)[:, 1:], v[:, 1:], 1e-6)
    close(infini.read(other, k)[:, 0], 1.5 * v[:, 0], 1e-6)


def test_infini_feature_map():
    x = jnp.array([-60.0, -20.0, -1.0, 0.0, 2.0])
    close(infini.feature_map(x)[2:], jax.nn.elu(x[2:]) + 1)
    np.testing.assert_allclose(infini.feature_map(x)[:2], np.exp(x[:2]), rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(jax.grad(infini.feature_map))(x)[1:], np.exp(np.minimum(x[1:], 0)), rtol=1e-5)
    empty = infini.init_memory(1, 1, 2, 3)
    assert not np.asarray(infini.read(empty, jnp.ones((1, 4, 1, 2)))).any()
    gradient = jax.grad(lambda q: jnp.sum(infini.read(empty, q)))(jnp.full((1, 4, 1, 2), -200.0))
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("error", "call", "words"),
    [
        (ValueError, lambda q, k, v: parallel("memorizing", q, k[:, :3], v), r"k has shape .*must be .*time=10"),
        (ValueError, lambda q, k, v: parallel("infini", q[..., :3], k[..., :3], v), "key_dim is 3, must be even"),
        (ValueError, lambda q, k, v: parallel("infini", q, k, v, GATE[:1]), r"gate has shape \(1,\), must be \[heads=2\]"),
        (ValueError, lambda q, k, v: parallel("memorizing", q, k, v, length=0), "queue_length must be an integer ≥ 1, got 0"),
        (ValueError, lambda q, k, v: parallel("memorizing", q, k, v, length=2.5), "queue_length .* got 2.5"),
        (ValueError, lambda q, k, v: parallel("infini", q, k, v, size=0), "infini.attention: block_size .* ≥ 1, got 0"),
        (ValueError, lambda q, k, v: memorizing.init_state(2, -1, 5, 2, 4, 6, "float32"), "queue_length .* got -1"),
        (ValueError, lambda q, k, v: infini.init_state(2, True, 2, 4, 6, "float32"), "block_size .* got True"),
        (ValueError, lambda q, k, v: infini.extend(q[:1], k[:1], v[:1], GATE, fresh("infini")), r"state.*must be \[batch=1"),
        (TypeError, lambda q, k, v: infini.extend(q, k, v, GATE, fresh("memorizing")), "state must be the result of its own"),
        (TypeError, lambda q, k, v: memorizing.extend(q, k, v, GATE, None), "memorizing.extend: state must be .* got None"),
        (TypeError, lambda q, k, v: infini.extend(q, k, v, GATE, fresh("infini")._replace(block=None)),
         r"state.block.keys must be an array \[.*got NoneType"),
        (ValueError, lambda q, k, v: memorizing.extend(q, k, v, GATE, narrow("memorizing")),
         r"state.memory.values has shape .*must be \[batch=2, queue_length=4, heads=2, value_dim=6\]"),
        (ValueError, lambda q, k, v: parallel("infini", q, k, v, theta=0), "infini.attention: rope_theta must .* got 0"),
        (ValueError, lambda q, k, v: parallel("infini", q, k, v, norm_eps=None), "infini.attention: norm_eps must .* got None"),
        (ValueError, lambda q, k, v: parallel("infini", q, k, v, norm_eps=0), "norm_eps must be a number > 0, got 0"),
        (ValueError, lambda q, k, v: infini.init_state(-1, 3, 2, 4, 6, "float32"), "infini.init_state: batch_size .* got -1"),
        (TypeError, lambda q, k, v: infini.init_state(2, 3, 2, 4, 6, "flot32"), "infini.init_state: dtype .* got 'flot32'"),
        (ValueError, lambda q, k, v: memorizing.init_state(2, 4, 5, 0, 4, 6, "float32"), "memorizing.init_state: heads .* got 0"),
        (ValueError, lambda q, k, v: infini.init_memory(2, 2, 4, None), "infini.init_memory: value_dim .* got None"),
        (ValueError, lambda q, k, v: infini.read(None, q), "infini.read: memory must be a Associative, got None"),
        (ValueError, lambda q, k, v: infini.write(infini.init_memory(1, 2, 4, 6), k, v), r"infini.write: k .*\[batch=1, time"),
        (ValueError, lambda q, k, v: parallel("infini", q, k, v, segment_ids=jnp.zeros((2, 3), int)), r"segment_ids has shape"),
    ],
)  # fmt: skip
def test_bad_input_is_named(error, call, words):
    with pytest.raises(error, match=words):
        call(*arrays(10))


@pytest.mark.parametrize("shift", [-25.0, -60.0, -80.0])
def test_infini_with_very_negative_keys_and_queries(shift):
    """φ(x + s) = eˢ φ(x) for negative numbers, and reads are quotients: neither they nor their gradients depend on s."""
    q, k, v = arrays(7)
    q, k, weights = -abs(q), -abs(k), jax.random.normal(jax.random.key(5), v.shape)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
    def read(q, k, v, shift):
        memory = infini.init_memory(BATCH, HEADS, KEY, VALUE)
        for keys, values in ((k, v), (q, v[:, ::-1])):
            memory = infini.write(memory, keys + shift, values)
        y = infini.read(memory, q + shift)
        return jnp.sum(weights * y), y

    close(read(q, k, v, shift), read(q, k, v, 0.0), 1e-4)
    total = lambda *arrays: jnp.sum(infini.attention(*arrays, GATE, block_size=SIZE, rope_theta=None))
    gradients = jax.jit(jax.grad(total, (0, 1, 2)))(q + shift, k + shift, v)
    assert all(bool(jnp.isfinite(x).all()) for x in gradients)
