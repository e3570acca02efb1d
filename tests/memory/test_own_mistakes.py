"""Mistakes in a user's own structure or loss, and in rarer arguments, are errors of one line that name what is wrong."""

import dataclasses
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.memory import features, objectives, optimizers, structures


@dataclasses.dataclass(frozen=True)
class Own(structures.Structure):
    """Applies the weights `names`, of which there are A and B."""

    names: tuple[str, ...] = ("A", "B")

    def weight_shapes(self, features, value_dim):
        return {"A": (value_dim, features), "B": (value_dim, features)}

    def apply(self, linear, x, skip, norm):
        return sum(linear(name, x) for name in self.names)


@dataclasses.dataclass(frozen=True)
class Unsummed(objectives.Objective):
    def loss(self, out, v, threshold=None):
        return (out - v) ** 2


@dataclasses.dataclass(frozen=True)
class Total(objectives.Objective):
    def loss(self, out, v, threshold=None):
        return jnp.sum((out - v) ** 2)


def _call(rule):
    params = memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=4, value_dim=4)
    x = jax.random.normal(jax.random.key(1), (1, 3, 1, 4))
    gates = memory.suggested_gates(rule, batch_size=1, time=3, num_heads=1, key_dim=4)
    return memory.scan(rule, params, None, x, x, x, gates)


def _rule(**parts):
    return memory.MemoryRule(optimizer=optimizers.GradientDescent(), chunk_size=2, **parts)


def test_a_structure_that_applies_each_weight_once_is_accepted():
    y, _ = _call(_rule(structure=Own()))
    assert jnp.isfinite(y).all()


@dataclasses.dataclass(frozen=True)
class Started(Own):
    """Starts with the weights `initial(shapes)`."""

    initial: Callable = dict

    def init(self, key, features, value_dim):
        return self.initial(self.weight_shapes(features, value_dim))


@pytest.mark.parametrize(
    ("initial", "words"),
    [
        (lambda shapes: {"A": jnp.zeros(shapes["A"])}, "{A: float32.4, 4.}; it must be a dict of floating-point"),
        (lambda shapes: [jnp.zeros(shape) for shape in shapes.values()], "returned .float32.4, 4., float32.4, 4..;"),
        (lambda shapes: {name: jnp.zeros((4, 3)) for name in shapes}, "shapes of weight_shapes, {'A': .4, 4., 'B': .4, 4.}"),
        (lambda shapes: {name: jnp.zeros(shape, jnp.int32) for name, shape in shapes.items()}, "{A: int32.4, 4., B: int32"),
    ],
    ids=["missing", "list", "shape", "dtype"],
)  # fmt: skip
def test_initial_weights_are_those_of_the_shapes(initial, words):
    with pytest.raises(ValueError, match=r"Started.init returned") as error:
        _call(_rule(structure=Started(initial=initial)))
    assert re.search(words, str(error.value))


@dataclasses.dataclass(frozen=True)
class Coefficients(features.Features):
    initial: Callable

    def dim(self, key_dim):
        return key_dim

    def init(self):
        return self.initial()

    def apply(self, coefficients, x):
        return coefficients * x


@pytest.mark.parametrize("initial", [float, tuple, lambda: np.ones((), np.int32)])
def test_initial_coefficients_are_a_floating_point_array(initial):
    with pytest.raises(ValueError, match=r"Coefficients.init returned .+; it must be None or a floating-point array"):
        _call(_rule(structure=Own(), features=Coefficients(initial)))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("A", "B", "A"), "Own.apply uses the weight 'A' twice; every weight must be applied exactly once"),
        (("A", "W"), "Own.apply uses the weight 'W', which weight_shapes does not have .it has A, B."),
        (("A",), "Own.apply does not use the weight 'B' of weight_shapes"),
    ],
)
def test_a_structure_applies_each_of_its_weights_once(names, words):
    with pytest.raises(ValueError, match=words):
        _call(_rule(structure=Own(names)))


@pytest.mark.parametrize("loss", [Unsummed, Total])
def test_a_loss_is_one_number_for_each_token(loss):
    with pytest.raises(
        ValueError, match=f"{loss.__name__}.loss returned shape .*; it must be one number for each token"
    ):
        _call(_rule(structure=structures.Matrix(), objective=loss()))


@pytest.fixture(scope="module")
def delta():
    """(rule, params, state, token, gates of a token)."""
    rule = rules.delta_rule(chunk_size=4)
    params = memory.init_params(rule, jax.random.key(0), num_heads=2, key_dim=4, value_dim=4)
    gates = memory.suggested_gates(rule, batch_size=1, time=None, num_heads=2, key_dim=4)
    return rule, params, memory.init_state(rule, params, batch_size=1), jnp.ones((1, 2, 4)), gates


def test_a_layer_may_be_a_number(delta):
    rule, params, state, x, gates = delta
    states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    want, _ = memory.step(rule, params, state, x, x, x, gates)
    for layer in (1, np.int32(1), jnp.int32(1)):
        y, after = memory.step(rule, params, states, x, x, x, gates, layer=layer)
        np.testing.assert_allclose(y, want, rtol=1e-6)
        np.testing.assert_array_equal(jax.tree.leaves(after)[0][0], jax.tree.leaves(states)[0][0])


@pytest.mark.parametrize(
    ("layer", "words"),
    [(2, r"layer has the value 2, must be in \[0, 1\]"), (-1, "layer has the value -1"), (1.0, "layer must be an integer"),
     ("a", "layer must be an integer or None, got 'a'"), (True, "layer must be an integer")],
)  # fmt: skip
def test_another_layer_is_refused(delta, layer, words):
    rule, params, state, x, gates = delta
    states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    with pytest.raises((TypeError, ValueError), match=words):
        memory.step(rule, params, states, x, x, x, gates, layer=layer)


@pytest.mark.parametrize("weights", [[1j, 1.0], [None, 1], {"a": 1}, [[1], [1, 2]], [True, False]], ids=str)
def test_weights_of_a_soup_are_real_numbers(delta, weights):
    rule, params, state, *_ = delta
    with pytest.raises(TypeError, match=r"memory.soup: weights must be 2 real numbers, got"):
        memory.soup(rule, params, [state, state], weights)


def test_a_wrong_state_of_a_soup_is_named(delta):
    rule, params, state, *_ = delta
    for states, number in (([state, None], 1), ([None, state], 0)):
        with pytest.raises((TypeError, ValueError), match=rf"memory.soup: states\[{number}\]: "):
            memory.soup(rule, params, states)


def test_integer_gates_and_other_partitions_are_named(delta):
    rule, params, _, x, _ = delta
    tokens = (x[:, None],) * 3
    with pytest.raises(TypeError, match=r"gates.step_size must be floating point, got int32"):
        memory.scan(rule, params, None, *tokens, memory.Gates(step_size=jnp.ones((), int)))
    with pytest.raises(TypeError, match=r"partition must be a memory.Partition or None, got 'data'"):
        memory.scan(rule, params, None, *tokens, memory.Gates(step_size=0.1), partition="data")


@pytest.mark.parametrize("write", [lambda: rules.delta_rule(), None])
def test_a_rule_is_registered_with_what_it_writes(write):
    with pytest.raises(TypeError, match=r"rules.register: write is .*; it must be text"):
        rules.register(write)


@dataclasses.dataclass(frozen=True)
class Shapeless(Own):
    def weight_shapes(self, features, value_dim):
        return None


@dataclasses.dataclass(frozen=True)
class Tall(Own):
    """Returns shapes with the two sizes exchanged."""

    def weight_shapes(self, features, value_dim):
        return {"A": (value_dim, 2), "B": (features + 1, 2)}


@pytest.mark.parametrize(
    ("structure", "words"),
    [
        (Shapeless(), "Shapeless.weight_shapes returned None for features of size 1"),
        (Tall(), "the last, 'B', should read the features with 1 columns"),
        (Own(("A", "C")), "Own.apply uses the weight 'C', which weight_shapes does not have"),
        (Own(("A", "A")), "Own.apply uses the weight 'A' twice"),
        (Own(("A", "B", 3)), "Own.apply uses the weight 3, which"),
        (Own(None), "Own.apply failed: 'NoneType' object is not iterable"),
    ],
)
def test_a_softmax_rule_tells_what_is_wrong_with_its_structure(structure, words):
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        memory.SoftmaxRule(structure, chunk_size=4)
    assert "\n" not in str(error.value)
