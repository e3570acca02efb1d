"""Preparation on a runner of Apache Beam: what one machine makes, and resumable."""

import dataclasses
import json

import pytest

from atlasjax import cli, storage
from atlasjax.data import DataConfig
from atlasjax.data.manifest import read_manifest
from atlasjax.data.preparation import prepare
from tests.data.conftest import make_texts
from tests.data.test_data_bytes import bpe

beam = pytest.importorskip("apache_beam", reason="needs the extra beam")
from atlasjax.data import beam as on_beam  # noqa: E402
from atlasjax.data.beam import prepare_on_beam  # noqa: E402

DIRECT = ("--runner=DirectRunner", "--direct_num_workers=1")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    texts = make_texts(60, seed=2)
    for i in range(3):
        lines = (json.dumps({"text": text}) + "\n" for text in texts[20 * i : 20 * (i + 1)])
        (folder / f"{i}.jsonl").write_text("".join(lines))
    return folder


def config(corpus, **more):
    return DataConfig(
        **{"source": "jsonl", "paths": (str(corpus),), "packing": "documents", "validation_fraction": 0.1} | more
    )


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_same(one, other):
    one, other = contents(one), contents(other)
    one.pop("lock"), other.pop("lock")  # who wrote it last
    assert one == other


@pytest.mark.parametrize(
    "more",
    [
        {"tokenizer": "bpe:300"},
        {"packing": "contiguous", "shuffle": False, "tokenizer": "byte"},
    ],
)
def test_it_makes_what_one_machine_makes(corpus, tmp_path, monkeypatch, more):
    monkeypatch.setattr(on_beam, "_PIECE", 7)  # most documents are in several pieces
    data = config(corpus, **more)
    one = prepare(data, tmp_path / "one", shard_tokens=400)
    reports = []
    many = prepare_on_beam(data, tmp_path / "many", DIRECT, shard_tokens=400, on_report=reports.append)
    assert many == one == read_manifest(tmp_path / "many")
    assert len(one.splits["train"]) > 2
    check_same(tmp_path / "one", tmp_path / "many")
    assert [(report.stage, report.done, report.unit) for report in reports] == [
        ("tokenizing", 3, "parts"), ("shuffling", 60, "documents")
    ]  # fmt: skip
    assert prepare_on_beam(data, tmp_path / "many", DIRECT, shard_tokens=400) == one
    with pytest.raises(ValueError, match="contains another preparation: seed was 0 and is now 1"):
        prepare_on_beam(dataclasses.replace(data, seed=1), tmp_path / "many", DIRECT, shard_tokens=400)


def test_tokens_whose_bytes_depend_on_the_text(corpus, tmp_path):
    """Validation files have the bytes of each token."""
    bpe("accents", "plain", False, True).save(tmp_path / "tokenizer")
    data = config(corpus, tokenizer=f"bpe:{tmp_path / 'tokenizer' / 'bpe.json'}")
    one = prepare(data, tmp_path / "one")
    assert one.splits["validation"][0].sizes_crc32 is not None
    assert prepare_on_beam(data, tmp_path / "many", DIRECT) == one
    check_same(tmp_path / "one", tmp_path / "many")


def test_it_resumes_by_part_and_by_file(corpus, tmp_path):
    data = config(corpus, tokenizer="byte")
    prepare(data, tmp_path / "one", shard_tokens=600)
    (corpus / "1.jsonl").rename(corpus / "hidden")
    (corpus / "1.jsonl").write_text("x" * (corpus / "hidden").stat().st_size)  # as large, and no JSON
    with pytest.raises(RuntimeError, match=r"Line 1 of the data file .*1.jsonl' is not JSON.* Finished parts are kept"):
        prepare_on_beam(data, tmp_path / "many", DIRECT, shard_tokens=600)
    finished = {path.name for path in (tmp_path / "many/parts").glob("*.json")}
    assert "0-000001.json" not in finished
    (corpus / "hidden").rename(corpus / "1.jsonl")
    made = []
    write, written = (
        on_beam._written,
        lambda folder, name, *more, **options: made.append(name) or write(folder, name, *more, **options),
    )

    def stopping(folder, name, *more, **options):
        if name == "train-00001":
            raise ValueError("this worker is gone")
        written(folder, name, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_beam, "_written", stopping)
        with pytest.raises(RuntimeError, match="this worker is gone"):
            prepare_on_beam(data, tmp_path / "many", DIRECT, shard_tokens=600)
        assert finished.isdisjoint(f"{name}.json" for name in made)
        before = set(made)
        patch.setattr(on_beam, "_written", written)
        made.clear()
        prepare_on_beam(data, tmp_path / "many", DIRECT, shard_tokens=600)
    assert not before & set(made)
    assert "train-00001" in made
    check_same(tmp_path / "one", tmp_path / "many")


def test_a_bucket(corpus, tmp_path):
    """Any store of fsspec: the files of the folder are those of a disk."""
    data = config(corpus, tokenizer="bpe:300")
    one = prepare(data, tmp_path / "one", shard_tokens=400)
    assert prepare_on_beam(data, "memory://bucket/many", DIRECT, shard_tokens=400) == one
    folder = storage.path("memory://bucket/many")
    wanted = contents(tmp_path / "one")
    wanted.pop("lock")
    assert {str(file).removeprefix("memory://bucket/many/"): file.read_bytes() for file in folder.files()} == wanted


def test_a_worker_that_sees_another_source(corpus, tmp_path):
    encode = on_beam._Encode(config(corpus), str(tmp_path), "another digest")
    with pytest.raises(ValueError, match="A worker finds other files in the source"):
        encode.setup()


def test_the_command(corpus, tmp_path, capsys):
    source = ["--data.source", "jsonl", "--data.paths", str(corpus), "--data.packing", "documents"]
    out = ["prepare", *source, "--out", str(tmp_path / "out")]
    assert cli.main([*out, "--runner", "DirectRunner", "--", "--direct_num_workers=1"]) == 0
    printed = capsys.readouterr().out
    assert "tokenizing: 3 of 3 parts" in printed
    assert "train: 57 documents, " in printed
    assert cli.main([*out, "--runner", "NoRunner"]) == 0  # it is there already
