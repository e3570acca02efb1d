"""A user's own file: rules that the library does not have, made of its public classes only. docs/own_rule.md explains them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax.memory import MemoryRule, features, objectives, optimizers, retention, structures


@dataclasses.dataclass(frozen=True)
class LogCosh(objectives.Objective):
    """Σ log cosh(out − v): ℓ2 near the target, ℓ1 far from it."""

    has_target = True  # convex, with its minimum at v: step sizes may be bounded

    def loss(self, out, v, threshold=None):
        error = jnp.abs(out - v)
        return jnp.sum(error + jnp.log1p(jnp.exp(-2.0 * error)) - jnp.log(2.0), axis=-1)


@dataclasses.dataclass(frozen=True)
class CappedL2(objectives.L2):
    """A subclass of ℓ2 with another loss: it must not be taken for the delta rule. The error is capped at `most`, smoothly."""

    most: float = 1.0

    def loss(self, out, v, threshold=None):
        return 0.5 * jnp.sum(jnp.square(self.most * jnp.tanh((out - v) / self.most)), axis=-1)


@dataclasses.dataclass(frozen=True)
class RemoveWhereRead(objectives.DeltaKeys):
    """A delta rule that removes at the read key itself, and writes the value at k."""

    writes_at_own_keys = True

    def removed_at(self, k, own):
        return own["removal_key"]


@dataclasses.dataclass(frozen=True)
class SwiGLU(structures.Structure):
    """M(x) = W1 (silu(W2 x) ⊙ W3 x): three matrices, no residual."""

    expansion: int = 2

    def weight_shapes(self, feature_dim, value_dim):
        hidden = self.expansion * value_dim
        return {"W1": (value_dim, hidden), "W2": (hidden, feature_dim), "W3": (hidden, feature_dim)}

    def apply(self, linear, x, skip, norm):
        return linear("W1", jax.nn.silu(linear("W2", x)) * linear("W3", x))


@dataclasses.dataclass(frozen=True)
class SignMomentum(optimizers.Optimizer):
    """S_t = θ_t S_{t−1} + (1 − θ_t) g_t; every weight moves by η_t against the sign of S_t."""

    has_momentum = True

    def update(self, state, gradient, step_size, momentum_decay):
        S = {name: momentum_decay * state[name] + (1.0 - momentum_decay) * g for name, g in gradient.items()}
        return {name: -step_size * jnp.sign(s) for name, s in S.items()}, S


@dataclasses.dataclass(frozen=True)
class Adam(optimizers.Optimizer):
    """Adam on every weight by itself, with fixed decay rates: no gate for momentum, two moments and a count in the state."""

    b1: float = 0.8
    b2: float = 0.9
    epsilon: float = 1e-2

    def init(self, weights):
        zeros = jax.tree.map(jnp.zeros_like, weights)
        return {"mean": zeros, "square": jax.tree.map(jnp.copy, zeros), "count": jnp.zeros_like(weights["W1"][0, 0])}

    def update(self, state, gradient, step_size, momentum_decay):
        count = state["count"] + 1.0
        mean = {n: self.b1 * state["mean"][n] + (1.0 - self.b1) * g for n, g in gradient.items()}
        square = {n: self.b2 * state["square"][n] + (1.0 - self.b2) * g * g for n, g in gradient.items()}

        def step(m, s):
            m, s = m / (1.0 - self.b1**count), s / (1.0 - self.b2**count)
            return (
                -step_size * m / jnp.sqrt(s + self.epsilon**2)
            )  # ε inside the root: its derivative is finite at s = 0

        steps = {n: step(mean[n], square[n]) for n in gradient}
        return steps, {"mean": mean, "square": square, "count": count}


@dataclasses.dataclass(frozen=True)
class RandomFourier(features.Features):
    """√(2/D) cos(Ω x + b) with Ω and b drawn once from `seed` (Rahimi and Recht 2007). Nothing is learned."""

    size: int = 16
    input_dim: int = 4
    seed: int = 0

    def dim(self, key_dim):
        return self.size

    def key_dim(self, feature_dim):
        return self.input_dim  # D is the same for any size of key

    def apply(self, coefficients, x):
        drawn = np.random.default_rng(self.seed)
        omega, phase = drawn.standard_normal((self.input_dim, self.size)), drawn.uniform(0, 2 * np.pi, self.size)
        return (2.0 / self.size) ** 0.5 * jnp.cos(x @ jnp.asarray(omega, x.dtype) + jnp.asarray(phase, x.dtype))


@dataclasses.dataclass(frozen=True)
class SoftThreshold(retention.Retention):
    """Elastic-net retention: weights decay by α_t, and then move towards zero by `amount`, but not past it."""

    amount: float = 1e-3

    def decay(self, weight, alpha):
        weight = alpha * weight
        return jnp.sign(weight) * jnp.maximum(jnp.abs(weight) - self.amount, 0.0)


IDEAS: dict[str, MemoryRule] = {
    "own_loss": MemoryRule(objective=LogCosh(), window=3, chunk_size=8),
    "own_loss_matrix": MemoryRule(
        structures.Matrix(), CappedL2(), optimizer=optimizers.GradientDescent(), retention=retention.Full(), chunk_size=1
    ),
    "own_structure": MemoryRule(SwiGLU(), window=2, chunk_size=8),
    "own_sign_momentum": MemoryRule(optimizer=SignMomentum(), window=3, chunk_size=10),
    "own_adam": MemoryRule(structures.MLP(expansion=2), optimizer=Adam(), chunk_size=8),
    "own_features": MemoryRule(
        structures.Matrix(), features=RandomFourier(), optimizer=optimizers.GradientDescent(), chunk_size=8, window=11
    ),
    "own_delta_rule": MemoryRule(
        structures.Matrix(), RemoveWhereRead(), optimizer=optimizers.GradientDescent(),
        retention=retention.Channel(), chunk_size=1,
    ),
    "own_retention": MemoryRule(retention=SoftThreshold(), window=2, chunk_size=9),
    "all_of_them": MemoryRule(SwiGLU(), LogCosh(), RandomFourier(), Adam(), SoftThreshold(), window=5, chunk_size=4),
}  # fmt: skip
