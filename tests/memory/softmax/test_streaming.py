"""Any cut of a sequence into calls is the same function; packed segments are as if alone; caches are bounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory
from atlasjax.memory.softmax.init import init_state
from tests.marks import each_name, some_slow
from tests.memory.cases import assert_close, check_every_split_and_read, steps
from tests.memory.softmax.cases import RULES, make_inputs

EXACT = 1e-9
TIME, PIECE = 19, 7


STREAMED = [
    "decay_momentum", "matrix_window", "deep_transformer_online", "deep_unnormalized", "swdt_cache_under_chunk",
    "swdt_cache_over_length", "dot_delta", "dot", "dot_window_over_chunk", "dot_sliding",
]  # fmt: skip


# Every choice is in the others.
STREAMED_IF_SLOW = [
    "decay_momentum", "matrix_window", "deep_transformer_online", "deep_unnormalized", "swdt_cache_over_length", "dot",
    "dot_window_over_chunk", "dot_sliding",
]  # fmt: skip


@each_name(STREAMED, slow=STREAMED_IF_SLOW)
def test_every_split(name, x64, short_blocks):
    rule = RULES[name]
    params, *tokens = make_inputs(rule, batch=1, time=TIME, dtype=jnp.float64)
    state = init_state(rule, params, batch_size=1, max_length=TIME, dtype=jnp.float64)
    check_every_split_and_read(rule, params, tokens, PIECE, EXACT, state)


def test_float64_tokens_after_a_float32_state(x64):
    """The state becomes as wide as the tokens, by a step as by a scan."""
    rule = RULES["swdt"]
    params, q, k, v, gates = make_inputs(rule, batch=1, time=2, dtype=jnp.float64)
    state = memory.init_state(rule, jax.tree.map(lambda x: x.astype(jnp.float32), params), batch_size=1)
    assert state.keys.dtype == jnp.float32
    expected, after = jax.jit(lambda: memory.scan(rule, params, state, q, k, v, gates))()
    for t in range(2):
        y, state = memory.step(rule, params, state, *jax.tree.map(lambda x, t=t: x[:, t], (q, k, v, gates)))
    assert_close((y, state), (expected[:, -1], after), EXACT)
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype("float64"), jnp.dtype("int32")}


SEGMENTS = np.array([[0] * 4 + [1] * 1 + [2] * 9 + [7] * 10, [3] * 24, [0, 1, 2, 3] * 2 + [4] * 16])


@pytest.mark.parametrize(
    "name", some_slow(["matrix_window", "swdt", "dot_window_over_chunk"], ["swdt", "dot_window_over_chunk"])
)
def test_segments(name, x64, short_blocks):
    """Packed segments equal the reference, which forgets by definition, in one call and in two; and that equals each alone."""
    rule = RULES[name]
    params, q, k, v, gates = make_inputs(rule, batch=3, time=24, dtype=jnp.float64)
    ids = jnp.asarray(SEGMENTS)

    def total(run, *inputs):
        y, state = run(*inputs)
        return jnp.sum(jnp.cos(jnp.arange(y.size)).reshape(y.shape) * y), (y, state)

    def graded(run):
        if name != "matrix_window":  # gradients once
            return jax.jit(lambda *x: total(run, *x))
        return jax.jit(jax.value_and_grad(lambda *x: total(run, *x), argnums=(0, 1, 2, 3), has_aux=True))

    expected = graded(lambda *x: memory.reference(rule, params, None, *x, segment_ids=ids))(q, k, v, gates)
    packed = graded(lambda *x: memory.scan(rule, params, None, *x, segment_ids=ids, max_segments=9))
    assert_close(packed(q, k, v, gates), expected, EXACT)
    y, final = expected[0][1] if name == "matrix_window" else expected[1]

    state, outputs = init_state(rule, params, batch_size=3, max_length=24, dtype=jnp.float64), []
    run = jax.jit(lambda ids, *x: memory.scan(rule, params, *x, segment_ids=ids, max_segments=9))
    for start, stop in ((0, 12), (12, 24)):  # both of one shape
        piece = jax.tree.map(lambda x, a=start, b=stop: x[:, a:b], (q, k, v, gates))
        part, state = run(ids[:, start:stop], state, *piece)
        outputs.append(part)
    assert_close(jnp.concatenate(outputs, axis=1), y, EXACT, what="stream")
    assert_close(state, final, EXACT, what="state of the stream")

    alone = jax.jit(lambda *x: memory.scan(rule, params, None, *x)[0])
    piece = jax.tree.map(lambda x: x[:1, 14:24], (q, k, v, gates))
    assert_close(y[:1, 14:24], alone(*piece), EXACT, what="alone")


def test_too_many_segments_are_loud():
    rule = RULES["deep_transformer"]
    params, q, k, v, gates = make_inputs(rule, batch=1)
    packed = jax.jit(lambda ids: memory.scan(rule, params, None, q, k, v, gates, segment_ids=ids, max_segments=1))
    y, state = packed(jnp.arange(23)[None])
    assert np.isnan(np.asarray(y)).any()
    assert np.isnan(np.asarray(state.weights["W1"])).all()


def test_more_tokens_than_the_cache_holds_are_nan():
    rule = RULES["dot_delta"]
    params, q, k, v, gates = make_inputs(rule, batch=1)
    state = memory.init_state(rule, params, batch_size=1, max_length=13)
    with pytest.raises(ValueError, match=r"memory\.scan: state has room for 13 more tokens, got 23"):
        memory.scan(rule, params, state, q, k, v, gates)
    scan = jax.jit(lambda state: memory.scan(rule, params, state, q, k, v, gates))
    (expected, _), (y, after) = scan(None), scan(state)
    assert_close(y[:, :13], expected[:, :13], 1e-5)
    assert np.isnan(np.asarray(y[:, 13:])).all()
    stepped, last, _ = jax.jit(lambda: steps(rule, params, state, q, k, v, gates))()
    assert_close(stepped[:, :13], expected[:, :13], 1e-5)
    assert np.isnan(np.asarray(stepped[:, 13:])).all()
    for late in (after, last):
        assert np.isnan(np.asarray(jax.jit(lambda s: memory.read(rule, params, s, q))(late))).all()
        with pytest.raises(ValueError, match=r"memory\.step: state has room for 0 more tokens, got 1"):
            memory.step(rule, params, late, *jax.tree.map(lambda x: x[:, 0], (q, k, v, gates)))
        layers = jax.tree.map(lambda x: x[None], late)
        with pytest.raises(ValueError, match=r"memory\.step: state has room for 0 more tokens, got 1"):
            memory.step(rule, params, layers, *jax.tree.map(lambda x: x[:, 0], (q, k, v, gates)), layer=0)


def test_states_are_bounded():
    """SWDT holds w entries, a full cache max_length; tail b − 1 and c − 1 tokens; the batch axis comes first everywhere."""
    swdt, dot = RULES["swdt"], RULES["dot"]
    for rule, entries, tail in ((swdt, 7, 3), (dot, 64, 2 + 7)):
        params, q, k, v, gates = make_inputs(rule)
        fresh = memory.init_state(rule, params, batch_size=2, max_length=64)
        assert fresh.keys.shape == (2, 2, entries, 4)
        assert fresh.coefficients.shape == (2, 2, entries, 8)
        assert fresh.tail.keys.shape == (2, 2, tail, 4)
        _, state = jax.eval_shape(lambda *x, rule=rule: memory.scan(rule, *x), params, fresh, q, k, v, gates)
        assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, fresh)
        assert all(x.shape[0] == 2 for x in jax.tree.leaves(state))


def test_state_can_be_donated():
    rule = RULES["deep_transformer_online"]
    params, q, k, v, gates = make_inputs(rule, time=5)
    run = jax.jit(lambda state: memory.scan(rule, params, state, q, k, v, gates)[1], donate_argnums=0)
    state = run(run(memory.init_state(rule, params, batch_size=2, max_length=64)))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
