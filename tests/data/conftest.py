"""Small corpora, written once per test session."""

import random

import pytest

SENTENCE = "the memory learns while it reads and forgets what it no longer needs so that a long text fits in little"


def make_texts(count: int, seed: int, longest: int = 60) -> list[str]:
    """Texts of 1 to `longest` words, each beginning with its own number."""
    rng = random.Random(seed)
    return [f"{i}: " + " ".join(rng.choices(SENTENCE.split(), k=rng.randint(1, longest))) + "\n" for i in range(count)]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return make_texts(90, seed=0)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory, texts):
    """Ninety files in two folders, in the order of `texts`."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "deep").mkdir()
    for i, text in enumerate(texts):
        (folder / ("deep" if i >= 45 else ".") / f"{'z' if i >= 45 else 'a'}{i:03d}.txt").write_text(text)
    # "a…" sorts before "deep/…", so the order of reading is that of `texts`.
    return folder


@pytest.fixture(scope="session")
def parquet_folder(tmp_path_factory, texts):
    """The same texts in two Parquet files of several row groups, beside a column of numbers."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path_factory.mktemp("parquet")
    for name, part in (("0.parquet", texts[:50]), ("1.parquet", texts[50:])):
        table = pa.table({"id": list(range(len(part))), "text": part})
        pq.write_table(table, folder / name, row_group_size=7)
    return folder
