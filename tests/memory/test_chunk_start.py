"""`memory.scan` with the promise that a state is at the start of a chunk."""

import functools

import jax
import jax.numpy as jnp
import pytest

from atlasjax import memory
from tests.marks import some_slow
from tests.memory.cases import RULES, assert_close, make_inputs


@pytest.mark.parametrize(
    "name",
    some_slow(["titans_at_its_limits", "dla", "gated_delta_rule", "own_features"], ["dla", "own_features"]),
)
@pytest.mark.parametrize("length", [16, 21])
def test_it_is_the_call_without_the_promise(name, length):
    """In whole chunks of 8, and with an incomplete last one, after which the state is inside a chunk."""
    rule = RULES[name]
    params, *tokens = make_inputs(rule, time=16 + length)
    cut = lambda which: jax.tree.map(lambda x: x[:, which], tokens)
    _, state = memory.scan(rule, params, None, *cut(slice(16)))
    run = functools.partial(memory.scan, rule, params, state, *cut(slice(16, None)))
    found = run(at_chunk_start=True)
    assert_close(found, run(), 2e-6)
    assert jax.tree.structure(found[1]) == jax.tree.structure(state)


def test_the_grid_of_chunks_is_static():
    """No chunk is added for tokens before the first whole one."""
    rule = RULES["titans"]
    params, q, k, v, gates = make_inputs(rule, batch=1, time=32)
    state = memory.init_state(rule, params, batch_size=1)
    text = lambda **given: jax.jit(
        lambda state: memory.scan(rule, params, state, q, k, v, gates, **given)
    ).trace(state).jaxpr.pretty_print()  # fmt: skip
    assert "scatter" in text()
    assert "scatter" not in text(at_chunk_start=True)


def test_bad_input():
    rule = RULES["titans"]
    params, q, k, v, gates = make_inputs(rule, time=12)
    _, state = memory.scan(rule, params, None, q, k, v, gates)
    with pytest.raises(ValueError, match=r"with at_chunk_start, state.position has the value 4, must be in \[0, 0\]"):
        memory.scan(rule, params, state, q, k, v, gates, at_chunk_start=True)
    ids = jnp.zeros((2, 12), jnp.int32)
    with pytest.raises(ValueError, match="at_chunk_start is given with segment_ids"):
        memory.scan(rule, params, state, q, k, v, gates, segment_ids=ids, max_segments=1, at_chunk_start=True)
