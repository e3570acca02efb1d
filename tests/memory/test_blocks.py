"""Parts of the arithmetic of a block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.memory import blocks


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
