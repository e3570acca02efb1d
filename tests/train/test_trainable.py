"""Runs that start from another run's parameters, and train only some of them."""

import contextlib
import dataclasses
import io
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from atlasjax import cli
from atlasjax.cli.train import TrainCommand, _with_branch
from atlasjax.nn import AttentionConfig, BranchConfig, CachingConfig, MemoryConfig
from atlasjax.presets import get_preset
from atlasjax.storage.tensors import named
from atlasjax.train import ConfigError, OptimizerConfig, TrainConfig, train
from atlasjax.train import state as state_lib
from atlasjax.train.reports import metrics
from atlasjax.train.setup import prepare
from atlasjax.train.trainable import counted, marked, replaced, select, trainable_mask
from tests.train.tiny import MODEL, config, train_losses

pytestmark = pytest.mark.usefixtures("compile_fast")

PARAMS = {
    "embedding": np.ones((2, 3)),
    "layers": {"mixer": {"out": np.ones(4), "gate": np.ones(5)}, "norm": np.ones(6)},
}


def test_selection_by_pattern():
    mask = trainable_mask(r"mixer|norm$", PARAMS)
    assert named(mask) == {
        "embedding": False, "layers.mixer.out": True, "layers.mixer.gate": True, "layers.norm": True,
    }  # fmt: skip
    assert counted(PARAMS, mask) == (15, 21)
    assert select(PARAMS, mask) == {"layers": PARAMS["layers"]}
    assert select(PARAMS, trainable_mask("out", PARAMS)) == {
        "layers": {"mixer": {"out": PARAMS["layers"]["mixer"]["out"]}}
    }
    changed = replaced(PARAMS, {"layers": {"norm": 0}, "new": 1})
    assert named(changed) == {**named(PARAMS), "layers.norm": 0, "new": 1}
    assert trainable_mask(None, PARAMS) is None
    assert trainable_mask(".", PARAMS) is None  # all of them
    assert named(marked(PARAMS, lambda path: path == "embedding"))["embedding"]


def test_patterns_that_are_refused():
    with pytest.raises(
        ValueError, match=r"'mixr', which is found in no parameter's path. Did you mean 'mixer'\? .*layers.norm"
    ):
        trainable_mask("mixr", PARAMS)
    with pytest.raises(ValueError, match=r"optimizer.trainable is '\*cache', must be a regular expression"):
        OptimizerConfig(trainable="*cache")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(base run, its result, the run with added caching, its result, what that one printed)."""
    folder = tmp_path_factory.mktemp("added")
    model = dataclasses.replace(MODEL, mixer="gated_deltanet", num_layers=1, num_heads=1)
    base = config(folder, model=model, run_dir=str(folder / "base"), steps=2, checkpoint_every=0)
    optimizer = dataclasses.replace(base.optimizer, trainable=r"\.cache\.", clip_norm=1e-3)
    added = dataclasses.replace(
        base, model=dataclasses.replace(model, caching=CachingConfig.added("grm", 4)), optimizer=optimizer, steps=4,
        checkpoint_every=2, run_dir=str(folder / "added"), init_from=base.run_dir,
    )  # fmt: skip
    first = train(base)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        second = train(added)
    return base, first, added, second, out.getvalue()


def test_only_what_was_added_is_trained(runs):
    base, first, added, second, said = runs
    old, new = named(first.state.params), named(second.state.params)
    assert {path for path in new if path not in old} == {
        "layers.mixer.cache.blend", "layers.mixer.cache.connector.kernel",
    }  # fmt: skip
    for path, value in old.items():
        np.testing.assert_array_equal(value, new[path], err_msg=path)
    assert np.abs(new["layers.mixer.cache.blend"]).min() > 0
    moments = [leaf for leaf in jax.tree.leaves(second.state.optimizer) if leaf.ndim]
    assert sorted(leaf.shape for leaf in moments) == 2 * [(1, 1)] + 2 * [(1, 16, 1, 16)]
    evaluations = [x for x in metrics.read(pathlib.Path(added.run_dir) / "metrics.jsonl") if x["kind"] == "evaluation"]
    assert [x["step"] for x in evaluations] == [0, 4]
    assert evaluations[0]["bits_per_byte"] == pytest.approx(first.evaluation.bits_per_byte, rel=1e-6)
    assert evaluations[1]["bits_per_byte"] != evaluations[0]["bits_per_byte"]
    total = sum(value.size for value in new.values())
    assert f"Starting from the parameters in {base.run_dir}/checkpoints/2." in said
    assert "257 parameters are new: layers.mixer.cache.blend, layers.mixer.cache.connector.kernel." in said
    assert f"257 of {total:,} parameters train; the others are frozen." in said


def test_it_resumes(runs, tmp_path):
    """From the checkpoint of step 2, without the run that it started from; bit for bit."""
    _, _, added, result, _ = runs
    again = dataclasses.replace(added, run_dir=str(tmp_path / "again"), init_from=str(tmp_path / "gone"))
    shutil.copytree(added.run_dir, again.run_dir)
    shutil.rmtree(pathlib.Path(again.run_dir) / "checkpoints/4")
    resumed = train(again)
    assert resumed.resumed_from == 2
    jax.tree.map(np.testing.assert_array_equal, resumed.state.params, result.state.params)
    assert train_losses(again.run_dir) == train_losses(added.run_dir)
    other = dataclasses.replace(again, optimizer=dataclasses.replace(again.optimizer, trainable=None))
    with pytest.raises(ConfigError, match=r"optimizer.trainable: '.*' → None.*init_from=.* starts a new run"):
        train(other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"init_from": "nowhere"}, "init_from is 'nowhere'; there is no run with a checkpoint in it"),
        (
            {"caching": CachingConfig("grm", 4, blended=True)},
            'start is "fresh", which clears the memory at the start of every',
        ),
        ({"caching": CachingConfig("residual", 4, start="carry")}, 'blended=False: with aggregation "residual" cached'),
        ({"norm_eps": 1e-3}, r"another architecture \(model.norm_eps: 1e-06 → 0.001\)"),
        ({"trainable": "cachet"}, r"'cachet', which is found in no parameter's path. Did you mean 'cache'\?"),
        ({"tokenizer": "bpe:300"}, "data.tokenizer is 'bpe:300'; the run in init_from=.* has 'byte'"),
        ({"run_dir": None}, "the run's own folder; give another run_dir"),
    ],
)
def test_what_cannot_be_started(runs, tmp_path, change, message):
    base, _, added, _, _ = runs
    new = {"run_dir": str(tmp_path / "new")}

    def start():
        ((field, value),) = change.items()
        if field in ("caching", "norm_eps"):
            new["model"] = dataclasses.replace(added.model, **change)
        elif field == "trainable":
            new["optimizer"] = dataclasses.replace(added.optimizer, **change)
        elif field == "tokenizer":
            new["data"] = dataclasses.replace(added.data, **change)
        else:
            new[field] = base.run_dir if value is None else value
        prepare(dataclasses.replace(added, **new))

    with pytest.raises(ValueError, match=message):
        start()
    assert not (tmp_path / "new").exists()


def test_added_caching_is_exported_in_the_plain_form(runs, tmp_path, capsys):
    """No public family has it, which is said."""
    added = runs[2]
    assert cli.main(["export", str(tmp_path / "out"), "--run-dir", added.run_dir]) == 0
    assert "the model has Memory Caching (grm), which no public family has." in capsys.readouterr().out
    assert json.loads((tmp_path / "out/config.json").read_bytes())["model_type"] == "atlasjax"


def test_a_run_with_parameters_of_its_own_takes_no_others(runs):
    base, _, added, _, _ = runs
    with pytest.raises(ValueError, match="holds a run that began with parameters of its own"):
        prepare(dataclasses.replace(base, init_from=added.run_dir))


def test_a_branch_is_added(runs, tmp_path, capsys):
    """The run starts with the outputs of the other one, moves only the branch, and is exported in no family's form."""
    base, first, *_ = runs
    model = dataclasses.replace(base.model, branch=BranchConfig("swa", attention=AttentionConfig(4)))
    optimizer = dataclasses.replace(base.optimizer, trainable=r"\.branch\.")
    added = dataclasses.replace(
        base, model=model, optimizer=optimizer, run_dir=str(tmp_path / "added"), init_from=base.run_dir
    )
    second = train(added)
    old, new = named(first.state.params), named(second.state.params)
    assert all(path.startswith("layers.branch.") for path in new if path not in old)
    for path, value in old.items():
        np.testing.assert_array_equal(value, new[path], err_msg=path)
    assert np.abs(new["layers.branch.scale"]).min() > 0
    evaluations = [x for x in metrics.read(pathlib.Path(added.run_dir) / "metrics.jsonl") if x["kind"] == "evaluation"]
    assert evaluations[0]["bits_per_byte"] == pytest.approx(first.evaluation.bits_per_byte, rel=1e-6)
    assert evaluations[1]["bits_per_byte"] != evaluations[0]["bits_per_byte"]
    capsys.readouterr()
    assert cli.main(["export", str(tmp_path / "out"), "--run-dir", added.run_dir]) == 0
    assert "the model has a branch (swa), which no public family has." in capsys.readouterr().out


def test_a_memory_beside_a_mixer_of_wide_values():
    """Titans has a residual, so its values are as wide as its keys; those of a Gated DeltaNet are wider."""
    model = dataclasses.replace(get_preset("gated-deltanet-tiny"), num_layers=2, dim=32)
    titans = BranchConfig("memory", memory=MemoryConfig("titans"))
    with pytest.raises(ValueError, match="value_expansion=2 needs a memory without a residual"):
        state_lib.model_shapes(dataclasses.replace(model, branch=titans))
    branch = dataclasses.replace(titans, value_expansion=1)
    with_branch = dataclasses.replace(model, branch=branch)
    state_lib.model_shapes(with_branch)
    assert with_branch.branch_alone.value_dim == with_branch.branch_alone.resolved_head_dim == model.resolved_head_dim
    with pytest.raises(ValueError, match="value_expansion must be an integer ≥ 1 or None, got 0"):
        BranchConfig(value_expansion=0)
    started = TrainConfig(model, init_from="base")
    assert _with_branch(TrainCommand(started, add_memory="titans"), started).model.branch == branch
    linear = BranchConfig("memory", memory=MemoryConfig("delta_rule"))
    assert _with_branch(TrainCommand(started, add_memory="delta_rule"), started).model.branch == linear


def test_branches_from_the_command_line(runs, tmp_path, monkeypatch, capsys):
    base = runs[0]
    asked = []
    monkeypatch.setattr("atlasjax.cli.train.offer", lambda config, preset: asked.append(config) or 1 / 0)
    start = ["train", "--init-from", base.run_dir, "--run-dir", str(tmp_path / "new")]
    cli.main([*start, "--add-window", "8"])
    cli.main([*start, "--add-memory", "titans"])
    assert [config.model.branch for config in asked] == [
        BranchConfig("swa", attention=AttentionConfig(8)), BranchConfig("memory", memory=MemoryConfig("titans")),
    ]  # fmt: skip
    capsys.readouterr()
    for arguments, message in (
        ([*start, "--add-window", "8", "--add-memory", "titans"], "a layer has one branch; leave one of them out"),
        (["train", "--add-window", "8"], "--add-window 8 is for a trained model: give --init-from"),
        ([*start, "--add-memory", "titan"], "Unknown memory rule 'titan'. Did you mean 'titans'?"),
        ([*start, "--add-window", "0"], "window"),
    ):
        assert cli.main(arguments) == 2
        assert message in capsys.readouterr().err


def test_from_the_command_line(runs, tmp_path, monkeypatch, capsys):
    base, _, added, _, _ = runs
    asked = []
    monkeypatch.setattr("atlasjax.cli.train.offer", lambda config, preset: asked.append(config) or 1 / 0)
    start = ["train", "--init-from", base.run_dir, "--add-caching", "grm", "--segment-size", "4"]
    cli.main([*start, "--run-dir", str(tmp_path / "new"), "--optimizer.trainable", r"\.cache\.", "--steps", "9"])
    assert asked[0].model == added.model
    assert (asked[0].steps, asked[0].init_from, asked[0].optimizer.trainable) == (9, base.run_dir, r"\.cache\.")
    assert asked[0].data == base.data
    cli.main([*start, "--run-dir", added.run_dir])  # the same command resumes
    assert asked[1] == dataclasses.replace(added, init_from=base.run_dir)
    capsys.readouterr()
    for arguments, message in (
        (start, "needs --run-dir, the folder of the new run"),
        ([*start, "--run-dir", "x", "--preset", "atlas-tiny"], "both give the model; leave --preset out"),
        (["train", "--add-caching", "grm"], "--add-caching is for a trained model: give --init-from"),
        (["train", "--init-from", "none", "--run-dir", "x"], "init_from is 'none'; there is no run in it"),
        ([*start[:-1], "8", "--run-dir", added.run_dir], "the model has Memory Caching already"),
    ):
        assert cli.main(arguments) == 2
        assert message in capsys.readouterr().err
    folder = tmp_path / "attention"
    folder.mkdir()
    saved = json.loads((pathlib.Path(base.run_dir) / "config.json").read_text())
    saved["model"]["mixer"] = "swa"
    (folder / "config.json").write_text(json.dumps(saved))
    assert cli.main(["train", "--init-from", str(folder), "--run-dir", "x", "--add-caching", "ssc"]) == 2
    assert "caching is given, but mixer is 'swa'" in capsys.readouterr().err
