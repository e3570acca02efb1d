"""Command lines: files of options, names of other programs, the order of options, and what help shows."""

import json

import pytest

from atlasjax import cli
from atlasjax.cli.arguments import _OTHER_NAMES, _options
from atlasjax.cli.options import evaluate, generate, prepare, train, tune
from atlasjax.config_json import to_dict
from atlasjax.train import default_config

TOML = """
preset = "titans-tiny"
steps = 7
run-dir = "runs/x"
[data]
sequence-length = 64
[model.memory]
expansion = 3
[model.caching]
segment_size = 128
[optimizer]
learning_rate = 1
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(*arguments):
    return train.read(list(arguments))


def test_a_file_of_options_beside_options(folder):
    (folder / "run.toml").write_text(TOML.replace("[model.caching]\nsegment_size = 128\n", ""))
    request = read("--config", "run.toml", "--steps", "9", "--data.batch-size=2")
    config, default = request.command.config, default_config("titans-tiny")
    assert (request.preset, request.own_vocabulary) == ("titans-tiny", False)
    assert (config.steps, config.run_dir, config.data.batch_size, config.data.sequence_length) == (9, "runs/x", 2, 64)
    assert config.optimizer.learning_rate == 1.0
    assert config.model.memory.expansion == 3
    assert config.model.dim == default.model.dim
    assert config.data.seed == default.data.seed
    other = read("--preset", "atlas-tiny", "--config", "run.toml")
    assert other.command.config.model.memory.rule == "atlas"


def test_the_config_of_a_run_and_json(folder):
    saved = read(
        "--preset", "gla-tiny", "--steps", "5", "--model.caching.segment-size", "64", "--compilation-cache", "True"
    )
    text = json.dumps(to_dict(saved.command.config))
    (folder / "config.json").write_text(text)
    (folder / "other.json").write_text(text)
    for name in (str(folder), "other.json"):
        request = read("--config", name, "--run-dir", "runs/new")
        wanted = json.loads(text) | {"run_dir": "runs/new", "compilation_cache": None}  # code, which no file asks for
        assert to_dict(request.command.config) == wanted
        assert request.own_vocabulary


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.toml", '[data]\nsorce = "text"', "a.toml: Unknown field of DataConfig 'sorce'. Did you mean 'source'?"),
        ("a.toml", "stepz = 1", "a.toml: Unknown field of TrainConfig 'stepz'. Did you mean 'steps'?"),
        ("a.toml", 'steps = "a"', "a.toml: TrainConfig.steps: must be int, got 'a'."),
        ("a.toml", "steps = 0", "a.toml: steps is 0; it must be at least 1"),
        ("a.toml", "preset = 3", "a.toml: preset is 3; it must be the name of a preset."),
        ("a.toml", "steps = [", "'a.toml' is not TOML: "),
        ("a.toml", "a = " + "[" * 200 + "]" * 200, "'a.toml' is nested too deep."),
        ("a.toml", 'model = "titans"', "a.toml: ModelConfig: expected a dictionary of fields"),
        ("a.json", "[1]", "'a.json' should have fields, like those of a run's config.json; it is a list."),
        ("a.json", '{"steps": 1, "steps": 2}', "'a.json' has the key 'steps' twice"),
        ("a.yaml", "steps: 1", "config is 'a.yaml'; it must be a file .toml or .json, or the folder of a run."),
        ("b.toml", "", "config is 'a.toml', which is neither a file nor the folder of a run."),
        ("a.toml", 'trackers = ["theirs:T"]', "a.toml: trackers is 'theirs:T', a name of your own or of somebody else"),
        ("a.toml", '[model.memory]\nrule = "theirs:rule"', "add --trust theirs (in Python"),
    ],
)
def test_files_that_are_refused(folder, capsys, name, content, words):
    (folder / name).write_text(content)
    asked = name if name != "b.toml" else "a.toml"
    assert cli.main(["train", "--config", asked]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


def test_a_file_may_name_what_is_trusted_or_typed(folder):
    (folder / "a.toml").write_text('[data]\nsource = "tests.own_parts:Counting"')
    for more in (["--trust", "tests.own_parts"], ["--data.source", "tests.own_parts:Counting"]):
        with cli.trusted.scope():
            assert read("--config", "a.toml", *more).command.config.data.source == "tests.own_parts:Counting"


@pytest.mark.parametrize(
    ("command", "typed", "meant"),
    [
        ("train", "--lr", "--optimizer.learning-rate"),
        ("train", "--batch-size", "--data.batch-size"),
        ("train", "--max_steps", "--steps"),
        ("train", "--seq-len=3", "--data.sequence-length"),
        ("train", "--epochs", "--steps"),
        ("train", "--wandb", "--trackers"),
        ("prepare", "--tokenizer", "--data.tokenizer"),
        ("prepare", "--num-workers", "--workers"),
        ("generate", "--max-new-tokens", "--max-tokens"),
        ("evaluate", "--checkpoint", "--run-dir"),
    ],
)
def test_names_of_other_programs_are_understood(capsys, command, typed, meant):
    assert cli.main([command, typed, "3"]) == 2
    assert f". Did you mean {meant}? `atlasjax {command} --help`" in capsys.readouterr().err


def test_names_of_other_programs_are_none_of_ours():
    commands = (
        train.TrainCommand,
        prepare.PrepareCommand,
        generate.GenerateCommand,
        evaluate.EvaluateCommand,
        tune.TuneCommand,
    )
    every = [{name for name, _ in _options(command)} for command in commands]
    assert set(_OTHER_NAMES.values()) <= set.union(*every)
    assert not set(_OTHER_NAMES) & {name for names in every for name in names if all(name in each for each in every)}


@pytest.mark.parametrize(
    "arguments",
    [
        "--model.caching.segment-size 64 --steps 9 --model.branch.num_heads=2",
        "--model.branch.num-heads 2 model.branch:branch-config --steps 9 --model.caching.segment-size=64",
        "model.caching:caching-config --steps 9 --model.caching.segment-size 64 --model.branch.num-heads 2",
    ],
)
def test_no_word_and_no_order_is_needed(arguments):
    config = read("--preset", "gla-tiny", *arguments.split()).command.config
    assert (config.steps, config.model.caching.segment_size, config.model.branch.num_heads) == (9, 64, 2)


def test_help_shows_what_people_use(capsys):
    assert cli.main(["train", "--preset", "titans-tiny", "--help"]) == 0
    out = capsys.readouterr().out
    assert 15 <= sum(line.startswith("  --") for line in out.splitlines()) <= 20
    assert "(default: runs/titans-tiny)" in out
    assert out.endswith("`atlasjax train --help all` lists all options.\n")
    assert max(map(len, out.splitlines())) <= 150
    assert cli.main(["train", "--preset", "titans-tiny", "--help", "all"]) == 0
    everything = capsys.readouterr().out
    for name in train.SHOWN:
        assert f"--{name} " in everything
    assert "--optimizer.ema-decay" in everything
    assert "--optimizer.ema-decay" not in out
