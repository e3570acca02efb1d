"""experiments/studies: the models differ as they say, noise stays in its place, comparisons have the papers' signs, rows resume."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax.mixers.elastic import hippo
from atlasjax.nn import CachingConfig
from atlasjax.nn.abstract import count_parameters
from atlasjax.train import state as state_lib
from experiments.studies import measure, run
from experiments.studies.compare import DIRECTIONS, compared
from experiments.studies.corruption import corrupted
from experiments.studies.measure import bits, memory_floats, memory_layer
from experiments.studies.models import BLOCK, LENGTH, MODELS, model
from experiments.studies.paper import runs
from experiments.studies.reconstruction import Recorded, reconstruction
from experiments.studies.report import write


def small(name):
    """A model of the studies, narrow and with blocks of 8."""
    config = model(name)
    changed = {
        field: dataclasses.replace(getattr(config, field), block_size=8)
        for field in ("block_attention", "elastic", "memorizing")
    }
    return dataclasses.replace(config, dim=8, num_heads=2, mlp_dim=8, **changed)


@pytest.fixture(scope="module")
def texts():
    tokens = np.random.default_rng(0).integers(0, 256, (2, 17))
    return [{"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((2, 16), np.float32)}]


def params_of(config):
    return state_lib.init_params(config, jax.random.key(0))


def test_memories_have_the_sizes_that_are_said():
    floats = {name: memory_floats(config) for name, config in MODELS.items()}
    assert floats["elastic-exp-1x"] == floats["memorizing-1x"] == floats["elastic-uniform-1x"] == 16 * 128
    assert floats["elastic-exp-16x"] == 16 * floats["elastic-exp-1x"]
    assert floats["block"] == 0
    assert floats["titans-grm"] is None
    assert memory_layer(model("block")) == memory_layer(model("elastic-exp-1x")) == 2
    assert count_parameters(model("elastic-exp-16x")) == count_parameters(model("block"))


def test_gates_differ_in_the_gate_alone():
    for name in ("titans-grm", "linear-grm", "titans-ssc"):
        seeing, blind = model(name).memory, model(f"{name}-age").memory
        assert blind.caching.capacity == LENGTH // BLOCK - 1
        assert dataclasses.replace(blind.caching, connector="input", capacity=None) == seeing.caching
        assert dataclasses.replace(blind, caching=seeing.caching) == seeing


@pytest.mark.parametrize("name", ["elastic-exp-1x", pytest.param("memorizing-1x", marks=pytest.mark.slow)])
def test_noise_changes_the_last_block_alone(name, texts):
    config = small(name)
    params = params_of(config)
    clean = bits(config, params, texts, 8)
    everywhere = bits(corrupted(config, 1.0, 8, (0, 1, 2, 3)), params, texts, 8)
    np.testing.assert_allclose(everywhere[0], clean[0], rtol=1e-5)
    one = bits(corrupted(config, 1.0, 8, (2,)), params, texts, 8)
    assert len({round(float(x[-1]), 5) for x in (clean, everywhere, one)}) == 3
    np.testing.assert_allclose(bits(corrupted(config, 0.0, 8, (2,)), params, texts, 8), clean, rtol=1e-5)


@pytest.mark.slow  # tests/nn/test_elastic.py reads by another sampling
def test_the_sampling_is_changed_without_training(texts, monkeypatch):
    monkeypatch.setattr(measure, "RATES", (0.5,))
    config = small("elastic-uniform-1x")
    found = measure.tested(config, params_of(config), texts, 8)
    assert found["by_sampling"]["uniform"] == pytest.approx(np.mean(found["by_block"]), abs=1e-3)
    assert found["by_sampling"]["exponential"] != found["by_sampling"]["uniform"]
    with pytest.raises(ValueError, match="not two or more whole blocks of 12"):
        measure.tested(config, params_of(config), texts, 12)


def rows_of(losses):
    """Rows whose last block has noise that costs as much as the model's number says."""
    return [
        {"model": name, "seed": seed, "bits_per_byte": loss + seed / 100, "by_block": [loss, loss],
         "reconstruction": {"mean_squared_error": loss, "share": loss / 10},
         "by_sampling": {"exponential": loss, "uniform": loss + 0.1 + seed / 1000},
         "corrupted": {where: {rate: loss + noise for rate in ("0.25", "0.5", "0.75")} for where in ("memory", "all")}}
        for name, (loss, noise) in losses.items()
        for seed in range(3)
    ]  # fmt: skip


def test_reconstruction_is_that_of_the_state_that_the_last_block_reads():
    config = small("elastic-exp-1x")
    config = dataclasses.replace(config, elastic=dataclasses.replace(config.elastic, order=4))
    mixer = Recorded(config, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 24, config.dim)), jnp.float32)
    Recorded.notes.clear()
    mixer(x)
    jax.effects_barrier()
    ((lost, whole, count),) = Recorded.notes
    _, state = mixer.extend(x[:, :17], mixer.init_state(2, 24))  # the last block has begun
    _, k, v = mixer._project(x[:, :16])
    history = jnp.concatenate([k, v], axis=-1)
    rebuilt = hippo.reconstruct(state.coefficients.reshape(2, 4, -1), np.arange(16) + 0.5, 16).reshape(history.shape)
    assert lost == pytest.approx(float(jnp.sum((rebuilt - history) ** 2)), rel=1e-4)
    assert whole == pytest.approx(float(jnp.sum(history**2)), rel=1e-5)
    assert count == history.size
    assert 0.3 < lost / whole < 1


def test_more_coefficients_lose_less(texts):
    config = small("elastic-exp-1x")
    params = params_of(config)
    of = lambda order: dataclasses.replace(config, elastic=dataclasses.replace(config.elastic, order=order))
    few, many = (reconstruction(of(order), params, texts) for order in (2, 6))
    assert 0 < many["share"] < few["share"] < 1
    assert many["mean_squared_error"] < few["mean_squared_error"]


def test_signs_of_the_comparisons():
    rows = rows_of({
        "elastic-exp-1x": (2.0, 0.5), "elastic-uniform-1x": (2.1, 0.5), "elastic-exp-2x": (1.9, 0.5), "memorizing-1x": (2.4, 0.3),
        "titans-grm": (2.0, 0), "titans-grm-age": (1.7, 0),
    })  # fmt: skip
    found = {line.told: line.comparison for line in compared(rows)}
    assert found["elastic-exp-1x against elastic-uniform-1x"].effect == pytest.approx(0.1)
    assert found["elastic-exp-2x against elastic-exp-1x"].effect == pytest.approx(0.1)
    assert found["elastic-exp-2x against elastic-exp-1x: share of keys and values lost"].effect == pytest.approx(0.01)
    assert found["elastic-exp-2x against elastic-exp-1x: mean squared error"].effect == pytest.approx(0.1)
    assert found["titans-grm against titans-grm-age"].effect == pytest.approx(-0.3)
    assert found["elastic-uniform-1x, tested exponential against tested uniform"].effect == pytest.approx(0.101)
    noise = "elastic-exp-1x against memorizing-1x, 50% noise in all layers: "
    assert found[f"{noise}rise of the loss"].effect == pytest.approx(-0.2)
    assert found[f"{noise}loss"].effect == pytest.approx(0.2)
    assert {line.direction for line in compared(rows)} <= set(DIRECTIONS)


def test_signs_under_corruption_are_those_of_the_papers_table():
    rows = rows_of({"elastic-exp-1x": (2.0, 0.5), "memorizing-1x": (2.4, 0.3)})
    orders = {line.told: line.comparison.effect for line in compared(rows) if line.direction == "orders"}
    rises = "memorizing-1x against elastic-exp-1x, {}: rise of the loss"
    assert orders[rises.format("75% noise in the memory layer")] == pytest.approx(0.2)
    assert orders[rises.format("75% noise in all layers")] == pytest.approx(0.2)
    assert "elastic-exp-1x against memorizing-1x, 50% noise in all layers: rise of the loss" in orders
    assert not [told for told in orders if told.endswith("75% noise in the memory layer: loss")]  # 3.316 both
    assert len(orders) == 11


def test_rows_of_models_without_an_elastic_memory_are_plotted(tmp_path):
    (row, *_) = rows_of({"block": (2.0, 0.1)})
    sizes = {"parameters": 1, "memory_floats": 0, "seconds": 1.0, "recipe": dataclasses.asdict(measure.Recipe())}
    write([{**row, **sizes}], tmp_path / "x.jsonl")
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_rows_resume_seed_by_seed(tmp_path, monkeypatch, capsys):
    order = []

    def row_of(name, seed, recipe, text):
        order.append((name, seed))
        (row,) = (row for row in rows_of({name: (2.0, 0.1)}) if row["seed"] == seed)
        sizes = {"parameters": 10, "memory_floats": 5, "seconds": 1.0, "recipe": dataclasses.asdict(recipe)}
        return {**row, **sizes}

    monkeypatch.setattr(run, "measure", row_of)
    options = ["--only", "block", "elastic-exp-1x", "--out", str(tmp_path)]
    run.main([*options, "--seeds", "1"])
    run.main([*options, "--seeds", "2"])
    assert order == [("block", 0), ("elastic-exp-1x", 0), ("block", 1), ("elastic-exp-1x", 1)]
    rows = [json.loads(line) for line in (tmp_path / "embedded.jsonl").read_text().splitlines()]
    assert [(row["model"], row["seed"]) for row in rows] == order
    assert "Noise in keys and values" in capsys.readouterr().out
    assert (tmp_path / "embedded.png").stat().st_size > 10_000


def test_rows_of_another_text_with_the_same_name_are_refused(tmp_path, monkeypatch, capsys):
    def row_of(name, seed, recipe, text):
        (row, *_) = rows_of({name: (2.0, 0.1)})
        return {**row, "parameters": 10, "memory_floats": 5, "seconds": 1.0, "recipe": dataclasses.asdict(recipe)}

    monkeypatch.setattr(run, "measure", row_of)
    book = tmp_path / "book.txt"
    book.write_text("The whale.")
    options = ["--only", "block", "--seeds", "1", "--out", str(tmp_path), "--text", str(book)]
    run.main(options)
    run.main(options)
    assert len((tmp_path / "book.jsonl").read_text().splitlines()) == 1
    book.write_text("The white whale.")
    with pytest.raises(SystemExit):
        run.main(options)
    assert "rows of another recipe" in capsys.readouterr().err


def test_commands_of_the_paper_are_real(config_of_command):
    chosen = ("elastic-uniform-16x", "block", "titans-ssc-age")
    elastic, block, gate = (config_of_command(line).model for name, _, line in runs() if name in chosen)
    assert (elastic.elastic.order, elastic.elastic.block_size, elastic.block_attention.block_size) == (8640, 2048, 2048)
    assert elastic.pattern.index("elastic") == 8
    assert set(block.pattern) == {"block_attention"}
    assert gate.memory.caching == CachingConfig("ssc", 256, connector="age", capacity=15)
