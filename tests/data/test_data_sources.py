"""Every source: what it reads, how it is divided, and what it says about bad input."""

import importlib
import itertools
import os
import pathlib
import shutil
import sys
from pydoc_data.topics import topics

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from atlasjax.data import DataConfig, load_documents, load_text, make_pipeline, make_tokenizer, prepare
from atlasjax.data.documents import EveryNth, TextDocuments
from atlasjax.data.parquet import ParquetDocuments, _Rows
from atlasjax.data.sources import embedded_documents
from atlasjax.train.evaluations import text_data


def everything(documents) -> list[str]:
    return [documents[i] for i in range(len(documents))]


# Embedded text


def test_embedded_documents_hold_every_paragraph_of_the_reference_once():
    paragraphs = [" ".join(p.split()) for text in embedded_documents().texts for p in text.split("\n\n")]
    wanted = {" ".join(p.split()) for text in topics.values() for p in text.split("\n\n")}
    assert len(paragraphs) == len(set(paragraphs))
    assert set(paragraphs) == wanted
    assert sum(map(len, paragraphs)) > 200_000


def test_embedded_split_covers_the_text_and_keeps_the_halves_apart():
    config = DataConfig()
    train, validation = load_text(config, "train"), load_text(config, "validation")
    whole = config.separator.join(embedded_documents().texts)
    assert sorted(train + validation) == sorted(whole)
    assert 0.03 < len(validation) / len(whole) < 0.07
    seen = set(train.split("\n"))
    lines = [line for line in validation.split("\n") if len(line) > 20]
    assert sum(line in seen for line in lines) < 0.1 * len(lines)


def test_embedded_blocks_are_spread_over_the_text():
    whole = DataConfig().separator.join(embedded_documents().texts)
    validation = load_text(DataConfig(), "validation")
    places = sorted(whole.index(line) / len(whole) for line in validation.split("\n") if whole.count(line) == 1)
    assert places[0] < 0.15
    assert places[-1] > 0.85
    assert max(b - a for a, b in itertools.pairwise(places)) < 0.3


def test_packed_documents_hold_out_whole_topics():
    config = DataConfig(packing="documents", validation_fraction=0.1)
    train, validation = (everything(load_documents(config, split)) for split in ("train", "validation"))
    assert sorted(train + validation) == sorted(embedded_documents().texts)
    assert len(validation) == len(embedded_documents()) // 10


# Text files


def test_text_folder_is_read_recursively_in_order(text_folder, texts):
    config = DataConfig(source="text", paths=(str(text_folder),), validation_fraction=0)
    assert everything(load_documents(config, "train")) == texts
    assert load_text(config, "train") == "\n\n".join(texts)


def test_text_folder_holds_out_every_nth_file(text_folder, texts):
    config = DataConfig(source="text", paths=(str(text_folder),), validation_fraction=0.1)
    assert everything(load_documents(config, "validation")) == texts[9::10]
    assert everything(load_documents(config, "train")) == [t for i, t in enumerate(texts) if i % 10 != 9]


def test_single_text_holds_out_its_tail(tmp_path):
    text = "".join(f"line {i}\n" for i in range(1000))
    (tmp_path / "long.txt").write_text(text)
    config = DataConfig(source="text", paths=(str(tmp_path / "long.txt"),), validation_fraction=0.2)
    train, validation = load_text(config, "train"), load_text(config, "validation")
    assert train + validation == text
    assert len(validation) == pytest.approx(0.2 * len(text), abs=1)


def test_separate_validation_files_hold_nothing_out(text_folder, tmp_path, texts):
    (tmp_path / "valid.txt").write_text("held out")
    config = DataConfig(source="text", paths=(str(text_folder),), validation_paths=(str(tmp_path / "valid.txt"),))
    assert everything(load_documents(config, "train")) == texts
    assert everything(load_documents(config, "validation")) == ["held out"]


def test_files_by_name_pattern_and_suffix(tmp_path):
    for name, text in {"a.txt": "A", "b.md": "B", "c.rst": "C", ".hidden.txt": "H", "bom.txt": "\ufeffM"}.items():
        (tmp_path / name).write_text(text, "utf-8")

    def read(*paths, **more):
        return everything(
            load_documents(DataConfig(source="text", paths=paths, validation_fraction=0, **more), "train")
        )

    assert read(str(tmp_path)) == ["A", "B", "M"]
    assert read(str(tmp_path), suffixes=(".rst",)) == ["C"]
    assert read(str(tmp_path / "c.rst"), str(tmp_path)) == ["C", "A", "B", "M"]
    assert read(str(tmp_path / "*.rst"), str(tmp_path / "c.rst")) == ["C"]


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "atlasjax.data.files"]


def fill(folder):
    """A folder with one file to read, a.txt, and everything else that may be in one."""
    for name in ("b.csv", "c.csv", "d.txt.bz2", ".e.txt", ".git/f.txt", "book.txt/g.txt", "other/h.txt"):
        path = folder / ("data" if not name.startswith("other") else "") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    data = folder / "data"
    (data / "a.txt").write_text("a text that is read\n" * 9)
    (data / "i.txt").touch()
    for name, target in {"j": folder / "other", "k.txt": folder / "none", "l": data, "m.txt": data / "m.txt"}.items():
        (data / name).symlink_to(target)
    (data / "n.txt").symlink_to(folder / "other/h.txt")  # a link to a file is read
    os.mkfifo(data / "o.txt")
    return data


def test_what_is_left_out_of_a_folder_is_counted_and_named_once(tmp_path, caplog):
    data = fill(tmp_path)
    config = DataConfig(source="text", paths=(str(data),), validation_fraction=0)
    for _ in range(2):
        assert len(load_documents(config, "train")) == 3
    assert said(caplog) == [
        f"atlasjax: left out of {str(data)!r}: empty: 1 ('{data}/i.txt'); hidden: 2 ('{data}/.e.txt', '{data}/.git'); "
        f"links to folders: 2 ('{data}/j', '{data}/l'); links to nothing: 2 ('{data}/k.txt', '{data}/m.txt'); "
        f"neither a file nor a folder: 1 ('{data}/o.txt'); other kinds: 3 ('{data}/b.csv', '{data}/c.csv', '{data}/d.txt.bz2')."
    ]


@pytest.mark.parametrize("use", ["prepare", "pattern", "evaluate"])
def test_it_is_said_wherever_folders_are_read(tmp_path, caplog, use):
    data = fill(tmp_path)
    if use == "prepare":
        (data / "a.jsonl").write_text('{"text": "the memory"}\n')
        prepare(DataConfig(source="jsonl", paths=(str(data),), validation_fraction=0), tmp_path / "out", workers=1)
        wanted = "other kinds: 7 ("
    elif use == "pattern":
        load_documents(DataConfig(source="text", paths=(f"{data}/*.txt",), validation_fraction=0), "train")
        wanted = f"empty: 1 ('{data}/i.txt'); folders: 1 ('{data}/book.txt'); links to nothing: 2 ("
    else:
        make_pipeline(
            text_data(DataConfig(sequence_length=8), (str(data),)), make_tokenizer(DataConfig()), "validation"
        )
        wanted = "links to folders: 2 ("
    (line,) = said(caplog)
    assert wanted in line


def test_a_folder_of_other_files_says_what_it_has(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.csv").write_text("a")
    (tmp_path / "linked").symlink_to(tmp_path / "deep")
    message = r"contains no \*.txt, \*.md file, .*Left out: links to folders: 1 .*; other kinds: 1 \('.*a.csv'\)"
    with pytest.raises(FileNotFoundError, match=message):
        load_documents(DataConfig(source="text", paths=(str(tmp_path),)), "train")


def test_empty_file_in_a_folder_is_left_out(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "full.txt").write_text("x")
    config = DataConfig(source="text", paths=(str(tmp_path),), validation_fraction=0)
    assert everything(load_documents(config, "train")) == ["x"]


@pytest.mark.parametrize(
    ("content", "path", "error", "message"),
    [
        (None, "nowhere", FileNotFoundError, "nowhere' does not exist"),
        (None, "*.txt", FileNotFoundError, r"No file matches .*\*\.txt"),
        (None, ".", FileNotFoundError, r"contains no \*\.txt, \*\.md file"),
        (b"", "empty.txt", ValueError, "empty.txt' is empty"),
        (b"", ".", ValueError, "All 1 data files under .* are empty"),
        (b"caf\xe9 au lait", "latin.txt", ValueError, "latin.txt' is not UTF-8: byte 0xe9 at offset 3"),
    ],
)
def test_bad_text_paths(tmp_path, content, path, error, message):
    if content is not None:
        (tmp_path / (path if path != "." else "found.txt")).write_bytes(content)
    with pytest.raises(error, match=message):
        load_documents(DataConfig(source="text", paths=(str(tmp_path / path),)), "train")


# Parquet


def test_parquet_column(parquet_folder, texts):
    config = DataConfig(source="parquet", paths=(str(parquet_folder),), validation_fraction=0)
    documents = load_documents(config, "train")
    assert everything(documents) == texts
    assert documents[89] == texts[89]
    with pytest.raises(IndexError):
        documents[90]


def test_parquet_keeps_few_row_groups_in_memory(parquet_folder, monkeypatch):
    monkeypatch.setattr("atlasjax.data.parquet._MAX_BLOCKS", 8)
    documents = ParquetDocuments([str(parquet_folder)], "text")
    everything(documents)
    info = documents._read.cache_info()
    assert info.misses == len(documents.block_offsets) - 1 == 8 + 6
    assert info.currsize == documents.blocks_in_memory == 8
    monkeypatch.setattr("atlasjax.data.parquet._CACHE_BYTES", 1)
    assert ParquetDocuments([str(parquet_folder)], "text").blocks_in_memory == 1


def test_parquet_missing_value_is_an_empty_document(tmp_path):
    pq.write_table(pa.table({"text": ["a", None, "b"]}), tmp_path / "f.parquet")
    assert everything(ParquetDocuments([str(tmp_path)], "text")) == ["a", "", "b"]


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int8(), pa.string()),
        pa.dictionary(pa.int32(), pa.large_string()),
    ],
    ids=str,
)
def test_parquet_strings_of_every_kind(tmp_path, kind):
    """polars writes string views and large strings, pandas its categories as dictionaries."""
    texts = ["größer", None, "a", "a", "", "größer"]
    pq.write_table(pa.table({"text": pa.array(texts).cast(kind)}), tmp_path / "f.parquet", row_group_size=4)
    documents = load_documents(DataConfig(source="parquet", paths=(str(tmp_path),), validation_fraction=0), "train")
    assert [documents[i] for i in range(len(documents))] == [text or "" for text in texts]


def test_parquet_rows_in_many_chunks():
    """As pyarrow returns row groups of more than 2 GiB. Some chunks are empty."""
    texts = [str(i) for i in range(20)]
    rows = _Rows([pa.array(texts[a:b], pa.string()) for a, b in ((0, 0), (0, 7), (7, 7), (7, 8), (8, 20))])
    assert [rows[i] for i in range(20)] == texts


@pytest.mark.parametrize(
    "kind", [pa.dictionary(pa.int8(), pa.int64()), pa.binary(), pa.large_list(pa.string())], ids=str
)
def test_parquet_columns_that_hold_no_strings(tmp_path, kind):
    pq.write_table(pa.table({"text": pa.array([None], kind)}), tmp_path / "f.parquet")
    with pytest.raises(ValueError, match=r"Column 'text' of the data file .* has type .*; it should hold strings."):
        ParquetDocuments([str(tmp_path)], "text")


def plain_parquet(path, texts) -> None:
    """Row groups of two, as plain pages."""
    pq.write_table(pa.table({"text": texts}), path, row_group_size=2, compression="none", use_dictionary=False)


def test_parquet_that_is_not_utf8(tmp_path):
    bad = pa.array([b"a", b"b", b"c", b"\xff\xfe", b"e"]).view(pa.string())
    plain_parquet(tmp_path / "1.parquet", ["x", "y", "z"])
    plain_parquet(tmp_path / "2.parquet", bad)
    documents = ParquetDocuments([str(tmp_path)], "text")
    assert [documents[i] for i in (0, 2, 5, 7)] == ["x", "z", "c", "e"]
    with pytest.raises(
        ValueError, match=r"2.parquet' is not UTF-8 in row 3 \(column 'text'\): invalid start byte at byte 0"
    ):
        documents[6]


def test_a_damaged_page(tmp_path):
    plain_parquet(tmp_path / "1.parquet", ["x", "y", "z"])
    plain_parquet(tmp_path / "2.parquet", ["some text"] * 5)
    where = pq.read_metadata(tmp_path / "2.parquet").row_group(1).column(0)
    content = bytearray((tmp_path / "2.parquet").read_bytes())
    content[where.data_page_offset : where.data_page_offset + where.total_compressed_size] = (
        b"\xff" * where.total_compressed_size
    )
    (tmp_path / "2.parquet").write_bytes(content)
    documents = ParquetDocuments([str(tmp_path)], "text")
    assert documents[3] == "some text"
    with pytest.raises(ValueError, match=r"2.parquet' is damaged in rows 2 to 3 \(column 'text'\): "):
        documents[5]


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null"])
def test_what_is_no_file_is_not_read(path):
    with pytest.raises(ValueError, match="is neither a file nor a folder"):
        load_text(DataConfig(source="text", paths=(path,)), "train")


def test_text_beyond_the_machines_memory(tmp_path):
    with open(tmp_path / "huge.txt", "wb") as file:
        file.truncate(2**43)  # 8 TiB, none of it on the disk
    with pytest.raises(ValueError, match=r"have 8,192.0 GiB, which are read into memory; the machine has"):
        load_text(DataConfig(source="text", paths=(str(tmp_path),)), "train")


def test_bad_parquet(parquet_folder, tmp_path):
    with pytest.raises(ValueError, match=r"no column 'txt'\. Did you mean 'text'\? It has: id, text"):
        ParquetDocuments([str(parquet_folder)], "txt")
    with pytest.raises(ValueError, match=r"'id' .*int64; it should hold strings"):
        ParquetDocuments([str(parquet_folder)], "id")
    with pytest.raises(FileNotFoundError, match=r"contains no \*\.parquet file"):
        ParquetDocuments([str(tmp_path)], "text")
    (tmp_path / "no.parquet").write_text("no")
    with pytest.raises(ValueError, match=r"no\.parquet' is not a Parquet file"):
        ParquetDocuments([str(tmp_path / "no.parquet")], "text")
    (tmp_path / "no.parquet").unlink()
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    with pytest.raises(ValueError, match="have no rows"):
        ParquetDocuments([str(tmp_path)], "text")


# TensorFlow Datasets


class NoTensorFlow:
    """Finds whatever the usual finders find, except TensorFlow: as if it were not installed."""

    def __init__(self, finders):
        self._finders = list(finders)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tensorflow":
            return None
        specs = (finder.find_spec(name, path, target) for finder in self._finders)
        return next((spec for spec in specs if spec is not None), None)


def forbid_tensorflow(patch):
    patch.setattr(sys, "meta_path", [NoTensorFlow(sys.meta_path)])
    patch.delitem(sys.modules, "tensorflow", raising=False)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("tensorflow")


@pytest.fixture(scope="module")
def tfds_folder(tmp_path_factory):
    """A dataset written by TFDS, with TensorFlow made impossible to import."""
    tfds = pytest.importorskip("tensorflow_datasets")

    class TinyText(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {"text": tfds.features.Text(), "label": np.int64}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
            )

        def _split_generators(self, dl_manager):
            del dl_manager
            return {"train": self._generate_examples(40), "test": self._generate_examples(3)}

        def _generate_examples(self, count):
            for i in range(count):
                yield i, {"text": f"Beispiel {i}: größer", "label": i}

    folder = tmp_path_factory.mktemp("tfds")
    with pytest.MonkeyPatch.context() as patch:
        forbid_tensorflow(patch)
        TinyText(data_dir=folder, file_format="array_record").download_and_prepare()
    return str(folder)


@pytest.fixture
def without_tensorflow(monkeypatch):
    forbid_tensorflow(monkeypatch)


@pytest.mark.usefixtures("without_tensorflow")
def test_tfds_is_read_back_without_tensorflow(tfds_folder):
    config = DataConfig(source="tfds", tfds_name="tiny_text", tfds_data_dir=tfds_folder, validation_fraction=0.1)
    train, validation = (everything(load_documents(config, split)) for split in ("train", "validation"))
    assert validation == [f"Beispiel {i}: größer" for i in (9, 19, 29, 39)]
    assert sorted(train + validation) == sorted(f"Beispiel {i}: größer" for i in range(40))


@pytest.mark.usefixtures("without_tensorflow")
def test_tfds_splits(tfds_folder):
    config = DataConfig(
        source="tfds", tfds_name="tiny_text:1.0.0", tfds_data_dir=tfds_folder,
        tfds_split="train[:50%]", tfds_validation_split="test",
    )  # fmt: skip
    assert len(load_documents(config, "train")) == 20
    assert len(load_documents(config, "validation")) == 3


@pytest.mark.usefixtures("without_tensorflow")
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tfds_name": "kaggle:tiny_text"}, ValueError, "'kaggle:tiny_text'; TFDS would download code"),
        ({"tfds_name": "huggingface:a/b"}, ValueError, "TFDS would download code"),
        ({"tfds_name": "tiny_test"}, FileNotFoundError, "no TFDS dataset 'tiny_test'"),
        ({"tfds_feature": "texts"}, ValueError, "Did you mean 'text'"),
        ({"tfds_feature": "label"}, ValueError, "'label' .* should hold text"),
        ({"tfds_split": "trian"}, ValueError, r"'trian'.*\['train', 'test'\]"),
    ],
)
def test_bad_tfds(tfds_folder, change, error, message):
    fields = {"source": "tfds", "tfds_name": "tiny_text", "tfds_data_dir": tfds_folder} | change
    with pytest.raises(error, match=message):
        load_documents(DataConfig(**fields), "train")


@pytest.mark.usefixtures("without_tensorflow")
def test_tfds_imports_nothing_that_a_file_names(tfds_folder, tmp_path):
    shutil.copytree(tfds_folder, tmp_path / "copy")
    (file,) = (tmp_path / "copy").rglob("features.json")
    file.write_text(file.read_text().replace("tensorflow_datasets.core.features.text_feature.Text", "antigravity.Text"))
    config = DataConfig(source="tfds", tfds_name="tiny_text:1.0.0", tfds_data_dir=str(tmp_path / "copy"))
    with pytest.raises(
        ValueError, match=r"features.json': pythonClassName is 'antigravity.Text'.*nothing was imported"
    ):
        load_documents(config, "train")
    assert "antigravity" not in sys.modules


@pytest.mark.usefixtures("without_tensorflow")
def test_tfds_never_downloads(tmp_path):
    pytest.importorskip("tensorflow_datasets")
    config = DataConfig(source="tfds", tfds_name="ag_news_subset", tfds_data_dir=str(tmp_path))
    with pytest.raises(FileNotFoundError, match="'ag_news_subset' is not prepared in"):
        load_documents(config, "train")
    assert not list(pathlib.Path(tmp_path).iterdir())


# Views and configuration


@pytest.mark.parametrize("n", [2, 3, 7])
def test_views_select_what_they_say(n):
    documents = TextDocuments([str(i) for i in range(23)])
    documents.block_offsets = pa.array([0, 5, 5, 11, 23]).to_numpy()
    for view, wanted in [
        (EveryNth(documents, n), [i for i in range(23) if i % n == n - 1]),
        (EveryNth(documents, n, complement=True), [i for i in range(23) if i % n != n - 1]),
    ]:
        assert everything(view) == [str(i) for i in wanted]
        with pytest.raises(IndexError):
            view[len(wanted)]
        # The blocks of a view are those of the documents, less what is not selected.
        blocks = [sum(a <= i < b for i in wanted) for a, b in ((0, 5), (5, 11), (11, 23))]
        sizes = view.block_offsets[1:] - view.block_offsets[:-1]
        assert [size for size in sizes if size] == [size for size in blocks if size]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"separator": 5}, "separator is 5; it must be a string"),
        ({"column": True}, "column is True; it must be a string"),
        ({"tokenizer": 300}, "tokenizer is 300; it must be a string"),
        ({"source": "text", "paths": (5,)}, r"paths is \(5,\); it must be a tuple of strings"),
        ({"source": "text", "paths": 5}, "paths is 5; it must be a tuple of strings"),
        ({"source": "txt"}, "Unknown data source 'txt'. Did you mean 'text'"),
        ({"packing": "document"}, "Did you mean 'documents'"),
        ({"held_out": "tial"}, "Did you mean 'tail'"),
        ({"source": "text"}, "'text' needs paths"),
        ({"paths": ("a.txt",)}, "'embedded' reads no paths, but 'a.txt'"),
        ({"source": "text", "paths": "a.txt"}, "paths is 'a.txt'; it must be a tuple"),
        ({"source": "tfds"}, "needs tfds_name"),
        ({"source": "parquet", "paths": ("p",), "held_out": "tail"}, "'tail' cuts text in memory"),
        ({"packing": "documents", "held_out": "blocks"}, "'blocks' cuts across documents"),
        ({"sequence_length": 0}, "sequence_length is 0"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"max_segments": 1}, "max_segments is 1; it must be an integer of at least 2"),
        ({"validation_fraction": 0.7}, "validation_fraction is 0.7"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_bad_configuration(fields, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**fields)


def test_no_validation_split(text_folder):
    with pytest.raises(ValueError, match=r"no validation split: --data.validation-fraction is 0"):
        load_documents(DataConfig(validation_fraction=0), "validation")
    with pytest.raises(ValueError, match=r"Unknown split 'valid'\. Did you mean 'validation'"):
        load_documents(DataConfig(), "valid")
    config = DataConfig(source="text", paths=(str(text_folder),), held_out="documents", validation_fraction=0.01)
    with pytest.raises(
        ValueError, match=r"every 100th document, but there are only 90; use --data.held-out tail, a larger"
    ):
        load_documents(config, "train")


def test_a_small_source_is_not_told_to_use_what_it_cannot(tmp_path):
    (tmp_path / "few.jsonl").write_text('{"text": "one"}\n' * 5)
    config = DataConfig(source="jsonl", paths=(str(tmp_path / "few.jsonl"),))
    with pytest.raises(ValueError, match="but there are only 5; use a larger fraction, or separate"):
        load_documents(config, "train")
