"""experiments/mqar: models have the sizes that are said, the mixture of pairs is even, and runs are kept and resumed."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from atlasjax.data.associative_recall import IGNORE
from atlasjax.nn.abstract import state_bytes
from experiments.mqar import run
from experiments.mqar.models import model
from experiments.mqar.report import best, chance
from experiments.recall import training
from experiments.recall.training import language_model


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
    (sequences,), part, rows = run.Recipe(steps=10, batch_size=30).training(0)
    assert rows.shape == (10, 30)
    assert not part.any()
    tokens, labels = (array[rows.ravel()] for array in sequences)
    assert tokens.shape == (300, 64)
    asked = (labels != IGNORE).sum(1)
    assert {int(n): int(count) for n, count in zip(*np.unique(asked, return_counts=True))} == {4: 100, 8: 100, 16: 100}
    few = run.Recipe(steps=10, batch_size=30, sequences=60).training(0)
    assert len(few.parts[0][0]) == 60
    for epoch in few.rows.reshape(5, 60):
        assert sorted(epoch) == list(range(60))


CELLS = run.Recipe(64, 32, [2, 4, 8], 12, 5, None, 8, lengths=[8, 16, 32], sizes=[16, 10, 5])


def test_numbers_of_pairs_with_lengths_of_their_own_have_batches_of_their_own():
    parts, part, rows = CELLS.training(0)
    assert [tokens.shape for tokens, _ in parts] == [(16, 8), (10, 16), (5, 32)]
    assert [np.unique((labels != IGNORE).sum(1)).tolist() for _, labels in parts] == [[2], [4], [8]]
    assert rows.shape == (12, 5)
    for epoch in (slice(0, 6), slice(6, 12)):  # 3 + 2 + 1 whole batches
        assert np.bincount(part[epoch]).tolist() == [3, 2, 1]
        for cell, count in enumerate([15, 10, 5]):
            of_cell = rows[epoch][part[epoch] == cell].ravel()
            assert len(set(of_cell)) == count
    assert part[:6].tolist() != part[6:].tolist()
    _, same, other = CELLS.training(1)
    np.testing.assert_array_equal(part, same)
    assert (rows != other).any()
    assert {n: tokens.shape for n, (tokens, _) in CELLS.tests(0).items()} == {2: (8, 8), 4: (8, 16), 8: (8, 32)}


def test_the_paper_has_the_published_mixture():
    paper = run.SIZES["paper"]
    assert paper.steps == 32 * sum(size // 256 for size in paper.sizes)
    assert paper.shown() == pytest.approx((777e6, 89.5e6), rel=2e-3)


def test_the_paper_is_tested_at_lengths_of_its_own_between_random_tokens():
    tests = dataclasses.replace(run.SIZES["paper"], test_sequences=2).tests(seed=0)
    assert {pairs: tokens.shape for pairs, (tokens, _) in tests.items()} == {
        4: (2, 64), 8: (2, 64), 16: (2, 64), 32: (2, 128), 64: (2, 256),
    }  # fmt: skip
    tokens, labels = tests[4]
    between = tokens[:, 8:][labels[:, 8:] == IGNORE]
    assert np.count_nonzero(between) > 0.9 * between.size
    tokens, labels = dataclasses.replace(run.SIZES["paper_zeros"], test_sequences=2).tests(seed=0)[8]
    assert tokens.shape == (2, 128)
    assert not tokens[:, 16:][labels[:, 16:] == IGNORE].any()


TWO = {"length": 16, "pairs": [2, 4], "lengths": [8, 16], "sizes": [16, 10]}  # each length compiles a step of its own


@pytest.mark.slow
def test_the_loss_is_that_of_the_logits_at_the_queries(monkeypatch):
    """Batches of two lengths, and logits of three queries at a time."""
    recipe = dataclasses.replace(CELLS, **TWO)
    net = language_model(model("delta", 16, 64))
    rate, losses = 1e-2, []
    params = jax.jit(net.init)(jax.random.key(0))
    tx = optax.adamw(lambda t: rate * 0.5 * (1 + jnp.cos(jnp.pi * t / 12)), weight_decay=0.1, mask=net.mask)
    state = tx.init(params)

    def loss(params, tokens, labels):
        entropy = optax.softmax_cross_entropy_with_integer_labels(net.logits(params, tokens), jnp.maximum(labels, 0))
        return jnp.sum(entropy * (labels >= 0)) / jnp.sum(labels >= 0)

    @jax.jit
    def step(params, state, tokens, labels):
        value, slope = jax.value_and_grad(loss)(params, tokens, labels)
        updates, state = tx.update(slope, state, params)
        return value, optax.apply_updates(params, updates), state

    parts, part, rows = recipe.training(0)
    for cell, chosen in zip(part, rows, strict=True):
        value, params, state = step(params, state, *(array[chosen] for array in parts[cell]))
        losses.append(float(value))
    monkeypatch.setattr(training, "LOGITS", 3 * 64)
    found, seen = training.fit(net, recipe, [(0, rate)], lambda *_: None)
    np.testing.assert_allclose(seen[0], losses, rtol=1e-4)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a[0], b, atol=2e-3 * float(jnp.abs(b).max()))


@pytest.mark.slow
def test_a_stopped_training_goes_on_from_its_copy(tmp_path, monkeypatch):
    net, runs = language_model(model("gam", 16, 64)), [(0, 1e-2), (1, 1e-2)]
    recipe = dataclasses.replace(CELLS, **TWO)
    monkeypatch.setattr(training, "PIECE", 4)
    monkeypatch.setattr(training, "KEEP_SECONDS", 0)
    whole = training.fit(net, recipe, runs, lambda *_: None)

    def stop(step, _):
        if step == 8:
            raise KeyboardInterrupt

    path, steps = tmp_path / "partial" / "gam.npz", []
    with pytest.raises(KeyboardInterrupt):
        training.fit(net, recipe, runs, stop, partial=path)
    rest = training.fit(net, recipe, runs, lambda step, _: steps.append(step), partial=path)
    assert steps == [8, 12]
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(rest), strict=True):
        np.testing.assert_array_equal(a, b)
    assert [file.name for file in path.parent.iterdir()] == ["gam.npz"]
    with pytest.raises(ValueError, match=r"gam.npz is the state of another training"):
        training.fit(language_model(model("delta", 16, 64)), recipe, runs, lambda *_: None, partial=path)
    of = lambda *changes: training.partial_path(tmp_path, "gam-16", *changes)
    assert len({of(recipe, runs), of(recipe, runs[:1]), of(run.Recipe(), runs)}) == 3


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


def test_lengths_need_sizes_and_both_one_number_for_each():
    with pytest.raises(ValueError, match=r"lengths=\[64, 64, 64\] need sizes"):
        run.Recipe(lengths=[64, 64, 64])
    with pytest.raises(ValueError, match=r"sizes needs one number for each of \[4, 8, 16\] pairs, got \[100\]"):
        run.Recipe(sizes=[100])


def test_chance_is_one_of_the_listed_values():
    assert chance(128, 64, [4, 8, 16]) == pytest.approx((1 / 4 + 1 / 8 + 1 / 16) / 3)


def test_the_best_rate_and_the_order_of_seeds():
    rows = [
        {"model": "a", "width": 16, "seed": seed, "learning_rate": rate, "accuracy": accuracy}
        for rate, accuracies in ((1e-3, {1: 0.2, 0: 0.4}), (1e-2, {0: 0.5, 1: 0.7}), (1.0, {0: 1.0}))
        for seed, accuracy in accuracies.items()
    ]
    assert [row["accuracy"] for row in best(rows)["a", 16]] == [0.5, 0.7]
