"""experiments/efficiency: models are timed in turn with the reference, ratios have the right sign, rows resume."""

import dataclasses
import json

import pytest

from atlasjax.presets import get_preset
from experiments.efficiency import measure, report, run
from experiments.efficiency.measure import Program, Recipe


def test_programs_run_in_turn_and_the_first_round_is_not_counted():
    order = []
    own, other = (Program(lambda name=name: order.append(name), 8) for name in "ab")
    seconds, others = measure.timed(own, other, 3)
    assert len(seconds) == len(others) == 3
    assert "".join(order) == "baabbaab"
    assert measure.timed(own, Program(None, 8), 2)[1] is None


def row_of(name, length, seconds, others, kind="training"):
    return {
        "kind": kind, "model": name, "length": length, "tokens": 100, "seconds": seconds, "reference_seconds": others,
        "parameters": 7, "device": "cpu: cpu", "recipe": dataclasses.asdict(Recipe()),
    }  # fmt: skip


def test_a_faster_model_is_above_one():
    fast = row_of("titans", 512, [1.0, 2.0, 1.0], [2.0, 4.0, 9.0])  # the second round was in a slow moment
    assert report.relative(fast) == 2
    assert report.speed(fast) == 100
    text = report.table([fast, row_of("titans", 1024, [1.0], None), row_of("gla", 512, [4.0], [2.0])])
    assert "| titans | 2.00 | – | 7 |" in text
    assert "| gla | 0.50 |  | 7 |" in text


@pytest.mark.slow  # of the functions that the other experiments resume by
def test_rows_resume(tmp_path, monkeypatch, capsys):
    def small(name, length, recipe):
        return dataclasses.replace(get_preset("transformer++-tiny"), dim=8, num_layers=1, num_heads=2, mlp_dim=8)

    monkeypatch.setattr(measure, "config_of", small)
    monkeypatch.setattr(measure, "DECODED", 2)
    options = ["--lengths", "8", "--tokens", "16", "--rounds", "1", "--out", str(tmp_path)]
    run.main([*options, "--only", "gla", "--kinds", "training"])
    run.main([*options, "--only", "gla", "titans"])
    rows = [json.loads(line) for line in (tmp_path / "cpu-tiny.jsonl").read_text().splitlines()]
    assert [run.key_of(row) for row in rows] == [
        ("training", "gla", 8), ("training", "titans", 8), ("decoding", "gla", 8), ("decoding", "titans", 8),
    ]  # fmt: skip
    assert [row["tokens"] for row in rows] == [16, 16, 2, 2]
    assert all(len(row["seconds"]) == len(row["reference_seconds"]) == 1 for row in rows)
    assert rows[0]["temporary_bytes"] > 0
    assert "Training step" in capsys.readouterr().out
    assert (tmp_path / "cpu-tiny.png").stat().st_size > 10_000
