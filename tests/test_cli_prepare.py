"""The command `atlasjax prepare`, and training on what it wrote."""

import json
import sys

import pytest

from atlasjax import cli
from atlasjax.cli import report
from atlasjax.data import DataConfig
from tests.data.conftest import make_texts
from tests.test_cli import MODEL, PRESET, printed_by
from tests.train.tiny import train_losses

pytestmark = pytest.mark.usefixtures("compile_fast")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    lines = (json.dumps({"body": text}) + "\n" for text in make_texts(200, seed=3))
    (folder / "a.jsonl").write_text("".join(lines))
    return folder


def prepare_arguments(corpus) -> list[str]:
    return [
        *("prepare", "--data.source", "jsonl", "--data.paths", str(corpus), "--data.column", "body"),
        *("--data.packing", "documents", "--workers", "1"),
    ]


@pytest.fixture(scope="module")
def prepared(corpus):
    """Two sets for packing documents: (folder, what the command printed)."""
    sets = (("one", "0"), ("two", "5"))
    return corpus, [
        printed_by([*prepare_arguments(corpus), "--out", str(corpus / name), "--data.seed", seed])
        for name, seed in sets
    ]


def train(folder, *sets, steps, run="run", more=()):
    model = [*MODEL]
    model[model.index("text")] = "prepared"
    return printed_by([
        "train", *PRESET, *model, "--data.packing", "documents", "--steps", str(steps), *more,
        "--run-dir", str(folder / run), "--data.paths", *(str(folder / name) for name in sets),
    ])  # fmt: skip


def test_what_prepare_prints(prepared):
    folder, (out, _) = prepared
    assert "tokenizing: 1 of 1 files" in out
    assert "train: 190 documents, " in out
    assert "validation: 10 documents, " in out
    assert out.splitlines()[-1] == (
        f"train: atlasjax train --data.source prepared --data.paths {folder / 'one'} --data.packing documents"
    )
    assert "already prepared" not in out
    again = printed_by([*prepare_arguments(folder), "--out", str(folder / "one"), "--data.seed", "0"])
    assert again.startswith(f"{folder / 'one'} was already prepared; nothing was done.\ntrain: 190 documents, ")


def test_training_on_a_mixture_goes_on_where_it_was(prepared, capsys, monkeypatch):
    from atlasjax.cli import train as command

    folder, _ = prepared
    # Such a schedule does not depend on the number of steps, so that two runs are the same as one.
    more = ("--data.weights", "1", "3", "--optimizer.schedule", "constant", "--optimizer.warmup-steps", "0")
    with monkeypatch.context() as brief:
        brief.setattr(command, "_report", lambda *_: None)  # of the last one alone
        train(folder, "one", "two", steps=4, run="a", more=more)
        train(folder, "one", "two", steps=2, run="b", more=more)
    out = train(folder, "one", "two", steps=4, run="b", more=more)
    assert "this model, 4 steps" in out
    assert "interpolated trigram" in out
    assert train_losses(folder / "a") == train_losses(folder / "b")
    assert cli.main(["evaluate", "--run-dir", str(folder / "b")]) == 0
    assert cli.main(["evaluate", "--run-dir", str(folder / "b"), "--stream", "--piece", "64"]) == 0
    assert capsys.readouterr().out.count("bits per byte  ") == 2


def test_baselines_of_prepared_data_are_those_of_its_text(prepared, monkeypatch):
    folder, _ = prepared
    source = DataConfig(source="jsonl", paths=(str(folder / "a.jsonl"),), column="body", separator="", shuffle=False)
    sets = {"prepared": (str(folder / "one"),), "twice": (str(folder / "one"),) * 2}
    found = {
        name: report.baselines(DataConfig(source="prepared", paths=paths, packing="documents"))
        for name, paths in sets.items()
    }
    assert list(found["prepared"]) == ["unigram of bytes", "interpolated trigram"]
    # The order of documents matters only where one meets the next, and in the share that weights are fitted on.
    assert found["prepared"] == pytest.approx(report.baselines(source), rel=0.01)
    assert found["twice"]["unigram of bytes"] == pytest.approx(found["prepared"]["unigram of bytes"], rel=1e-3)
    monkeypatch.setattr(report, "_BASELINE_CHARACTERS", 20_000)
    cut = report.baselines(DataConfig(source="prepared", paths=sets["prepared"], packing="documents"))
    assert list(cut) == ["unigram of bytes of 0M chars", "interpolated trigram of 0M chars"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["prepare", "--out", "x", "--workers", "0"], "workers is 0; it must be at least 1"),
        (["prepare", "--out", "x", "--data.source", "text", "--data.paths", "nowhere"], "'nowhere' does not exist"),
        (["prepare", "--out", "x", "--data.errors", "skip"], "source 'embedded' has no bytes to decode"),
        (
            ["prepare", "--out", "x", "--data.batch-size", "2"],
            "batch_size is 2; it is set when training on prepared data",
        ),
        (["prepare", "--out", "x", "--", "--region=a"], "--region=a after -- is an option of Beam; it needs --runner."),
        (
            ["prepare", "--runner", "FlinkRunner"],
            "--runner FlinkRunner needs Apache Beam: pip install 'atlasjax[beam]'.",
        ),
        (
            ["prepare", "--runner", "FlinkRunner", "--workers", "2"],
            "--workers is for processes of this machine; FlinkRunner",
        ),
        (["train", *PRESET, "--data.source", "prepared", "--data.paths", "."], "'.' is not prepared data"),
        (["train", *PRESET, "--data.source", "prepared"], "source 'prepared' needs paths"),
    ],
)
def test_user_errors_are_one_line(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "apache_beam", None)  # as if it were not installed
    assert cli.main(arguments) == cli.USER_ERROR
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert words in error[0]
    assert not (tmp_path / "x").exists() or not any((tmp_path / "x").iterdir())
