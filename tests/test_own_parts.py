"""What a user wrote in a file of their own trains, is saved, goes on, decodes and is evaluated like what the library has."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from atlasjax import cli
from atlasjax.config_json import from_dict, to_dict
from atlasjax.data import DataConfig, make_pipeline, make_tokenizer
from atlasjax.data.sources import load_documents
from atlasjax.nn import LanguageModel, MemoryConfig, ModelConfig
from atlasjax.train.config import OptimizerConfig, TrainConfig, changes_on_resume
from atlasjax.train.optimizer import check_optimizer, learning_rate, make_optimizer
from tests import own_parts
from tests.streams import streamed

ROOT = pathlib.Path(__file__).parent.parent
SMALL = {"dim": 16, "num_layers": 2, "num_heads": 2, "dtype": "float32", "conv_width": 2}


def run(folder, *arguments):
    """The command in a child process that finds the user's file on PYTHONPATH."""
    command = [sys.executable, "-m", "atlasjax", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.parametrize("bounded", ["no-bounded", pytest.param("bounded", marks=pytest.mark.slow)])  # less to compile
def test_a_language_model_of_own_parts_from_the_command_line(bounded, tmp_path, monkeypatch, capsys):
    """Trains on an own source with an own mixer, memory rule, schedule and optimizer; goes on; evaluates; generates."""
    options = [
        "train", "--preset", "titans-tiny", "--run-dir", str(tmp_path / "run"),
        "--model.dim", "16", "--model.num-layers", "2", "--model.num-heads", "2",
        "--model.mixer", "tests.own_parts:MovingAverage", "memory", "--model.mixer-options", '{"longest": 32}',
        "--model.memory.rule", "tests.own_parts:log_cosh_memory", "--model.memory.chunk-size", "8",
        f"--model.memory.{bounded}",
        "--model.memory.rule-options", '{"expansion": 2}',
        "--data.source", "tests.own_parts:Counting", "--data.source-options", '{"documents": 40}',
        "--data.sequence-length", "32", "--data.batch-size", "4",
        "--optimizer.name", "tests.own_parts:sgd", "--optimizer.options", '{"momentum": 0.5}',
        "--optimizer.schedule", "tests.own_parts:inverse_square_root", "--optimizer.learning-rate", "0.1",
        "--mesh.data", "1", "--eval-batches", "1", "--no-tensorboard",
    ]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert cli.main([*options, "--steps", "3"]) == 0
    assert "step 3/3" in capsys.readouterr().out
    assert cli.main([*options, "--steps", "5"]) == 0
    said = capsys.readouterr().out
    assert "step 5/5" in said
    for command in ("continue: ", "sample more: ", "measure: "):  # they can be copied
        (line,) = [line for line in said.splitlines() if line.startswith(command)]
        assert "--trust tests.own_parts" in line
    run_dir = str(tmp_path / "run")
    place = ["--run-dir", run_dir, "--trust", "tests.own_parts"]
    assert (
        cli.main(["generate", "--run-dir", run_dir, "--prompt", "1 2"]) == 2
    )  # the config in the folder says it, not the user
    assert "add --trust tests.own_parts" in capsys.readouterr().err
    assert cli.main(["generate", *place, "--prompt", "1 2", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("1 2")
    done = run(tmp_path, "evaluate", *place, "--max-batches", "1")  # another process finds everything by name
    assert done.returncode == 0, done.stderr[-2000:]
    assert "bits per byte" in done.stdout
    assert cli.main([*options, "--steps", "7", "--optimizer.options", "{}", "--optimizer.name", "optax:lion"]) == 2
    assert "optimizer.name: 'tests.own_parts:sgd' → 'optax:lion'" in capsys.readouterr().err


def test_a_mixer_that_does_not_decode_and_an_optimizer_that_takes_the_loss(tmp_path, capsys):
    place = ["--run-dir", str(tmp_path / "run")]
    options = [
        "train", "--preset", "titans-tiny", *place, "--model.dim", "16", "--model.num-layers", "1", "--model.num-heads", "2",
        "--model.mixer", "tests.own_parts:NotDecoded", "--optimizer.name", "tests.own_parts:plateau",
        "--data.sequence-length", "32", "--data.batch-size", "4", "--mesh.data", "1", "--eval-batches", "1", "--no-tensorboard",
    ]  # fmt: skip
    assert cli.main([*options, "--steps", "2"]) == 0  # saves a state whose least loss is infinite
    assert cli.main([*options, "--steps", "3"]) == 0
    out = capsys.readouterr().out
    assert "sample" not in out
    assert "measure:" in out
    assert cli.main(["evaluate", *place, "--trust", "tests.own_parts", "--max-batches", "1"]) == 0
    (text := tmp_path / "text.txt").write_text("a text")
    capsys.readouterr()
    place += ["--trust", "tests.own_parts"]
    for command in (["generate", *place], ["evaluate", *place, "--stream", "--text", str(text)], ["serve", *place]):
        assert cli.main(command) == 2, command
        said = capsys.readouterr().err
        assert "its model decodes no tokens: mixer 'tests.own_parts:NotDecoded': extend for x" in said, command
        assert "raised NotImplementedError: whole sequences only" in said, command


def test_a_mixer_streams_and_packs():
    """The class itself in the config; any cut of a sequence is the same function, and packed segments are as if alone."""
    config = ModelConfig(mixer=own_parts.MovingAverage, mixer_options={"longest": 16.0}, **SMALL)
    assert config.mixer == "tests.own_parts:MovingAverage"
    assert from_dict(ModelConfig, to_dict(config)) == config
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (2, 11), 0, 256)
    whole = model(tokens)
    parts, _ = streamed(model.extend, tokens, model.init_cache(2), (0, 4, 5, 11))
    np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-5)
    ids = jnp.asarray([[0] * 4 + [1] * 7] * 2)
    packed = model(tokens, segment_ids=ids, max_segments=2)
    np.testing.assert_allclose(packed[:, 4:], model(tokens[:, 4:]), rtol=1e-4, atol=1e-5)


def test_sources():
    config = DataConfig(own_parts.Counting, source_options={"documents": 40}, sequence_length=16, batch_size=4)
    assert config.source == "tests.own_parts:Counting"
    assert from_dict(DataConfig, to_dict(config)) == config
    tokenizer = make_tokenizer(config)
    train, held_out = (make_pipeline(config, tokenizer, split) for split in ("train", "validation"))
    assert train.num_tokens > 10 * held_out.num_tokens  # two of forty documents
    both = DataConfig("tests.own_parts:split_counting", sequence_length=16, batch_size=4, packing="documents")
    assert both.separate_validation
    assert next(iter(make_pipeline(both, tokenizer, "validation")))["inputs"].shape == (4, 16)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("optax:lion", {"b1": 0.8}),
        ("optax:adafactor", {}),
        ("optax.contrib:muon", {}),
        (own_parts.sgd, {"momentum": 0.5}),
    ],
)
def test_any_optax_optimizer(name, options):
    config = OptimizerConfig(name=name, options=options, learning_rate=0.01, warmup_steps=1, schedule="linear")
    optimizer = make_optimizer(config, 10, {"w": True, "b": False})
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones((4,))}
    state = optimizer.init(params)
    updates, state = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
    after = optax.apply_updates(params, updates)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(after))
    assert all((after[name] < params[name]).all() for name in params)


def test_schedules():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=2, final_fraction=0.5, schedule="linear")
    rates = [float(learning_rate(config, 7)(step)) for step in range(8)]
    np.testing.assert_allclose(rates, [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.5], atol=1e-6)
    constant = learning_rate(dataclasses.replace(config, schedule="constant"), 7)
    assert [float(constant(step)) for step in (0, 1, 5, 9)] == [0.5, 1.0, 1.0, 1.0]
    own = learning_rate(dataclasses.replace(config, schedule=own_parts.inverse_square_root), 7)
    assert float(own(6)) == 0.5


def test_another_optimizer_is_another_run():
    base = TrainConfig(ModelConfig(**SMALL))
    other = dataclasses.replace(base, optimizer=OptimizerConfig(name="optax:lion"))
    assert changes_on_resume(to_dict(base), to_dict(other))[1] == ["optimizer.name: 'adamw' → 'optax:lion'"]
    faster = dataclasses.replace(base, optimizer=OptimizerConfig(schedule="linear"))
    assert changes_on_resume(to_dict(base), to_dict(faster)) == ([], [], ["optimizer.schedule: 'cosine' → 'linear'"])


def broken_schedule(name):
    learning_rate(OptimizerConfig(schedule=f"tests.broken_parts:{name}"), 3)


def broken_optimizer(name):
    full = f"tests.broken_parts:{name}"
    params = {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}
    config = OptimizerConfig(name=full, clip_norm=None)
    check_optimizer(config, make_optimizer(config, 3, {}), params)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelConfig(mixer="tests.own_parts:MovingAverages"), "has no 'MovingAverages'. Did you mean 'MovingAverage'?"),
        (lambda: ModelConfig(mixer="no_such_module:Mixer"), "module 'no_such_module' cannot be imported"),
        (lambda: ModelConfig(mixer=lambda config, rngs: None), "a class or function at the top of a module"),
        (lambda: ModelConfig(mixer=3), "must be a name, or a class or function at the top of a module"),
        (lambda: ModelConfig(mixer="memory", mixer_options={"longest": 1}), "are for a mixer of your own"),
        (lambda: ModelConfig(mixer=own_parts.MovingAverage, mixer_options="{"), "must be a JSON object such as"),
        (
            lambda: LanguageModel(
                ModelConfig(mixer=own_parts.MovingAverage, mixer_options={"longst": 1}, **SMALL), rngs=nnx.Rngs(0)
            ),
            "got an unexpected keyword argument 'longst'",
        ),
        (
            lambda: LanguageModel(ModelConfig(mixer="tests.own_parts:Counting", **SMALL), rngs=nnx.Rngs(0)),
            "mixer 'tests.own_parts:Counting' with options",
        ),
        (lambda: MemoryConfig("tests.own_parts:not_a_rule"), "must be a memory.Rule"),
        (lambda: MemoryConfig(own_parts.log_cosh_memory, window=3), "window"),
        (lambda: MemoryConfig("titans", rule_options={"depth": 3}), "unexpected keyword argument 'depth'"),
        (lambda: DataConfig("tests.own_parts:Countin"), "Did you mean 'Counting'?"),
        (lambda: DataConfig("txt"), "Did you mean 'text'?"),
        (lambda: DataConfig("embedded", source_options={"a": 1}), "takes none"),
        (lambda: make_tokenizer(DataConfig("builtins:int", tokenizer="bpe:300")), "must be a sequence of strings"),
        (lambda: OptimizerConfig(name="adam"), "Unknown optimizer 'adam'. Did you mean 'adamw'?"),
        (lambda: OptimizerConfig(options={"b1": 0.5}), "'adamw' has fields of its own"),
        (lambda: OptimizerConfig(schedule="cosin"), "Did you mean 'cosine'?"),
        (lambda: make_optimizer(OptimizerConfig(name="optax:lion", options={"b3": 1}), 3, {}), "'b3'"),
        (lambda: make_optimizer(OptimizerConfig(name="builtins:dict"), 3, {}), "optimizer 'builtins:dict'"),
        (lambda: learning_rate(OptimizerConfig(schedule="builtins:max"), 3), "schedule 'builtins:max'"),
        (lambda: broken_schedule("vector"), "schedule 'tests.broken_parts:vector' gave a rate of shape (2,), must be a number."),
        (lambda: broken_schedule("branches"), "schedule 'tests.broken_parts:branches' fails for a traced step: Tracer"),
        (lambda: broken_optimizer("other_dtype"), "whose state[1]['n'] is int32 () at first and float32 () after a step."),
        (lambda: broken_optimizer("other_shape"), "whose state[1]['n'] is float32 () at first and float32 (2,) after a step."),
        (lambda: broken_optimizer("more_state"), "whose state[1]['m'] is missing at first and float32 () after a step."),
        (lambda: ModelConfig(mixer="tests.raises_when_imported:Mixer"), "_when_imported' raised RuntimeError: not today"),
        (lambda: ModelConfig(mixer="tests.exits_when_imported:Mixer"), "_when_imported' raised SystemExit: not today"),
        (lambda: broken_optimizer("refuses"), "optimizer 'tests.broken_parts:refuses' raised ValueError: decay must be (line "),
        (lambda: broken_optimizer("needs_function"), "whose update fails: TypeError: "),
        (lambda: ModelConfig(mixer=":Mixer"), "mixer is ':Mixer'; it must be like 'package.module:object'."),
        (lambda: DataConfig(".x:Source"), "data source is '.x:Source'; it must be like 'package.module:object'."),
        (lambda: load_documents(DataConfig("tests.broken_parts:no_documents"), "train"), "has no documents."),
        (lambda: load_documents(DataConfig("tests.broken_parts:raises_at_once"), "train"), "_at_once' raised KeyError: 'no key'"),
        (
            lambda: load_documents(DataConfig("tests.broken_parts:RaisesLater"), "train")[3],
            "data source 'tests.broken_parts:RaisesLater': document 3 raised RuntimeError: the disk is gone",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_one_clear_line(make, message):
    with pytest.raises(ValueError) as caught:
        make()
    assert message in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)
