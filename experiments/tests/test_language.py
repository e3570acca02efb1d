"""experiments/language: bins sum to the whole, rows resume, the rate is the sweep's best, comparisons have the papers' signs."""

import dataclasses
import json

import jax
import pytest

from atlasjax.nn.abstract import count_parameters
from atlasjax.presets import get_preset
from atlasjax.train import state as state_lib
from experiments.language import measure, run
from experiments.language.compare import DIRECTIONS, PAIRS, chosen, compared, rates
from experiments.language.measure import Recipe
from experiments.language.models import MODELS, model
from experiments.language.paper import plan, runs
from experiments.zoo import training

SMALL = Recipe(steps=3, sweep_steps=2, batch_size=1, length=16, bin=4)


def small(name, length=16):
    """A model that trains in a moment, whatever its name."""
    config = get_preset("transformer++-tiny")
    return dataclasses.replace(config, dim=8, num_layers=1, num_heads=2, mlp_dim=8, remat=False)


@pytest.fixture
def book(tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("The whale, the white whale, a sail. " * 40)
    return text


@pytest.mark.slow  # tests/test_presets.py counts the presets' parameters
def test_models_have_as_many_parameters():
    counts = {name: count_parameters(model(name)) for name in MODELS}
    assert max(counts.values()) < 1.03 * min(counts.values())
    assert model("elastic-exp").elastic.context == 1024
    omeganet, atlas = (model(name).memory.build() for name in ("omeganet", "atlas"))
    assert dataclasses.replace(atlas, optimizer=omeganet.optimizer, bound=omeganet.bound) == omeganet
    assert {name for pairs in PAIRS.values() for pair in pairs for name in pair} <= set(MODELS)
    assert set(PAIRS) == set(DIRECTIONS)


def test_bins_sum_to_the_whole(book):
    config = small("titans")
    data = measure.run_config(config, SMALL, (str(book),), seed=0, rate=1e-3, steps=1).data
    params = state_lib.init_params(config, jax.random.key(0))
    found = measure.tested(config, params, data, SMALL)
    assert [len(found["by_position"][str(length)]) for length in (16, 32, 64)] == [4, 8, 16]
    # Padding of the last window counts as nothing, so bins need not have the same number of tokens.
    for length in (16, 32, 64):
        bits, tokens = measure.sums(config, params, measure.held_out(data, length, SMALL), 4)
        assert tokens.sum() == found["held_out_tokens"]
        assert found["by_position"][str(length)] == pytest.approx(list(bits / tokens), abs=1e-4)
        if length == 16:
            assert found["bits_per_byte"] == pytest.approx(bits.sum() / tokens.sum(), abs=1e-4)
            one = measure.sums(config, params, measure.held_out(data, length, SMALL), 16)
            assert one.sum(1) == pytest.approx([bits.sum(), tokens.sum()])


def test_the_whole_is_that_of_the_library(book):
    config = small("titans")
    whole = training.Recipe(steps=1, batch_size=1, sequence_length=16, text=str(book), eval_batches=None)
    data = training.train_config(config, whole).data
    params = state_lib.init_params(config, jax.random.key(0))
    assert measure.tested(config, params, data, SMALL)["bits_per_byte"] == pytest.approx(
        training.held_out(config, params, whole), abs=1e-3
    )


@pytest.mark.slow  # of the functions that the other experiments resume by
def test_rows_resume(book, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "model", small)
    monkeypatch.setattr(run, "model", small)
    small_options = [
        f"--{name.replace('_', '-')}={value}" for name, value in dataclasses.asdict(SMALL).items() if name != "text"
    ]
    options = [
        *["--only", "titans", "titans-grm", "--rates", "0.001", "0.01", "--text"],
        str(book),
        "--out",
        str(tmp_path),
    ]
    run.main([*options, *small_options, "--seeds", "1"])
    path = tmp_path / "book.jsonl"
    before = path.read_text()
    rows = [json.loads(line) for line in before.splitlines()]
    kinds = ("rate", "rate", "run")
    assert [(row["kind"], row["model"]) for row in rows] == [(k, m) for m in ("titans", "titans-grm") for k in kinds]
    assert all(row["learning_rate"] == rates(rows)[row["model"]] for row in rows if row["kind"] == "run")
    assert rows[2]["tokens"] == 48
    path.write_text(before[:-20])  # killed in the last row
    run.main([*options, *small_options, "--seeds", "1"])
    again = [json.loads(line) for line in path.read_text().splitlines()]
    assert [run.key_of(row) for row in again] == [run.key_of(row) for row in rows]
    assert again[-1]["by_position"] == rows[-1]["by_position"]
    assert "titans-grm against titans" in capsys.readouterr().out
    assert (tmp_path / "book.png").stat().st_size > 10_000


def rows_of(losses):
    """Runs of three seeds at two rates, of which 0.01 is the better one. Each model's second half of a long context is easier."""
    recipe = {"length": 16, "bin": 4}
    found = []
    for name, (start, end, beyond) in losses.items():
        for rate, loss in ((0.001, 2.0), (0.01, 1.0), (0.1, None)):
            found.append({"kind": "rate", "model": name, "seed": 1000, "learning_rate": rate, "loss": loss})
        for seed in range(3):
            for rate, worse in ((0.001, 5.0), (0.01, 0.0)):
                by = {"16": [start, start, start, end], "64": [start] * 4 + [beyond] * 12}
                by = {length: [x + worse + seed / 100 for x in bins] for length, bins in by.items()}
                found.append({"kind": "run", "model": name, "seed": seed, "learning_rate": rate, "recipe": recipe,
                              "bits_per_byte": start + worse + seed / 100, "by_position": by})  # fmt: skip
    return found


def test_signs_of_the_comparisons():
    rows = rows_of({"titans-grm": (2.0, 1.5, 1.4), "titans": (2.1, 1.9, 3.0)})
    assert rates(rows) == {"titans-grm": 0.01, "titans": 0.01}
    assert {row["learning_rate"] for row in chosen(rows)["titans"].values()} == {0.01}
    found = {line.told.partition(": ")[2]: line.comparison for line in compared(rows)}
    assert found["context of 16"].effect == pytest.approx(0.1)
    assert found["positions 12 to 16"].effect == pytest.approx(0.4)
    assert found["fall of the loss from the first to the last quarter of 16"].effect == pytest.approx(0.3)
    assert found["positions 16 to 64"].effect == pytest.approx(1.6)


def test_commands_of_the_pod_are_real(config_of_command):
    found = {name: config_of_command(line) for name, _, line in runs() if name in ("titans-grm", "retnet-lmm")}
    assert found["titans-grm"].model.memory.caching.aggregation == "grm"
    assert "retnet-lmm" in found
    assert "EFLOP" in plan()
