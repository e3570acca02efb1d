"""Encodings, compressed files and JSON lines."""

import bz2
import gzip
import json
import lzma
import shutil
import sys

import pytest

from atlasjax.data import DataConfig, load_documents
from atlasjax.data.text import json_documents, text_pieces


def read(source, *paths, **more):
    config = DataConfig(source=source, paths=tuple(map(str, paths)), validation_fraction=0, **more)
    documents = load_documents(config, "train")
    return [documents[i] for i in range(len(documents))]


def zst(content: bytes) -> bytes:
    if sys.version_info >= (3, 14):
        from compression import zstd

        return zstd.compress(content)
    return pytest.importorskip("zstandard").compress(content)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "shift_jis", "utf-8"])
def test_a_chosen_encoding(tmp_path, encoding):
    text = "größer\r\n" if encoding != "shift_jis" else "日本語\r\n"
    (tmp_path / "a.txt").write_bytes(text.encode(encoding) * (1 if encoding == "utf-16" else 9))
    assert read("text", tmp_path, encoding=encoding) == [text * (1 if encoding == "utf-16" else 9)]


@pytest.mark.parametrize(("errors", "wanted"), [("replace", "caf\ufffd!"), ("skip", "caf!")])
def test_bad_bytes_can_be_replaced_or_left_out(tmp_path, errors, wanted):
    (tmp_path / "a.txt").write_bytes(b"good")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9!")
    assert read("text", tmp_path, errors=errors) == ["good", wanted]


def test_bad_bytes_name_the_file_the_place_and_the_options(tmp_path, monkeypatch):
    monkeypatch.setattr("atlasjax.data.text._READ", 7)
    (tmp_path / "b.txt").write_bytes("ö".encode() * 10 + b"\xe9!" + b"x" * 20)
    with pytest.raises(
        ValueError, match=r"b.txt' is not UTF-8: byte 0xe9 at offset 20 .*--data.encoding.*--data.errors"
    ):
        read("text", tmp_path)
    with pytest.raises(ValueError, match=r"b.txt' is not ASCII: byte 0xc3 at offset 0 "):
        read("text", tmp_path, encoding="ascii")
    with pytest.raises(
        ValueError, match=r"b.txt' is not UTF-16: .* BOM. Set its encoding, e.g. --data.encoding utf-16-le"
    ):
        read("text", tmp_path, encoding="utf-16")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_pieces_are_the_text(tmp_path, monkeypatch, size):
    monkeypatch.setattr("atlasjax.data.text._READ", size)
    text = "a€\r\n😀 ö\n\n" * 9
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    pieces = list(text_pieces(tmp_path / "a.txt"))
    assert "".join(pieces) == text
    assert all(pieces)
    assert max(map(len, pieces)) <= size


@pytest.mark.parametrize("pack", [gzip.compress, zst])
def test_compressed_files(tmp_path, pack):
    ending = "gz" if pack is gzip.compress else "zst"
    (tmp_path / f"a.txt.{ending}").write_bytes(pack(b"A" * 1000))
    (tmp_path / "b.md").write_bytes(b"B")
    (tmp_path / f"c.csv.{ending}").write_bytes(pack(b"C"))
    (tmp_path / f"d.TXT.{ending.upper()}").write_bytes(pack(b"D"))
    (tmp_path / f"empty.txt.{ending}").write_bytes(pack(b""))
    assert read("text", tmp_path) == ["A" * 1000, "B", "D"]
    assert read("text", tmp_path / f"c.csv.{ending}") == ["C"]
    (tmp_path / f"a.jsonl.{ending}").write_bytes(pack(b'{"text": "one"}\n{"text": "two"}'))
    assert read("jsonl", tmp_path) == ["one", "two"]
    broken = pack(bytes(range(256)) * 4000)
    (tmp_path / f"a.txt.{ending}").write_bytes(b"no" + broken)
    with pytest.raises(ValueError, match=f"a.txt.{ending}' cannot be decompressed"):
        read("text", tmp_path)


def test_gzip_that_was_cut_off(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(bytes(range(128)) * 999)[:-20])
    with pytest.raises(ValueError, match=r"a.txt.gz' cannot be decompressed: .*end-of-stream"):
        read("text", tmp_path)


@pytest.mark.parametrize("pack", [gzip.compress, zst, None])
@pytest.mark.parametrize("size", [3, 2**20])
def test_files_that_were_joined_have_a_mark_at_the_start_of_each(tmp_path, monkeypatch, pack, size):
    """`cat a b > c` of text or JSON lines, as they are or compressed."""
    monkeypatch.setattr("atlasjax.data.text._READ", size)
    monkeypatch.setattr("atlasjax.data.text._COMPRESSED", size)
    ending = {gzip.compress: ".gz", zst: ".zst", None: ""}[pack]
    joined = lambda *parts: b"".join(map(pack or bytes, parts))
    mark = b"\xef\xbb\xbf"
    (tmp_path / f"a.txt{ending}").write_bytes(
        joined(mark + "ä\n".encode(), mark + b"b \xef\xbb\xbf c\n", b"", mark + b"d")
    )
    assert read("text", tmp_path) == ["ä\nb \ufeff c\nd"], "a mark inside a line is a character"
    lines = [mark + b'{"text": "one"}\n', mark + b'{"text": "two"}\r\n', mark + b'{"text": "three"}']
    (tmp_path / f"a.jsonl{ending}").write_bytes(joined(*lines))
    assert read("jsonl", tmp_path) == ["one", "two", "three"]
    if pack is not None:  # the member says where the second file begins; a character may be divided between two
        (tmp_path / f"a.txt{ending}").write_bytes(joined(mark + b"one" + b"\xc3", b"\xa4", mark + b"two"))
        assert read("text", tmp_path) == ["oneätwo"]


@pytest.mark.parametrize("pack", [gzip.compress, zst])
def test_a_joined_file_that_was_cut_off(tmp_path, pack):
    ending = "gz" if pack is gzip.compress else "zst"
    (tmp_path / f"a.txt.{ending}").write_bytes(pack(b"A" * 10_000) + pack(b"B" * 10_000)[:-3])
    with pytest.raises(ValueError, match=rf"a.txt.{ending}' cannot be decompressed: .*end-of-stream"):
        read("text", tmp_path)
    (tmp_path / f"a.txt.{ending}").write_bytes(pack(b"A" * 10_000) + b"some more")
    with pytest.raises(ValueError, match=rf"a.txt.{ending}' cannot be decompressed: "):
        read("text", tmp_path)


def test_padding_after_gzip(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"A") + bytes(700) + gzip.compress(b"B") + bytes(300))
    assert read("text", tmp_path) == ["AB"]


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_archives_are_no_text(tmp_path, encoding):
    (tmp_path / "member.txt").write_text("text")
    for kind, what in (("zip", "a zip archive"), ("tar", "a tar archive"), ("gztar", "a tar archive")):
        packed = shutil.make_archive(str(tmp_path / "a"), kind, tmp_path, "member.txt")
        with pytest.raises(ValueError, match=f"{packed}' is {what}, not text. Unpack it; of compressed files, .gz and"):
            read("text", packed, encoding=encoding)
    for pack, what in ((gzip.compress, "gzip"), (bz2.compress, "bzip2"), (lzma.compress, "xz")):
        (tmp_path / "a.jsonl").write_bytes(pack(b'{"text": "a"}'))
        with pytest.raises(ValueError, match=f"a.jsonl' is compressed with {what}, not text."):
            read("jsonl", tmp_path / "a.jsonl", encoding=encoding)


def test_zst_without_a_reader(tmp_path, monkeypatch):
    (tmp_path / "a.txt.zst").write_bytes(b"x" * 100)
    for name in ("zstandard", "compression", "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"a.txt.zst' .*needs Python 3.14 or the package zstandard: pip install"):
        read("text", tmp_path)


def test_json_lines(tmp_path, monkeypatch):
    rows = [{"text": "a\nb\u2028c", "id": 1}, {"text": None}, {"body": "other", "text": "größer"}]
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "last"}\r\n')
    for size in (1, 7, 2**20):
        monkeypatch.setattr("atlasjax.data.text._READ", size)
        assert read("jsonl", tmp_path) == ["a\nb\u2028c", "", "größer", "last"]
    (tmp_path / "c.jsonl").write_text('{"body": "B"}\n')
    assert read("jsonl", tmp_path / "c.jsonl", column="body") == ["B"]


def test_json_lines_hold_out_documents(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": str(i)}) + "\n" for i in range(40)))
    config = DataConfig(source="jsonl", paths=(str(tmp_path),), validation_fraction=0.1)
    documents = load_documents(config, "validation")
    assert [documents[i] for i in range(len(documents))] == ["9", "19", "29", "39"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", r"Line 2 of the data file .*a.jsonl' is not JSON"),
        (b"[1]", r"Line 2 .* is not a JSON object, but a list"),
        (b'{"txt": "a"}', r"Line 2 .* has no field 'text' \(--data.column\). Did you mean 'txt'\? It has: txt"),
        (b'{"text": 3}', r"Line 2 .*: field 'text' is a int; it must be a string"),
        (b'{"text": "\\ud800"}', r"Line 2 .* has a lone surrogate, .*--data.errors replace"),
        (b'{"text": "\xff"}', r"a.jsonl' is not UTF-8: byte 0xff at offset 23"),
    ],
)
def test_bad_json_lines(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(b'{"text":"x"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        read("jsonl", tmp_path)


@pytest.mark.parametrize(("errors", "wanted"), [("replace", "a\ufffdb"), ("skip", "ab")])
def test_half_surrogate_pairs(tmp_path, errors, wanted):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}')
    assert list(json_documents(tmp_path / "a.jsonl", "text", errors=errors)) == [wanted]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoding": "utf-9"}, "encoding is 'utf-9'; it must be a text encoding"),
        ({"encoding": "base64"}, "encoding is 'base64'; it must be a text encoding"),
        ({"errors": "replce"}, "Did you mean 'replace'"),
        ({"source": "embedded", "paths": (), "errors": "skip"}, "source 'embedded' has no bytes to decode"),
    ],
)
def test_bad_configuration(fields, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**{"source": "text", "paths": ("a",)} | fields)
