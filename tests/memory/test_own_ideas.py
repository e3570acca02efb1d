"""Rules made of a user's own classes (`own_ideas`): no fast path takes them for what it knows, and errors say what is missing.

That they are computed right is in test_engine.py, test_streaming.py and test_bound.py, whose table of rules has them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from atlasjax import memory, rules
from atlasjax.memory import MemoryRule, features, objectives, optimizers, retention, structures
from atlasjax.memory.fast_weights.kernels import unsupported
from tests.marks import some_slow
from tests.memory.cases import assert_close, make_inputs
from tests.memory.own_ideas import IDEAS, Adam, CappedL2, LogCosh, RandomFourier, SignMomentum, SoftThreshold, SwiGLU

CLASSES = {
    structures.Structure: (structures.Matrix(), structures.MLP(), structures.GatedMLP()),
    objectives.Objective: (
        objectives.L2(), objectives.DotProduct(), objectives.Lp(), objectives.Huber(), objectives.RemoveAndReplace(),
    ),
    features.Features: (features.Identity(), features.Polynomial(), features.Powers(), features.TensorSketch()),
    optimizers.Optimizer: (
        optimizers.GradientDescent(), optimizers.Implicit(), optimizers.Momentum(), optimizers.Muon(),
    ),
    retention.Retention: (
        retention.Full(), retention.Scalar(), retention.Channel(), retention.KL(), retention.Lq(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("base", CLASSES, ids=lambda base: base.__name__)
def test_claims_are_not_inherited(base):
    """A subclass that might change the formula claims nothing, whatever its parent claims."""
    assert base.claims
    for value in CLASSES[base]:
        Sub = dataclasses.dataclass(frozen=True)(type("Sub", (type(value),), {}))
        for name, default in base.claims.items():
            assert getattr(Sub(), name) == default, (value, name)
    assert any(getattr(value, name) != default for value in CLASSES[base] for name, default in base.claims.items())


def test_a_subclass_is_not_taken_for_its_parent():
    """ℓ2 with another loss and a matrix memory: the delta rule's closed form would be wrong by as much as the output."""
    mine = IDEAS["own_loss_matrix"]
    parent = dataclasses.replace(mine, objective=objectives.L2())
    assert parent.is_linear
    assert not mine.is_linear
    params, q, k, v, gates = make_inputs(parent, time=20, step_size=0.9)
    y, _ = memory.scan(mine, params, None, q, k, v, gates)
    expected, _ = memory.reference(mine, params, None, q, k, v, gates)
    other, _ = memory.scan(parent, params, None, q, k, v, gates)
    assert_close(y, expected, 1e-5)
    assert jnp.abs(other - expected).max() > 0.1 * jnp.abs(expected).max()


@pytest.mark.parametrize("name", IDEAS)
def test_kernels_refuse_what_they_do_not_know(name):
    rule = IDEAS[name] if IDEAS[name].is_linear else dataclasses.replace(IDEAS[name], window=1, chunk_size=16)
    params, q, *_ = make_inputs(rule, time=32)
    reason = unsupported("pallas_tpu", rule, params, None, q, False)
    assert reason is None if name == "own_features" else reason  # features are applied before a kernel
    assert unsupported("pallas_tpu", rules.titans(16), *make_inputs(rules.titans(16))[:1], None, q, False) is None


# The other classes are in `all_of_them`.
@pytest.mark.parametrize("name", some_slow(IDEAS, set(IDEAS) - {"own_loss_matrix", "own_sign_momentum", "all_of_them"}))
def test_suggested_gates(name):
    """Keys of unit length and values of unit length, a few hundred tokens: finite, and it learns more than nothing."""
    rule = IDEAS[name]
    gates = memory.suggested_gates(rule, batch_size=1, time=256, num_heads=2, key_dim=4)
    params, q, k, v, _ = make_inputs(rule, batch=1, time=256)
    y, state = memory.scan(rule, params, None, q, k, v / jnp.linalg.norm(v, axis=-1, keepdims=True), gates)
    assert jnp.isfinite(y).all()
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    moved = jax.tree.map(lambda new, old: jnp.abs(new[0] - old).max(), state.memory, rule.start(params.weights))
    assert max(jax.tree.leaves(moved)) > 0


class Undecorated(objectives.Objective):
    def loss(self, out, v, threshold=None):
        return jnp.sum(jnp.abs(out - v), axis=-1)


@dataclasses.dataclass(eq=False)
class Unfrozen(retention.Retention):
    pass


class Inheriting(LogCosh):
    """Of a frozen dataclass, with nothing of its own to compare: it is one too."""


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"objective": object()}, "objective must be a atlasjax.memory.axes.objectives.Objective, got <object"),
        ({"objective": LogCosh}, r"Give an instance, LogCosh\(...\), not the class"),
        ({"objective": Undecorated()}, r"objective must be a frozen dataclass, .* above class Undecorated\.$"),
        ({"retention": Unfrozen()}, r"retention must be a frozen dataclass, .* above class Unfrozen\.$"),
        ({"optimizer": Adam(b1=[0.9])}, "optimizer=Adam.* must be hashable to be static under jit"),
        ({"optimizer": dataclasses.replace(SignMomentum()), "chunk_size": 0}, "chunk_size must be an integer ≥ 1"),
        ({"retention": SoftThreshold(), "optimizer": optimizers.Implicit()}, "is known for a decay α M only"),
    ],
)
def test_mistakes_are_named(choices, message):
    known = {"structure": structures.Matrix(), "chunk_size": 1, **choices}
    with pytest.raises(ValueError, match=message):
        MemoryRule(**known)


def test_equal_parts_make_equal_rules():
    """Rules that are made alike are one program under jit."""
    one, other = (MemoryRule(structures.Matrix(), Inheriting(), chunk_size=1) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)


class WrongFeatures(RandomFourier):
    def apply(self, coefficients, x):
        return super().apply(coefficients, x)[..., :-1]


class WrongStructure(SwiGLU):
    def apply(self, linear, x, skip, norm):
        return jnp.repeat(super().apply(linear, x, skip, norm), 2, axis=-1)


class WrongUse(SwiGLU):
    def apply(self, linear, x, skip, norm):
        return linear("W1", linear("W2", x) * linear("W2", x))


class WrongInput(SwiGLU):
    def apply(self, linear, x, skip, norm):
        return linear("W1", x)


class WrongLoss(LogCosh):
    def loss(self, out, v, threshold=None):
        return jnp.abs(out - v)


class WrongDecay(SoftThreshold):
    def decay(self, weight, alpha):
        return jnp.sum(alpha * weight, axis=0)


class WrongMap(retention.KL):
    def map(self, accumulator):
        return accumulator[0]


class WrongSteps(SignMomentum):
    def update(self, state, gradient, step_size, momentum_decay):
        steps, S = super().update(state, gradient, step_size, momentum_decay)
        return {name: step.T for name, step in steps.items()}, S


class WrongState(SignMomentum):
    def update(self, state, gradient, step_size, momentum_decay):
        steps, S = super().update(state, gradient, step_size, momentum_decay)
        return steps, {name: s.sum() for name, s in S.items()}


class StepsOnly(SignMomentum):
    def update(self, state, gradient, step_size, momentum_decay):
        return super().update(state, gradient, step_size, momentum_decay)[0]


class CountsInIntegers(Adam):
    def init(self, weights):
        return {**super().init(weights), "count": jnp.zeros((), jnp.int32)}


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"features": WrongFeatures()}, r"WrongFeatures.apply returned shape \(2, 15\) .* it must be \(2, 16\)"),
        ({"structure": WrongStructure()}, r"WrongStructure.apply returned shape \(2, 8\) .* it must be \(2, 4\)"),
        ({"structure": WrongUse()}, "WrongUse.apply uses the weight 'W2' twice"),
        ({"structure": WrongInput()}, r"'W1' of shape \(4, 8\) is applied to an array of shape \(2, 4\); it must be \(2, 8\)"),
        ({"objective": WrongLoss()}, r"WrongLoss.loss returned shape \(2, 4\) .* one number for each token, \(2,\)"),
        ({"retention": WrongDecay()}, r"WrongDecay.decay returned shape \(\d+,\) for a weight of shape .*; it must be \("),
        ({"retention": WrongMap(), "chunk_size": 1}, r"WrongMap.map returned shape \(\d+,\) for a weight"),
        ({"optimizer": WrongSteps()}, r"WrongSteps.update returned the steps .* one for each weight, {'W1': \(4, 16\)"),
        ({"optimizer": WrongState()}, r"WrongState.update returned the state {W1: float32\[\], .*like that of init, {W1: float"),
        ({"optimizer": StepsOnly()}, r"StepsOnly.update returned {W1.* it must be a tuple"),
        ({"optimizer": CountsInIntegers()}, r"init returned the state {.*count: int32\[\].* must be floating point"),
    ],
    ids=lambda x: type(next(iter(x.values()))).__name__ if isinstance(x, dict) else "",
)  # fmt: skip
def test_a_part_that_returns_a_wrong_shape_is_named(choices, message):
    """Before anything is compiled: by `init_params`, and by calls with parameters made by a rule without the mistake."""
    rule = MemoryRule(**choices)
    with pytest.raises(ValueError, match=message) as raised:
        memory.init_params(rule, jax.random.key(0), num_heads=2, key_dim=4, value_dim=4)
    assert "\n" not in str(raised.value)
    right = {axis: type(part).__mro__[1]() for axis, part in choices.items() if axis != "chunk_size"}
    params, q, k, v, _ = make_inputs(dataclasses.replace(rule, **right))
    gates = memory.suggested_gates(MemoryRule(), batch_size=2, time=37, num_heads=2, key_dim=4)
    with pytest.raises(ValueError, match=message):
        memory.scan(rule, params, None, q, k, v, gates)


def test_a_missing_method_is_named():
    @dataclasses.dataclass(frozen=True)
    class Empty(objectives.Objective):
        pass

    rule = MemoryRule(objective=Empty())
    params, q, k, v, gates = make_inputs(MemoryRule(), time=3)
    with pytest.raises(ValueError, match=r"Empty\.loss is not implemented"):
        memory.scan(rule, params, None, q, k, v, gates)


def test_features_that_do_not_tell_the_key_size_say_so():
    @dataclasses.dataclass(frozen=True)
    class Constant(features.Features):
        def dim(self, key_dim):
            return 7

        def apply(self, coefficients, x):
            return jnp.ones((*x.shape[:-1], 7), x.dtype)

    rule = MemoryRule(structures.Matrix(), features=Constant())
    with pytest.raises(ValueError, match=r"Constant\.key_dim failed: .* Implement its method `key_dim`"):
        memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=3, value_dim=3)


def test_a_registered_rule_has_a_name(registered_rules):
    @rules.register("M_t = α M_{t−1} − η ∇")
    def capped(chunk_size: int = 16) -> MemoryRule:
        return MemoryRule(objective=CappedL2(), chunk_size=chunk_size)

    from atlasjax import table1
    from atlasjax.nn import MemoryConfig

    assert MemoryConfig("capped").build() == capped()
    assert table1.row("capped").objective == "CappedL2(most=1.0)"
    with pytest.raises(ValueError, match=r"'titans' is already the name of atlasjax\.rules\.deep\.titans"):
        rules.register("…")(type("Other", (), {"__name__": "titans", "__module__": "mine"})())
