"""Soups of states: what they read, what follows, and which rules have none."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.memory import objectives, optimizers, retention
from tests.memory.own_family import MovingSum

SIZES = {"num_heads": 2, "key_dim": 4, "value_dim": 4}
LINEAR = rules.linear_attention()
YAAD = rules.yaad(chunk_size=4)
OMEGANET = rules.omeganet(chunk_size=8, window=3)
HUBER = dataclasses.replace(OMEGANET, objective=objectives.Huber())


def made(rule, count=2, batch=3):
    """Parameters and states with random floats, in the middle of a chunk."""
    params = memory.init_params(rule, jax.random.key(0), **SIZES)
    fresh = memory.init_state(rule, params, batch_size=batch, max_length=40)
    rng = np.random.default_rng(1)
    random = lambda x: (
        jnp.asarray(rng.normal(size=x.shape), x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x + 1
    )
    return params, [jax.tree.map(random, fresh) for _ in range(count)]


def test_two_texts_read_apart_are_one_text():
    """Linear attention without a decay: the memory is a sum over tokens."""
    params = memory.init_params(LINEAR, jax.random.key(0), **SIZES)
    q, k, v = jax.random.normal(jax.random.key(1), (3, 1, 12, 2, 4))
    scan = jax.jit(lambda state, *tokens: memory.scan(LINEAR, params, state, *tokens, memory.Gates(step_size=1.0)))
    halves = [[x[:, :6] for x in (q, k, v)], [x[:, 6:] for x in (q, k, v)]]
    empty = memory.init_state(LINEAR, params, batch_size=1)
    first, second = (scan(empty, *tokens)[1] for tokens in halves)
    both = scan(first, *halves[1])[1]
    soup = memory.soup(LINEAR, params, [first, second], weights=[1.0, 1.0])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), soup.memory, both.memory)
    reads = [np.asarray(memory.read(LINEAR, params, state, q)) for state in (first, second)]
    mean = memory.read(LINEAR, params, memory.soup(LINEAR, params, (first, second)), q)
    np.testing.assert_allclose(mean, (reads[0] + reads[1]) / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "rule", [OMEGANET, HUBER, rules.atlas(chunk_size=4, window=2)], ids=["omeganet", "huber", "atlas"]
)
def test_a_soup_is_a_fresh_state_with_summed_weights(rule):
    params, states = made(rule, count=3)
    weights = np.array([0.5, -0.25, 2.0], np.float32)
    total = lambda *leaves: sum(w * np.asarray(x) for w, x in zip(weights, leaves, strict=True))
    summed = jax.tree.map(total, *(state.memory for state in states))
    expected = memory.init_state(rule, params, batch_size=3)._replace(
        memory=summed,
        chunk_start=summed,
        momentum=jax.tree.map(total, *(state.momentum for state in states)),
        segment=states[0].segment,
    )
    found = jax.jit(lambda *states: memory.soup(rule, params, states, weights))(*states)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for have, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert have.dtype == want.dtype
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


@dataclasses.dataclass(frozen=True)
class OwnOptimizer(optimizers.Optimizer):
    """One whose state may be anything."""

    def update(self, state, gradient, step_size, momentum_decay):
        return {name: -step_size * jnp.sign(g) for name, g in gradient.items()}, state


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (rules.deep_transformer(chunk_size=4), "a SoftmaxRule has no soup: its memory is a cache of tokens"),
        (memory.CachedRule(OMEGANET, "soup", segment_size=16), "a CachedRule has no soup: it keeps several memories"),
        (dataclasses.replace(YAAD, retention=retention.KL()), r"a MemoryRule has no soup: retention=KL\(.*\) maps"),
        (dataclasses.replace(YAAD, optimizer=OwnOptimizer()), r"the state of optimizer=OwnOptimizer\(\) is not known"),
        (MovingSum(), "a MovingSum has no soup: its state is not a set of weights"),
    ],
    ids=["softmax", "cached", "map", "optimizer", "own"],
)
def test_rules_without_a_soup(rule, words):
    params = memory.init_params(rule, jax.random.key(0), **SIZES)
    state = memory.init_state(rule, params, batch_size=1, max_length=8)
    with pytest.raises(ValueError, match=f"memory.soup: .*{words}") as info:
        memory.soup(rule, params, [state])
    assert len(str(info.value).splitlines()) == 1


def test_refused():
    params, (state, other) = made(OMEGANET)
    soup = lambda *arguments: memory.soup(OMEGANET, params, *arguments)
    for states in (state, []):
        with pytest.raises(TypeError, match="states must be a list of at least one state"):
            soup(states)
    with pytest.raises(ValueError, match=r"state\.memory\['W1'\] has shape \(2, .*, must be \[3, "):
        soup([state, jax.tree.map(lambda x: x[:2], other)])
    with pytest.raises(ValueError, match=r"weights has shape \(3,\), must be \[2\]"):
        soup([state, other], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"weights are \[1.0, nan\]; they must be finite"):
        soup([state, other], [1.0, float("nan")])
    with pytest.raises(TypeError, match=r"states\[1\]\.memory\['W1'\] must be an array"):
        soup([state, jax.tree.map(lambda x: None, other)._replace(memory={"W1": "x"})])
