"""experiments/evidence: the verdict of a direction, the signs of the comparisons, and the page's parts.

That docs/evidence.md is what the rows give is in tests/test_site.py, with the other generated pages.
"""

import pytest

from experiments.evidence import page, sources
from experiments.evidence.directions import DIRECTIONS, EXPERIMENTS, Direction
from experiments.evidence.sources import Line
from experiments.intervals import compare

BETTER, WORSE, OPEN = [1.0, 1.1, 0.9, 1.0], [-1.0, -1.1, -0.9, -1.0], [1.0, -1.0, 1.1, -1.2]


def line(differences, unit="accuracy"):
    return Line("a against b", compare(differences, [0.0] * len(differences)), unit, 1000, "capacity")


@pytest.mark.parametrize(
    ("lines", "verdict"),
    [
        ([], "not run"),
        ([OPEN, [5.0]], "undecided"),
        ([BETTER, [5.0]], "reproduced"),
        ([BETTER, OPEN], "reproduced in part"),
        ([WORSE, OPEN, WORSE], "refuted here in part"),
        ([BETTER, WORSE], "depends on the setting"),
    ],
)
def test_verdict_of_a_direction(lines, verdict):
    assert page.verdict([line(x) for x in lines]) == verdict


def test_one_seed_has_no_interval_and_a_borrowed_power(monkeypatch):
    monkeypatch.setattr(page, "language_spread", lambda: 0.01)
    direction = Direction("a is better", "A", lambda: [line([0.02], "bits per byte"), line(OPEN)], ("zoo",))
    text = page._section(3, direction)
    assert "| +0.020 bits per byte |  |  | 1 | 1,000 | undecided |" in text
    assert "by the spread of titans-tiny" in text
    assert "by their spread between seeds" in text
    assert "python -m experiments.zoo.run" in text


def test_a_lower_loss_is_better(monkeypatch):
    found = [
        {"model": model, "bits_per_byte": loss + seed, "tokens": 8, "recipe": {"seed": seed}}
        for model, loss in (("good", 2.0), ("bad", 2.5))
        for seed in range(3)
    ]
    monkeypatch.setattr(sources, "rows", lambda path: found)
    for compared in sources.ablation([("good", "bad"), ("good", "missing")]):
        assert compared.comparison.differences == (0.5, 0.5, 0.5)
        assert compared.comparison.verdict == "reproduced"
    assert len(sources.ablation([("good", "missing")])) == 0


def test_larger_curves_are_better(monkeypatch):
    found = [
        {"budget": 256, "passes": 1, "keys": "narrow", "memory": name, "floats": 256, "recalled": curves,
         "recipe": {"pairs": [2, 4, 8]}}
        for name, curves in (("good", [[1, 1, 1], [1, 1, 0.8]]), ("bad", [[1, 1, 0], [1, 1, 0]]))
    ]  # fmt: skip
    monkeypatch.setattr(sources, "rows", lambda path: found)
    (compared,) = sources.capacity([("good", "bad")])
    assert compared.comparison.differences == pytest.approx((0.5, 0.4))


def test_there_are_nineteen_directions_and_each_has_a_command():
    assert len(DIRECTIONS) == 19
    for direction in DIRECTIONS:
        assert direction.experiments
        assert set(direction.experiments) <= set(EXPERIMENTS)
