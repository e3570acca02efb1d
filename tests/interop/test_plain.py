"""The plain form: a model that no public family has, as safetensors with the names of our parameters."""

import dataclasses
import hashlib
import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from atlasjax import cli
from atlasjax.interop import export_weights, import_weights
from atlasjax.nn import AttentionConfig, CachingConfig
from atlasjax.train.errors import ConfigError
from atlasjax.train.load import load_run
from atlasjax.train.saving.runs import run_config
from tests.interop import own_runs
from tests.marks import some_slow

ATLAS = own_runs.MODELS["atlasjax"]


def params(run):
    return jax.device_get(nnx.to_pure_dict(nnx.state(load_run(run).model, nnx.Param)))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    run = own_runs.make(folder / "run", ATLAS)
    assert cli.main(["export", str(folder / "out"), "--run-dir", str(run)]) == 0
    return folder


def test_it_is_read_back_bit_for_bit(exported, capsys):
    """Parameters, model and tokenizer; and what is exported again is the same files."""
    assert cli.main(["import", str(exported / "out"), "--run-dir", str(exported / "again")]) == 0
    assert "tokens of texts: begin none; end none; padding none" in capsys.readouterr().out
    given, back = load_run(exported / "run"), load_run(exported / "again")
    assert back.config.model == given.config.model
    assert back.tokenizer.fingerprint == given.tokenizer.fingerprint
    jax.tree.map(np.testing.assert_array_equal, params(exported / "run"), params(exported / "again"))
    assert export_weights(exported / "again", exported / "out again").family == "atlasjax"
    files = [{x.name: x.read_bytes() for x in (exported / name).iterdir()} for name in ("out", "out again")]
    assert files[0] == files[1]
    assert files[0].keys() >= {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"}


def test_weights_that_were_damaged_are_refused(exported, tmp_path):
    """Nothing in a safetensors file says that a number is another one; `sha256sum --check SHA256SUMS` would."""
    damaged = shutil.copytree(exported / "out", tmp_path / "damaged")
    content = bytearray((damaged / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (damaged / "model.safetensors").write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"model\.safetensors' is not the file whose SHA-256 SHA256SUMS has: it is damaged"
    ):
        import_weights(damaged, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (damaged / "SHA256SUMS").write_text("?")
    with pytest.raises(ConfigError, match="SHA256SUMS' is damaged; each line"):
        import_weights(damaged, tmp_path / "run")
    (damaged / "SHA256SUMS").write_text(
        f"{hashlib.sha256(content).hexdigest()} *model.safetensors\n"
    )  # as sha256sum -b
    assert import_weights(damaged, tmp_path / "run").family == "atlasjax"


def test_names_are_those_of_the_parameters(exported):
    tensors = load_file(exported / "out/model.safetensors")
    assert {"embedding", "norm.scale", "layers.mixer_norm.scale"} <= tensors.keys()
    assert {x.dtype for x in tensors.values()} == {np.dtype(np.float32)}


OTHERS = {
    "caching": {"mixer": "gla", "caching": CachingConfig("grm", segment_size=8)},
    "two mixers": {"mixer": ("memory", "swa"), "attention": AttentionConfig(window=8)},
    "form of the heads": {"mixer": "gla"},
}


@pytest.mark.parametrize(
    "change",
    some_slow(
        ["caching", "two mixers", "form of the heads"],
        ["form of the heads", "two mixers"],
    ),
)
def test_whatever_a_model_has(tmp_path, change):
    run = own_runs.make(tmp_path / "run", dataclasses.replace(ATLAS, **OTHERS[change]))
    done = export_weights(run, tmp_path / "out")
    assert ("gla cannot have" if change == "form of the heads" else "no public family has") in done.why
    import_weights(tmp_path / "out", tmp_path / "again")
    assert run_config(tmp_path / "again").model == run_config(run).model
    jax.tree.map(np.testing.assert_array_equal, params(run), params(tmp_path / "again"))


def edit(**changes):
    return lambda config: {**config, **changes}


def edit_model(**changes):
    return lambda config: {**config, "model": {**config["model"], **changes}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (edit(model=3), "model is 3; it must be an object"),
        (edit_model(mixer="other:mixer"), "a name of your own or of somebody else, .*; nothing was imported"),
        (edit_model(dim=48), r"tensor 'embedding' has shape \(257, 32\), must be \(257, 48\)"),
        (edit_model(tie_embeddings=True), "has no tensors 'head.kernel'"),
        (edit_model(layers=3), "layers"),
        (edit_model(num_layers=10**9), "has shape"),
    ],
)
def test_refuses_another_config(exported, tmp_path, change, words):
    file = exported / "out/config.json"
    (tmp_path / "in").mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / "in" / name).write_bytes((exported / "out" / name).read_bytes())
    (tmp_path / "in/config.json").write_text(json.dumps(change(json.loads(file.read_bytes()))))
    with pytest.raises(ConfigError, match=words) as error:
        import_weights(tmp_path / "in", tmp_path / "run")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_refuses_other_tensors(exported, tmp_path):
    tensors = load_file(exported / "out/model.safetensors")
    (tmp_path / "in").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "in" / name).write_bytes((exported / "out" / name).read_bytes())
    kernel = tensors["head.kernel"]
    for changed, words in (
        ({"head.kernel": kernel.astype(np.float16)}, "'head.kernel' is F16, must be F32"),
        ({"head.kernel": np.full_like(kernel, np.nan)}, "NaN or infinite"),
    ):
        save_file(tensors | changed, tmp_path / "in/model.safetensors")
        with pytest.raises(ConfigError, match=words):
            import_weights(tmp_path / "in", tmp_path / "run")
