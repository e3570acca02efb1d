"""GAM's experiments: the recipe is the paper's, the blocks that are compared compute what they should, results are kept."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from experiments.gam import scaling, train
from experiments.gam.models import MODELS, small

SETTINGS = scaling.Settings(batch_size=2, dim=16)
TEXT = "the table is the same for every text, and so it mixes no tokens; the convolution sees three. " * 240


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text(TEXT)
    return train.Recipe(text=str(path), epochs=3, batch_size=2)


def test_recipe_is_the_papers(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "VOCABULARY", 300)
    config = train.train_config("gam", recipe, tmp_path / "runs")
    assert (config.data.tokenizer, config.data.sequence_length) == ("bpe:300", 256)
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.warmup_steps, optimizer.final_fraction) == (3e-4, 100, 0.0)
    assert (optimizer.b1, optimizer.b2, optimizer.weight_decay, optimizer.clip_norm) == (0.9, 0.95, 0.1, 1.0)
    assert config.model == small(MODELS["gam"])
    assert config.model.dropout == 0.1
    assert config.steps == 3 * config.eval_every > 0
    paper = train.train_config("mamba", dataclasses.replace(recipe, size="paper", steps=7), tmp_path / "runs")
    assert (paper.model, paper.steps) == (MODELS["mamba"], 7)
    with pytest.raises(ValueError, match="a batch of 99 sequences needs more than"):
        train.train_config("gam", dataclasses.replace(recipe, batch_size=99), tmp_path / "runs")


def test_a_run_makes_a_row_and_a_page(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "VOCABULARY", 300)
    tiny = dataclasses.replace(small(MODELS["gam"]), dim=16, num_layers=1, vocab_size=300, num_heads=2)
    monkeypatch.setattr(train, "small", lambda _: tiny)
    recipe = dataclasses.replace(recipe, steps=2)
    row = train.run_model("gam", recipe, tmp_path / "runs")
    assert row["curve"][-1] == [2 * 2 * 256, row["bits_per_byte"]]
    assert 0 < row["bits_per_byte"] < 8
    page = train.table([row, {**row, "model": "better", "bits_per_byte": 0.5}], recipe, "command")
    assert page.index("| better |") < page.index("| gam |")
    train.plot([row], tmp_path / "plot.png", "title")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    again = train.run_model("gam", recipe, tmp_path / "runs")  # a finished run is not run again
    assert again == row


def test_both_attention_blocks_are_the_same_function():
    gradients = {}
    for name in ("attention", "attention-whole"):
        program, shapes = scaling.compiled(name, 40, SETTINGS)
        leaves, tree = jax.tree.flatten(shapes)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        arguments = tree.unflatten([jax.random.normal(key, s.shape, s.dtype) for key, s in zip(keys, leaves)])
        gradients[name] = [np.asarray(x) for x in jax.tree.leaves(program(*arguments))]
    for a, b in zip(*gradients.values(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(a).max())


def test_rows_are_kept_and_told_apart(tmp_path):
    rows = [scaling.measure(length, SETTINGS, 1, 1e9) for length in (32, 64)]
    cell = rows[0]["blocks"]["gam"]
    assert cell["bytes"] > cell["temporary_bytes"] > 0
    assert cell["seconds"] > 0
    assert scaling.measure(32, SETTINGS, 1, 0.0)["blocks"]["gam"] == {**cell, "seconds": None}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert scaling.read(path, SETTINGS) == {32: rows[0], 64: rows[1]}
    assert scaling.read(path, dataclasses.replace(SETTINGS, batch_size=3)) == {}
    assert scaling.growth(rows, "gam", "bytes") == rows[1]["blocks"]["gam"]["bytes"] / cell["bytes"]
    page = scaling.table(rows, SETTINGS, "command", "cpu")
    assert "| × 2 |" in page
    scaling.plot(rows, tmp_path / "plot.png", "title")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_bytes_of_a_gam_block_grow_with_the_length():
    """At the paper's width; nothing is run. From 1,024 to 8,192 tokens, 8 times as many."""
    sizes = [scaling.compiled("gam", length, scaling.Settings())[0].memory_analysis() for length in (1024, 8192)]
    assert sizes[1].temp_size_in_bytes < 9.5 * sizes[0].temp_size_in_bytes
