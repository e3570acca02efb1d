"""Any cut of a sequence into calls is the same function; packed segments are as if alone; caches are bounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.memory import kernelized
from tests.memory.cases import assert_close
from tests.memory.kernelized.cases import RULES, make_inputs

EXACT = 1e-9
TIME, PIECE = 19, 7


def steps(rule, params, state, q, k, v, gates):
    """One `step` a token; outputs, final state, and the state before every token (time axis first)."""

    def body(state, xs):
        y, new = kernelized.step(rule, params, state, *xs)
        return new, (y, state)

    last, (y, before) = jax.lax.scan(body, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, gates)))
    return jnp.moveaxis(y, 0, 1), last, before


@pytest.mark.parametrize("name", RULES)
def test_every_split(name, x64, short_blocks):
    """One token at a time equals the reference; and a call that begins after ANY number of tokens goes on exactly."""
    rule = RULES[name]
    params, q, k, v, gates = make_inputs(rule, batch=1, time=TIME, dtype=jnp.float64)
    state = kernelized.init_state(rule, params, batch_size=1, max_length=TIME, dtype=jnp.float64)
    expected, final = jax.jit(lambda: kernelized.reference(rule, params, state, q, k, v, gates))()
    y, last, before = jax.jit(lambda: steps(rule, params, state, q, k, v, gates))()
    assert_close(y, expected, EXACT, what="steps")
    assert_close(last, final, EXACT, what="state after steps")

    # Every start is a row of one batch, each with its own place in its chunk.
    starts = np.arange(TIME - PIECE + 1)
    rows = starts[:, None] + np.arange(PIECE)
    states = jax.tree.map(lambda x: x[starts, 0], before)
    pieces = jax.tree.map(lambda x: x[0][rows], (q, k, v, gates))
    y, after = jax.jit(lambda: kernelized.scan(rule, params, states, *pieces))()
    assert_close(y, expected[0][rows], EXACT, what="piece")
    ends = starts[:-1] + PIECE
    assert_close(jax.tree.map(lambda x: x[:-1], after), jax.tree.map(lambda x: x[ends, 0], before), EXACT, what="after")
    looked = jax.jit(lambda: kernelized.read(rule, params, after, pieces[0][:, -1:]))()
    assert_close(looked[:, 0], y[:, -1], EXACT, what="read")
