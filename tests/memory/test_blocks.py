"""Parts of the arithmetic of a block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.memory import blocks
from tests.marks import some_slow


@pytest.mark.parametrize(("shape", "axis"), [((2, 1, 3), -2), ((2, 1, 3), 1), ((3, 1, 2, 2), 1), ((2, 3, 1), -1)])
@pytest.mark.parametrize("size", [1, 2, 7, 8])
def test_spread_is_a_broadcast(shape, axis, size):
    """Value, forward and reverse derivatives, and the derivative of the derivative."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    x, tangent = normal(*shape), normal(*shape)
    wide = (*shape[:axis], size, *shape[axis:][1:])
    weights = normal(*wide)

    def numbers(spread):
        value = lambda x: jnp.sum(weights * spread(x) ** 3)
        slope = jax.grad(value)
        return spread(x), jax.jvp(spread, (x,), (tangent,)), slope(x), jax.grad(lambda x: jnp.sum(slope(x) ** 2))(x)

    both = lambda: (numbers(lambda x: blocks.spread(x, size, axis)), numbers(lambda x: jnp.broadcast_to(x, wide)))
    for a, b in zip(*map(jax.tree.leaves, jax.jit(both)()), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * np.abs(b).max())


def test_its_derivative_has_no_sum_over_an_axis():
    """The slow operation of XLA's CPU backend."""
    pullback = lambda x, d: jax.vjp(lambda x: blocks.spread(x, 8, -2), x)[1](d)
    program = str(jax.make_jaxpr(pullback)(jnp.ones((4, 1, 3)), jnp.ones((4, 8, 3))))
    assert "split" in program, program
    assert "reduce_sum" not in program, program


def test_gram_has_the_derivatives_of_the_product_of_rows(x64):
    x, dx, weight = (
        np.random.default_rng(i).standard_normal(shape) for i, shape in enumerate([(5, 3), (5, 3), (5, 5)])
    )
    for of in (lambda f, x: jax.jvp(f, (x,), (dx,)), lambda f, x: jax.vjp(f, x)[1](jnp.asarray(weight))):
        for got, wanted in zip(of(blocks.gram, x), of(lambda x: x @ x.T, x), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)


def test_gram_takes_one_product_for_its_derivative():
    text = str(jax.make_jaxpr(jax.grad(lambda x: jnp.sin(blocks.gram(x)).sum()))(jnp.ones((4, 4))))
    assert text.count("matrix_product") == 2


@pytest.mark.parametrize("size", some_slow([1, 2, 5, 8], [2, 8]))
def test_unit_lower_solve_has_the_derivatives_of_a_solve(size, x64):
    rng = np.random.default_rng(size)
    lower, right = np.tril(rng.standard_normal((size, size)), -1), rng.standard_normal(size)
    changes = np.tril(rng.standard_normal((size, size)), -1), rng.standard_normal(size)
    wanted = lambda lower, right: jnp.linalg.solve(jnp.eye(size) + jnp.tril(lower, -1), right)
    solve = lambda lower, right: blocks.unit_lower_solve(jnp.tril(lower, -1), right)
    second = lambda f: jax.hessian(lambda x: f(x * lower, right).sum())(1.5)
    for of in (
        lambda f: jax.jvp(f, (lower, right), changes),
        lambda f: jax.vjp(f, lower, right)[1](jnp.arange(1.0, size + 1)),
        lambda f: [second(f)],
    ):
        for got, expected in zip(of(solve), of(wanted), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)
