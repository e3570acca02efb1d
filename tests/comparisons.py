"""Comparisons of arrays with their definition, relative to the largest expected number."""

import jax
import jax.numpy as jnp
import numpy as np


def close(got, expected, tolerance=1e-5):
    """Of arrays, or of trees of arrays leaf by leaf."""
    for have, want in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        want = np.asarray(want, np.float64)
        np.testing.assert_allclose(np.asarray(have, np.float64), want, rtol=0, atol=tolerance * np.abs(want).max())


def close_with_gradients(run, definition, x, shape):
    """The outputs [*shape] of run(*x) and of its definition, and the gradients of all x. Returns the gradients."""
    weights = jax.random.normal(jax.random.key(9), shape)
    graded = lambda f: jax.jit(
        jax.value_and_grad(lambda x: (lambda y: (jnp.sum(weights * y), y))(f(*x)), has_aux=True)
    )(x)
    (_, expected), expected_gradients = graded(definition)
    (_, y), gradients = graded(run)
    close(y, expected)
    for got, want in zip(gradients, expected_gradients, strict=True):
        close(got, want, 2e-5)
    return gradients
