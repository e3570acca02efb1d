"""Retention maps: their shortcuts and derivatives against the formulas, and their block of tokens against the general engine's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory
from atlasjax.memory import MemoryRule, optimizers, retention, structures
from tests.marks import if_slow
from tests.memory.cases import assert_close, make_inputs

MAPS = (retention.KL(), retention.Lq(), retention.Lq(2.5), retention.Lq(7.0), retention.Lq(3.0, published=True))


def matrices(*shape):
    return tuple(jnp.asarray(np.random.default_rng(i).standard_normal(shape)) for i in range(2))


@pytest.mark.parametrize("kind", MAPS, ids=repr)
def test_shortcuts_give_what_the_methods_give(kind, x64):
    A, _ = matrices(5, 7)
    left, right = jnp.linspace(-1.0, 2.0, 5), jnp.linspace(-3.0, 1.0, 7)
    stored = kind.start(A)
    assert_close(kind.stored_and_mapped(A), (stored, kind.map(stored)), 1e-13)
    for derivative in (lambda f: f, lambda f: jax.grad(f, argnums=(0, 1, 2))):
        outer = derivative(kind.change_along_outer)(stored, left, right)
        formed = derivative(lambda A, left, right: kind.change_along(A, jnp.outer(left, right)))(stored, left, right)
        assert_close(outer, formed, 1e-12)


@pytest.mark.parametrize("q", [2.0, 2.5, 3.0, 4.0, 7.0])
def test_monetas_map_has_the_derivative_of_its_formula(q, x64):
    A, D = matrices(3, 5)
    formula = lambda A: jnp.sign(A) * jnp.abs(A) ** (q - 1) / jnp.sum(jnp.abs(A) ** q) ** ((q - 2) / q)
    kind = retention.Lq(q)
    assert_close(jax.jvp(kind.map, (A,), (D,)), jax.jvp(formula, (A,), (D,)), 1e-12)
    assert_close(jax.vjp(kind.map, A)[1](D), jax.vjp(formula, A)[1](D), 1e-12)
    second = lambda f: jax.grad(lambda A: jnp.sum(D * jax.grad(lambda A: jnp.sum(D * jnp.sin(f(A))))(A)))
    assert_close(second(kind.map)(A), second(formula)(A), 1e-11)


@pytest.mark.parametrize("size", [1e-15, 1.0, 1e15])
def test_monetas_map_and_its_derivative_keep_their_range_in_float32(size):
    """The fourth powers of these entries leave float32."""
    A, D = (x.astype(jnp.float32) for x in matrices(3, 5))
    kind = retention.Lq(4.0)
    value, change = jax.jvp(kind.map, (size * A,), (D,))
    assert_close((value / size, change), jax.jvp(kind.map, (A,), (D,)), 1e-5)


def test_the_derivative_of_monetas_map_is_finite_where_an_entry_or_all_are_zero():
    A = jnp.asarray([[0.0, 1.0], [2.0, 0.0]])
    for q in (2.0, 2.5, 4.0):
        for at in (A, 0 * A):
            _, change = jax.jvp(retention.Lq(q).map, (at,), (jnp.ones_like(A),))
            assert jnp.isfinite(change).all()


@dataclasses.dataclass(frozen=True)
class Doubled(retention.KL):
    """A map of its own. The shortcuts of `KL` would use the map of `KL`."""

    def map(self, accumulator):
        return 2.0 * super().map(accumulator)


def test_a_subclass_does_not_inherit_shortcuts(x64):
    A, D = matrices(4, 4)
    assert_close(Doubled().stored_and_mapped(A)[1], 2.0 * retention.KL().map(A), 1e-13)
    assert_close(
        Doubled().change_along_outer(A, D[0], D[1]), 2.0 * retention.KL().change_along_outer(A, D[0], D[1]), 1e-12
    )


@dataclasses.dataclass(frozen=True)
class UnclaimedKL(retention.KL):
    """The general engine takes it, because it claims nothing."""


@dataclasses.dataclass(frozen=True)
class UnclaimedLq(retention.Lq):
    """As `UnclaimedKL`."""

    def change_along(self, accumulator, direction):
        return retention.Lq(self.q).change_along(accumulator, direction)


KINDS = {"KL": (retention.KL(), UnclaimedKL()), "Lq": (retention.Lq(), UnclaimedLq())}
BLOCKS = {
    "deep": MemoryRule(structures.MLP(expansion=2), optimizer=optimizers.GradientDescent(), chunk_size=20),
    "momentum_window": MemoryRule(structures.MLP(expansion=2), optimizer=optimizers.Momentum(), window=3, chunk_size=9),
    "channel_steps": MemoryRule(
        structures.Matrix(), optimizer=optimizers.GradientDescent(per_channel=True), chunk_size=8
    ),
    "matrix_window": MemoryRule(structures.Matrix(), optimizer=optimizers.Momentum(), window=3, chunk_size=9),
    "unbounded": MemoryRule(structures.Matrix(), optimizer=optimizers.Momentum(), chunk_size=8, bound=None),
}
# Each with one of the two maps, but for a window over two layers, which compiles for ten seconds.
ONCE = {("deep", "KL"), ("matrix_window", "Lq"), ("channel_steps", "KL"), ("unbounded", "Lq")}


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) if (name, kind) in ONCE else if_slow(name, kind) for name in BLOCKS for kind in KINDS],
)
def test_a_mapped_block_is_the_general_block(name, kind, x64):
    """Values, states and all derivatives, with large steps, so that the bound acts."""
    fast, general = (dataclasses.replace(BLOCKS[name], retention=each) for each in KINDS[kind])
    assert fast.maps_sums
    assert not general.maps_sums
    params, q, k, v, gates = make_inputs(fast, dtype=jnp.float64, time=21)
    gates = gates._replace(step_size=20.0 * gates.step_size)

    def outputs(rule, *args):
        y, state = memory.scan(rule, args[0], None, *args[1:])
        return jnp.sum(jnp.sin(y)) + sum(jnp.sum(jnp.cos(w)) for w in state.memory.values()), (y, state.memory)

    both = [
        jax.value_and_grad(lambda *a, rule=r: outputs(rule, *a), argnums=(0, 1, 2, 3, 4), has_aux=True)(
            params, q, k, v, gates
        )
        for r in (fast, general)
    ]
    assert_close(both[0], both[1], 1e-9)
