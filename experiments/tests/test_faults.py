"""experiments/faults: a small part of the generated attack, and that a failure is seen."""

import importlib
import time

import pytest

from experiments.faults import run

# The other classes prepare longer before their first case, and their cases compile more.
MOST = {
    "checkpoints": 6, "calls": 60, "texts": 40, "arrays": 12, "amounts": 8, "weights": 6, "hard": 3, "trust": 3, "others": 8,
    "server": 12, "folders": 1, "commands": 4, "versions": 3, "gradients": 1, "programs": 1, "processes": 1,
}  # fmt: skip
SLOW = ("amounts", "weights", "hard", "trust", "folders", "commands", "versions", "gradients", "programs", "processes")


@pytest.mark.parametrize(
    "attacked", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in run.CLASSES]
)
def test_a_small_part_of_the_attack(attacked):
    cases = importlib.import_module(f"experiments.faults.{attacked}").cases
    counts = run.attack(cases(seed=1, most=MOST[attacked]))
    assert sum(counts.values()) >= MOST[attacked]
    assert not set(counts) & set(run.FAILURES), counts


def test_a_failure_is_seen(monkeypatch, capsys):
    monkeypatch.setattr(run, "SECONDS", 1)

    def raises() -> str:
        raise KeyError("98m")

    def differs() -> str:
        raise run.WrongError("by 3")

    def hangs() -> str:
        while True:
            time.sleep(0.01)

    slow = run.Slow(lambda: time.sleep(1.2) or "right")
    cases = [("a", lambda: "wrong"), ("b", raises), ("c", hangs), ("d", lambda: "right"), ("e", differs), ("f", slow)]
    assert run.attack(iter(cases)) == {"wrong": 2, "traceback": 1, "hang": 1, "right": 2}
    printed = capsys.readouterr().out
    assert "traceback: b KeyError: '98m'" in printed
    assert "wrong: e by 3" in printed
