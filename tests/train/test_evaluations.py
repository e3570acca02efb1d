"""The moving average of the parameters, and several evaluation sets."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import cli
from atlasjax.data import DataConfig
from atlasjax.distributed import MeshConfig, make_mesh
from atlasjax.storage.tensors import named
from atlasjax.train import ConfigError, OptimizerConfig, TrainConfig, load_run, train
from atlasjax.train import state as state_lib
from atlasjax.train.config import parse_sets
from atlasjax.train.evaluations import text_data
from atlasjax.train.reports import metrics
from atlasjax.train.setup import prepare
from atlasjax.train.step import averaged
from tests.train.tiny import MODEL, TEXT, config

pytestmark = pytest.mark.usefixtures("compile_fast")

DECAY = 0.3


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """(config, result, parameters after each step) of four steps with a moving average, all but the norms frozen, and two sets."""
    folder = tmp_path_factory.mktemp("ema")
    other, rows = folder / "other.txt", folder / "rows.jsonl"
    other.write_text("what it needs, a memory keeps while it reads. " * 40)
    rows.write_text("".join(json.dumps({"text": TEXT[:300]}) + "\n" for _ in range(4)))
    run = config(
        folder, model=dataclasses.replace(MODEL, num_layers=1), checkpoint_every=1, keep=9, eval_every=2,
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2, trainable="scale", ema_decay=DECAY),
        evaluation_sets=(f"other={other}", f"rows={rows}"),
    )  # fmt: skip
    result = train(run)
    load = lambda step: named(state_lib.pure(_params(load_run(run.run_dir, step).model)))
    return run, result, [load(step) for step in (1, 2, 3, 4)]


def _params(model):
    from flax import nnx

    return nnx.state(model, nnx.Param)


def test_the_average_is_that_of_the_parameters(done):
    """Computed again from the checkpoints of all steps; frozen parameters have none."""
    run, result, params = done
    start = named(prepare(dataclasses.replace(run, run_dir=run.run_dir + "_start")).init_state().params)
    found = named(result.state.ema)
    assert list(found) == [path for path in start if "scale" in path]
    for path, value in found.items():
        want = np.asarray(start[path], np.float64)
        for n, each in enumerate(params):
            d = min(DECAY, (1 + n) / (10 + n))
            want = d * want + (1 - d) * np.asarray(each[path], np.float64)
        np.testing.assert_allclose(value, want, rtol=1e-6, err_msg=path)
        assert not np.array_equal(value, params[-1][path])


def test_it_is_loaded_evaluated_and_resumed(done, tmp_path, capsys):
    run, result, _ = done
    loaded = named(state_lib.pure(_params(load_run(run.run_dir, ema=True).model)))
    for path, value in named(result.state.averaged).items():
        np.testing.assert_array_equal(loaded[path], value)
    again = dataclasses.replace(run, run_dir=str(tmp_path / "again"))
    shutil.copytree(run.run_dir, again.run_dir)
    for step in (3, 4):
        shutil.rmtree(pathlib.Path(again.run_dir) / f"checkpoints/{step}")
    resumed = train(again)
    assert resumed.resumed_from == 2
    jax.tree.map(np.testing.assert_array_equal, resumed.state.ema, result.state.ema)
    assert resumed.ema_evaluations == result.ema_evaluations
    capsys.readouterr()
    for ema, results in (((), result.evaluations), (("--ema",), result.ema_evaluations)):
        assert cli.main(["evaluate", "--run-dir", run.run_dir, "--max-batches", "1", *ema]) == 0
        said = capsys.readouterr().out
        for name, at in (("held-out", f"{run.run_dir}, step 4"), ("other", "other"), ("rows", "rows")):
            part = said[said.index(f"{at}: {results[name].tokens:,} tokens") :]
            assert f"{results[name].bits_per_byte:9.4f}" in part.split("bits per byte")[1]


def test_every_text_is_recorded_under_its_name(done):
    run, result, _ = done
    kinds = ["evaluation", "evaluation/other", "evaluation/rows"]
    kinds += [kind.replace("evaluation", "evaluation_ema") for kind in kinds]
    records = [
        x for x in metrics.read(pathlib.Path(run.run_dir) / "metrics.jsonl") if x["kind"].startswith("evaluation")
    ]
    assert [(x["step"], x["kind"]) for x in records] == [(step, kind) for step in (2, 4) for kind in kinds]
    last = {x["kind"]: x["bits_per_byte"] for x in records}
    assert len(set(last.values())) == 6
    assert list(result.evaluations) == list(result.ema_evaluations) == ["held-out", "other", "rows"]
    assert result.evaluation == result.evaluations["held-out"]
    assert last["evaluation_ema/other"] == result.ema_evaluations["other"].bits_per_byte


def test_a_run_without_an_average(done, tmp_path):
    run, _, _ = done
    plain = dataclasses.replace(run.optimizer, ema_decay=None)
    saved = tmp_path / "saved"
    shutil.copytree(run.run_dir, saved)
    stopped = dataclasses.replace(run, optimizer=plain, run_dir=str(saved), steps=5, evaluation_sets=())
    assert train(stopped).state.ema is None  # to drop it is allowed
    with pytest.raises(ConfigError, match=r"no moving average of its parameters \(optimizer.ema_decay\)"):
        load_run(saved, ema=True)
    with pytest.raises(ConfigError, match=r"must not change \(optimizer.ema_decay: None → 0.3\)"):
        train(dataclasses.replace(stopped, optimizer=run.optimizer))


def test_the_average_is_sharded_like_the_parameters():
    import optax

    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=1), jax.devices()[:2])
    shardings, _ = state_lib.state_shardings(MODEL, optax.adamw(1e-3), mesh, ema=True)
    assert shardings.ema == shardings.params
    assert any(not x.is_fully_replicated for x in jax.tree.leaves(shardings.ema))
    assert float(averaged(jnp.float32(1), jnp.float32(3), 0.9, jnp.int32(0))) == pytest.approx(0.1 + 0.9 * 3)


def test_what_is_refused(tmp_path):
    assert parse_sets(("a=x,y", "b-1=z")) == {"a": ("x", "y"), "b-1": ("z",)}
    base = {"model": MODEL, "run_dir": str(tmp_path / "run")}
    for sets, message in (
        (("wiki",), "evaluation_sets has 'wiki', must be \"name=path\""),
        (("a/b=x",), "evaluation_sets has 'a/b=x'"),
        (("a=x", "a=y"), "two sets named 'a'"),
        (("held-out=x",), "two sets named 'held-out'"),
        ("a=x", "must be a tuple of strings"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainConfig(**base, evaluation_sets=sets)
    with pytest.raises(FileNotFoundError, match=r"evaluation set 'a': .*nowhere"):
        prepare(TrainConfig(**base, mesh=MeshConfig(1, 1, 1), evaluation_sets=("a=nowhere.txt",)))
    with pytest.raises(ValueError, match=r"optimizer.ema_decay is 1.0, must be in \(0, 1\)|ema_decay is 1.0; it must"):
        OptimizerConfig(ema_decay=1.0)
    assert text_data(DataConfig(), ("x.parquet",)).source == "parquet"
    assert text_data(DataConfig(), ("x.JSONL", "y.jsonl.gz")).source == "jsonl"
    for paths in (("x.jsonl", "y.txt"), ("folder", "x.parquet")):
        with pytest.raises(ValueError, match="all files must be of one kind"):
            text_data(DataConfig(), paths)
