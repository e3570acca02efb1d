"""No file decides what is imported or called: names of own parts in files are refused, unless the user has vouched for them."""

import contextlib
import dataclasses
import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest

import atlasjax
from atlasjax import cli, names, trusted
from atlasjax.config_json import from_dict, to_dict
from atlasjax.data import DataConfig
from atlasjax.nn import BranchConfig, MemoryConfig, ModelConfig
from atlasjax.nn.baselines import RetNetMixer
from atlasjax.rules import REGISTRY
from atlasjax.train import state as state_lib
from atlasjax.train.config import OptimizerConfig, TrainConfig, saved_config
from atlasjax.train.errors import ConfigError
from atlasjax.train.load import load_run
from atlasjax.train.saving.checkpoint import Checkpoints
from atlasjax.train.saving.runs import run_config

MODULE = "trust_probe"
PROBE = """
import functools, os, pathlib, sys
from os import getcwd

(pathlib.Path(__file__).parent / "imported").touch()
print("the probe is imported", file=sys.stderr)


def part(*_, **__):
    raise ValueError("the probe was asked")


alias = functools.partial(part)
foreign = functools.partial(getcwd)
"""
MODEL = ModelConfig(
    dim=8, num_layers=2, num_heads=1, mixer=("retnet", "gla"), dtype="float32", conv_width=2,
    memory=MemoryConfig("delta_rule"), branch=BranchConfig("retnet", memory=MemoryConfig("delta_rule")),
)  # fmt: skip
FIELDS = (
    "model.mixer", "model.memory.rule", "model.memory.implementation", "model.branch.mixer", "model.branch.memory.rule",
    "model.branch.memory.implementation", "data.source", "optimizer.name", "optimizer.schedule",
)  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_vouched_for(monkeypatch):
    """Other tests of this process have given names."""
    for known in ("_modules", "_given", "_imported", "_said"):
        monkeypatch.setattr(trusted, known, set())


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """A user's module, of which a file says whether it was imported. Returns a function that says it."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / f"{MODULE}.py").write_text(PROBE)
    monkeypatch.syspath_prepend(folder)
    with trusted.scope():
        yield (folder / "imported").exists
    sys.modules.pop(MODULE, None)


def saved(folder: pathlib.Path, **changes: str) -> dict:
    """The JSON of a run's config, with other values in some fields."""
    values = json.loads(json.dumps(to_dict(TrainConfig(MODEL, run_dir=str(folder), steps=3))))
    for field, value in changes.items():
        *path, last = field.split(".")
        inner = values
        for name in path:
            inner = inner[name]
        inner[last] = [inner[last][0], value] if isinstance(inner[last], list) else value
    return values


def make_run(folder: pathlib.Path, values: dict) -> pathlib.Path:
    """A run with a checkpoint of step 0, as an import makes it, whose config is `values`."""
    params = state_lib.init_params(dataclasses.replace(MODEL), jax.random.key(0))
    state = state_lib.TrainState(params, None, jax.random.key(0), jnp.zeros((), jnp.int32))
    folder.mkdir()
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text('{"kind": "byte"}')
    (folder / "config.json").write_text(json.dumps(values))
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(state, [None], values)
    return folder


def one_line(error: BaseException | str, *words: str) -> None:
    text = str(error)
    assert len(text.strip().splitlines()) == 1, text
    for word in words:
        assert word in text, text


@pytest.mark.parametrize("field", FIELDS)
def test_a_file_names_no_part_on_any_axis(field, tmp_path, probe, capsys):
    values = saved(tmp_path, **{field: f"{MODULE}:part"})
    with pytest.raises(ValueError, match=MODULE) as caught:
        saved_config(values, "runs/x")
    one_line(caught.value, "the config of the run in runs/x", f"{field} is '{MODULE}:part'", f"add --trust {MODULE}")
    assert not probe()
    assert MODULE not in sys.modules
    # With the user's word it is imported, and a line says so before.
    atlasjax.trust(MODULE)
    with contextlib.suppress(ValueError):  # a rule is made at once, other parts later
        saved_config(values, "runs/x")
    assert probe()
    said, imported = capsys.readouterr().err.splitlines()
    assert said == f"atlasjax: the config of the run in runs/x: {field} is '{MODULE}:part', so '{MODULE}' is imported."
    assert imported == "the probe is imported"


@pytest.mark.parametrize(
    "name",
    [
        "os:getcwd", "builtins:print", "atlasjax.names:importlib.import_module", "atlasjax.names:resolve",
        "atlasjax.storage:write_whole", "atlasjax.rules:register", "atlasjax.rules:functools.partial", "atlasjax:cli.main",
        "optax:apply_updates", "optax:lion.__globals__", "optax.contrib:jax.device_get", "optax._src.alias:lion", "optax:adam.x",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "field", ["model.memory.rule", "model.mixer", "data.source", "optimizer.name", "optimizer.schedule"]
)
def test_what_is_no_part_of_the_library_is_refused(field, name, tmp_path):
    with trusted.scope(), pytest.raises(ValueError, match="nothing was imported") as caught:
        saved_config(saved(tmp_path, **{field: name}))
    one_line(caught.value, f"{field} is '{name}'")


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("model.memory.rule", names.name_of("rule", REGISTRY["titans"])),
        ("model.mixer", names.name_of("mixer", RetNetMixer)),
        ("optimizer.name", "optax:lion"),
        ("optimizer.name", "optax.contrib:muon"),
    ],
)
def test_the_librarys_own_parts_need_no_trust(field, name, tmp_path):
    trusted._given.discard(name)
    saved_config(saved(tmp_path, **{field: name}))
    if field == "optimizer.name":  # a name of an axis is none of another
        with pytest.raises(ValueError, match="nothing was imported"):
            saved_config(saved(tmp_path, **{"model.memory.rule": name}))


def test_a_trusted_module_opens_no_way_to_others(tmp_path, probe):
    atlasjax.trust(MODULE)
    for path in (
        "getcwd",
        "os.getcwd",
        "foreign",
        "part.__globals__",
        "part.__class__",
        "sys.exit",
        "functools.partial",
    ):
        with pytest.raises(ValueError, match="not in the module that it is named in") as caught:
            saved_config(saved(tmp_path, **{"model.memory.rule": f"{MODULE}:{path}"}))
        one_line(caught.value, f"{MODULE}:{path}")
    for path in ("part", "alias"):
        with pytest.raises(ValueError, match="the probe was asked"):
            saved_config(saved(tmp_path, **{"model.memory.rule": f"{MODULE}:{path}"}))


def test_modules_below_a_trusted_one_and_beside_it(tmp_path):
    with trusted.scope():
        atlasjax.trust("no_such_package.rules")
        for module, words in (("no_such_package.rules.own", "cannot be imported"), ("no_such_package.rules2", "nothing was"),
                              ("no_such_package", "nothing was")):  # fmt: skip
            with pytest.raises(ValueError, match=words):
                saved_config(saved(tmp_path, **{"data.source": f"{module}:x"}))
    with trusted.scope(), pytest.raises(ValueError, match="nothing was"):
        saved_config(saved(tmp_path, **{"data.source": "no_such_package.rules.own:x"}))
    for wrong in ("", "a:b", "a..b", 3):
        with pytest.raises(ValueError, match="is not the name of a module"):
            atlasjax.trust(wrong)


def test_what_python_code_names_is_known(tmp_path, probe):
    """A class or a name that this process was given may come back from a file."""
    values = to_dict(DataConfig(f"{MODULE}:part"))
    assert probe()
    assert from_dict(DataConfig, values).source == f"{MODULE}:part"
    with pytest.raises(ValueError, match=f"{MODULE}:alias.*nothing was imported"):
        from_dict(DataConfig, values | {"source": f"{MODULE}:alias"})
    config = to_dict(OptimizerConfig(schedule=saved))
    assert from_dict(OptimizerConfig, config).schedule == "tests.test_trusted:saved"
    with pytest.raises(ValueError, match="nothing was imported"):
        from_dict(OptimizerConfig, config | {"schedule": "tests.test_trusted:make_run"})


def test_another_process_of_the_program_is_no_file(probe):
    with pytest.raises(ValueError, match="the probe was asked"):
        from_dict(MemoryConfig, {"rule": f"{MODULE}:part"}, file=None)


COMMANDS = {
    "resumed": ["train", "--run-dir", "{run}", "--steps", "5"],
    "resumed with a preset": ["train", "--preset", "retnet-tiny", "--run-dir", "{run}"],
    "started from it": ["train", "--init-from", "{run}", "--run-dir", "{new}"],
    "evaluated": ["evaluate", "--run-dir", "{run}"],
    "asked for what is far": ["evaluate", "--run-dir", "{run}", "--tasks", "niah_1", "--lengths", "256"],
    "sampled": ["generate", "--run-dir", "{run}"],
    "served": ["serve", "--run-dir", "{run}", "--port", "0"],
    "exported": ["export", "{new}", "--run-dir", "{run}"],
}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A run whose config names somebody's function as its rule."""
    folder = tmp_path_factory.mktemp("hostile")
    return make_run(folder / "run", saved(folder / "run", **{"model.memory.rule": f"{MODULE}:part"}))


@pytest.mark.parametrize("what", COMMANDS)
def test_no_command_imports_what_a_run_names(what, hostile, tmp_path, probe, capsys):
    new = tmp_path / "new"
    command = [x.format(run=hostile, new=new) for x in COMMANDS[what]]
    files = lambda: sorted(file for file in hostile.rglob("*") if file.name != "lock")
    before = files()
    assert cli.main(command) == 2
    one_line(capsys.readouterr().err, f"model.memory.rule is '{MODULE}:part'", f"--trust {MODULE}", str(hostile))
    assert not probe()
    assert files() == before
    assert not new.exists()
    # The user's word holds for one command.
    assert cli.main([*command, "--trust", MODULE]) == 2
    assert "the probe was asked" in capsys.readouterr().err
    assert probe()
    assert cli.main(command) == 2
    assert "nothing was imported" in capsys.readouterr().err
    assert cli.main([*command, "--trust", "another_module"]) == 2
    assert "nothing was imported" in capsys.readouterr().err


def test_the_command_that_names_a_part_needs_no_option(hostile, probe, capsys):
    """A run that was begun with own parts goes on with the command that began it."""
    command = ["train", "--run-dir", str(hostile)]
    assert cli.main([*command, "--model.memory.rule", f"{MODULE}:part"]) == 2
    assert "the probe was asked" in capsys.readouterr().err
    assert cli.main([*command, f"--model.memory.rule={MODULE}:part"]) == 2
    assert "the probe was asked" in capsys.readouterr().err
    assert cli.main([*command, "--model.memory.rule", f"{MODULE}:alias"]) == 2
    assert "nothing was imported" in capsys.readouterr().err


def test_a_checkpoint_that_is_nested_too_deep(tmp_path):
    """As deep as JSON is read, and deeper than what walks through it can go."""
    run = make_run(
        tmp_path / "run", saved(tmp_path / "run") | {"data": functools.reduce(lambda x, _: [x], range(150), 0)}
    )
    with pytest.raises(ConfigError, match="no checkpoint that can be read") as caught:
        load_run(run)
    one_line(caught.value, str(run))


def test_python_is_as_careful(hostile, probe):
    for call in (load_run, run_config):
        with pytest.raises(ConfigError, match="nothing was imported") as caught:
            call(hostile)
        one_line(caught.value)
    assert not probe()
    atlasjax.trust(MODULE)
    for call in (load_run, run_config):
        with pytest.raises(ConfigError, match="the probe was asked"):
            call(str(hostile))
