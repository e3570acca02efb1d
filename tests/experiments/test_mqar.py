"""experiments/mqar: models have the sizes that are said, the mixture of pairs is even, and runs are kept and resumed."""

import json

import numpy as np
import pytest

from atlasjax.data.associative_recall import IGNORE
from atlasjax.nn.abstract import state_bytes
from experiments.mqar import run
from experiments.mqar.models import model
from experiments.mqar.report import best, chance


@pytest.mark.parametrize(
    "name", ["attention", "titans", "titans-grm-8", "delta", "titans-mac", "gam", "delta+attention"]
)
def test_models_at_every_width(name):
    for width in (16, 32, 64):
        config = model(name, width, 128)
        assert config.num_heads * config.resolved_head_dim == width
        assert state_bytes(config, length=64) > 0


def test_matrices_and_deep_memories_have_as_many_floats_from_width_32_on():
    floats = lambda name, width: state_bytes(model(name, width, 128), length=64)
    assert floats("omega-matrix", 32) == floats("omega", 32)
    assert floats("omega-matrix", 64) == floats("omega", 64)
    assert floats("omega-matrix", 16) < floats("omega", 16)


def test_training_has_every_number_of_pairs_equally_often():
    tokens, labels = run.Recipe(steps=10, batch_size=30).training(0)
    assert tokens.shape == (300, 64)
    asked = (labels != IGNORE).sum(1)
    assert {int(n): int(count) for n, count in zip(*np.unique(asked, return_counts=True))} == {4: 100, 8: 100, 16: 100}
    few, _ = run.Recipe(steps=10, batch_size=30, sequences=60).training(0)
    assert few.shape == (300, 64)
    assert len(np.unique(few, axis=0)) <= 60


@pytest.mark.slow  # of the functions that test_mad.py resumes by
def test_rows_are_kept_and_resumed(tmp_path, monkeypatch, capsys):
    options = ["--models", "gam", "--steps", "2", "--batch-size", "6", "--test-sequences", "8", "--seeds", "1"]
    options += ["--out", str(tmp_path)]
    run.main([*options, "--rates", "1e-3"])
    (row,) = map(json.loads, (tmp_path / "small.jsonl").read_text().splitlines())
    assert (row["model"], row["width"], row["seed"], row["learning_rate"]) == ("gam", 16, 0, 1e-3)
    assert set(row["by_pairs"]) == {"4", "8", "16"}
    assert row["accuracy"] == pytest.approx(np.mean(list(row["by_pairs"].values())), abs=1e-3)
    assert (tmp_path / "small.png").stat().st_size > 5_000
    monkeypatch.setattr(run, "measure", lambda *_: pytest.fail("measured again"))
    run.main([*options, "--rates", "1e-3"])
    assert "| gam | 16 | 128 |" in capsys.readouterr().out


def test_the_plan_of_the_paper_trains_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run, "measure", lambda *_: pytest.fail("trained"))
    run.main(["--size", "paper", "--models", "delta", "--widths", "16", "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert "819 million tokens per run" in out
    assert "--size paper --go" in out
    assert f"--models delta --out {tmp_path}/host-0" in out


def test_chance_is_one_of_the_listed_values():
    assert chance(128, 64, [4, 8, 16]) == pytest.approx((1 / 4 + 1 / 8 + 1 / 16) / 3)


def test_the_best_rate_and_the_order_of_seeds():
    rows = [
        {"model": "a", "width": 16, "seed": seed, "learning_rate": rate, "accuracy": accuracy}
        for rate, accuracies in ((1e-3, {1: 0.2, 0: 0.4}), (1e-2, {0: 0.5, 1: 0.7}), (1.0, {0: 1.0}))
        for seed, accuracy in accuracies.items()
    ]
    assert [row["accuracy"] for row in best(rows)["a", 16]] == [0.5, 0.7]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--models", "titan"], "Did you mean 'titans'"),
        (["--seeds", "0"], "--seeds must be at least 1"),
        (["--models", "delta", "--widths", "40"], "do not divide the width 40"),
    ],
)
def test_bad_options_are_refused(options, words, capsys):
    with pytest.raises(SystemExit):
        run.main(options)
    assert words in capsys.readouterr().err
