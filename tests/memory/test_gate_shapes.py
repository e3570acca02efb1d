"""Gates may be numbers and arrays that broadcast; what would silently lose accuracy is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from tests.marks import some_slow
from tests.memory.cases import RULES, assert_close, make_inputs


@pytest.mark.parametrize(
    "name", some_slow(["titans", "titans_matrix", "gla", "omeganet", "longhorn_channel"], ["titans", "omeganet"])
)
def test_numbers_and_smaller_arrays_are_the_whole_ones(name):
    rule = RULES[name]
    params, q, k, v, _ = make_inputs(rule)
    lead = q.shape[:3]
    for value in (0.5, np.float32(0.5), jnp.full((2,), 0.5), jnp.full((37, 1), 0.5)):
        whole, given = {}, {}
        for gate, channels in rule.gate_channels(4, 4).items():
            shape = lead if channels is None else (*lead, channels)
            whole[gate] = jnp.full(shape, 0.5)
            given[gate] = value if channels is None else jnp.full((channels,), 0.5)
        for fn in (memory.scan, memory.reference):
            expected = fn(rule, params, None, q, k, v, memory.Gates(**whole))
            assert_close(fn(rule, params, None, q, k, v, memory.Gates(**given)), expected, 0.0)


def test_one_value_for_each_head():
    rule = rules.titans(8)
    params, q, k, v, gates = make_inputs(rule)
    by_head = jnp.asarray([0.9, 0.99])
    expected = memory.scan(
        rule, params, None, q, k, v, gates._replace(retention=jnp.broadcast_to(by_head, q.shape[:3]))
    )
    assert_close(memory.scan(rule, params, None, q, k, v, gates._replace(retention=by_head)), expected, 0.0)
    state = memory.init_state(rule, params, batch_size=2)
    now = [x[:, 0] for x in (q, k, v)]
    y, _ = memory.step(rule, params, state, *now, memory.Gates(retention=by_head, step_size=0.01, momentum_decay=0.9))
    assert y.shape == (2, 2, 4)


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        (jnp.full((2, 37, 2), 0.99, jnp.bfloat16), r"gates\.retention is bfloat16, must be float32"),
        (np.full((2, 37, 2), 0.99, np.float16), r"gates\.retention is float16, must be float32"),
        (jnp.full((3,), 0.9), r"gates\.retention has shape \(3,\), must be \[2, 37, 2\]"),
        (jnp.ones((2, 37, 2), jnp.int32), r"gates\.retention must be floating point"),
        (True, r"gates\.retention must be an array"),
        ("0.9", r"gates\.retention must be an array"),
    ],
)
def test_what_does_not_fit_is_refused(gate, message):
    rule = rules.titans(8)
    params, q, k, v, gates = make_inputs(rule)
    with pytest.raises((TypeError, ValueError), match=message):
        memory.scan(rule, params, None, q, k, v, gates._replace(retention=gate))


def test_an_axis_of_channels_is_never_guessed():
    """[batch, time, heads] could be taken for [time, heads, channels] where the sizes agree."""
    rule = RULES["gla"]
    params, q, k, v, gates = make_inputs(rule, batch=3, time=3, heads=4)
    with pytest.raises(ValueError, match=r"gates\.retention has shape \(3, 3, 4\), must be \[3, 3, 4, 4\]"):
        memory.scan(rule, params, None, q, k, v, gates._replace(retention=jnp.ones((3, 3, 4))))
