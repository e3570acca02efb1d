"""experiments/stability/train: models of pairs read the same batches on three seeds and come first; their lines are paired."""

import numpy as np
import pytest

from atlasjax.data import make_pipeline
from atlasjax.data.tokenizers import ByteTokenizer
from experiments.evidence import sources
from experiments.stability import candidates, report
from experiments.stability.pairs import PAIRS, models
from experiments.stability.train import SEEDS, TEXTS, Case, cases, config_of


def test_each_model_of_a_pair_has_all_seeds_before_the_rest():
    order = cases()
    assert len(order) == len(set(order))
    ends = [order.index(Case(name, "moby_dick", SEEDS - 1)) for name in models()]
    assert max(ends) < order.index(Case("swdt", "embedded", 0)) < order.index(Case("samba", "embedded", 0))
    for name in models():
        assert {case.seed for case in order if case.preset == name} == set(range(SEEDS))
        assert {case.text for case in order if case.preset == name} == set(TEXTS)
    assert {name for pairs in PAIRS.values() for pair in pairs for name in pair} == set(models())


def test_models_of_a_seed_read_the_same_batches(tmp_path):
    configs = {
        name: [config_of(Case(name, "embedded", seed), tmp_path).data for seed in (0, 1)]
        for name in ("linear-attention", "transformer++", "elastic-exp")
    }
    assert configs["linear-attention"] == configs["transformer++"] == configs["elastic-exp"]
    same, again, other = (
        next(iter(make_pipeline(data, ByteTokenizer(), "train")))["inputs"]
        for data in (configs["elastic-exp"][0], configs["transformer++"][0], configs["transformer++"][1])
    )
    np.testing.assert_array_equal(same, again)
    assert not np.array_equal(same, other)


def test_lines_of_whole_runs(monkeypatch):
    row = {"text": "embedded", "steps": 300, "bounded": True}
    found = [
        {**row, "preset": name, "seed": seed, "bits_per_byte": loss + seed / 10}
        for name, loss in (("good", 2.0), ("bad", 2.25))
        for seed in range(3)
    ]
    found += [{**row, "preset": "good", "seed": 0, "bounded": False, "bits_per_byte": 9.0}]
    found += [{**row, "preset": "bad", "seed": 3, "bits_per_byte": None}]
    found += [{**row, "preset": "good", "seed": 3, "bits_per_byte": 2.0}]
    monkeypatch.setattr(sources, "rows", lambda path: found)
    (line,) = sources.trained([("good", "bad"), ("good", "missing")])
    assert line.comparison.differences == pytest.approx((0.25, 0.25, 0.25))
    assert (line.tokens, line.source) == (307_200, "stability")
    assert "good against bad: embedded" in line.setting


def test_training_of_candidates_takes_runs_that_train_has():
    tasks = [task for task in candidates.tasks() if task["part"] == "train"]
    assert {task["candidate"] for task in tasks} | set(candidates.IN_TRAIN) == set(candidates._BOUNDS)
    assert tuple(candidates._BOUNDS) == candidates.CANDIDATES
    done = lambda loss: {"bits_per_byte": loss, "diverged_at": None}
    rows = [{"task": task, **done(3.0 + task["seed"] / 10)} for task in tasks if task["candidate"] == "share"]
    run = lambda preset, bounded, loss: {"preset": preset, "text": "embedded", "bounded": bounded, **done(loss)}
    trained = [run("titans", True, 2.0), run("titans", False, 2.5), run("atlas", True, 9.0)]
    (line,) = (x for x in report.candidates_tables(rows, trained).splitlines() if x.startswith("| embedded"))
    assert line == "| embedded | 2.500 | 2.000 | – | – | 3.100 (3.000 – 3.200) | – |"
