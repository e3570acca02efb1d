"""experiments/timing.py: programs take turns, and a rule's inputs are what `memory.scan` takes."""

import numpy as np

from atlasjax import rules
from experiments import timing


def test_runs_take_turns_and_the_first_round_is_not_counted():
    order, times = [], iter([0, 1, 10, 19, 20, 23, 30, 34, 40, 42])
    found = timing.in_turn({name: lambda name=name: order.append(name) for name in "ab"}, 2, clock=lambda: next(times))
    assert "".join(order) == "ababab"
    assert found == {"a": 4, "b": 2}


def test_inputs_of_a_rule():
    rule = rules.gated_delta_rule()
    params, q, k, v, gates = timing.inputs(rule, 6, 2, 4, {"step_size": (0.7, 0.8)})
    assert q.shape == k.shape == v.shape == (1, 6, 2, 4)
    np.testing.assert_allclose(np.linalg.norm(k, axis=-1), 1, rtol=1e-5)
    assert 0.7 <= gates.step_size.min() <= gates.step_size.max() <= 0.8
    run, temporary = timing.compiled(timing.squares(rule), params, q, k, v, gates)
    assert temporary >= 0
    assert all(np.isfinite(x).all() for x in run()[1:4])
