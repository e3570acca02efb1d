"""Features, objectives and the rule itself."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.memory import features, objectives, optimizers, retention, structures
from atlasjax.memory.fast_weights.rule import MemoryRule


def pairs(dim, count=200, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, count, dim)) / math.sqrt(dim)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_polynomial_kernel_is_exact(degree, x64):
    q, k = pairs(5)
    phi = features.Polynomial(degree)
    c = jnp.asarray(np.random.default_rng(1).uniform(0.5, 1.5, degree + 1))
    inner = jnp.sum(phi.apply(c, jnp.asarray(q)) * phi.apply(c, jnp.asarray(k)), -1)
    expected = sum(float(c[i]) ** 2 * np.sum(q * k, -1) ** i for i in range(degree + 1))
    np.testing.assert_allclose(inner, expected, atol=1e-12)
    assert phi.dim(5) == math.comb(5 + degree, degree) == phi.apply(c, jnp.asarray(q)).shape[-1]
    initial = np.asarray(phi.init()) ** 2
    np.testing.assert_allclose(initial, [1 / math.factorial(i) for i in range(degree + 1)], rtol=1e-6)


def test_polynomial_order_is_by_degree_then_lexicographic():
    x = jnp.asarray([2.0, 3.0, 5.0])
    c = jnp.ones(3)
    products = [math.prod(x[i] for i in row) for row in itertools.combinations_with_replacement(range(3), 2)]
    weights = [1, math.sqrt(2), math.sqrt(2), 1, math.sqrt(2), 1]
    expected = [1.0, 2.0, 3.0, 5.0, *(w * p for w, p in zip(weights, products))]
    np.testing.assert_allclose(features.Polynomial(2).apply(c, x), expected, rtol=1e-6)


def test_powers():
    x, c = jnp.asarray([2.0, -3.0]), jnp.asarray([1.0, 0.5])
    np.testing.assert_allclose(features.Powers(2).apply(c, x), [2, -3, 2, 4.5])
    np.testing.assert_allclose(features.Powers(2).degree_one(c, x), x)


def test_sketch_is_unbiased_with_exact_low_degrees(x64):
    q, k = pairs(6, count=20)
    c, both = jnp.ones(4), jnp.asarray(np.stack([q, k]))
    dot = np.sum(q * k, -1)
    expected = 1 + dot + dot**2 + dot**3
    spread = {}
    for size in (16, 64):
        estimates = []
        for seed in range(300):
            phi = features.TensorSketch(3, size, seed)
            of_queries, of_keys = np.asarray(phi.apply(c, both))
            estimates.append(np.sum(of_queries * of_keys, -1))
        estimates = np.asarray(estimates)
        spread[size] = estimates.std(0)
        assert (np.abs(estimates.mean(0) - expected) < 5 * spread[size] / math.sqrt(300)).all()
    # The variance falls as 1 / size.
    assert 1.5 < spread[16].mean() / spread[64].mean() < 2.7
    low = features.TensorSketch(3, 32).apply(c, jnp.asarray(q))
    np.testing.assert_allclose(low[:, :7], np.concatenate([np.ones((20, 1)), q], 1))


def test_huber_uses_the_norm_of_the_error():
    out, v = jnp.asarray([3.0, 4.0]), jnp.zeros(2)
    np.testing.assert_allclose(objectives.Huber().loss(out, v, jnp.asarray(6.0)), 12.5)
    np.testing.assert_allclose(objectives.Huber().loss(out, v, jnp.asarray(2.0)), 2 * (5 - 1))
    slope = jax.grad(lambda o: objectives.Huber().loss(o, v, jnp.asarray(2.0)))(out)
    np.testing.assert_allclose(jnp.linalg.norm(slope), 2.0, rtol=1e-6)


def test_every_named_rule_builds_and_is_hashable():
    assert set(rules.REGISTRY) >= {
        "titans", "titans_no_momentum", "ttt_linear", "ttt_mlp", "dla", "swla", "omeganet", "atlas", "atlas_plus_plus",
        "delta_rule", "linear_attention",
    }  # fmt: skip
    built = [factory() for factory in rules.REGISTRY.values()]
    assert len(set(built)) == len(built)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0])
def test_losses_have_finite_derivatives_at_zero_error(p):
    for objective in (objectives.Lp(p), objectives.L2(), objectives.DotProduct(), objectives.Huber()):
        loss = lambda o, objective=objective: objective.loss(o, jnp.zeros(3), jnp.asarray(1.0))
        derivatives = jax.jit(lambda o, loss=loss: (jax.grad(loss)(o), jax.hessian(loss)(o)))(jnp.zeros(3))
        assert all(np.isfinite(x).all() for x in derivatives)


@dataclasses.dataclass(frozen=True)
class OtherKeys(objectives.DeltaKeys):
    """A subclass that does not say that it writes as its parent does."""


CLASHES = {
    "retention=Channel.*clashes with structure=MLP": lambda: MemoryRule(retention=retention.Channel()),
    "every=3.*clashes with chunk_size=64": lambda: rules.atlas(newton_schulz_every=3),
    "window must be an integer ≥ 1, got 0": lambda: rules.omeganet(window=0),
    "chunk_size must be an integer ≥ 1, got 2.5": lambda: rules.titans(2.5),
    r"steps \(Newton–Schulz\) must be an integer ≥ 0, got -1": lambda: rules.atlas(newton_schulz_steps=-1),
    "Unknown Newton–Schulz schedule 'standrad'. Did you mean 'standard'": lambda: optimizers.Muon(schedule="standrad"),
    "Unknown activation 'gleu'. Did you mean 'gelu'": lambda: structures.MLP(activation="gleu"),
    "depth must be an integer ≥ 1": lambda: structures.MLP(depth=0),
    "degree must be an integer ≥ 1": lambda: features.Polynomial(0),
    "p must be ≥ 1": lambda: objectives.Lp(0.5),
    "objective must be a .* Give an instance": lambda: MemoryRule(objective=objectives.L2),
    "optimizer is Momentum.*not Muon": lambda: rules.titans().with_newton_schulz(3),
    r"decay_first=True\) clashes with chunk_size=8": lambda: MemoryRule(
        retention=retention.Scalar(decay_first=True), chunk_size=8
    ),
    r"KL\(\) clashes with optimizer=Muon": lambda: MemoryRule(optimizer=optimizers.Muon(), retention=retention.KL()),
    r"per_channel=True\) clashes with structure=MLP": lambda: MemoryRule(
        optimizer=optimizers.GradientDescent(per_channel=True)
    ),
    r"per_channel=True\) clashes with window=3": lambda: MemoryRule(
        structures.Matrix(), optimizer=optimizers.GradientDescent(per_channel=True), window=3
    ),
    r"Implicit\(per_channel=False\) clashes with the other choices": lambda: MemoryRule(
        optimizer=optimizers.Implicit()
    ),
    r"it decays first": lambda: MemoryRule(
        structures.Matrix(), optimizer=optimizers.Implicit(), retention=retention.Scalar(), chunk_size=1
    ),
    r"RemoveAndReplace\(\) clashes with the other choices": lambda: MemoryRule(objective=objectives.RemoveAndReplace()),
    r"DeltaKeys\(\) clashes with the other choices": lambda: MemoryRule(
        structures.Matrix(), objectives.DeltaKeys(), optimizer=optimizers.Momentum(), chunk_size=1
    ),
    r"OtherKeys\(\) clashes with its own_keys: .* writes_at_own_keys = True only": lambda: MemoryRule(
        structures.Matrix(), OtherKeys(), optimizer=optimizers.GradientDescent(), chunk_size=1
    ),
    r"decay_first must be True or False, got 1": lambda: retention.Scalar(decay_first=1),
    r"q must be a number ≥ 2, got 1.0": lambda: retention.Lq(1.0),
}


@pytest.mark.parametrize("message", CLASHES)
def test_impossible_rules_are_refused(message):
    with pytest.raises(ValueError, match=message):
        CLASHES[message]()


def call(rule=None, **changes):
    rule = rule or rules.omeganet(8, 3, features=features.Identity())
    arrays = {
        "q": jnp.ones((2, 5, 3, 4)),
        "k": jnp.ones((2, 5, 3, 4)),
        "v": jnp.ones((2, 5, 3, 4)),
        "gates": memory.Gates(jnp.ones((2, 5, 3)), jnp.ones((2, 5, 3)), window_weights=jnp.ones((2, 5, 3, 3))),
    }
    options = {key: changes.pop(key) for key in list(changes) if key not in arrays and key != "state"}
    state = changes.pop("state", None)
    arrays |= changes
    params = memory.init_params(rule, jax.random.key(0), num_heads=3, key_dim=4, value_dim=4)
    return memory.scan(rule, params, state, **arrays, **options)


GATES = memory.Gates(jnp.ones((2, 5, 3)), jnp.ones((2, 5, 3)), window_weights=jnp.ones((2, 5, 3, 3)))
BAD_CALLS = {
    r"q has shape \(2, 5, 4\), must be \[batch, time, 3, 4\]": {"q": jnp.ones((2, 5, 4))},
    r"k has shape \(2, 6, 3, 4\), must be \[2, 5, 3, 4\]": {"k": jnp.ones((2, 6, 3, 4))},
    r"v has shape \(2, 5, 2, 4\), must be \[2, 5, 3, 4\]": {"v": jnp.ones((2, 5, 2, 4))},
    r"k must be floating point, got int32": {"k": jnp.ones((2, 5, 3, 4), jnp.int32)},
    r"the same dtype, got q float32 and v bfloat16": {"v": jnp.ones((2, 5, 3, 4), jnp.bfloat16)},
    r"gates.momentum_decay is given, but this rule has no such gate": {"gates": GATES._replace(momentum_decay=jnp.ones((2, 5, 3)))},
    r"gates.window_weights is missing; this rule needs it with shape \[2, 5, 3, 3\]": {
        "gates": GATES._replace(window_weights=None)
    },
    r"gates.retention has shape \(2, 5\)": {"gates": GATES._replace(retention=jnp.ones((2, 5)))},
    r"gates must be memory.Gates, got dict": {"gates": {}},
    r"Unknown implementation 'xal'. Did you mean 'xla'": {"implementation": "xal"},
    r"segment_ids has shape \(5,\)": {"segment_ids": jnp.zeros(5, jnp.int32)},
    r"segment_ids must be integers": {"segment_ids": jnp.zeros((2, 5))},
    r"max_segments=3 is given without": {"max_segments": 3},
    r"state must be a MemoryState": {"state": {}},
    r"gates.retention must be in \[0, 1\], got 1.5 at index \(0, 0, 0\)": {
        "gates": GATES._replace(retention=jnp.full((2, 5, 3), 1.5)), "check_gates": True,
    },
    r"gates.step_size must be in \[0, inf\), got nan": {
        "gates": GATES._replace(step_size=jnp.full((2, 5, 3), jnp.nan)), "check_gates": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_CALLS)
def test_bad_calls_say_what_is_wrong(message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(**BAD_CALLS[message])


def test_a_state_of_another_rule_or_batch_is_refused():
    other = rules.titans(8)
    params = memory.init_params(other, jax.random.key(0), num_heads=3, key_dim=4, value_dim=4)
    with pytest.raises(ValueError, match=r"state belongs to another rule: it has .*momentum"):
        call(state=memory.init_state(other, params, batch_size=2))
    rule = rules.omeganet(8, 3, features=features.Identity())
    params = memory.init_params(rule, jax.random.key(0), num_heads=3, key_dim=4, value_dim=4)
    with pytest.raises(ValueError, match=r"state.* has shape \(1, .*must be \[2, "):
        call(state=memory.init_state(rule, params, batch_size=1))
    with pytest.raises(ValueError, match="coefficients"):
        memory.init_state(rules.omeganet(8, 3), params, batch_size=1)


def test_segments_under_jit_need_a_bound():
    with pytest.raises(ValueError, match="need max_segments"):
        jax.jit(lambda ids: call(segment_ids=ids)[0])(jnp.zeros((2, 5), jnp.int32))


def test_gate_checks_under_jit():
    from jax.experimental import checkify

    bad = GATES._replace(window_weights=jnp.full((2, 5, 3, 3), -0.25))
    error, _ = checkify.checkify(jax.jit(lambda gates: call(gates=gates, check_gates=True)[0]))(bad)
    with pytest.raises(checkify.JaxRuntimeError, match=r"gates.window_weights must be in \[0, 1\], got -0.25"):
        error.throw()


def test_residual_needs_equal_sizes():
    with pytest.raises(ValueError, match="key_dim must equal value_dim, got key_dim=4, value_dim=8"):
        memory.init_params(rules.titans(), jax.random.key(0), num_heads=1, key_dim=4, value_dim=8)


def test_a_norm_needs_more_than_one_number():
    with pytest.raises(ValueError, match="zero for a single number; value_dim must be ≥ 2, got 1"):
        memory.init_params(rules.ttt_mlp(), jax.random.key(0), num_heads=1, key_dim=1, value_dim=1)


@pytest.mark.parametrize("rule", [rules.titans(4), rules.atlas(4), rules.omeganet(4), rules.yaad(4), rules.dot(4)])
def test_scalar_values(rule):
    """Memories of numbers: refused with a residual, in words that name what has none, and that works."""
    make = lambda rule: memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=3, value_dim=1)
    with pytest.raises(ValueError, match=r"dataclasses\.replace\(rule, structure=structures\.PlainMLP\(\)\)") as error:
        make(rule)
    assert "\n" not in str(error.value)
    rule = dataclasses.replace(rule, structure=structures.PlainMLP(expansion=2))
    params, q = make(rule), jax.random.normal(jax.random.key(1), (1, 9, 1, 3)) / 3**0.5
    gates = memory.suggested_gates(rule, batch_size=1, time=9, num_heads=1, key_dim=3, value_dim=1)
    y, state = memory.scan(rule, params, None, q, q, q[..., :1], gates)
    expected, _ = memory.reference(rule, params, None, q, q, q[..., :1], gates)
    assert y.shape == (1, 9, 1, 1)
    assert jnp.allclose(y, expected, atol=1e-5 * float(jnp.abs(expected).max()))
    assert float(jnp.abs(memory.read(rule, params, state, q)).max()) > 0


@dataclasses.dataclass(frozen=True)
class Falling(features.Features):
    """16 features of keys of size 4, and 12 of those of size 8."""

    def dim(self, key_dim):
        return {4: 16, 8: 12}.get(key_dim, 100 + key_dim)


def test_the_size_of_a_key_is_found_from_its_features():
    maps = (features.Identity(), features.Powers(3), features.Polynomial(3))
    assert [[kind.key_dim(kind.dim(size)) for size in (1, 2, 7, 10**9)] for kind in maps] == 3 * [[1, 2, 7, 10**9]]
    assert (Falling().key_dim(16), Falling().key_dim(12), Falling().key_dim(107)) == (4, 8, 7)
    with pytest.raises(ValueError, match="no key size with 7 features"):
        features.Powers(3).key_dim(7)
