"""A method of a user's own part that is missing, fails, or returns what it should not, is named before anything is compiled."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import cli, memory
from atlasjax.memory import features, objectives, optimizers, retention, structures


@dataclasses.dataclass(frozen=True)
class Loss(objectives.Objective):
    def loss(self, out, v, threshold=None):
        return jnp.sum((out - v) ** 2, axis=-1)


class Whole(Loss):
    def loss(self, out, v, threshold=None):
        return jnp.sum(out > v, axis=-1)


class Two(Loss):
    def loss(self, out, v):
        return jnp.sum((out - v) ** 2, axis=-1)


class Thresholded(Loss):
    def loss(self, out, v, threshold=None):
        return threshold * super().loss(out, v)


class Number(Loss):
    def loss(self, out, v, threshold=None):
        return float(jnp.sum((out - v) ** 2))


@dataclasses.dataclass(frozen=True)
class Unwritten(objectives.Objective):
    pass


def unwritten():
    """A rule that a config can name."""
    return memory.MemoryRule(objective=Unwritten())


@dataclasses.dataclass(frozen=True)
class Shaped(structures.Structure):
    """Returns `shapes` as its weights; an expression of the features' size f and the value's size v."""

    shapes: str = "{'W': (v, f)}"

    def weight_shapes(self, feature_dim, value_dim):
        return eval(self.shapes, {"f": feature_dim, "v": value_dim})

    def apply(self, linear, x, skip, norm):
        for name in reversed(self.weight_shapes(x.shape[-1], 4)):
            x = linear(name, x)
        return x


class Skipping(Shaped):
    def apply(self, linear, x, skip, norm):
        return skip + linear("W", x)


class Normed(Shaped):
    def apply(self, linear, x, skip, norm):
        return structures.layer_norm(linear("W", x), norm)


class Asserting(Shaped):
    def apply(self, linear, x, skip, norm):
        assert skip is not None
        return skip + linear("W", x)


class Misnamed(Shaped):
    def apply(self, linear, x, skip, norm):
        return {"W": linear("W", x)}["V"]


@dataclasses.dataclass(frozen=True)
class Descent(optimizers.Optimizer):
    def update(self, state, gradient, step_size, momentum_decay):
        return {name: -step_size * g for name, g in gradient.items()}, state


class Decayed(Descent):
    def init(self, weights):
        return jax.tree.map(jnp.zeros_like, weights)

    def update(self, state, gradient, step_size, momentum_decay):
        state = {name: momentum_decay * state[name] - step_size * g for name, g in gradient.items()}
        return state, state


class Stateless(Descent):
    def update(self, state, gradient, step_size, momentum_decay):
        state = {name: 0.9 * state[name] - step_size * g for name, g in gradient.items()}
        return state, state


class Branching(Descent):
    def update(self, state, gradient, step_size, momentum_decay):
        return super().update(state, gradient, step_size, momentum_decay) if step_size > 0 else (gradient, state)


@dataclasses.dataclass(frozen=True)
class Unmoving(optimizers.Optimizer):
    pass


@dataclasses.dataclass(frozen=True)
class Ungated(retention.Retention):
    def decay(self, weight):
        return weight


@dataclasses.dataclass(frozen=True)
class Unmapped(retention.Retention):
    def map(self, accumulator):
        return accumulator[0]


@dataclasses.dataclass(frozen=True)
class Wide(features.Features):
    """Twice as many features as the size of a key."""

    def dim(self, key_dim):
        return 2 * key_dim

    def apply(self, coefficients, x):
        return jnp.concatenate([x, x * x], axis=-1)


class Residual(Wide):
    def degree_one(self, coefficients, x):
        return self.apply(coefficients, x)


class Fractional(Wide):
    def dim(self, key_dim):
        return 1.5 * key_dim


class Fixed(Wide):
    def dim(self, key_dim):
        return 8


@dataclasses.dataclass(frozen=True)
class Undimensioned(features.Features):
    pass


class Scaled(Wide):
    def apply(self, coefficients, x):
        return coefficients * super().apply(None, x)


def _init(**parts):
    parts = {"optimizer": optimizers.GradientDescent(), "structure": structures.Matrix(), "chunk_size": 2} | parts
    rule = memory.MemoryRule(**parts)
    return rule, memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=4, value_dim=4)


_DICT = "it must be a dict, name → (out, in), of at least one weight with integers ≥ 1."
_SIZES = "for features of size 4 and values of size 4"
_ORDER = "the first weight, 'V', must be the outermost with 4 rows, and the last, 'W', should read the features with 4 columns."
_TRACED = "(JAX traces it without values: use jnp.where instead of `if`, and neither float() nor NumPy)."
_MISTAKES = {
    "loss of integers": ({"objective": Whole()}, "Whole.loss returned int32 for outputs (2, 4); it must be floating point."),
    "two arguments": ({"objective": Two()}, "Two.loss failed: Two.loss() takes 3 positional arguments but 4 were given."),
    "no loss": ({"objective": Unwritten()}, "Unwritten.loss is not implemented."),
    "threshold": ({"objective": Thresholded()}, "(threshold is None; with uses_threshold = True it is the gate)."),
    "float": ({"objective": Number()}, _TRACED),
    "vector": ({"structure": Shaped("{'W': (v, f), 'b': (v,)}")}, f"returned {{'W': (4, 4), 'b': (4,)}} {_SIZES}; {_DICT}"),
    "no weights": ({"structure": Shaped("{}")}, f"Shaped.weight_shapes returned {{}} {_SIZES}; {_DICT}"),
    "list": ({"structure": Shaped("[('W', (v, f))]")}, f"returned [('W', (4, 4))] {_SIZES}; {_DICT}"),
    "float width": ({"structure": Shaped("{'V': (v, 1.5 * v), 'W': (1.5 * v, f)}")}, _DICT),
    "zero": ({"structure": Shaped("{'V': (v, 0), 'W': (0, f)}")}, _DICT),
    "innermost first": ({"structure": Shaped("{'V': (8, f), 'W': (v, 8)}")}, f"{_SIZES}; {_ORDER}"),
    "names of sizes": (
        {"structure": Shaped("{f'W{i}': (v, f) for i in range(f)}")},
        "'W3': (4, 4)} for features of size 4 and values of size 4, and {'W0': (1, 1)} for sizes of 1; the names should not depend",
    ),
    "size of 1": (
        {"structure": Shaped("{'W': (v, f + 0 // (f - 1))}")},
        "Shaped.weight_shapes(1, 1) failed: ZeroDivisionError: integer",
    ),
    "skip": ({"structure": Skipping()}, "(skip is None; with residual = True it is the residual of the memory; norm is None;"),
    "norm": ({"structure": Normed()}, "norm is None; with norm = True it has a scale and a bias)."),
    "assertion": ({"structure": Asserting()}, "(skip is None; with residual = True it is the residual of the memory;"),
    "key": ({"structure": Misnamed()}, "Misnamed.apply failed: KeyError: 'V'."),
    "theta": ({"optimizer": Decayed()}, "(momentum_decay is None; with has_momentum = True it is the gate)."),
    "state": ({"optimizer": Stateless()}, "it is the gate; state is None, as init returns)."),
    "if": ({"optimizer": Branching()}, _TRACED),
    "no update": ({"optimizer": Unmoving()}, "Unmoving.update is not implemented."),
    "decay": ({"retention": Ungated()}, "Ungated.decay failed: Ungated.decay() takes 2 positional arguments but 3 were given."),
    "map": ({"retention": Unmapped()}, "Unmapped.map returned shape (4,) for a weight of shape (4, 4); it must be (4, 4)."),
    "degree_one": (
        {"features": Residual(), "structure": structures.MLP()},
        "Residual.degree_one returned shape (2, 8) for keys of shape (2, 4); it must be (2, 4).",
    ),
    "dim": ({"features": Fractional()}, "Fractional.dim returned 6.0 for a key of size 4; it must be an integer ≥ 1."),
    "no dim": ({"features": Undimensioned()}, "Undimensioned.dim is not implemented."),
    "key_dim": ({"features": Fixed()}, "Fixed.key_dim failed: Fixed() has 8 features for several key sizes."),
    "coefficients": ({"features": Scaled()}, "(coefficients is None, as init returns)."),
}  # fmt: skip


@pytest.mark.parametrize("mistake", _MISTAKES)
def test_the_method_is_named(mistake):
    parts, words = _MISTAKES[mistake]
    with pytest.raises(ValueError, match=r"^\w+\.\w+") as error:
        _init(**parts)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("part", [{"objective": Thresholded()}, {"features": Scaled()}, {"features": Undimensioned()}])
def test_a_model_names_the_method_too(part):
    """It asks for gates and step sizes before it creates the parameters."""
    rule = memory.MemoryRule(structures.Matrix(), optimizer=optimizers.GradientDescent(), chunk_size=2, **part)
    with pytest.raises(ValueError, match=r"\w+\.\w+ (failed: .* is None|is not implemented)"):
        memory.suggested_gates(rule, batch_size=1, time=2, num_heads=1, key_dim=4)


def test_the_cause_is_kept():
    with pytest.raises(ValueError, match=r"Two\.loss failed") as error:
        _init(objective=Two())
    assert isinstance(error.value.__cause__, TypeError)


def test_a_config_error(capsys, tmp_path):
    options = [
        "--preset",
        "titans-tiny",
        "--run-dir",
        str(tmp_path / "run"),
        "--model.dim",
        "16",
        "--model.num-heads",
        "2",
    ]
    assert cli.main(["train", *options, "--model.memory.rule", f"{__name__}:unwritten", "--steps", "1"]) == 2
    assert capsys.readouterr().err == "atlasjax: Unwritten.loss is not implemented.\n"


@pytest.mark.parametrize("features", [Wide(), features.Identity()])
def test_what_is_right_is_accepted(features):
    shapes = "{'V': (v, v + 2), 'W': (v + 2, f)}"
    rule, params = _init(structure=Shaped(shapes), objective=Loss(), optimizer=Descent(), features=features)
    x = jax.random.normal(jax.random.key(1), (1, 3, 1, 4))
    y, _ = memory.scan(rule, params, None, x, x, x, memory.Gates(retention=0.9, step_size=0.1))
    assert jnp.isfinite(y).all()


def _optimizer(**traits):
    return type("Traits", (Descent,), traits)()


@pytest.mark.parametrize(
    ("traits", "words"),
    [
        ({"every": 0}, "its every=0, which must be an integer ≥ 1"),
        ({"every": 2.0}, r"its every=2.0, which must be an integer ≥ 1"),
        ({"orthogonalizes": True, "has_momentum": True, "schedule": "standard"}, "its steps=None, which must be an integer ≥ 0"),
        ({"orthogonalizes": True, "has_momentum": True, "steps": 5}, "its schedule=None, which must be 'standard' or"),
        ({"orthogonalizes": True, "steps": 5, "schedule": "standard"}, "its has_momentum=False, which must be True"),
    ],
)  # fmt: skip
def test_traits_of_an_optimizer_are_checked(traits, words):
    with pytest.raises(ValueError, match=f"MemoryRule: optimizer=.*Traits.* clashes with {words}") as error:
        memory.MemoryRule(optimizer=_optimizer(**traits), chunk_size=2)
    assert "\n" not in str(error.value)


@dataclasses.dataclass(frozen=True)
class Counted(optimizers.Optimizer):
    """Its state is float32, whatever the weights are."""

    def init(self, weights):
        return {"scale": jnp.ones((1,), jnp.float32)}

    def update(self, state, gradient, step_size, momentum_decay):
        scale = state["scale"] * (1.0 + step_size)
        return {name: -step_size * scale * g for name, g in gradient.items()}, {"scale": scale}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_a_float32_state_where_float64_is_the_default(dtype, x64):
    rule, params = _init(structure=structures.MLP(), optimizer=Counted())
    q, k, v = jax.random.normal(jax.random.key(1), (3, 1, 6, 1, 4), dtype) / 2
    gates = memory.Gates(retention=0.9, step_size=0.1)
    y, state = memory.scan(rule, params, None, q, k, v, gates)
    expected, _ = memory.reference(rule, params, None, q, k, v, gates)
    np.testing.assert_allclose(y, expected, atol=1e-5 * jnp.abs(expected).max())
    assert y.dtype == dtype
    assert math.isclose(state.momentum["scale"].item(), 1.1**6, rel_tol=1e-5)


class Widening(Counted):
    def update(self, state, gradient, step_size, momentum_decay):
        steps, after = super().update(state, gradient, step_size, momentum_decay)
        return steps, {"scale": after["scale"].astype(float)}


def test_a_state_that_becomes_float64_is_refused(x64):
    with pytest.raises(
        ValueError, match=r"Widening.update returned the state {scale: float64\[1\]}; it must be like that"
    ):
        _init(structure=structures.MLP(), optimizer=Widening())
