"""experiments/intervals.py: known intervals, the rule of the verdict, and the power calculation against textbook values."""

import math

import numpy as np
import pytest
import scipy.stats

from experiments.intervals import bootstrap, bootstrap_of, clearly_above, compare, runs_needed, student


def test_student_interval_is_scipys():
    values = [0.1, 0.4, 0.2, 0.9]
    expected = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
    np.testing.assert_allclose(student(values), (expected.low, expected.high))
    assert student([1.0]) == (-math.inf, math.inf)


def test_bootstrap_covers_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    inside = [low <= 0 <= high for low, high in (bootstrap(rng.standard_normal(20)) for _ in range(100))]
    assert 0.84 <= np.mean(inside) <= 1
    assert bootstrap([1, 2, 3, 4]) == bootstrap([1, 2, 3, 4])
    assert bootstrap([2.0, 2.0, 2.0]) == (2, 2)
    assert bootstrap([5.0]) == (5, 5)


def test_bootstrap_of_a_statistic_of_seeds():
    x = np.array([3.0, 1.0, 4.0, 1.0, 5.0])
    assert bootstrap_of(lambda seeds: x[seeds].mean(-1), 5) == bootstrap(x)


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([1.0, 1.1, 0.9, 1.0, 1.05], "reproduced"),
        ([-1.0, -1.1, -0.9, -1.0, -1.05], "refuted here"),
        ([1.0, 1.1], "undecided"),  # two seeds never decide
        ([1.0, -1.0, 0.5, -0.4], "undecided"),
        ([0.1, 0.9, 0.3], "undecided"),  # one sign, but the t interval includes zero
        ([0.0, 0.0, 0.0], "undecided"),
        ([1.0, 1.0, 1.0], "reproduced"),
    ],
)
def test_verdict(differences, verdict):
    found = compare(differences, [0.0] * len(differences))
    assert found.verdict == verdict
    assert found.seeds == len(differences)
    assert compare([0.0] * len(differences), differences).effect == -found.effect


def test_pairs_are_paired():
    """A seed that moves both sides leaves the difference alone."""
    seeds = np.array([0.0, 10.0, -20.0, 5.0])
    assert compare((seeds + np.array([1, 1.1, 0.9, 1])).tolist(), seeds.tolist()).verdict == "reproduced"


def test_refuses_what_is_not_comparable():
    with pytest.raises(ValueError, match="as many numbers"):
        compare([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="not finite"):
        compare([math.nan, 1.0], [1.0, 2.0])


@pytest.mark.parametrize(("effect", "runs"), [(1.0, 10), (0.5, 34), (0.2, 199)])  # Cohen's table for paired t tests
def test_runs_needed(effect, runs):
    assert runs_needed(1.0, effect) == runs_needed(2.0, -2 * effect) == runs


def test_runs_needed_at_the_ends():
    assert runs_needed(1.0, 0.0) is None
    assert runs_needed(1.0, 1e-6) is None
    assert runs_needed(0.0, 1.0) == runs_needed(1e-6, 1.0) == 3
    assert compare([1.0], [0.0]).runs_needed is None


def test_clearly_above_is_a_verdict():
    assert clearly_above({0: 0.5, 1: 0.52, 2: 0.51}, 0.4)
    assert not clearly_above({0: 0.5, 1: 0.3, 2: 0.6}, 0.4)
    assert not clearly_above({0: 0.5}, 0.4)  # one seed
    assert not clearly_above({0: 0.5, 1: 0.52, 2: 0.51}, {0: 0.4, 1: 0.6, 2: 0.5})
    assert not clearly_above({}, 0.4)
