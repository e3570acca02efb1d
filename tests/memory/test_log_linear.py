"""Log-linear memories: the fast forms against the definition, the identity with Log-Linear Attention, and what must be refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.memory import LogLinearRule, SoftmaxRule, structures
from atlasjax.mixers import log_linear
from tests.marks import some_slow
from tests.memory.cases import assert_close
from tests.memory.cases import make_inputs as plain_inputs
from tests.memory.own_family import MovingSum

EXACT = 1e-9
TIME = 17
# Two or three levels and a short last segment, at the end of which level 1 is half written (except titans), or in use.
CASES = {
    "titans": LogLinearRule(rules.titans(2, structures.MLP(expansion=1)), 6, levels=4),
    "omeganet": LogLinearRule(rules.omeganet(3, window=3, structure=structures.MLP(expansion=1)), 3, levels=4),
    "delta_rule": LogLinearRule(rules.gated_delta_rule(), 3, levels=2),  # forgets the first twelve tokens
    "linear": LogLinearRule(rules.linear_attention(), 1, levels=5),
    "own": LogLinearRule(MovingSum(), 3, levels=4),
}
PIECE = 5
DEFAULT = {"titans", "delta_rule"}
IDS = jnp.array([[0] * 7 + [1] * 10, [2] * 5 + [3] * 3 + [4] * 9])


def make_inputs(rule, *, time=TIME, dtype=jnp.float64):
    wide = jnp.promote_types(dtype, jnp.float32)
    if isinstance(rule.rule, MovingSum):
        draw = lambda seed: jnp.asarray(np.random.default_rng(seed).standard_normal((2, time, 2, 4)), dtype)
        params = jax.tree.map(
            lambda x: x.astype(wide), rule.rule.init_params(jax.random.key(0), num_heads=2, key_dim=4, value_dim=4)
        )
        q, k, v, gates = draw(0), draw(1), draw(2), memory.Gates(retention=jax.nn.sigmoid(draw(3)[..., 0].astype(wide)))
    else:
        params, q, k, v, gates = plain_inputs(
            rule.rule, batch=2, time=time, heads=2, key_dim=4, value_dim=4, dtype=dtype, seed=0
        )
    u = np.random.default_rng(4).standard_normal((*q.shape[:-1], 1 + rule.levels))
    return params, q, k, v, gates._replace(connector=jnp.asarray(u, wide))


def outputs(fn, rule, params, *tokens, **options):
    return fn(rule, params, None, *tokens, **options)[0]


def empty(rule, params, time=TIME, batch=2):
    return memory.init_state(rule, params, batch_size=batch, max_length=time)


def compiled(fn, rule, **options):
    return jax.jit(lambda *args: outputs(fn, rule, *args, **options))


each = pytest.mark.parametrize("name", some_slow(CASES, set(CASES) - DEFAULT))
quick = pytest.mark.parametrize("name", some_slow(CASES, set(CASES) - {"delta_rule"}))  # the others compile for longer


@quick
def test_outputs(name, x64):
    rule = CASES[name]
    args = make_inputs(rule)
    assert_close(compiled(memory.scan, rule)(*args), compiled(memory.reference, rule)(*args), EXACT)


@quick
def test_gradients(name, x64):
    rule = CASES[name]
    args = make_inputs(rule)
    weights = jnp.asarray(np.random.default_rng(5).standard_normal(args[3].shape))
    graded = lambda fn: jax.jit(jax.grad(lambda args: jnp.vdot(weights, outputs(fn, rule, *args))))(args)
    assert_close(graded(memory.scan), graded(memory.reference), EXACT)


@each
def test_every_split(name, x64):
    """At every token a call of one token, a read, and a call of several that reaches over segments; and the state at the end."""
    rule = CASES[name]
    params, *tokens = make_inputs(rule)
    expected, end = jax.jit(lambda *args: memory.scan(rule, params, None, *args))(*tokens)

    def body(state, start):
        piece = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, PIECE, 1), tuple(tokens))
        q, k, v, gates = jax.tree.map(lambda x: x[:, 0], piece)
        y, after = memory.step(rule, params, state, q, k, v, gates)
        again = memory.read(rule, params, after, q[:, None], connector=gates.connector[:, None])
        several, last = memory.scan(rule, params, state, *piece)
        return after, (y, again[:, 0], several, last)

    starts = jnp.arange(TIME - PIECE + 1)
    _, (y, again, several, last) = jax.jit(lambda: jax.lax.scan(body, empty(rule, params), starts))()
    for start in starts.tolist():
        assert_close(several[start], expected[:, start : start + PIECE], EXACT, f"from {start}: ")
        assert_close(y[start], expected[:, start], EXACT, f"step {start}: ")
        assert_close(again[start], expected[:, start], EXACT, f"read after {start}: ")
    assert_close(jax.tree.map(lambda x: x[-1], last), end, EXACT)


@quick
def test_packed_documents(name, x64):
    rule = CASES[name]
    args = make_inputs(rule)
    y, state = jax.jit(lambda *args: memory.scan(rule, args[0], None, *args[1:], segment_ids=IDS, max_segments=3))(
        *args
    )
    assert_close(y, compiled(memory.reference, rule, segment_ids=IDS)(*args), EXACT)
    params, *tokens = args
    alone, end = memory.scan(rule, params, None, *jax.tree.map(lambda x: x[:1, 7:], tuple(tokens)))
    assert_close(y[:1, 7:], alone, EXACT)
    own = jax.tree.map(lambda x: x[:1], state.own._replace(segment=state.own.segment * 0 - 1))
    assert_close(own, end.own, EXACT)
    assert state.position.tolist() == [10, 9]
    few = jax.jit(lambda ids: memory.scan(rule, params, None, *tokens, segment_ids=ids, max_segments=2))
    last = few(jnp.arange(2 * TIME).reshape(2, TIME))[0][:, -1]
    assert jnp.isnan(last).all() == (rule.segment_size > 1)  # segments of one token always fit


def test_bfloat16():
    rule = CASES["titans"]
    args = make_inputs(rule, dtype=jnp.bfloat16)
    y = compiled(memory.scan, rule)(*args)
    assert y.dtype == jnp.bfloat16
    assert_close(y.astype(jnp.float32), compiled(memory.reference, rule)(*args).astype(jnp.float32), 2e-2)


def test_segments_of_one_token_are_log_linear_attention(x64):
    """SEMANTICS 4.7 with W_0 = 0 and η = 1, because a sum over tokens is the sum of its parts."""
    rule = CASES["linear"]
    params, q, k, v, gates = make_inputs(rule)
    params = jax.tree.map(jnp.zeros_like, params)
    gates = gates._replace(step_size=jnp.ones_like(gates.step_size))
    y, _ = memory.scan(rule, params, None, q, k, v, gates)
    assert log_linear.num_levels(TIME) == 1 + rule.levels
    assert_close(y, log_linear.attention(q, k, v, jax.nn.softplus(gates.connector)), EXACT)


def test_one_segment_is_the_rule_times_its_weight(x64):
    rule = dataclasses.replace(CASES["delta_rule"], segment_size=30)
    params, q, k, v, gates = make_inputs(rule)
    y, state = memory.scan(rule, params, None, q, k, v, gates)
    plain, _ = memory.scan(rule.rule, params, None, q, k, v, gates._replace(connector=None))
    assert_close(y, jax.nn.softplus(gates.connector[..., :1]) * plain, EXACT)
    assert state.levels == ()


def test_what_is_further_back_than_the_levels_is_forgotten(x64):
    """Two levels of three tokens: token 12 begins segment 4, of which the two lower bits are clear."""
    rule = CASES["delta_rule"]
    params, q, k, v, gates = make_inputs(rule)
    other = [x.at[:, :12].multiply(2.0) for x in (k, v)]
    y, changed = (outputs(memory.scan, rule, params, q, *kv, gates) for kv in ((k, v), other))
    assert_close(changed[:, 12:], y[:, 12:], EXACT)
    assert float(jnp.abs(changed - y)[:, :12].max()) > 0.1


def test_more_tokens_than_the_state_has_levels_for_are_nan():
    rule = CASES["titans"]
    params, *tokens = make_inputs(rule, dtype=jnp.float32)
    state = empty(rule, params, 12)
    with pytest.raises(ValueError, match=f"state has room for 12 more tokens, got {TIME}"):
        memory.scan(rule, params, state, *tokens)
    y, _ = jax.jit(functools.partial(memory.scan, rule))(params, state, *tokens)
    assert jnp.isnan(y).any((0, 2, 3)).tolist() == [t >= 12 for t in range(TIME)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LogLinearRule(rules.titans(3), 4), "segment_size=4 must be a multiple of the rule's chunk_size=3"),
        (lambda: LogLinearRule(SoftmaxRule(structures.Matrix())), "rule is a SoftmaxRule, must be one whose state"),
        (lambda: LogLinearRule("titans"), "rule must be a MemoryRule, got str"),
        (lambda: LogLinearRule(CASES["titans"]), "rule must be a MemoryRule, got LogLinearRule"),
        (lambda: LogLinearRule(rules.titans(), levels=0), "levels"),
        (lambda: LogLinearRule(rules.titans(), levels=31), "levels=31 must be at most 30"),
    ],
)
def test_refused_rules(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_refused_calls():
    rule = CASES["titans"]
    params, q, k, v, gates = make_inputs(rule, dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"gates.connector is missing; this rule needs it with shape \[2, 17, 2, 5\]"):
        memory.scan(rule, params, None, q, k, v, gates._replace(connector=None))
    with pytest.raises(ValueError, match=r"gates.connector"):
        memory.scan(rule, params, None, q, k, v, gates._replace(connector=gates.connector[..., 1:]))
    state = empty(rule, params)
    with pytest.raises(ValueError, match="connector is missing"):
        memory.read(rule, params, state, q)
    with pytest.raises(ValueError, match="require state=None"):
        memory.scan(rule, params, state, q, k, v, gates, segment_ids=IDS, max_segments=3)
    with pytest.raises(ValueError, match="has no soup: it keeps several memories"):
        memory.soup(rule, params, [state, state])
