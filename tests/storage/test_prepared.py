"""Prepared data in a bucket: written there, trained on from a checked copy on the disk."""

import dataclasses
import itertools
import os
import shutil

import numpy as np
import pytest

from atlasjax import cli, storage
from atlasjax.data import DataConfig, make_pipeline, make_tokenizer, prepared_copies
from atlasjax.data.preparation import prepare
from tests.storage.server import BUCKET, Fault
from tests.train.tiny import MODEL, TEXT

SETS = f"gs://{BUCKET}/sets"


@pytest.fixture(autouse=True)
def disk(tmp_path, monkeypatch):
    """A disk of its own, and no copy in use."""
    monkeypatch.setenv("ATLASJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(prepared_copies, "_in_use", {})
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path):
    (tmp_path / "texts").mkdir()
    for i in range(20):
        (tmp_path / f"texts/{i}.txt").write_text(f"{i}: {TEXT[i * 40 : i * 40 + 300]}")
    return DataConfig(
        source="text",
        paths=(str(tmp_path / "texts"),),
        packing="documents",
        validation_fraction=0.2,
        held_out="documents",
    )


def batches(path, number=12):
    config = DataConfig(source="prepared", paths=(str(path),), packing="documents", sequence_length=64, batch_size=4)
    return list(itertools.islice(make_pipeline(config, make_tokenizer(config), "train"), number))


def forget():
    """As if the process had ended."""
    for lock in prepared_copies._in_use.values():
        lock.close()
    prepared_copies._in_use.clear()


def test_prepared_in_a_bucket(server, source, tmp_path, disk):
    local = prepare(source, tmp_path / "local", shard_tokens=1000)
    manifest = prepare(source, f"{SETS}/one", shard_tokens=1000)
    assert manifest == local
    assert len(manifest.splits["train"]) > 2
    names = {name.removeprefix("sets/one/") for name in server.names("sets/one/")}
    assert {"manifest.json", "train-00000.tokens", "train-00000.ends"} < names
    assert "prepare.json" not in names
    for name in names - {"manifest.json"}:
        assert server.read(f"sets/one/{name}") == (tmp_path / "local" / name).read_bytes()
    assert not any((disk / "preparing").iterdir())
    assert prepare(source, f"{SETS}/one", shard_tokens=1000) == manifest  # there already
    with pytest.raises(ValueError, match=r"contains another preparation: seed was 0 and is now 1"):
        prepare(dataclasses.replace(source, seed=1), f"{SETS}/one", shard_tokens=1000)
    with pytest.raises(ValueError, match=r"'gs://pod/sets' contains other files"):
        prepare(source, SETS, shard_tokens=1000)
    for ours, theirs in zip(batches(f"{SETS}/one"), batches(tmp_path / "local"), strict=True):
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name])
    # A second start reads nothing but the manifest and the tokenizer.
    forget()
    server.requests.clear()
    batches(f"{SETS}/one")
    assert not [request for request in server.requests if "train-" in request]
    # A copy that was interrupted goes on: a missing file, and one that was cut off.
    forget()
    (copy,) = (disk / "prepared").iterdir()
    (copy / "train-00001.tokens").unlink()
    os.truncate(copy / "train-00000.ends", 3)
    (copy / ".train-00001.tokens.0.partial").write_bytes(b"left")
    server.requests.clear()
    batches(f"{SETS}/one")
    read = {request.rpartition("/")[2].partition("?")[0] for request in server.requests}
    fetched = {name for name in read if name.startswith("train-")}
    assert fetched == {"train-00001.tokens", "train-00000.ends"}
    assert not list(copy.glob(".*.partial"))


def test_bad_input_leaves_nothing_in_the_bucket(server, tmp_path, disk):
    (tmp_path / "a.jsonl").write_text("bad\n")
    config = DataConfig(source="jsonl", paths=(str(tmp_path / "a.jsonl"),), validation_fraction=0)
    with pytest.raises(ValueError, match=r"Line 1 .* is not JSON"):
        prepare(config, f"{SETS}/bad")
    assert not [name for name in server.names() if name.startswith("sets/bad")]


def test_an_upload_goes_on(server, source, disk):
    refused = Fault(lambda method, path: method == "GET" and "sets/later/manifest.json" in path, status=403)
    with server.faulty(refused), pytest.raises(storage.StoreError):
        prepare(source, f"{SETS}/later", shard_tokens=1000)
    storage.path(f"{SETS}/later/prepare.json").write_bytes(b'{"source": "jsonl"}')
    with pytest.raises(ValueError, match="contains another preparation: source was 'jsonl' and is now 'text'"):
        prepare(source, f"{SETS}/later", shard_tokens=1000)
    storage.path(f"{SETS}/later/prepare.json").unlink()
    prepare(source, f"{SETS}/later", shard_tokens=1000)
    assert "sets/later/manifest.json" in server.names()


def test_damage_in_the_bucket(server, source, disk):
    prepare(source, f"{SETS}/damaged", shard_tokens=1000)
    tokens = storage.path(f"{SETS}/damaged/train-00000.tokens")
    content = tokens.read_bytes()
    for bad, words in ((content[:-1] + b"?", "its checksum is not that"), (content[:-1], "bytes and should have")):
        tokens.write_bytes(bad)
        with pytest.raises(ValueError, match=f"train-00000.tokens' is damaged: .*{words}"):
            batches(f"{SETS}/damaged")
    tokens.write_bytes(content)
    assert batches(f"{SETS}/damaged")
    with pytest.raises(FileNotFoundError, match=r"'gs://pod/sets/none' is not prepared data"):
        batches(f"{SETS}/none")


def test_a_disk_that_is_too_small(server, source, disk, monkeypatch):
    """Sets that nobody uses make room."""
    for name in ("old", "new"):
        prepare(dataclasses.replace(source, seed=ord(name[0])), f"{SETS}/{name}", shard_tokens=1000)
    batches(f"{SETS}/old")
    (old,) = (disk / "prepared").iterdir()
    free = lambda path: shutil._ntuple_diskusage(0, 0, 2**30 + (0 if old.exists() else 10**6))
    monkeypatch.setattr(shutil, "disk_usage", free)
    with pytest.raises(ValueError, match=r"needs 0\.0 GiB in .* Set ATLASJAX_CACHE"):  # it is in use
        batches(f"{SETS}/new")
    forget()
    assert batches(f"{SETS}/new")
    assert not old.exists()


@pytest.mark.usefixtures("compile_fast")
def test_the_commands(server, source, tmp_path, capsys):
    out = f"{SETS}/command"
    data = ("--data.source", "text", "--data.paths", str(tmp_path / "texts"), "--data.packing", "documents")
    assert cli.main(["prepare", *data, "--data.validation-fraction", "0", "--workers", "1", "--out", out]) == 0
    assert f"--data.paths {out}" in capsys.readouterr().out
    options = [
        *("train", "--preset", "linear-attention-tiny", "--model.dim", str(MODEL.dim), "--model.num-layers", "1"),
        *("--model.num-heads", "2", "--model.mlp-dim", "32", "--data.source", "prepared", "--data.paths", out),
        *("--data.packing", "documents", "--data.validation-fraction", "0", "--data.sequence-length", "16"),
        *("--data.batch-size", "4", "--steps", "2", "--eval-every", "0", "--mesh.data", "1", "--no-tensorboard"),
        *("--run-dir", str(tmp_path / "run")),
    ]  # fmt: skip
    assert cli.main(options) == 0
