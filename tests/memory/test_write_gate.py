"""The write gate of momentum: its formula, where it is refused, its initial values. Engine against reference: `cases.RULES`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax import memory, rules
from atlasjax.memory import Bound, Gates, MemoryRule, SoftmaxRule, objectives, optimizers, structures
from atlasjax.nn import GateProjection
from tests.memory.cases import assert_close, make_inputs

GATED = optimizers.Momentum(write_gate=True)
TITANS = dataclasses.replace(rules.titans(8), optimizer=GATED)


@dataclasses.dataclass(frozen=True)
class GatedMuon(optimizers.Muon):
    write_gate = True
    orthogonalizes = True


@dataclasses.dataclass(frozen=True)
class GatedDescent(optimizers.GradientDescent):
    write_gate = True
    is_linear = True


def test_a_gate_of_one_is_the_rule_without_it(x64):
    params, q, k, v, gates = make_inputs(TITANS, dtype=jnp.float64, write_size=1.0)
    expected = memory.scan(rules.titans(8), params, None, q, k, v, gates._replace(write_size=None))
    assert_close(memory.scan(TITANS, params, None, q, k, v, gates), expected, 1e-12)


def test_a_gate_of_zero_writes_nothing_but_keeps_the_gradients(x64):
    """Without decay: the momentum is another one, the memory is the same, and the token that writes adds all of it."""
    rule = dataclasses.replace(TITANS, structure=structures.Matrix()).unbounded()
    params, q, k, v, gates = make_inputs(rule, dtype=jnp.float64, retention=1.0, write_size=0.0)
    initial = memory.init_state(rule, params, batch_size=2)
    _, state = memory.scan(rule, params, None, q, k, v, gates)
    assert_close(state.memory, initial.memory, 1e-12)
    assert np.abs(state.momentum["W"]).max() > 0.01
    _, last = memory.scan(rule, params, None, q, k, v, gates._replace(write_size=gates.write_size.at[:, -1].set(1.0)))
    assert_close(last.memory["W"], initial.memory["W"] + state.momentum["W"], 1e-12)


@pytest.mark.parametrize("optimizer", [GatedMuon(), GatedDescent()], ids=lambda o: type(o).__name__)
def test_where_the_step_size_is_such_a_gate_already(optimizer):
    with pytest.raises(
        ValueError, match=r"MemoryRule: optimizer=Gated.* clashes with its write_gate=True: .*step_size"
    ):
        MemoryRule(optimizer=optimizer)


def test_softmax_memories_have_none():
    with pytest.raises(ValueError, match=r"Momentum\(write_gate=True\): a softmax memory has no write gate"):
        SoftmaxRule(structures.Matrix(), optimizer=GATED)


def test_calls():
    params, q, k, v, gates = make_inputs(TITANS)
    scan = lambda gates: memory.scan(TITANS, params, None, q, k, v, gates, check_gates=True)
    with pytest.raises(ValueError, match=r"gates.write_size is missing"):
        scan(gates._replace(write_size=None))
    with pytest.raises(ValueError, match=r"gates.write_size must be in \[0, 1\], got 1.5"):
        scan(gates._replace(write_size=gates.write_size + 1.5 - gates.write_size))
    with pytest.raises(ValueError, match=r"gates.write_size is given, but this rule has no such gate"):
        memory.scan(rules.titans(8), params, None, q, k, v, gates)
    with pytest.raises(ValueError, match="Momentum: write_gate must be True or False, got 1"):
        optimizers.Momentum(write_gate=1)


def test_initial_gates_and_their_projection():
    suggested = memory.suggested_gates(TITANS, batch_size=1, time=3, num_heads=2, key_dim=4)
    assert suggested.write_size.shape == (1, 3, 2)
    plain = memory.suggested_gates(rules.titans(8), batch_size=1, time=3, num_heads=2, key_dim=4)
    assert_close(suggested._replace(write_size=None), plain, 1e-6)
    sizes = {"dim": 8, "num_heads": 2, "key_dim": 4, "value_dim": 4, "max_step": None}
    learned = GateProjection(TITANS, **sizes, rngs=nnx.Rngs(0))(jnp.zeros((1, 3, 8)))
    assert_close(learned, suggested, 1e-5)


def test_the_bound_holds_for_gates_that_change(x64):
    """SEMANTICS 1.12: max(‖M‖², ‖M + (H − β) S‖²) grows by at most H η̄ ‖v‖² per token, also if β and θ change at every token."""
    rule = MemoryRule(structures.Matrix(), objectives.L2(), optimizer=GATED, chunk_size=16, bound=Bound(horizon=8.0))
    params, q, k, v, _ = make_inputs(rule, time=600, batch=1, key_dim=8, value_dim=8, dtype=jnp.float64)
    rng = np.random.default_rng(0)
    some = lambda: jnp.asarray(rng.integers(0, 2, v.shape[:3]), jnp.float64)
    gates = Gates(retention=jnp.ones_like(v[..., 0]), step_size=5.0, momentum_decay=some(), write_size=some())
    k = jnp.where(some()[..., None] > 0, k, k[:, :1])  # half of all keys are one

    params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
    _, state = memory.scan(rule, params, None, q, k, v, gates)
    start = jnp.sum(jnp.square(params.weights["W"]), axis=(-2, -1))
    total = jnp.sum(jnp.square(v), axis=(1, 3))[0]  # H η̄ ‖k‖² ≤ 1
    for reach in (0.0, 7.0, 8.0):
        size = jnp.sum(jnp.square(state.memory["W"] + reach * state.momentum["W"]), axis=(-2, -1))[0]
        assert np.all(size <= start + 1.001 * total)
