"""A rule of a user's own family runs in every function of the memory, and inside a `CachedRule`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory
from tests.marks import some_slow
from tests.memory.cases import assert_close
from tests.memory.own_family import MovingSum

TIME, EXACT = 13, 1e-12
RULE = MovingSum()


def inputs(batch=2, heads=2, dim=4, dtype=jnp.float64):
    keys = jax.random.split(jax.random.key(0), 6)
    params = memory.init_params(RULE, keys[0], num_heads=heads, key_dim=dim, value_dim=dim)
    q, k, v, u = (jax.random.normal(key, (batch, TIME, heads, dim), dtype) for key in keys[1:5])
    gates = memory.Gates(retention=jax.random.uniform(keys[5], (batch, TIME, heads), dtype))
    return jax.tree.map(lambda x: x.astype(dtype), params), q, k, v, gates, u


def cut(tokens, start, stop):
    return jax.tree.map(lambda x: x[:, start:stop], tokens)


def test_splits(x64):
    params, *tokens, _ = inputs()
    expected, last = memory.reference(RULE, params, None, *tokens)
    assert_close(memory.scan(RULE, params, None, *tokens), (expected, last), EXACT)
    assert_close(memory.scan(RULE, params, None, *tokens, implementation="reference"), (expected, last), EXACT)
    state = memory.init_state(RULE, params, batch_size=2)
    for t in range(TIME):
        if t in (0, 1, 6, 7, 12):  # each length is a program
            whole = t == 0
            first, before = (
                (cut(expected, 0, t), state) if whole else memory.scan(RULE, params, None, *cut(tokens, 0, t))
            )
            rest, after = memory.scan(RULE, params, before, *cut(tokens, t, TIME))
            assert_close((jnp.concatenate([first, rest], axis=1), after), (expected, last), EXACT)
        now = jax.tree.map(lambda x: x[:, 0], cut(tokens, t, t + 1))
        y, state = memory.step(RULE, params, state, *now)
        assert_close(y, expected[:, t], EXACT)
        assert_close(memory.read(RULE, params, state, tokens[0][:, t : t + 1])[:, 0], y, EXACT)
    assert_close(state, last, EXACT)


def test_gradients_segments_and_gates_that_broadcast(x64):
    params, *tokens, _ = inputs()
    ids = jnp.asarray([[0] * 5 + [3] * 8, [1] + [2] * 11 + [5]])

    def total(function):
        return lambda *x: jnp.sum(jnp.sin(function(RULE, x[0], None, *x[1:], segment_ids=ids)[0]))

    gradient = lambda function: jax.jit(jax.grad(total(function), argnums=(0, 1, 2, 3, 4)))
    packed = lambda *x, **options: memory.scan(*x, max_segments=3, **options)
    assert_close(gradient(packed)(params, *tokens), gradient(memory.reference)(params, *tokens), EXACT)
    by_head = memory.Gates(retention=jnp.asarray([0.5, 0.9]))
    whole = memory.Gates(retention=jnp.broadcast_to(by_head.retention, (2, TIME, 2)))
    scan = lambda gates: memory.scan(RULE, params, None, *tokens[:3], gates)
    assert_close(scan(by_head), scan(whole), EXACT)


@pytest.mark.parametrize("aggregation", some_slow(["residual", "grm", "ssc"], ["residual", "ssc"]))
def test_inside_a_cached_rule(aggregation, x64):
    start = "carry" if aggregation == "grm" else "fresh"
    rule = memory.CachedRule(RULE, aggregation, segment_size=4, start=start)
    params, q, k, v, gates, u = inputs()
    gates = gates if aggregation == "residual" else gates._replace(connector=u)
    expected, _ = memory.reference(rule, params, None, q, k, v, gates)
    y, _ = memory.scan(rule, params, None, q, k, v, gates)
    assert_close(y, expected, EXACT)
    state, parts = memory.init_state(rule, params, batch_size=2, max_length=TIME), []
    for start, stop in ((0, 1), (1, 6), (6, TIME)):
        y, state = memory.scan(rule, params, state, *cut((q, k, v, gates), start, stop))
        parts.append(y)
    assert_close(jnp.concatenate(parts, axis=1), expected, EXACT)
    looked = memory.read(rule, params, state, q[:, -1:], None if aggregation == "residual" else u[:, -1:])
    assert_close(looked, expected[:, -1:], EXACT)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class OtherState:
    sums: jax.Array
    segment: jax.Array


@dataclasses.dataclass(frozen=True)
class OfDataclasses(MovingSum):
    """The same rule, whose states are dataclasses."""

    def init_state(self, *args, **options):
        return OtherState(*super().init_state(*args, **options))

    def scan(self, params, state, *args, **options):
        y, after = super().scan(params, state, *args, **options)
        return y, OtherState(*after)


def test_states_that_are_dataclasses_inside_a_cached_rule(x64):
    params, q, k, v, gates, u = inputs()
    ids = jnp.broadcast_to(jnp.arange(TIME) // 5, (2, TIME))
    rule = lambda one: memory.CachedRule(one, "grm", segment_size=4, capacity=2)
    run = lambda one: memory.scan(
        rule(one), params, None, q, k, v, gates._replace(connector=u), segment_ids=ids, max_segments=5
    )
    y, after = run(OfDataclasses())
    expected, _ = run(RULE)
    assert_close(y, expected, EXACT)
    assert isinstance(after.online, OtherState)


class Bare(MovingSum):
    """The same rule, whose state is one array."""

    def init_state(self, params, *, batch_size, max_length=None):
        return jnp.zeros((batch_size, *params.scale.shape), params.scale.dtype)

    def step(self, params, state, q, k, v, gates):
        state = gates.retention[..., None] * state + k * v
        return params.scale * q * state, state


def test_a_state_may_be_one_array(x64):
    params, q, k, v, gates, _ = inputs()
    now = jax.tree.map(lambda x: x[:, 0], (q, k, v, gates))
    y, after = memory.step(Bare(), params, memory.init_state(Bare(), params, batch_size=2), *now)
    assert_close(y, params.scale * now[0] * now[1] * now[2], EXACT)
    with pytest.raises(ValueError, match="state"):
        memory.step(Bare(), params, after[:1], *now)


def test_what_does_not_fit_is_named():
    params, q, k, v, gates, _ = inputs(dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"k has shape \(2, 12, 2, 4\), must be \[2, 13, 2, 4\]"):
        memory.scan(RULE, params, None, q, k[:, 1:], v, gates)
    with pytest.raises(
        ValueError, match=r"gates\.step_size is given, but this rule has no such gate \(it has retention\)"
    ):
        memory.scan(RULE, params, None, q, k, v, gates._replace(step_size=gates.retention))
    with pytest.raises(TypeError, match="state must be a State, got dict"):
        memory.step(RULE, params, {}, q[:, 0], k[:, 0], v[:, 0], jax.tree.map(lambda x: x[:, 0], gates))
    with pytest.raises(ValueError, match='"pallas_gpu" cannot run this call: there are no kernels for a MovingSum'):
        memory.scan(RULE, params, None, q, k, v, gates, implementation="pallas_gpu")
    with pytest.raises(ValueError, match='aggregation="soup" is not supported for this rule'):
        memory.CachedRule(RULE, "soup")
    with pytest.raises(ValueError, match="rule must be a MemoryRule or a SoftmaxRule, got CachedRule"):
        memory.CachedRule(memory.CachedRule(RULE))
    short = type("NoLengths", (MovingSum,), {"scan": lambda self, params, state, q, k, v, gates: None})()
    for wrapped in (memory.CachedRule, memory.LogLinearRule):
        with pytest.raises(
            ValueError, match=r"Rule: NoLengths\.scan does not take lengths, and should: see memory\.Rule\.scan"
        ):
            wrapped(short)
    with pytest.raises(ValueError, match="connector is given, but a MovingSum does not use it"):
        memory.read(RULE, params, memory.init_state(RULE, params, batch_size=2), q, q)
    with pytest.raises(TypeError, match="abstract"):
        dataclasses.dataclass(frozen=True)(type("NoStep", (memory.Rule,), {}))()


@pytest.mark.parametrize("function", [memory.scan, memory.step, memory.reference])
def test_what_is_no_rule(function):
    x = np.zeros((1, 1, 1, 1), np.float32)
    with pytest.raises(TypeError, match=r"rule must be a MemoryRule, a SoftmaxRule, .*got str"):
        function("titans", None, {}, x, x, x, memory.Gates())
    with pytest.raises(TypeError, match=r"Give an instance, MovingSum\(\.\.\.\), not the class"):
        function(MovingSum, None, {}, x, x, x, memory.Gates())


def test_suggested_gates():
    gates = memory.suggested_gates(RULE, batch_size=2, time=TIME, num_heads=3, key_dim=4)
    assert [name for name, gate in gates._asdict().items() if gate is not None] == ["retention"]
    assert gates.retention.shape == (2, TIME, 3)
    assert 0.99 < gates.retention.min() <= gates.retention.max() < 1.0
    with_steps = type("WithSteps", (MovingSum,), {"gate_channels": lambda *_: {"step_size": None}})()
    with pytest.raises(ValueError, match="WithSteps has no suggested_steps"):
        memory.suggested_gates(with_steps, batch_size=2, time=TIME, num_heads=3, key_dim=4)
