"""Prepared files that were changed without changing their size are never read from."""

import json
import shutil
import zlib

import numpy as np
import pytest

from atlasjax.data import DataConfig, make_pipeline, make_tokenizer, prepare
from atlasjax.data.manifest import read_manifest
from atlasjax.data.token_files import END

LENGTH = 16


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Several files of 257 tokens and more, ids of two bytes, with validation."""
    folder = tmp_path_factory.mktemp("prepared")
    lines = [json.dumps({"text": f"{i} the memory learns while it reads " * 3}) + "\n" for i in range(60)]
    (folder / "a.jsonl").write_text("".join(lines))
    for packing in ("documents", "contiguous"):
        config = DataConfig(source="jsonl", paths=(str(folder / "a.jsonl"),), tokenizer="bpe:300", packing=packing)
        prepare(config, folder / packing, shard_tokens=600)
    return folder


def batches(folder, packing, split="train", **more):
    config = DataConfig(
        source="prepared", paths=(str(folder),), packing=packing, sequence_length=LENGTH, batch_size=2, **more
    )
    return iter(make_pipeline(config, make_tokenizer(config), split, repeat=False))


def flip(file, at=-1):
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def compare(whole, found):
    for wanted in whole:
        batch = next(found)
        for name in wanted:
            np.testing.assert_array_equal(batch[name], wanted[name])


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize(
    ("packing", "kind"), [("documents", "tokens"), ("documents", "ends"), ("contiguous", "tokens")]
)
def test_one_bit_in_any_place(prepared, tmp_path, packing, kind, split):
    """Nothing of the file was used before: the batches before the error are those of the others."""
    folder = shutil.copytree(prepared / packing, tmp_path / "copy")
    file = sorted(folder.glob(f"{split}-*.{kind}"))[-1]
    flip(file, at=len(file.read_bytes()) // 2 if kind == "tokens" else 0)
    whole, found = (
        batches(prepared / packing, packing, split, shuffle=False),
        batches(folder, packing, split, shuffle=False),
    )
    with pytest.raises(ValueError, match=rf"{file.name}' is damaged: .*Put it back from a copy, or prepare") as error:
        compare(whole, found)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("threads", [0, 2])
def test_shuffled_and_in_threads(prepared, tmp_path, threads):
    folder = shutil.copytree(prepared / "documents", tmp_path / "copy")
    flip(folder / "train-00001.tokens")
    with pytest.raises(ValueError, match=r"train-00001.tokens' is damaged"):
        list(batches(folder, "documents", num_threads=threads))


def rewrite(folder, change):
    """The manifest with a changed description of the first file."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest["splits"]["train"][0], manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_token_beyond_the_vocabulary(prepared, tmp_path):
    """With the right checksum."""
    folder = shutil.copytree(prepared / "documents", tmp_path / "copy")
    file = folder / "train-00000.tokens"
    ids = np.fromfile(file, "<u2")
    ids[7] = 300
    ids.tofile(file)
    rewrite(folder, lambda described, _: described.update(crc32=zlib.crc32(file.read_bytes())))
    with pytest.raises(
        ValueError, match=r"train-00000.tokens' is damaged: it has the token 300, and the vocabulary 300"
    ):
        next(batches(folder, "documents", shuffle=False))


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [(0, lambda x: -1, "a document ends before it begins"), (2, lambda x: 10**6, "ends before it begins"),
     (-1, lambda x: x - 1, "documents end at token")],
)  # fmt: skip
def test_ends_that_cannot_be(prepared, tmp_path, caplog, place, change, message):
    """Of a set without checksums of the ends, as older versions prepared them: that is said, and what can be checked is."""
    folder = shutil.copytree(prepared / "documents", tmp_path / "copy")

    def older(_, manifest):
        manifest["format"] = 1
        for file in (file for files in manifest["splits"].values() for file in files):
            del file["ends_crc32"], file["sizes_crc32"]

    rewrite(folder, older)
    wanted = list(batches(prepared / "documents", "documents"))
    for batch, same in zip(batches(folder, "documents"), wanted, strict=True):
        np.testing.assert_array_equal(batch["inputs"], same["inputs"])
    assert [record.getMessage() for record in caplog.records if "older version" in record.getMessage()] == [
        f"atlasjax: The data in {str(folder)!r} was prepared by an older version of atlasjax: the ends of its documents have no "
        "checksum, and only their order is checked. Prepare it again to have one."
    ]
    file = folder / "train-00000.ends"
    ends = np.fromfile(file, END)
    ends[place] = change(ends[place])
    ends.tofile(file)
    with pytest.raises(ValueError, match=f"train-00000.ends' is damaged: .*{message}"):
        list(batches(folder, "documents"))


@pytest.mark.parametrize("change", [{"name": "../a"}, {"name": 5}, {"tokens": "9"}, {"documents": -1}, {"crc32": None}])
def test_a_manifest_whose_files_cannot_be(prepared, tmp_path, change):
    folder = shutil.copytree(prepared / "documents", tmp_path / "copy")
    rewrite(folder, lambda described, _: described.update(change))
    with pytest.raises(ValueError, match=r"manifest.json' is damaged"):
        read_manifest(folder)


def test_a_part_of_a_preparation_that_was_changed(prepared, tmp_path, monkeypatch):
    """Before it is resumed."""
    config = DataConfig(source="jsonl", paths=(str(prepared / "a.jsonl"),), tokenizer="bpe:300", packing="documents")

    class Stopped(BaseException):
        pass

    def stop(*_):
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr("atlasjax.data.preparation._gather", stop)
        with pytest.raises(Stopped):
            prepare(config, tmp_path / "out")
    (part,) = (tmp_path / "out/parts").glob("*.tokens")
    flip(part)
    with pytest.raises(ValueError, match=f"{part.name}' is damaged"):
        prepare(config, tmp_path / "out")
