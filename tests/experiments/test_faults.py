"""experiments/faults: a small part of the generated attack, and that a failure is seen."""

import time

import pytest

from experiments.faults import calls, checkpoints, run


@pytest.mark.parametrize(("attacked", "most"), [(checkpoints, 6), (calls, 60)], ids=["checkpoints", "calls"])
def test_a_small_part_of_the_attack(attacked, most):
    counts = run.attack(attacked.cases(seed=1, most=most))
    assert sum(counts.values()) == most
    assert not set(counts) & set(run.FAILURES), counts


def test_a_failure_is_seen(monkeypatch, capsys):
    monkeypatch.setattr(run, "SECONDS", 1)

    def raises() -> str:
        raise KeyError("98m")

    def hangs() -> str:
        while True:
            time.sleep(0.01)

    cases = [("a", lambda: "wrong"), ("b", raises), ("c", hangs), ("d", lambda: "right")]
    assert run.attack(iter(cases)) == {"wrong": 1, "traceback": 1, "hang": 1, "right": 1}
    assert "traceback: b KeyError: '98m'" in capsys.readouterr().out
