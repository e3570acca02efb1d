"""Large-chunk memories are the published formulas, with gradients by hand in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.memory import LargeChunkRule
from tests.memory.cases import assert_close
from tests.memory.large_chunk.cases import make_inputs
from tests.memory.large_chunk.formula import lact

EXACT = 1e-9


@pytest.mark.parametrize("schedule", ["lact", None])
def test_lact(schedule, x64):
    """Values of another size than keys, so that no matrix is square; 23 tokens are three chunks of 6 and 5 more."""
    rule = LargeChunkRule(chunk_size=6, momentum=True, schedule=schedule)
    params, q, k, v, gates = make_inputs(rule, value_dim=3)
    y, state = jax.jit(lambda: memory.reference(rule, params, None, q, k, v, gates))()
    for b in range(2):
        for h in range(2):
            of_head = [np.asarray(x[b, :, h]) for x in (q, k, v, gates.step_size, gates.momentum_decay)]
            weights = [np.asarray(params.weights[name][h]) for name in rule.names]
            expected, after, sums = lact(weights, *of_head, 6, schedule)
            assert_close(y[b, :, h], expected, EXACT)
            assert_close([state.memory[name][b, h] for name in rule.names], after, EXACT)
            assert_close([state.sums[name][b, h] for name in rule.names], sums, EXACT)
    assert (state.position == 5).all()


def test_in_place_ttt(x64):
    """W_{c+1} = W_c + η Σ_t (P u_t) h_tᵀ over chunk c, y_t = W_c h_t, with the down projection of an MLP as M_0."""
    rule, eta, chunk, time = rules.in_place_ttt(chunk_size=4), 0.3, 4, 14
    rng = np.random.default_rng(1)
    down, P = rng.standard_normal((3, 5)), rng.standard_normal((3, 3))
    h, u = rng.standard_normal((2, time, 5)), rng.standard_normal((2, time, 3))
    params = memory.MemoryParams({"W": jnp.asarray(down)[None]}, None, None)
    tokens = (jnp.asarray(x)[:, :, None] for x in (h, h, u @ P.T))
    y, _ = memory.scan(rule, params, None, *tokens, memory.Gates(step_size=eta))
    for row in range(2):
        for t in range(time):
            past = t // chunk * chunk
            W = down + eta * sum(np.outer(P @ u[row, s], h[row, s]) for s in range(past))
            assert_close(y[row, t, 0], W @ h[row, t], EXACT)


def test_a_chunk_longer_than_the_sequence_is_only_read(x64):
    rule = LargeChunkRule()
    params, q, k, v, gates = make_inputs(rule, time=9)
    y, state = memory.scan(rule, params, None, q, k, v, gates)
    assert_close(y, memory.read(rule, params, memory.init_state(rule, params, batch_size=2), q), EXACT)
    assert (state.position == 9).all()
    assert all((w == params.weights[name]).all() for name, w in state.memory.items())
    assert all((abs(g) > 0).any() for g in state.sums.values())


def test_a_complete_last_chunk_is_written(x64):
    """LaCT's code leaves it out. The outputs do not show this; the state does."""
    rule = LargeChunkRule(chunk_size=4)
    params, q, k, v, gates = make_inputs(rule, time=4)
    state = memory.scan(rule, params, None, q, k, v, gates)[1]
    assert (state.position == 0).all()
    assert all((abs(state.memory[name] - w) > 0).any() for name, w in params.weights.items())
    assert all((g == 0).all() for g in state.sums.values())
    rows = lambda w: np.linalg.norm(w, axis=-1)
    for name, w in params.weights.items():
        assert_close(rows(state.memory[name]), np.broadcast_to(rows(w), state.memory[name].shape[:-1]), 1e-4)
