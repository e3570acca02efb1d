"""The engine against the token-by-token reference: outputs, final state, gradients of everything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.memory.softmax import SoftmaxRule
from atlasjax.memory.softmax.init import init_state
from tests.marks import each_name, some_slow
from tests.memory.cases import assert_close, objective, steps
from tests.memory.softmax.cases import MATRIX, RULES, make_inputs

EXACT = 1e-9  # two forms of one function in float64


def both(rule):
    """Jitted value-and-gradient functions of the reference and of the engine, of (state, params, q, k, v, gates)."""
    functions = []
    for fn in (memory.reference, memory.scan):
        run = lambda state, *args, fn=fn: objective(fn, rule, *args, state)
        functions.append(jax.jit(jax.value_and_grad(run, argnums=(1, 2, 3, 4, 5), has_aux=True)))
    return functions


# One of every kind; the other rules' values and states are in test_streaming. By default `test_extreme_gates` and
# `test_gradients_through_a_stream` compare gradients: of an MLP and a matrix, decays and a loss with an error, momentum, windows
# and caches.
GRADED = [
    "decay_momentum", "matrix_window", "deep_transformer_online", "swdt_cache_under_chunk", "dot_matrix",
    "dot_window_over_chunk",
]  # fmt: skip


@pytest.mark.slow
@each_name(GRADED)
def test_outputs_state_and_gradients(name, x64, short_blocks):
    rule = RULES[name]
    args = make_inputs(rule, dtype=jnp.float64)
    reference, scan = both(rule)
    assert_close(scan(None, *args), reference(None, *args), EXACT)


def test_usual_blocks(x64):
    """Blocks of the usual size, several of them."""
    rule = RULES["dot_matrix"]
    params, *inputs = make_inputs(rule, time=290, batch=1, heads=1, dtype=jnp.float64)
    run = lambda fn: jax.jit(lambda *inputs: fn(rule, params, None, *inputs))(*inputs)
    assert_close(run(memory.scan), run(memory.reference), EXACT)


EDGES = [
    {},
    {"retention": 0.0},
    {"momentum_decay": 0.0},
    {"momentum_decay": 1.0, "retention": 0.5},
    {"window_weights": 0.0},
    {"step_size": 0.0},
    {"retention": 0.0, "momentum_decay": 0.0},
]


@each_name(["swdt_cache_under_chunk", "matrix_window", "dot_sliding"], slow=["swdt_cache_under_chunk", "dot_sliding"])
def test_extreme_gates(name, x64, short_blocks):
    """And the usual ones. Also where log ρ = −∞, and where Z forgets an entry whose momentum is still there (α = 0)."""
    rule = RULES[name]
    reference, scan = both(rule)
    for override in EDGES:
        args = make_inputs(rule, dtype=jnp.float64, **override)
        assert_close(scan(None, *args), reference(None, *args), EXACT, what=str(override))
    params, q, k, v, gates = make_inputs(rule, dtype=jnp.float64)
    gates = gates._replace(retention=gates.retention.at[:, 5].set(0.0).at[:, 16].set(0.0))
    assert_close(scan(None, params, q, k, v, gates), reference(None, params, q, k, v, gates), EXACT, what="zero decay")
    zero = jnp.zeros_like(k)
    assert_close(
        scan(None, params, zero, zero, zero, gates),
        reference(None, params, zero, zero, zero, gates),
        EXACT,
        what="zero",
    )


@each_name(["dot_matrix", "dot"], slow=["dot"])
def test_gradients_through_a_stream(name, x64, short_blocks):
    """Four calls, cut in the middle of chunks, have the gradients of one."""
    rule = RULES[name]
    params, *inputs = make_inputs(rule, batch=1, time=24, dtype=jnp.float64)
    weights = np.cos(np.arange(24 * 2 * 4)).reshape(1, 24, 2, 4)

    def whole(params, *inputs):
        return jnp.sum(weights * memory.reference(rule, params, None, *inputs)[0])

    def cut(params, *inputs):
        def call(state, piece):
            y, state = memory.scan(rule, params, state, *piece)
            return state, y

        # All calls are of one shape, so that they are compiled once.
        pieces = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(1, 4, 6, *x.shape[2:]), 1, 0), inputs)
        state = init_state(rule, params, batch_size=1, max_length=24, dtype=jnp.float64)
        _, y = jax.lax.scan(call, state, pieces)
        return jnp.sum(weights * jnp.moveaxis(y, 0, 1).reshape(weights.shape))

    argnums = (0, 1, 2, 3, 4)
    assert_close(
        jax.jit(jax.grad(cut, argnums))(params, *inputs), jax.jit(jax.grad(whole, argnums))(params, *inputs), EXACT
    )


@pytest.mark.parametrize("name", some_slow(["decay_momentum", "dot"], ["dot"]))
def test_float32_and_bfloat16(name, short_blocks):
    """Against the same inputs in float64, relative to the largest output."""
    rule = RULES[name]
    params, q, k, v, gates = make_inputs(rule, time=40)
    scan = jax.jit(lambda *args: memory.scan(rule, args[0], None, *args[1:]))
    for dtype, tolerance in {jnp.float32: 5e-6, jnp.bfloat16: 2e-2}.items():
        q, k, v = (x.astype(dtype) for x in (q, k, v))
        y, state = scan(params, q, k, v, gates)
        assert y.dtype == dtype
        assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype("float32"), jnp.dtype("int32")}
        with jax.enable_x64(True):
            up = lambda x: jnp.asarray(np.asarray(x.astype(jnp.float32)), jnp.float64)
            expected, _ = memory.scan(rule, *jax.tree.map(up, (params,)), None, *jax.tree.map(up, (q, k, v, gates)))
            assert_close(y.astype(jnp.float32), expected, tolerance, what=str(dtype))


@each_name(["dot_delta", "dot_matrix", "dot"], slow=["dot_matrix", "dot"])
def test_causality(name, short_blocks):
    """The Jacobian of outputs with respect to inputs is exactly zero above the diagonal."""
    rule = RULES[name]
    params, *inputs = make_inputs(rule, time=19, batch=1, heads=1)
    outputs = lambda inputs: memory.scan(rule, params, None, *inputs)[0][0].sum((-1, -2))
    jacobian = jax.jit(jax.jacrev(outputs))(inputs)
    depends = 0
    for leaf in jax.tree.leaves(jacobian):
        by_time = np.abs(np.asarray(leaf)).reshape(19, 19, -1).sum(-1)
        assert (np.triu(by_time, 1) == 0).all()
        depends += (np.tril(by_time) > 0).sum()
    assert depends > 19


@pytest.mark.parametrize("name", some_slow(["attention", "deep_transformer"], ["deep_transformer"]))
def test_backward_keeps_no_score_matrix(name):
    """Temporary bytes of forward and backward grow with length as the cache and a block's scores do, not as length²."""
    rule = RULES[name]

    def temporary_bytes(time):
        args = jax.eval_shape(lambda: make_inputs(rule, batch=1, time=time, heads=1, key_dim=8, value_dim=8))
        loss = lambda params, *args: memory.scan(rule, params, None, *args)[0].sum()
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4))).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporary_bytes(512), temporary_bytes(2048)
    assert long <= 4.5 * short
    assert long < 2048 * 2048 * 4


def test_old_entries_with_strong_keys(short_blocks):
    """float32: an entry that retention has all but erased, ρ = e^{−45}, and whose score is larger by as much; then by far more."""
    rule = SoftmaxRule(MATRIX)
    params, q, k, v, gates = make_inputs(rule, time=40, retention=0.315, step_size=1.0)

    @jax.jit
    def run(q, k, v, retention):
        loss = lambda *x: jnp.sum(memory.scan(rule, params, None, *x, gates._replace(retention=retention))[0][:, -1])
        return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)

    def attention(q, k, v):
        log = jnp.arange(40) * jnp.log(0.315)
        bias = (log[:, None] - log)[None, None]
        return jnp.sum(jax.nn.dot_product_attention(q, k, v, bias=bias.astype(q.dtype), is_causal=True)[:, -1])

    strong = k.at[:, 0].set(90 * q[:, -1])  # score 45
    expected = jax.jit(jax.value_and_grad(attention, argnums=(0, 1, 2)))(q, strong, v)
    assert_close(run(q, strong, v, gates.retention), expected, 1e-4)
    result = run(20 * q, strong, v, jnp.full_like(gates.retention, 1e-3))
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(result))


def test_old_entries_in_float16():
    """κ of an old key that matches well is e^{score − log ρ}, which exceeds the maximum of float16, 65504."""
    rule, time = SoftmaxRule(MATRIX, scale=1.0), 40
    k = jnp.tile(jnp.array([0.0, 1.0]), (1, time, 1, 1)).at[:, 0].set(jnp.array([3.5, 0.0])).astype(jnp.float16)
    q, v = k.at[:, -1].set(k[:, 0]), jnp.ones_like(k)
    params = memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=2, value_dim=2)
    gates = memory.Gates(retention=0.7, step_size=1.0)
    now = lambda *tokens: tuple(x[:, -1:] for x in tokens)

    @jax.jit
    def run(q, k, v):
        """The last token's read: from a fresh memory, with gradients, after a state, by a step, and without a write."""
        last = lambda v: jnp.sum(memory.scan(rule, params, None, q, k, v, gates)[0][:, -1])
        total, slope = jax.value_and_grad(last)(v)
        state = memory.init_state(rule, params, batch_size=1, max_length=time)
        state = memory.scan(rule, params, state, *(x[:, :-1] for x in (q, k, v)), gates)[1]
        y, after = memory.scan(rule, params, state, *now(q, k, v), gates)
        token, _ = memory.step(rule, params, state, *(x[:, 0] for x in now(q, k, v)), gates)
        return total / 2, jnp.sum(slope) / 2, y, token, memory.read(rule, params, after, *now(q))

    for x in run(q, k, v):  # reads are averages of values, which are ones
        np.testing.assert_allclose(x.astype(jnp.float32), 1.0, atol=5e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float16, 2e-3), (jnp.bfloat16, 4e-2)])
def test_large_values(dtype, tolerance):
    """Of 1,000: what an MLP holds of them exceeds the maximum of float16, 65504, and its outputs do not."""
    rule, (batch, time, heads, dim) = rules.deep_transformer(chunk_size=8), (1, 24, 2, 8)
    q, k, v = jax.random.normal(jax.random.key(0), (3, batch, time, heads, dim))
    unit = lambda x: (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(dtype)
    tokens = unit(q), unit(k), (1000 * v / jnp.abs(v).max()).astype(dtype)
    params = memory.init_params(rule, jax.random.key(1), num_heads=heads, key_dim=dim, value_dim=dim)
    gates = memory.suggested_gates(rule, batch_size=batch, time=time, num_heads=heads, key_dim=dim)

    @jax.jit
    def run(q, k, v):
        """From a fresh memory; and token by token."""
        y, _ = memory.scan(rule, params, None, q, k, v, gates)
        state = memory.init_state(rule, params, batch_size=batch, max_length=time)
        return y, steps(rule, params, state, q, k, v, gates)[0]

    expected, _ = run(*(x.astype(jnp.float32) for x in tokens))
    for y in run(*tokens):
        assert_close(y.astype(jnp.float32), expected, tolerance, what=str(dtype))


def test_what_left_the_cache_is_not_read(short_blocks):
    """A masked product would still carry NaN on: 0 · NaN. So the work per token is bounded by the window and the block."""
    rule = RULES["sliding"]
    params, q, k, v, gates = make_inputs(rule, time=40)
    y, _ = jax.jit(lambda v: memory.scan(rule, params, None, q, k, v, gates))(v.at[:, 0].set(jnp.nan))
    assert np.isnan(np.asarray(y[:, 0])).all()
    assert np.isfinite(np.asarray(y[:, rule.cache_window + 8 :])).all()
