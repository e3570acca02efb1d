"""Prepared data: the same documents as on the fly, whatever the workers and wherever it was stopped."""

import contextlib
import dataclasses
import gzip
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from atlasjax.data import DataConfig, load_documents, make_pipeline, make_tokenizer, preparation, preparation_steps
from atlasjax.data.inputs import open_inputs
from atlasjax.data.manifest import read_manifest
from atlasjax.data.preparation import prepare
from atlasjax.data.prepared import open_prepared
from atlasjax.data.tokenizers import ByteTokenizer
from atlasjax.data.windows import token_stream
from tests.data.conftest import make_texts

BYTE = ByteTokenizer()


class Numbered:
    """A source of one's own."""

    def __init__(self, split: str):
        self._texts = make_texts(20 if split == "train" else 5, seed=7)

    def __len__(self):
        return len(self._texts)

    def __getitem__(self, index):
        return self._texts[index]


@pytest.fixture(scope="module")
def sources(tmp_path_factory, text_folder, parquet_folder, texts):
    """Configs of every kind of source and of every way to hold out."""
    folder = tmp_path_factory.mktemp("sources")
    long = "".join(texts)
    (folder / "long.txt").write_text(long)
    (folder / "other.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + long[::-1].encode()))
    lines = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts))
    (folder / "a.jsonl").write_text(lines[:4000].rpartition("\n")[0])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines[lines[:4000].rindex("\n") :].encode()))
    parquet = (str(parquet_folder),)
    return {
        "embedded": DataConfig(),
        "embedded documents": DataConfig(held_out="documents", validation_fraction=0.2),
        "text": DataConfig(source="text", paths=(str(text_folder),), validation_fraction=0.2),
        "text tails": DataConfig(source="text", paths=(str(folder),), validation_fraction=0.1),
        "text blocks": DataConfig(source="text", paths=(str(folder / "long.txt"),), held_out="blocks"),
        "text of two folders": DataConfig(
            source="text", paths=(str(text_folder),), validation_paths=(str(folder / "long.txt"),)
        ),
        "jsonl": DataConfig(source="jsonl", paths=(str(folder),), validation_fraction=0.15),
        "parquet": DataConfig(source="parquet", paths=parquet, validation_fraction=0.3),
        "parquet without validation": DataConfig(source="parquet", paths=parquet, validation_fraction=0),
        "own": DataConfig(source="tests.data.test_data_prepare:Numbered"),
    }


KINDS = ["embedded", "embedded documents", "text", "text tails", "text blocks", "text of two folders", "jsonl", "parquet",
         "parquet without validation", "own"]  # fmt: skip


@pytest.fixture
def small_parts(monkeypatch):
    """Many parts and files of small sources."""
    monkeypatch.setattr("atlasjax.data.inputs._PART_BYTES", 3000)
    monkeypatch.setattr("atlasjax.data.inputs._PART_DOCUMENTS", 8)
    monkeypatch.setattr("atlasjax.data.preparation._GATHERED", 50)


def opened(config, folder, split, **more):
    config = DataConfig(source="prepared", paths=(str(folder),), packing=config.packing, **more)
    return open_prepared(config, make_tokenizer(config), split)[0]


def documents_of(tokens):
    return [tokens[slice(*tokens.document(i))].tolist() for i in range(tokens.num_documents)]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("kind", KINDS)
def test_documents_and_stream_are_those_of_the_source(kind, sources, tmp_path):
    """In the order of the source, without shuffling."""
    config = dataclasses.replace(sources[kind], shuffle=False)
    tokenizer = make_tokenizer(config)
    if "block" not in kind and kind != "embedded":
        packed = dataclasses.replace(config, packing="documents")
        prepare(packed, tmp_path / "documents", shard_tokens=2000)
        for split in ("train", "validation")[: 1 + config.has_validation]:
            documents = load_documents(packed, split)
            wanted = [tokenizer.encode(documents[i]).tolist() for i in range(len(documents))]
            assert documents_of(opened(packed, tmp_path / "documents", split)) == wanted
    manifest = prepare(config, tmp_path / "stream", shard_tokens=2000)
    for split in manifest.splits:
        stream, end = token_stream(load_documents(config, split), tokenizer, "\n\n"), tokenizer.encode("\n\n")
        tokens = opened(config, tmp_path / "stream", split)
        np.testing.assert_array_equal(tokens[:], np.concatenate([stream, end]))
        assert manifest.totals(split) == {
            "documents": tokens.num_documents, "tokens": len(stream) + 2, "num_bytes": len(stream) + 2
        }  # fmt: skip
    assert list(manifest.splits) == ["train", "validation"][: 1 + config.has_validation]


@pytest.mark.usefixtures("small_parts")
def test_training_documents_are_shuffled_once_more_or_less(sources, tmp_path):
    config = dataclasses.replace(sources["parquet"], packing="documents")
    train, validation = {}, {}
    for name, change in {"a": {}, "b": {}, "other seed": {"seed": 1}, "still": {"shuffle": False}}.items():
        prepare(dataclasses.replace(config, **change), tmp_path / name, shard_tokens=900)
        train[name] = documents_of(opened(config, tmp_path / name, "train"))
        validation[name] = documents_of(opened(config, tmp_path / name, "validation"))
    assert train["a"] == train["b"] != train["other seed"]
    assert sorted(train["a"]) == sorted(train["other seed"]) == sorted(train["still"])
    moved = np.mean([a != b for a, b in zip(train["a"], train["still"])])
    assert moved > 0.9
    assert validation["a"] == validation["other seed"] == validation["still"]


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_result_does_not_depend_on_the_workers(sources, tmp_path):
    config = dataclasses.replace(sources["jsonl"], tokenizer="bpe:300")
    reports = []
    for workers in (0, 2):
        prepare(config, tmp_path / str(workers), workers=workers, shard_tokens=1000, on_report=reports.append)
    assert len(list((tmp_path / "0").glob("train-*.tokens"))) > 3
    assert contents(tmp_path / "0") == contents(tmp_path / "2")
    last = [report for report in reports if report.done == report.total]
    assert {report.stage for report in last} == {"tokenizing", "shuffling"}
    assert all(report.fraction == 1 and report.tokens > 1000 and not report.kept for report in last)
    assert {(report.stage, report.total, report.unit) for report in last} == {
        ("tokenizing", 2, "files"), ("shuffling", 90, "documents")
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "total"), [("text", (90, "files")), ("text tails", (2, "files")), ("parquet", (90, "documents"))]
)
def test_progress_counts_what_is_read_not_what_is_written(kind, total, sources, tmp_path):
    reports = []
    prepare(sources[kind], tmp_path / "out", on_report=reports.append)
    first = [report for report in reports if report.stage == "tokenizing"]
    assert (first[-1].total, first[-1].unit) == total
    assert first[-1].done == first[-1].total


class Stopped(BaseException):
    pass


@pytest.mark.usefixtures("small_parts")
def test_stopped_at_every_file(sources, tmp_path, monkeypatch):
    config, options = sources["parquet"], {"shard_tokens": 900}
    prepare(config, tmp_path / "whole", **options)
    finish, written = preparation._finish, []

    def stopping(folder, writer, at):
        if len(written) == at:
            raise Stopped  # the file is there, and its description is not
        written.append(writer.finished.name)
        return finish(folder, writer)

    stops, parts = 0, len(open_inputs(config).parts[0])
    while True:  # each start gets one file further
        written.clear()
        monkeypatch.setattr(preparation, "_finish", lambda folder, writer: stopping(folder, writer, at=1))
        try:
            prepare(config, tmp_path / "stopped", **options)
            break
        except Stopped:
            stops += 1
            with pytest.raises(FileNotFoundError, match=r"is not prepared data: manifest.json is missing"):
                opened(config, tmp_path / "stopped", "train")
    assert stops == len(list((tmp_path / "whole").glob("*.tokens"))) + parts - 1
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")
    monkeypatch.setattr(preparation, "_finish", finish)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "stopped").rglob("*")}
    assert prepare(config, tmp_path / "stopped", **options) == read_manifest(tmp_path / "whole")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "stopped").rglob("*")} == before


def test_stopped_while_the_tokenizer_is_trained_or_the_manifest_written(sources, tmp_path, monkeypatch):
    config = dataclasses.replace(sources["text"], tokenizer="bpe:300")
    prepare(config, tmp_path / "whole")
    for module, name in (
        (preparation_steps, "make_tokenizer"),
        (preparation_steps, "write_manifest"),
        (preparation_steps, "clean"),
    ):
        with monkeypatch.context() as patch:

            def stop(*_):
                raise Stopped

            patch.setattr(module, name, stop)
            with pytest.raises(Stopped):
                prepare(config, tmp_path / "stopped")
    prepare(config, tmp_path / "stopped")
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_killed_with_its_workers(tmp_path):
    """The kill is real; workers end with their parent."""
    for i in range(8):
        lines = (json.dumps({"text": text}) + "\n" for text in make_texts(6000, seed=i))
        (tmp_path / f"{i}.jsonl").write_text("".join(lines))
    config = DataConfig(source="jsonl", paths=(str(tmp_path),), tokenizer="bpe:400", packing="documents")
    killed = tmp_path / "killed"
    command = [sys.executable, "-m", "atlasjax", "prepare", "--workers", "2", "--out", str(killed)]
    command += ["--data.source", "jsonl", "--data.paths", str(tmp_path), "--data.tokenizer", "bpe:400"]
    command += ["--data.packing", "documents"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None and not list(killed.glob("parts/*.json")):
        time.sleep(0.05)
    workers = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    kept = len(list(killed.glob("parts/*.json")))
    assert len(workers) >= 2
    assert 1 <= kept < 8
    deadline = time.monotonic() + 30
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    printed = subprocess.check_output(command, text=True)
    assert " kept" in printed
    prepare(config, tmp_path / "whole")
    # The lock names the process that held it, and these were two.
    assert contents(killed) | {"lock": b""} == contents(tmp_path / "whole") | {"lock": b""}


# Errors


class Broken:
    """A source whose reader ends its process, or raises something unforeseen."""

    def __init__(self, how: str):
        self._how = how

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if self._how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("no such thing")


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("killed", RuntimeError, "worker died with exit code -9"),
        ("key", ValueError, "test_data_prepare:Broken': document 0 raised KeyError: 'no such"),
    ],
)
def test_a_worker_that_fails(tmp_path, how, kind, message):
    config = DataConfig(
        source="tests.data.test_data_prepare:Broken", source_options={"how": how}, validation_fraction=0
    )
    with pytest.raises(kind, match=message):
        prepare(config, tmp_path / "out", workers=1)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_byte_is_named_and_the_rest_is_kept(tmp_path, workers):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.jsonl").write_text('{"text": "%s"}' % ("good " * 100))
    (tmp_path / "texts/b.jsonl").write_bytes(b'{"text": "%s"}' % (b"caf\xe9 " * 20))
    config = DataConfig(source="jsonl", paths=(str(tmp_path / "texts"),), validation_fraction=0)
    with pytest.raises(
        ValueError, match=r"b.jsonl' is not UTF-8: byte 0xe9 at offset 13 .*--data.errors replace or skip"
    ):
        prepare(config, tmp_path / "out", workers=workers)
    with pytest.raises(
        ValueError, match=r"contains another preparation: errors was 'strict' and is now 'skip'. Use another"
    ):
        prepare(dataclasses.replace(config, errors="skip"), tmp_path / "out")
    manifest = prepare(dataclasses.replace(config, errors="skip"), tmp_path / "other")
    assert manifest.totals("train")["num_bytes"] == 500 + 80 + 4


@pytest.mark.parametrize(("folder", "workers"), [("a/new/one", 0), ("a/new/one", 1), ("old", 0)])
def test_bad_input_leaves_nothing_and_the_corrected_one_can_have_the_folder(tmp_path, folder, workers):
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "good"}\nbad\n')
    (tmp_path / "old").mkdir()
    config = DataConfig(source="jsonl", paths=(str(lines),), validation_fraction=0)
    with pytest.raises(ValueError, match=r"Line 2 .* is not JSON"):
        prepare(config, tmp_path / folder, workers=workers)
    assert sorted(tmp_path.rglob("*")) == [lines, tmp_path / "old"]
    lines.write_text('{"words": "good"}\n')
    with pytest.raises(ValueError, match="has no field 'text'"):
        prepare(config, tmp_path / folder)
    prepare(dataclasses.replace(config, column="words"), tmp_path / folder)


def test_folders_that_hold_something_else(sources, tmp_path):
    config = sources["text"]
    (tmp_path / "used").mkdir()
    (tmp_path / "used/thesis.tex").touch()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"contains other files. Use an empty or new folder"):
        prepare(config, tmp_path / "used")
    with pytest.raises(ValueError, match=r"file' is a file; prepared data needs a folder"):
        prepare(config, tmp_path / "file")
    prepare(config, tmp_path / "out")
    with pytest.raises(ValueError, match=r"another preparation: seed was 0 and is now 3"):
        prepare(dataclasses.replace(config, seed=3), tmp_path / "out")
    with (
        preparation_steps.held(tmp_path / "out"),
        pytest.raises(ValueError, match="Another process is preparing data in"),
    ):
        prepare(config, tmp_path / "out")


def test_a_source_that_changed_meanwhile(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text\n" * 50)
    config = DataConfig(source="text", paths=(str(tmp_path / "a.txt"),), validation_fraction=0)
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_gather", lambda *_: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            prepare(config, tmp_path / "out")
    (tmp_path / "a.txt").write_text("some more text\n" * 50)
    with pytest.raises(ValueError, match=r"source has changed since preparation in .* began. Delete that folder"):
        prepare(config, tmp_path / "out")


def _write_texts(folder, kind, sizes):
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for name, size in sizes.items():
        if kind == "parquet":
            rows = pa.table({"text": [f"{name} {i}" + " more" * size for i in range(9)]})
            pq.write_table(rows, folder / f"{name}.parquet", compression="none", use_dictionary=False)
        else:
            line = json.dumps({"text": name * size}) + "\n" if kind == "jsonl" else name * size
            (folder / f"{name}.{'jsonl' if kind == 'jsonl' else 'txt'}").write_text(line)


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
@pytest.mark.parametrize("stopped", [True, False])
def test_each_file_is_compared_by_name_and_size(kind, stopped, tmp_path, monkeypatch):
    sizes = {"a": 500, "b": 500}
    _write_texts(tmp_path / "in", kind, sizes)
    _write_texts(tmp_path / "validation", kind, {"v": 500})
    folders = {"paths": (str(tmp_path / "in"),), "validation_paths": (str(tmp_path / "validation"),)}
    config = DataConfig(source=kind, **folders)
    with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
        if stopped:
            patch.setattr(preparation, "_gather", lambda *_: (_ for _ in ()).throw(Stopped))
            stack.enter_context(pytest.raises(Stopped))
        prepare(config, tmp_path / "out")
    for changed in ({"a": 400, "b": 600}, {"a": 500, "c": 500}, {"a": 500}):
        _write_texts(tmp_path / "in", kind, changed)
        with pytest.raises(ValueError, match="source has changed since"):
            prepare(config, tmp_path / "out")
    _write_texts(tmp_path / "in", kind, sizes)
    _write_texts(tmp_path / "validation", kind, {"w": 500})
    with pytest.raises(ValueError, match="source has changed since"):
        prepare(config, tmp_path / "out")
    _write_texts(tmp_path / "validation", kind, {"v": 500})
    prepare(config, tmp_path / "out")


def test_preparations_of_an_older_version_go_on(tmp_path, monkeypatch):
    """Those whose identity did not have each file."""
    (tmp_path / "a.txt").write_text("some text\n" * 50)
    config = DataConfig(source="text", paths=(str(tmp_path / "a.txt"),), validation_fraction=0)
    old = {name: value for name, value in open_inputs(config).identity.items() if name != "files"}
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_gather", lambda *_: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            prepare(config, tmp_path / "out")
    begun = tmp_path / "out/prepare.json"
    begun.write_text(json.dumps({**json.loads(begun.read_text()), "inputs": old}))
    done = prepare(config, tmp_path / "out")
    manifest = tmp_path / "out/manifest.json"
    digest = hashlib.sha256(json.dumps(old).encode()).hexdigest()
    manifest.write_text(json.dumps({**json.loads(manifest.read_bytes()), "inputs": digest}))
    assert prepare(config, tmp_path / "out") == dataclasses.replace(done, inputs=digest)
    (tmp_path / "a.txt").write_text("some more text\n" * 50)
    with pytest.raises(ValueError, match="source has changed since"):
        prepare(config, tmp_path / "out")


def test_a_source_that_changed_afterwards(tmp_path):
    (tmp_path / "a.txt").write_text("some text\n" * 50)
    config = DataConfig(source="text", paths=(str(tmp_path / "*.txt"),), validation_fraction=0)
    done = prepare(config, tmp_path / "out")
    (tmp_path / "b.txt").write_text("some more text\n" * 50)
    with pytest.raises(ValueError, match=r"source has changed since preparation in .* began. Delete that folder"):
        prepare(config, tmp_path / "out")
    for text in ("a.txt", "b.txt"):
        (tmp_path / text).unlink()
    assert prepare(config, tmp_path / "out") == done  # the source is gone
    manifest = tmp_path / "out/manifest.json"
    saved = json.loads(manifest.read_bytes())
    del saved["inputs"]
    manifest.write_text(json.dumps(saved))  # of an older version
    (tmp_path / "c.txt").write_text("another text\n" * 50)
    assert prepare(config, tmp_path / "out") == dataclasses.replace(done, inputs=None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": 4}, "batch_size is 4; it is set when training on prepared data"),
        ({"num_threads": 2}, "num_threads is 2; it is set when"),
        ({"source": "prepared", "paths": ("x",)}, "source 'prepared' is already prepared"),
        ({"validation_fraction": 0.005, "held_out": "documents"}, "validation split is empty: it is every 200th of"),
    ],
)
def test_what_cannot_be_prepared(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        prepare(DataConfig(**fields), tmp_path / "out")


def test_documents_without_text_cannot_be_prepared(tmp_path):
    file = tmp_path / "empty.jsonl"
    file.write_text('{"text": ""}\n' * 100)
    config = DataConfig(source="jsonl", paths=(str(file),), packing="documents")
    with pytest.raises(
        ValueError, match=r"split is empty: it is .*every 20th of 100 documents, and none of them has any text"
    ):
        prepare(config, tmp_path / "out")


def test_another_fraction_can_have_the_folder_of_an_empty_split(tmp_path):
    file = tmp_path / "two.jsonl"
    file.write_text('{"text": "one"}\n{"text": "another"}\n')
    config = DataConfig(source="jsonl", paths=(str(file),), packing="documents")
    with pytest.raises(ValueError, match=r"another --data.validation-fraction"):
        prepare(config, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=r"another --data.validation-fraction"):
        prepare(config, tmp_path / "out")
    splits = prepare(dataclasses.replace(config, validation_fraction=0.5), tmp_path / "out").splits
    assert [sum(file.documents for file in splits[split]) for split in ("train", "validation")] == [1, 1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, sources):
    folder = tmp_path_factory.mktemp("finished")
    prepare(sources["text"], folder / "byte")
    prepare(dataclasses.replace(sources["parquet without validation"], tokenizer="bpe:300"), folder / "bpe")
    return folder


def pipeline(*folders, split="train", tokenizer=None, **more):
    config = DataConfig(source="prepared", paths=tuple(map(str, folders)), sequence_length=32, batch_size=2, **more)
    return make_pipeline(config, tokenizer or make_tokenizer(config), split)


def test_bad_prepared_data(finished, tmp_path):
    byte, bpe = finished / "byte", finished / "bpe"
    for make, error, message in [
        (lambda: pipeline(tmp_path), FileNotFoundError, "is not prepared data: manifest.json is missing"),
        (lambda: pipeline(tmp_path, tokenizer=BYTE), FileNotFoundError, "is not prepared data: manifest.json is missing"),
        (lambda: pipeline(byte, bpe), ValueError, r"bpe' was prepared with another tokenizer \('bpe:300', 300 tokens, SHA-256 "),
        (lambda: pipeline(bpe, tokenizer=BYTE), ValueError, "than the run's .256 tokens"),
        (lambda: pipeline(bpe, split="validation"), ValueError, "without validation data. Use --data.validation-fraction 0"),
        (lambda: pipeline(byte, tokenizer=None, packing="documents"), ValueError, "prepared for packing 'contiguous'"),
        (lambda: pipeline(byte, separator="\n"), ValueError, r"separator is '\\n', but the data in .* with '\\n\\n'"),
        (lambda: DataConfig(source="prepared", paths=("a",), held_out="tail"), ValueError, "was split into training"),
        (lambda: DataConfig(source="prepared", paths=("a", "b"), weights=(1.0,)), ValueError, "positive number for each of the 2"),
        (lambda: DataConfig(source="prepared", paths=("a",), weights=(0.0,)), ValueError, "a positive number for each of the 1"),
        (lambda: DataConfig(weights=(1.0,)), ValueError, r"weights is \(1.0,\); it must be"),
        (lambda: load_documents(DataConfig(source="prepared", paths=("a",)), "train"), ValueError, "contains tokens, not text"),
    ]:  # fmt: skip
        with pytest.raises(error, match=message):
            make()


def test_the_tokenizer_of_the_data_is_taken_and_compared(finished, sources):
    config = DataConfig(source="prepared", paths=(str(finished / "bpe"),))
    assert make_tokenizer(config).vocab_size == 300
    file = str(finished / "bpe/tokenizer/bpe.json")
    assert make_tokenizer(dataclasses.replace(config, tokenizer=f"bpe:{file}")).vocab_size == 300
    other = DataConfig(source="prepared", paths=(str(finished / "byte"),), tokenizer=f"bpe:{file}")
    with pytest.raises(ValueError, match=r"byte' was prepared with another one. Omit it to use that one"):
        make_tokenizer(other)


@pytest.mark.parametrize("what", ["short", "missing", "manifest", "format"])
def test_damaged_prepared_data(finished, tmp_path, what):
    folder = tmp_path / "copy"
    shutil.copytree(finished / "byte", folder)
    tokens, manifest = folder / "train-00000.tokens", folder / "manifest.json"
    if what == "short":
        tokens.write_bytes(tokens.read_bytes()[:-1])
    elif what == "missing":
        tokens.unlink()
    elif what == "manifest":
        manifest.write_text(manifest.read_text()[:-40])
    else:
        manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 3'))
    message = {
        "short": r"train-00000.tokens' is damaged: it has [\d,]+ bytes and should have",
        "missing": "train-00000.tokens' is missing",
        "manifest": "manifest.json' is damaged",
        "format": "has format 3; this atlasjax reads format 2",
    }[what]
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        pipeline(folder)


def test_a_file_that_is_cut_off_while_it_is_read(finished, tmp_path):
    shutil.copytree(finished / "byte", tmp_path / "copy")
    batches = iter(pipeline(tmp_path / "copy", shuffle=False))
    next(batches)
    os.truncate(tmp_path / "copy/train-00000.tokens", 10)
    with pytest.raises(ValueError, match=r"train-00000.tokens' is damaged: it was truncated while being read"):
        next(batches)
