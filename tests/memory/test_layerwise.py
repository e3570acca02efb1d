"""`memory.step` in the states of all layers: that of each layer, with rows at different places of chunks and segments."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.memory.layerwise import steps_in_place
from tests.marks import some_slow
from tests.memory.own_family import MovingSum
from tests.memory.softmax.cases import RULES

LAYERS, BATCH, HEADS, DIM, TIME = 2, 3, 2, 4, 14
TITANS = rules.titans(chunk_size=3)


class OwnStep(memory.CachedRule):
    """A user's subclass with a `step` of its own, which what the library does in place must not pass by."""

    def step(self, params, state, q, k, v, gates):
        y, state = super().step(params, state, q, k, v, gates)
        return 2 * y, state


CASES = {
    "titans": TITANS,
    "dot": RULES["dot"],
    "softmax_online": RULES["deep_transformer_online"],
    "grm": memory.CachedRule(TITANS, "grm", segment_size=6),
    "ssc_evicted": memory.CachedRule(TITANS, "ssc", segment_size=6, capacity=2),
    "grm_of_tokens": memory.CachedRule(RULES["deep_transformer"], "grm", segment_size=8),
    "own": MovingSum(),
    "grm_of_own": memory.CachedRule(MovingSum(), "grm", segment_size=6),
    "own_step": OwnStep(TITANS, "grm", segment_size=6),
    "large_chunk": memory.LargeChunkRule(chunk_size=3, momentum=True),
    "soup": memory.CachedRule(TITANS, "soup", segment_size=6, start="carry"),
}
SLOW = ("softmax_online", "grm_of_tokens", "grm_of_own", "soup", "titans")  # "grm" has the steps of "titans"


def inputs(rule):
    """Parameters and fresh states of all layers, and (q, k, v, gates) by token and layer, [time, layers, batch, …]."""
    init = lambda key: memory.init_params(rule, key, num_heads=HEADS, key_dim=DIM, value_dim=DIM)
    params = jax.vmap(init)(jax.random.split(jax.random.key(0), LAYERS))
    states = jax.vmap(lambda p: memory.init_state(rule, p, batch_size=BATCH, max_length=2 * TIME))(params)
    lead = (TIME, LAYERS, BATCH, HEADS)
    q, k, v = jax.random.normal(jax.random.key(1), (3, *lead, DIM)) / DIM**0.5
    gates = {
        name: jax.random.uniform(
            jax.random.key(i), lead if channels is None else (*lead, channels), minval=0.1, maxval=0.9
        )
        for i, (name, channels) in enumerate(rule.gate_channels(DIM, DIM).items())
    }
    return params, states, (q, k, v, memory.Gates(**gates))


@pytest.mark.parametrize("name", some_slow(CASES, SLOW))
def test_a_step_in_the_states_of_all_layers(name):
    rule = CASES[name]
    params, states, tokens = inputs(rule)

    @jax.jit
    def run(params, states, tokens):
        def each(states, token):
            y, states = jax.vmap(lambda p, s, t: memory.step(rule, p, s, *t))(params, states, token)
            return states, y

        def staggered(states, xs):
            """Row b is only written from token b on."""
            token, t = xs
            keep = lambda a, b: jnp.where((jnp.arange(BATCH) <= t).reshape(1, -1, *(1,) * (a.ndim - 2)), a, b)
            return jax.tree.map(keep, each(states, token)[0], states), None

        def in_place(states, token):
            def layer(states, i):
                one = jax.tree.map(lambda x: x[i], (params, token))
                y, states = memory.step(rule, one[0], states, *one[1], layer=i)
                return states, y

            return jax.lax.scan(layer, states, jnp.arange(LAYERS))

        first = jax.tree.map(lambda x: x[: BATCH - 1], tokens)
        states = jax.lax.scan(staggered, states, (first, jnp.arange(BATCH - 1)))[0]
        return [jax.lax.scan(step, states, tokens) for step in (each, in_place)]

    expected, found = run(params, states, tokens)
    assert steps_in_place(rule) == (name not in ("own", "own_step"))
    for want, have in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", some_slow(["titans", "dot", "grm"], ["titans"]))
def test_float64_tokens_leave_float32_states(name, x64):
    """The states of all layers stay as they are, as the carry of a loop has to."""
    rule = CASES[name]
    with jax.enable_x64(False):
        params, states, tokens = inputs(rule)
    params, token = jax.tree.map(lambda x: x[0], params), jax.tree.map(lambda x: x[0, 0].astype(jnp.float64), tokens)
    y, after = jax.eval_shape(lambda: memory.step(rule, params, states, *token, layer=1))
    assert y.dtype == jnp.float64
    assert [x.dtype for x in jax.tree.leaves(after)] == [x.dtype for x in jax.tree.leaves(states)]


def test_a_subclass_without_a_step_of_its_own_steps_in_place():
    @dataclasses.dataclass(frozen=True)
    class Named(memory.CachedRule):
        name: str = "mine"

    assert steps_in_place(Named(TITANS, segment_size=6))
