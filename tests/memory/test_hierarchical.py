"""TNT's hierarchical memory: the fast forms against the definition, the definition against a loop in NumPy, what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.memory import HierarchicalRule, structures
from tests.memory.cases import assert_close, graded, steps
from tests.memory.cases import make_inputs as plain_inputs

pytestmark = pytest.mark.usefixtures("compile_fast")
EXACT = 1e-9
TIME = 17
# Shards of 6 tokens, the last one short; global chunks that end inside a shard and at its end.
CASES = {
    "matrix": HierarchicalRule(rules.delta_rule(4), 4, (2, 3), 6),
    "titans": HierarchicalRule(rules.titans(2, structures.MLP(expansion=1)), 8, (3,), 6, fine_chunks=(2,)),
    "omeganet": HierarchicalRule(
        rules.omeganet(3, window=3, structure=structures.MLP(expansion=1)), 6, (1, 2), 6, projected=False
    ),
}
each = pytest.mark.parametrize("name", CASES)
IDS = jnp.array([[0] * 7 + [1] * 10, [2] * 5 + [3] * 3 + [4] * 9])


def make_inputs(rule, *, time=TIME, dtype=jnp.float64, seed=0, key_dim=4):
    """As those of a plain rule, with keys of any length and one zero key, and gates that differ between the memories."""
    wide = jnp.promote_types(dtype, jnp.float32)
    rng = np.random.default_rng(seed)
    sets = [
        plain_inputs(one, batch=2, time=time, heads=2, key_dim=key_dim, value_dim=key_dim, dtype=dtype, seed=seed + i)
        for i, one in enumerate(rule.members)
    ]
    params = memory.HierarchicalParams(sets[0][0], tuple(one[0] for one in sets[1:]))
    _, q, k, v, _ = sets[0]
    k = k * jnp.asarray(rng.uniform(0.5, 1.0, (2, time, 2, 1)), dtype)
    k = k.at[0, min(3, time - 1)].set(0.0)
    inner = rule.rule.gate_channels(key_dim, key_dim)
    beside = lambda name: jnp.concatenate(
        [getattr(one[4], name).reshape(2, time, 2, inner[name] or 1) for one in sets], axis=-1
    )
    return params, q, k, v, memory.Gates(**{name: beside(name).astype(wide) for name in inner})


def from_start(fn, rule):
    return jax.jit(lambda params, *tokens, **options: fn(rule, params, None, *tokens, **options))


def assert_states_close(state, expected, tolerance):
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert_close(a, b, tolerance)


def test_the_definition_is_the_papers(x64):
    """Eqs. 5, 6, 7 and 15 for a matrix memory and ℓ2, in NumPy: gradients at the start of each chunk, restarts, projections."""
    rule = dataclasses.replace(CASES["matrix"], rule=rules.delta_rule(4).unbounded())
    params, *tokens = make_inputs(rule)
    q, k, v = (np.asarray(x) for x in tokens[:3])
    eta = np.asarray(tokens[3].step_size)
    weights = [np.asarray(own.weights["W"]) for own in (params.global_memory, *params.local_memories)]
    expected = np.zeros_like(v)
    for b, h in np.ndindex(2, 2):
        now = [w[h].copy() for w in weights]
        start, projection = [w.copy() for w in now], np.zeros((4, 4))
        for t in range(TIME):
            if t % rule.restart == 0:
                now[1:] = [w[h].copy() for w in weights[1:]]
                projection = np.zeros((4, 4))
            for i, chunk in enumerate((rule.global_chunk, *rule.local_chunks)):
                if (t if i == 0 else t % rule.restart) % chunk == 0:
                    start[i] = now[i].copy()
                now[i] -= eta[b, t, h, i] * np.outer(start[i] @ k[b, t, h] - v[b, t, h], k[b, t, h])
            square = k[b, t, h] @ k[b, t, h]
            projection += np.outer(k[b, t, h], k[b, t, h]) / square if square else 0.0
            local = projection @ q[b, t, h]
            expected[b, t, h] = now[0] @ q[b, t, h] + sum(w @ local for w in now[1:])
    y, state = from_start(memory.reference, rule)(params, *tokens)
    assert_close(y, expected, EXACT)
    assert_close(state.projection[1, 1], projection, EXACT)
    assert state.position.tolist() == [TIME % rule.restart] * 2


@each
@pytest.mark.parametrize("packed", [False, True])
def test_values_and_gradients(name, packed, x64):
    """One program for outputs, states and gradients, of every parameter, token and gate."""
    rule = CASES[name]
    args = make_inputs(rule)
    ids = {"segment_ids": IDS} if packed else {}
    found = graded(memory.scan, rule, *args, **ids, max_segments=3 if packed else None)
    expected = graded(memory.reference, rule, *args, **ids)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, EXACT)


@each
def test_every_split_of_a_stream(name, x64):
    """Token by token; and in pieces of 7 tokens that begin everywhere, each as a row of one call."""
    rule, size = CASES[name], 7
    params, *tokens = make_inputs(rule)
    expected, after = from_start(memory.scan, rule)(params, *tokens)
    fresh = memory.init_state(rule, params, batch_size=2)
    fresh = jax.tree.map(lambda x, like: x.astype(like.dtype), fresh, after)
    y, last, before = jax.jit(functools.partial(steps, rule))(params, fresh, *tokens)
    assert_close(y, expected, EXACT)
    assert_states_close(last, after, EXACT)
    begins = np.arange(TIME - size)
    windows = lambda x: x[0][begins[:, None] + np.arange(size)]
    states, ends = (jax.tree.map(lambda x, at=at: x[at, 0], before) for at in (begins, begins + size))
    y, state = jax.jit(functools.partial(memory.scan, rule))(params, states, *jax.tree.map(windows, tokens))
    assert_close(y, windows(expected), EXACT)
    assert_states_close(state, ends, EXACT)


def test_rows_in_different_places_of_a_shard(x64):
    """Documents end at different tokens of the rows, and calls with and without ids go on from there."""
    rule, cut = CASES["matrix"], 12
    args = make_inputs(rule)
    ids = jnp.array([[0] * 9 + [1] * 8, [0] * 4 + [1] * 13])

    @jax.jit
    def run(params, *tokens):
        first, rest = (jax.tree.map(lambda x, at=at: x[:, at], tokens) for at in (slice(cut), slice(cut, None)))
        packed = functools.partial(memory.scan, rule, params, max_segments=2)
        y, state = packed(None, *first, segment_ids=ids[:, :cut])
        whole = memory.reference(rule, params, None, *tokens, segment_ids=ids)
        return whole, y, packed(state, *rest, segment_ids=ids[:, cut:]), memory.scan(rule, params, state, *rest)

    whole, y, *both = run(*args)
    for rest, state in both:
        assert_close(jnp.concatenate([y, rest], axis=1), whole[0], EXACT)
        assert_states_close(state, whole[1], EXACT)


def test_a_read_is_that_of_the_last_token(x64):
    rule = CASES["matrix"]
    args = make_inputs(rule, time=6)  # a whole shard, which is still there
    y, state = memory.scan(rule, args[0], None, *args[1:])
    assert_close(memory.read(rule, args[0], state, args[1][:, -1:]), y[:, -1:], EXACT)


@pytest.mark.parametrize("packed", [False, True])
def test_bfloat16(packed):
    rule = CASES["matrix"]
    params, *tokens = make_inputs(rule, dtype=jnp.bfloat16)
    options = {"segment_ids": IDS, "max_segments": 3} if packed else {}
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), tokens)
    y, state = memory.scan(rule, params, None, *tokens, **options)
    assert y.dtype == jnp.bfloat16
    assert {x.dtype.name for x in jax.tree.leaves(state)} == {"float32", "int32"}
    expected, _ = memory.reference(rule, params, None, *wide, **({"segment_ids": IDS} if packed else {}))
    assert_close(y, expected, 2e-2)


def test_without_restarts_and_projection_it_is_a_sum_of_two_rules(x64):
    rule = HierarchicalRule(rules.delta_rule(2), 8, (2,), 32, projected=False)
    params, q, k, v, gates = make_inputs(rule)
    y, _ = memory.scan(rule, params, None, q, k, v, gates)
    own = rule.split_gates(gates, 4, 4)
    both = [params.global_memory, *params.local_memories]
    parts = [memory.scan(one, p, None, q, k, v, g)[0] for one, p, g in zip(rule.members, both, own, strict=True)]
    assert_close(y, parts[0] + parts[1], EXACT)


def test_local_memories_forget_at_a_restart(x64):
    """Tokens of one shard change later shards through the global memory alone."""
    rule = CASES["matrix"]
    params, q, k, v, gates = make_inputs(rule)
    without = gates._replace(step_size=gates.step_size.at[..., 0].set(0.0))
    run = functools.partial(memory.scan, rule, params, None)
    changed = v.at[:, :6].add(1.0)
    assert jnp.array_equal(run(q, k, v, without)[0][:, 6:], run(q, k, changed, without)[0][:, 6:])
    assert not jnp.allclose(run(q, k, v, gates)[0][:, 6:], run(q, k, changed, gates)[0][:, 6:])


def test_fine_chunks_change_neither_parameters_nor_gates():
    coarse = HierarchicalRule(rules.titans(), 64, (8,), 64)
    fine = dataclasses.replace(coarse, fine_chunks=(2,))
    sizes = {"num_heads": 2, "key_dim": 4}
    assert jax.tree.all(
        jax.tree.map(
            jnp.array_equal,
            memory.suggested_gates(coarse, batch_size=1, time=1, **sizes),
            memory.suggested_gates(fine, batch_size=1, time=1, **sizes),
        )
    )
    make = lambda rule: memory.init_params(rule, jax.random.key(0), value_dim=4, **sizes)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, make(coarse), make(fine)))
    assert fine.local_rules == (rules.titans(2),)
    assert memory.suggested_gates(coarse, batch_size=1, time=1, **sizes).step_size.shape == (1, 1, 2, 2)


def test_the_same_gates_for_all_memories():
    rule = HierarchicalRule(rules.titans(8), 16, (4,), 16)
    params = memory.init_params(rule, jax.random.key(0), num_heads=2, key_dim=4, value_dim=4)
    x = jax.random.normal(jax.random.key(1), (1, 5, 2, 4))
    same = memory.Gates(retention=0.9, step_size=jnp.full((1, 5, 2, 1), 0.1), momentum_decay=0.5)
    whole = memory.Gates(
        retention=jnp.full((1, 5, 2, 2), 0.9),
        step_size=jnp.full((1, 5, 2, 2), 0.1),
        momentum_decay=jnp.full((1, 5, 2, 2), 0.5),
    )
    run = functools.partial(memory.scan, rule, params, None, x, x, x)
    assert jnp.array_equal(run(same)[0], run(whole)[0])


def test_save_and_load(tmp_path):
    rule = CASES["matrix"]
    params, *tokens = make_inputs(rule, dtype=jnp.float32, time=8)
    _, state = memory.scan(rule, params, None, *tokens)
    memory.save(rule, params, state, tmp_path / "state.safetensors", num_tokens=8)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, memory.load(rule, params, tmp_path / "state.safetensors"), state))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HierarchicalRule(rules.titans, 8), "rule must be a memory.Rule"),
        (lambda: HierarchicalRule(rules.dot()), "whose state does not grow"),
        (lambda: HierarchicalRule(memory.CachedRule(rules.titans())), "has no chunks"),
        (lambda: HierarchicalRule(rules.linear_attention()), "chunk size has an effect"),
        (lambda: HierarchicalRule(rules.titans(), 4, (8,)), "local_chunks has 8, must be at most global_chunk=4"),
        (lambda: HierarchicalRule(rules.titans(), 64, (6,), 64), "restart=64 must be a multiple of each of local_chunks"),
        (lambda: HierarchicalRule(rules.titans(), 64, (16,), 8), "restart=8 must be a multiple"),
        (lambda: HierarchicalRule(rules.titans(), 64, ()), "local_chunks is \\(\\), must be numbers"),
        (lambda: HierarchicalRule(rules.titans(), 64, 8), "local_chunks is 8, must be numbers"),
        (lambda: HierarchicalRule(rules.titans(), 64, (8,), fine_chunks=(2, 4)), "should have 1 numbers"),
        (lambda: HierarchicalRule(rules.gated_delta_rule(), 64, (8,)), "clashes"),
    ],
)  # fmt: skip
def test_what_is_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_calls_that_are_refused():
    rule = CASES["titans"]
    params, *tokens = make_inputs(rule, dtype=jnp.float32)
    with pytest.raises(ValueError, match="should have 1, one for each of local_chunks"):
        memory.scan(rule, params._replace(local_memories=params.local_memories * 2), None, *tokens)
    with pytest.raises(TypeError, match="params must be HierarchicalParams"):
        memory.scan(rule, params.global_memory, None, *tokens)
    with pytest.raises(ValueError, match=r"gates\.retention has shape"):
        memory.scan(rule, params, None, *tokens[:3], rule.split_gates(tokens[3], 4, 4)[0])
    with pytest.raises(ValueError, match="has no soup"):
        memory.soup(rule, params, [memory.init_state(rule, params, batch_size=2)])


@pytest.mark.parametrize(
    ("name", "where"), [("position", "state"), ("local_memories", r"state.local_memories\[0\]: state")]
)
def test_a_state_that_is_beyond_its_shard_or_chunk(name, where):
    rule = HierarchicalRule(rules.titans_no_momentum(), 8, (8,), 8, fine_chunks=(2,))
    params, *_ = make_inputs(rule, dtype=jnp.float32)
    state = memory.init_state(rule, params, batch_size=2)
    beyond = lambda state: state._replace(position=state.position + 9)
    bad = beyond(state) if name == "position" else state._replace(local_memories=(beyond(state.local_memories[0]),))
    with pytest.raises(ValueError, match=rf"{where}.position has the value 9, must be in \[0, [18]\]"):
        memory.read(rule, params, bad, jnp.ones((2, 1, 2, 4)))


def test_around_a_rule_of_large_chunks():
    rule = HierarchicalRule(rules.lact(expansion=1, schedule=None), 8, (4,), 8)
    params = memory.init_params(rule, jax.random.key(0), num_heads=2, key_dim=4, value_dim=4)
    q, k, v = jax.random.normal(jax.random.key(1), (3, 2, 13, 2, 4))
    gate = jax.random.uniform(jax.random.key(2), (2, 13, 2, 8))
    tokens = (q, k, v, memory.Gates(step_size=0.1 * gate[..., :6], momentum_decay=gate[..., 6:]))
    y, state = from_start(memory.reference, rule)(params, *tokens)
    part = lambda *span: jax.tree.map(lambda x: x[:, slice(*span)], tokens)
    before, middle = memory.scan(rule, params, None, *part(9))
    after, last = memory.scan(rule, params, middle, *part(9, None))
    assert_close(jnp.concatenate([before, after], axis=1), y, 1e-5)
    assert_states_close(last, state, 1e-5)
