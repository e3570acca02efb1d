"""The bound on steps of softmax memories (SEMANTICS 2.5): what it keeps, where it changes nothing, and that every form has it."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from atlasjax import memory, rules
from atlasjax.memory import optimizers
from atlasjax.memory.softmax.init import init_state
from tests.marks import each_name, some_slow
from tests.memory.cases import assert_close, steps
from tests.memory.softmax.cases import RULES, make_inputs
from tests.memory.softmax.test_engine import EXACT, both
from tests.memory.softmax.test_streaming import SEGMENTS

ACTS = ["dot", "dot_window_over_chunk", "dot_sliding", "own_loss", "dot_matrix"]


def bold(rule, **options):
    """Keys that are alike, and steps of 1."""
    params, q, k, v, gates = make_inputs(rule, dtype=jnp.float64, step_size=1.0, **options)
    k = k[:, :1] + 0.2 * k
    return params, q, k / jnp.linalg.norm(k, axis=-1, keepdims=True), v, gates


@pytest.mark.slow  # the test below compares the same outputs and states token by token
@each_name(ACTS)
def test_the_engine_is_the_reference_where_the_bound_acts(name, x64, short_blocks):
    rule = RULES[name]
    args = bold(rule)
    reference, scan = both(rule)
    expected = reference(None, *args)
    assert_close(scan(None, *args), expected, EXACT)
    without, _ = memory.scan(rule.unbounded(), args[0], None, *args[1:])
    assert not jnp.abs(without - expected[0][1][0]).max() < 1e-3  # it acts


@each_name(ACTS, slow=["dot", "own_loss", "dot_sliding", "dot_matrix"])
def test_token_by_token_and_reads_where_the_bound_acts(name, x64, short_blocks):
    rule = RULES[name]
    params, q, k, v, gates = bold(rule, batch=1, time=19)
    state = init_state(rule, params, batch_size=1, max_length=19, dtype=jnp.float64)
    expected, final = memory.reference(rule, params, state, q, k, v, gates)
    y, last, before = jax.jit(lambda: steps(rule, params, state, q, k, v, gates))()
    assert_close(y, expected, EXACT)
    assert_close(last, final, EXACT)
    inside = jax.tree.map(lambda x: x[13], before)  # after 13 tokens
    assert_close(memory.read(rule, params, inside, q[:, 12:13]), expected[:, 12:13], EXACT)


def test_packed_segments_where_the_bound_acts(x64, short_blocks):
    rule = RULES["dot_window_over_chunk"]
    params, *inputs = bold(rule, batch=3, time=24)
    found, _ = memory.scan(rule, params, None, *inputs, segment_ids=jnp.asarray(SEGMENTS), max_segments=9)
    assert_close(found, memory.reference(rule, params, None, *inputs, segment_ids=jnp.asarray(SEGMENTS))[0], EXACT)


@pytest.mark.parametrize(
    "scale", some_slow([1.0, 1e4], [1.0]), ids=["keys that are alike and steps of 1", "keys of length 10,000"]
)
def test_dot_does_not_diverge(scale):
    rule = rules.dot()
    params, q, k, v, gates = make_inputs(
        rule, batch=1, heads=1, time=2048, key_dim=16, value_dim=16, window_weights=0.9
    )
    k = k if scale > 1 else k[:, :1] + 0.3 * k
    gates = gates._replace(step_size=jnp.ones_like(gates.step_size), retention=jnp.full_like(gates.retention, 0.999))
    run = jax.jit(memory.scan, static_argnums=0)
    y, _ = run(rule, params, None, q, scale * k, v, gates)
    assert jnp.abs(y).max() < 100 * scale
    assert not jnp.isfinite(run(rule.unbounded(), params, None, q, scale * k, v, gates)[0]).all()


@pytest.mark.parametrize("optimizer", [optimizers.GradientDescent(), optimizers.Momentum()], ids=str)
def test_suggested_steps_are_not_changed(optimizer):
    rule = dataclasses.replace(rules.dot(), optimizer=optimizer)
    params, q, k, v, _ = make_inputs(rule, batch=1, time=256, key_dim=16, value_dim=16)
    gates = memory.suggested_gates(rule, batch_size=1, time=256, num_heads=2, key_dim=16, value_dim=16)
    run = lambda rule: memory.scan(rule, params, None, q, k, v / 4, gates)[0]
    assert_close(run(rule), run(rule.unbounded()), 1e-6)


def test_which_rules_have_it():
    assert rules.dot().is_bounded
    assert not rules.dot(normalized=False).is_bounded
    assert not rules.deep_transformer().is_bounded
    assert not rules.dot().unbounded().is_bounded
    with pytest.raises(ValueError, match="step_bound must be a number > 0 or None, got 0"):
        dataclasses.replace(rules.dot(), step_bound=0)
