"""Trackers: each gets what metrics.jsonl gets."""

import hashlib
import shutil
import sys
import types

import pytest

from atlasjax.config_json import from_dict, to_dict
from atlasjax.nn import ModelConfig
from atlasjax.train import ConfigError, RunError, TrainConfig
from atlasjax.train.reports.metrics import MetricsWriter, read
from atlasjax.train.trackers import Trackers


class Noted:
    """A tracker of one's own."""

    made: list = []  # noqa: RUF012

    def __init__(self, config, after_step):
        self.calls = [("made", config.run_dir, after_step)]
        Noted.made.append(self)

    def log(self, step, kind, values):
        self.calls.append((step, kind, dict(values)))

    def commit(self):
        self.calls.append("commit")

    def close(self):
        self.calls.append("close")


class Failing(Noted):
    def log(self, step, kind, values):
        raise RuntimeError("the service is gone\nand more")


def refusing(config, after_step):
    raise RuntimeError("no account")


def config(folder, *trackers, **more):
    return TrainConfig(model=ModelConfig(), run_dir=str(folder), trackers=trackers, **{"tensorboard": False} | more)


def test_a_tracker_gets_every_record(tmp_path):
    run = config(tmp_path, Noted)
    assert run.trackers == ("tests.train.test_trackers:Noted",)
    with MetricsWriter(tmp_path, 2, trackers=Trackers(run, 2)) as writer:
        writer.write(3, "train", {"loss": 1.5})
        writer.write(4, "evaluation/book", {"loss": float("nan")})
        writer.commit()
    calls = Noted.made.pop().calls
    assert calls[:2] == [("made", str(tmp_path), 2), (3, "train", {"loss": 1.5})]
    assert calls[2][:2] == (4, "evaluation/book")
    assert calls[3:] == ["commit", "close"]
    assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [3, 4]


def test_tensorboard_is_one_of_them(tmp_path):
    for run in (config(tmp_path / "a", tensorboard=True), config(tmp_path / "b", "tensorboard", "tensorboard")):
        trackers = Trackers(run, 0)
        trackers.log(1, "train", {"loss": 1.0})
        trackers.close()
        assert len(list((tmp_path / run.run_dir / "tensorboard").glob("events*"))) == 1


def test_weights_and_biases(tmp_path, monkeypatch):
    """A resumed run goes on in the same run of the service, whose steps go back with it."""
    calls = []

    class Run:
        def define_metric(self, *names, **more):
            calls.append(("define_metric", *names, more))

        def log(self, values):
            calls.append(values)

        def finish(self):
            calls.append("finish")

    wandb = types.ModuleType("wandb")
    wandb.init = lambda **more: calls.append(more) or Run()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run = config(tmp_path / "mine", "wandb")
    for after in (0, 2):
        trackers = Trackers(run, after)
        trackers.log(after + 1, "train", {"loss": 2.0})
        trackers.commit()
        trackers.close()
    first, second = calls[: len(calls) // 2], calls[len(calls) // 2 :]
    assert first[0] == second[0]
    assert (first[0]["name"], first[0]["resume"], first[0]["config"]["run_dir"]) == ("mine", "allow", run.run_dir)
    assert first[1:3] == [("define_metric", "step", {}), ("define_metric", "*", {"step_metric": "step"})]
    assert first[3:] == [{"step": 1, "train/loss": 2.0}, "finish"]
    again, older, moved = tmp_path / "again", tmp_path / "older", tmp_path / "moved"
    Trackers(config(again, "wandb"), 0).close()
    shutil.rmtree(again)
    Trackers(config(again, "wandb"), 0).close()  # another run at the same place
    Trackers(config(older, "wandb"), 2).close()  # one of a version that kept no id
    older.rename(moved)
    Trackers(config(moved, "wandb"), 4).close()
    ids = [call["id"] for call in calls if "id" in call][2:]
    assert len({first[0]["id"], *ids}) == 4
    assert ids[2] == ids[3] == hashlib.sha256(str(older).encode()).hexdigest()[:16]
    assert second[3] == {"step": 3, "train/loss": 2.0}
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"tracker 'wandb' needs the package wandb: pip install 'atlasjax\[wandb\]'"):
        Trackers(run, 0)


def test_what_a_tracker_raises_names_it(tmp_path):
    trackers = Trackers(config(tmp_path, Noted, Failing), 0)
    with pytest.raises(
        RunError, match=r"tracker '.*:Failing' raised RuntimeError: the service is gone \(line \d+ of tests"
    ):
        trackers.log(1, "train", {})
    with pytest.raises(ConfigError, match=r"tracker '.*:refusing' raised RuntimeError: no account"):
        Trackers(config(tmp_path, Noted, refusing), 0)
    assert Noted.made[-1].calls[-1] == "close", "the one before is closed"


def test_a_file_may_name_the_librarys_own_only(tmp_path):
    saved = to_dict(config(tmp_path, "wandb"))
    assert from_dict(TrainConfig, saved).trackers == ("wandb",)
    with pytest.raises(ValueError, match="trackers is 'theirs:Tracker', a name of your own or of somebody else"):
        from_dict(TrainConfig, saved | {"trackers": ["theirs:Tracker"]})
    with pytest.raises(ValueError, match=r"Unknown tracker 'wand'. Did you mean 'wandb'"):
        config(tmp_path, "wand")
    with pytest.raises(ValueError, match="trackers is 'wandb'; it must be a tuple"):
        TrainConfig(model=ModelConfig(), trackers="wandb")
