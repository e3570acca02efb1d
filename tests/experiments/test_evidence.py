"""experiments/evidence: the verdict of a direction, the signs of the comparisons, and the page's parts.

That docs/evidence.md is what the rows give is in tests/test_site.py, with the other generated pages.
"""

import dataclasses

import pytest

from experiments.evidence import page, sources
from experiments.evidence.directions import DIRECTIONS, EXPERIMENTS, Direction
from experiments.evidence.sources import Line
from experiments.intervals import compare

BETTER, WORSE, OPEN = [1.0, 1.1, 0.9, 1.0], [-1.0, -1.1, -0.9, -1.0], [1.0, -1.0, 1.1, -1.2]


def line(differences, unit="accuracy", aside=""):
    return Line("a against b", compare(differences, [0.0] * len(differences)), unit, 1000, "capacity", aside)


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


def test_a_higher_speed_is_better(monkeypatch):
    found = [
        {"kind": kind, "model": name, "length": 512, "tokens": 1024, "seconds": seconds,
         "reference_seconds": [2.0, 4.0, 9.0], "device": "cpu: cpu", "recipe": {"rounds": 3, "size": "tiny"}}
        for kind, name, seconds in (("training", "good", [1.0, 2.0, 4.5]), ("training", "bad", [4.0, 8.0, 18.0]),
                                    ("training", "large", None), ("decoding", "good", [9.0, 9.0, 9.0]))
    ]  # fmt: skip
    monkeypatch.setattr(sources, "rows", lambda path: found)
    monkeypatch.setattr(sources, "texts", lambda name: ["cpu-tiny"])
    pairs = [("good", "bad"), ("good", "transformer++"), ("bad", "transformer++"), ("large", "bad")]
    lines = sources.efficiency(pairs)
    assert [line.comparison.differences for line in lines] == [(2.0,) * 3, (1.0,) * 3, (-1.0,) * 3]
    assert lines[0].tokens == 1024


def test_larger_curves_are_better(monkeypatch):
    found = [
        {"budget": 256, "passes": 1, "keys": "narrow", "memory": name, "floats": 256, "recalled": curves,
         "recipe": {"pairs": [2, 4, 8]}}
        for name, curves in (("good", [[1, 1, 1], [1, 1, 0.8]]), ("bad", [[1, 1, 0], [1, 1, 0]]))
    ]  # fmt: skip
    monkeypatch.setattr(sources, "rows", lambda path: found)
    (compared,) = sources.capacity([("good", "bad")])
    assert compared.comparison.differences == pytest.approx((0.5, 0.4))


def test_each_direction_has_a_command_and_a_name():
    assert len({direction.name for direction in DIRECTIONS}) == len(DIRECTIONS)
    for direction in DIRECTIONS:
        assert direction.experiments
        assert set(direction.experiments) <= set(EXPERIMENTS)
        assert {line.source for line in direction.lines()} <= set(direction.experiments)


def test_lines_test_the_claim_that_names_them():
    of = lambda words: [line for d in DIRECTIONS if words in d.name for line in d.lines()]
    assert not [line for line in of("GRM is better than Soup") if "residual" in line.setting]
    assert all("-age" in line.setting for line in of("should see the context"))
    assert not [line for line in of("Muon is the better") if "Muon 1," in line.setting]
    assert {line.aside for line in of("even without a gate") if "linear-residual" in line.setting} == {"control"}
    assert {line.unit for line in of("a larger memory is better")} == {"bits per byte"}


def test_lines_without_a_verdict_decide_nothing():
    aside = line(WORSE, aside="at chance")
    assert page.verdict([line(BETTER), aside]) == "reproduced in part"
    assert page.verdict([line(BETTER), line(WORSE, aside="control")]) == "reproduced"
    assert page.verdict([aside]) == "undecided"
    assert page._row(aside).endswith("| at chance |")
    assert page._power([aside]) == ""


def test_equal_lines_count_once():
    other = Line("c against d", compare([0.5], [0.0]), "accuracy", 1000, "capacity")
    lines = [line(BETTER), other, dataclasses.replace(line(BETTER), setting="a larger budget")]
    assert page.distinct(lines) == lines[:2]


def test_recall_at_chance_has_no_verdict(monkeypatch):
    recipe = {"vocab_size": 128, "length": 64, "pairs": [4, 8, 16], "steps": 1, "batch_size": 1}
    row = {"width": 16, "learning_rate": 0.01, "state_floats": 1, "recipe": recipe}
    found = [
        {**row, "model": name, "seed": seed, "accuracy": accuracy + seed / 1000}
        for name, accuracy in (("good", 0.5), ("poor", 0.13), ("worse", 0.1))
        for seed in range(3)
    ]
    monkeypatch.setattr(sources, "rows", lambda path: found if "small" in path else ())
    verdicts = [line.verdict for line in sources.mqar([("good", "poor"), ("poor", "worse")])]
    assert verdicts == ["reproduced", "at chance"]
