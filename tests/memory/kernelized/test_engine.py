"""The engine against the token-by-token reference: outputs, final state, gradients of everything."""

import jax
import jax.numpy as jnp
import pytest

from atlasjax.memory import kernelized
from tests.memory.cases import assert_close
from tests.memory.kernelized.cases import RULES, make_inputs

EXACT = 1e-9  # two forms of one function in float64


def objective(fn, rule, state, params, q, k, v, gates, **kwargs):
    """A scalar that every output and every state leaf enters with its own weight; and those."""
    y, state = fn(rule, params, state, q, k, v, gates, **kwargs)
    total = jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape))
    for leaf in jax.tree.leaves(state):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            total += jnp.sum(jnp.sin(leaf + jnp.arange(leaf.size).reshape(leaf.shape)))
    return total, (y, state)


def both(rule, **kwargs):
    """Jitted value-and-gradient functions of the reference and of the engine, of (state, params, q, k, v, gates)."""
    functions = []
    for fn in (kernelized.reference, kernelized.scan):
        extra = {k: v for k, v in kwargs.items() if k != "max_segments" or fn is kernelized.scan}
        run = lambda *args, fn=fn, extra=extra: objective(fn, rule, *args, **extra)
        functions.append(jax.jit(jax.value_and_grad(run, argnums=(1, 2, 3, 4, 5), has_aux=True)))
    return functions


@pytest.mark.parametrize("name", RULES)
def test_outputs_state_and_gradients(name, x64, short_blocks):
    rule = RULES[name]
    args = make_inputs(rule, dtype=jnp.float64)
    reference, scan = both(rule)
    assert_close(scan(None, *args), reference(None, *args), EXACT)
