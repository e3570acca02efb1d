"""experiments/recall: states are as large as the table says, runs are kept, compared and resumed."""

import json

import pytest

from atlasjax.nn.abstract import state_bytes
from experiments.recall import run
from experiments.recall.models import MODELS, model
from experiments.recall.training import Recipe

CONVOLUTIONS = 2 * 2 * 64  # last inputs of two convolutions over 3 tokens


def test_memories_are_matrices_of_key_by_value():
    floats = {name: state_bytes(model(name, 256), length=64) / 4 for name in MODELS}
    for width in (4, 8, 16, 32):  # what a memory has besides its matrix is one size for all widths
        assert floats[f"linear-{width}"] - floats["linear-4"] == 2 * (width - 4) * 64
    assert 0 <= floats["linear-4"] - CONVOLUTIONS - 2 * 4 * 64 < 16
    assert floats["gam"] == 2 * CONVOLUTIONS
    assert 0 <= floats["attention"] - CONVOLUTIONS - 2 * 2 * 64 * 64 < 16
    # 7 or 8 cached memories of 4 × 64 with a pooled key each, and the one in use.
    assert 2 * 7 * 4 * 64 < floats["linear-4-grm"] - floats["linear-4"] < 2 * 10 * 4 * 64
    assert all(model(name, 256).resolved_head_dim * model(name, 256).value_expansion == 64 for name in MODELS)


def test_rules_and_mixers_by_name_or_object():
    """Keys of 16 and values of 64 numbers are a matrix, whoever wrote the rule; an own mixer stands where a memory would."""
    assert model("delta_rule-16", 256) == model("delta-16", 256)
    assert model("linear_attention-4-ssc", 256) == model("linear-4-ssc", 256)
    own = model("tests.own_parts:log_cosh_memory-64", 256)
    assert (own.memory.rule, own.resolved_head_dim) == ("tests.own_parts:log_cosh_memory", 64)
    assert model("tests.own_parts:MovingAverage", 256).pattern == ("gam", "tests.own_parts:MovingAverage")
    assert model("retnet", 256).pattern == ("gam", "retnet")
    assert model("retnet-16", 256).memory.rule == "retnet"
    assert state_bytes(model("tests.own_parts:MovingAverage", 256), length=64) / 4 == CONVOLUTIONS + 2 * 64


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("delta_rul-16", "Did you mean 'delta_rule'"),
        ("tests.own_parts:MovinAverage", "Did you mean 'MovingAverage'"),
        ("mamba-16", "only a rule has a size of keys"),
        ("swla-7", "it divides 64"),
        ("swla-0", "it divides 64"),
    ],
)
def test_wrong_names_are_refused(name, words):
    with pytest.raises(ValueError, match=words):
        model(name, 256)


def test_runs_are_kept_and_resumed(tmp_path, monkeypatch, capsys):
    options = ["--models", "gam", "--steps", "2", "--batch-size", "4", "--test-sequences", "50", "--seeds", "1"]
    options += ["--out", str(tmp_path)]
    run.main([*options, "--rates", "1e-3"])
    lines = (tmp_path / "recall.jsonl").read_text().splitlines()
    (row,) = map(json.loads, lines)
    assert (row["model"], row["seed"], row["learning_rate"]) == ("gam", 0, 1e-3)
    assert 4 < row["loss"] < 8
    assert 0 <= row["accuracy"] < 0.2
    assert (tmp_path / "recall.png").stat().st_size > 10_000
    asked = []

    def train(config, recipe, runs, say):
        asked.extend(runs)
        return [{"accuracy": 0.5, "loss": 1.0, "seconds_of_all": 0.0} for _ in runs]

    monkeypatch.setattr(run, "train", train)
    run.main([*options, "--rates", "1e-3", "3e-3"])
    assert asked == [(0, 3e-3)]
    assert "| gam | 512 |" in capsys.readouterr().out
    with pytest.raises(ValueError, match="rows of another recipe"):
        run.main([*options, "--steps", "3"])
    with pytest.raises(ValueError, match="attention"):
        run.main(["--models", "atention"])


def test_the_best_rate_is_that_of_the_best_mean():
    accuracies = {1e-3: (0.2, 0.4), 3e-3: (0.1, 0.9), 1e-2: (1.0,)}  # the last has not all its seeds
    rows = [
        {"model": "gam", "seed": seed, "learning_rate": rate, "accuracy": accuracy, "state_floats": 1, "parameters": 2}
        for rate, found in accuracies.items()
        for seed, accuracy in enumerate(found)
    ]
    (row,) = run.best(rows).values()
    assert (row["learning_rate"], row["mean"], row["lowest"], row["highest"], row["seeds"]) == (3e-3, 0.5, 0.1, 0.9, 2)


def test_recipe():
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        Recipe(steps=0)
    with pytest.raises(ValueError, match="at least 4 · num_pairs"):
        Recipe(num_pairs=20)
