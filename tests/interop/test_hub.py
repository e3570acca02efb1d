"""Weights, tokenizers and data by their names on a Hugging Face Hub: a small one on this machine."""

import contextlib
import json

import pytest
from huggingface_hub import constants, utils

from atlasjax import cli
from atlasjax.data import DataConfig
from atlasjax.data.sources import load_documents
from atlasjax.data.tokenizers import BpeTokenizer
from atlasjax.interop import import_weights
from atlasjax.storage import StoreError
from atlasjax.storage import hub as client
from atlasjax.train.errors import ConfigError
from tests.interop import hub_server, peers

NAMED = {"eos_token": "<|endoftext|>", "added_tokens_decoder": {"7": {"content": "<|endoftext|>"}}}


def at(monkeypatch, url):
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    utils.disable_progress_bars()
    with hub_server.running() as server:
        at(monkeypatch, server.url)
        yield server
    utils.enable_progress_bars()


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_name_is_imported(hub, tmp_path, monkeypatch, capsys):
    """With a tokenizer of another repository, whose neighbours name the tokens of texts; the second time without a network."""
    weights = contents(peers.write(tmp_path / "source", "mamba2", files=2))
    hub.repositories["models/some/mamba2"] = weights | {
        "onnx/config.json": b"{",
        "consolidated.safetensors": b"",
        "x.bin": b"",
    }
    BpeTokenizer.train(["a text"], 257).save(tmp_path / "bpe")
    tokenizer = {
        "tokenizer.json": (tmp_path / "bpe/bpe.json").read_bytes(),
        "tokenizer_config.json": json.dumps(NAMED).encode(),
    }
    hub.repositories["models/other/neox"] = tokenizer | {"pytorch_model.bin": b"large"}
    options = ["--tokenizer", "bpe:hf://other/neox/tokenizer.json", "--revision", "main"]
    assert cli.main(["import", "some/mamba2", "--run-dir", str(tmp_path / "run"), *options]) == 0
    said = capsys.readouterr().out
    assert f"files of some/mamba2 at revision {hub_server.COMMIT} are in {tmp_path}/cache" in said
    assert f"end 7 ({hub_server.COMMIT}/tokenizer_config.json)" in said
    asked = " ".join(hub.requests)
    assert "model-00001-of-00002.safetensors" in asked
    for unwanted in ("onnx", "consolidated", "x.bin", "pytorch_model.bin"):
        assert unwanted not in asked
    at(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert client.snapshot("some/mamba2", wanted=("*.json", "*.safetensors"), but=("*/*", "consolidated*")).is_dir()


def test_a_download_goes_on_where_it_stopped(hub, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    content = bytes(range(256)) * 4000
    hub.repositories["models/a/b"] = {"model.safetensors": content}
    hub.cut = 100_000
    with contextlib.suppress(StoreError):  # the client itself may try again
        client.snapshot("a/b")
    found = client.snapshot("a/b")
    assert (found / "model.safetensors").read_bytes() == content
    assert any("bytes=" in request for request in hub.requests)


def test_data_by_urls(hub):
    hub.repositories["datasets/a/texts"] = {
        "en/1.txt": b"one",
        "en/2.txt": b"two",
        "de/1.txt": b"eins",
        "README.md": b"#",
    }
    for paths, expected in (
        ("hf://datasets/a/texts/en/*.txt", ["one", "two"]),
        ("hf://datasets/a/texts/en", ["one", "two"]),
        (f"hf://datasets/a/texts@{hub_server.COMMIT}/de/1.txt", ["eins"]),
    ):
        config = DataConfig(source="text", paths=(paths,), validation_fraction=0.0)
        documents = load_documents(config, "train")
        assert [documents[i] for i in range(len(documents))] == expected
    assert not any("README" in request for request in hub.requests)
    with pytest.raises(FileNotFoundError, match=r"hf://datasets/a/texts/fr.txt does not exist"):
        load_documents(DataConfig(source="text", paths=("hf://datasets/a/texts/fr.txt",)), "train")
    with pytest.raises(ValueError, match="names no repository; it must be hf://datasets/OWNER/NAME/FILE"):
        load_documents(DataConfig(source="text", paths=("hf://datasets/texts",)), "train")


def test_what_cannot_be_had_is_said_in_one_line(hub, tmp_path, monkeypatch):
    hub.repositories["models/a/pickled"] = {"config.json": b'{"model_type": "mamba2"}', "pytorch_model.bin": b""}
    hub.repositories["models/a/gated"] = {"config.json": b"{}"}
    hub.gated.add("models/a/gated")
    (tmp_path / "folder").mkdir()
    run = tmp_path / "run"

    def check(name, words, kind=ConfigError, **options):
        with pytest.raises(kind, match=words) as error:
            import_weights(name, run, **options)
        assert "\n" not in str(error.value)
        assert not run.exists()

    check("a/unknown", "'a/unknown' is neither a path here nor a name on http")
    check("hf://a/unknown", "'a/unknown' is neither a path here nor a name on http")
    check("a/pickled", "no safetensors; 'pytorch_model.bin' is a pickle, .*refs/pr/N")
    check("a/pickled", "has no revision 'v2'", revision="v2")
    check("hf://a/pickled@v3", "has no revision 'v3'")
    check("a/gated", "accept its terms at .*/a/gated")
    check(str(tmp_path / "folder"), "revision is 'v2', but .* is a folder", revision="v2")
    check("a/b/c", "'a/b/c' does not exist")
    check("hf://a", "'hf://a' is not the name of a repository")
    at(monkeypatch, "http://127.0.0.1:9")
    check("a/other", "http://127.0.0.1:9 cannot be reached for 'a/other'", StoreError)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    check("a/other", "not in the cache .*HF_HUB_OFFLINE is set; run `hf download a/other`", StoreError)
    assert cli.main(["import", "a/other", "--run-dir", str(run)]) == 1
