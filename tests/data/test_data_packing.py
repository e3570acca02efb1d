"""Packed documents: nothing lost, nothing doubled, nothing predicted across a boundary, and shuffling by blocks."""

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlasjax.data import DataConfig, load_documents, make_pipeline
from atlasjax.data.documents import TextDocuments
from atlasjax.data.mixture import Order
from atlasjax.data.packing import Dealt, DealtBlocks, packed_documents
from atlasjax.data.preparation import prepare
from atlasjax.data.token_rows import RowConfig
from atlasjax.data.tokenizers import ByteTokenizer

BYTE = ByteTokenizer()


def segments(rows):
    """Yield (inputs, targets, weights) of every segment of rows {"inputs": [..., T], …}, in order, padding left out."""
    for inputs, targets, weights, ids in zip(*(rows[n] for n in ("inputs", "targets", "weights", "segment_ids"))):
        present = [i for i, _ in itertools.groupby(ids)]
        # Ids count up from 1 in each row, and padding (0) comes only at the end.
        assert [i for i in present if i] == list(range(1, max(ids, default=0) + 1))
        assert 0 not in present[:-1]
        for i in range(1, max(ids) + 1):
            yield inputs[ids == i], targets[ids == i], weights[ids == i]
        assert not inputs[ids == 0].any()
        assert not weights[ids == 0].any()


def joined(batches):
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def pieces_of(text: str, length: int) -> list[tuple[bytes, bytes, tuple]]:
    """The segments that a document should give: inputs, targets where weighted, weights."""
    data = text.encode()
    weights = [1.0] * (len(data) - 1) + [0.0]
    return [
        (data[i : i + length], data[i + 1 : i + length + 1], tuple(weights[i : i + length]))
        for i in range(0, len(data), length)
    ]


def check_packing(texts, batches, length, max_segments):
    rows = joined(batches)
    found = collections.Counter(
        (bytes(x.tolist()), bytes(y[w == 1].tolist()), tuple(w.tolist())) for x, y, w in segments(rows)
    )
    assert found == collections.Counter(piece for text in texts for piece in pieces_of(text, length))
    changes = 1 + (np.diff(rows["segment_ids"], axis=1) != 0).sum(axis=1)
    assert changes.max() <= max_segments


def pack(texts, length, max_segments, batch_size, seed=None):
    return list(packed_documents(
        TextDocuments(texts), BYTE, RowConfig(length, max_segments, batch_size, slice(batch_size), seed), repeat=False,
        num_threads=0,
    ))  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.text(max_size=40), min_size=1, max_size=25).filter(any),
    length=st.integers(1, 30),
    max_segments=st.integers(2, 5),
    batch_size=st.integers(1, 10),
    seed=st.none() | st.integers(0, 9),
)
def test_every_token_once_with_its_target(texts, length, max_segments, batch_size, seed):
    check_packing(texts, pack(texts, length, max_segments, batch_size, seed), length, max_segments)


@pytest.mark.parametrize("process_count", [1, 2])
def test_one_pass_packs_the_whole_split(parquet_folder, process_count):
    config = DataConfig(
        source="parquet", paths=(str(parquet_folder),), packing="documents", validation_fraction=0.3,
        sequence_length=96, batch_size=4, max_segments=3,
    )  # fmt: skip
    for split in ("train", "validation"):
        documents = load_documents(config, split)
        texts = [documents[i] for i in range(len(documents))]
        pipelines = [make_pipeline(config, BYTE, split, i, process_count, repeat=False) for i in range(process_count)]
        assert all(pipeline.max_segments == 3 for pipeline in pipelines)
        check_packing(texts, [batch for pipeline in pipelines for batch in pipeline], 96, 3)


@pytest.mark.parametrize("process_count", [1, 2])
@pytest.mark.parametrize("max_segments", [2, 5])
def test_one_pass_packs_prepared_documents(parquet_folder, tmp_path, process_count, max_segments):
    source = DataConfig(
        source="parquet", paths=(str(parquet_folder),), packing="documents", validation_fraction=0.3
    )  # fmt: skip
    prepare(source, tmp_path / "out", shard_tokens=2000)
    config = DataConfig(
        source="prepared", paths=(str(tmp_path / "out"),), packing="documents",
        sequence_length=96, batch_size=6, max_segments=max_segments,
    )  # fmt: skip
    for split in ("train", "validation"):
        documents = load_documents(source, split)
        texts = [documents[i] for i in range(len(documents))]
        pipelines = [make_pipeline(config, BYTE, split, i, process_count, repeat=False) for i in range(process_count)]
        batches = [batch for pipeline in pipelines for batch in pipeline]
        assert {batch["inputs"].shape for batch in batches} == {(6 // process_count, 96)}
        check_packing(texts, batches, 96, max_segments)


def test_prepared_documents_come_once_an_epoch_in_another_order(texts, text_folder, tmp_path):
    source = DataConfig(source="text", paths=(str(text_folder),), packing="documents", validation_fraction=0)
    prepare(source, tmp_path / "out")
    config = DataConfig(
        source="prepared", paths=(str(tmp_path / "out"),), packing="documents", sequence_length=400, batch_size=3
    )
    numbers = first_words(list(itertools.islice(make_pipeline(config, BYTE, "train"), 60)))
    assert len(numbers) > 270
    groups = 9 * 15  # rows of a group change places: a document may come one group early or late
    assert max(collections.Counter(numbers[:90]).values()) <= 2
    assert set(numbers[: 90 + groups]) == set(range(90))
    assert numbers[:90] != numbers[90:180]


def test_rows_are_well_filled(texts):
    rows = joined(pack(texts, 400, 20, batch_size=8))
    filled = rows["segment_ids"] > 0
    assert filled[filled.any(axis=1)].mean() > 0.8


def first_words(batches) -> list[int]:
    """The numbers with which documents begin, in the order of the segments."""
    texts = (bytes(inputs.tolist()).decode() for inputs, _, _ in segments(joined(batches)))
    return [int(text.partition(":")[0]) for text in texts if text.partition(":")[0].isdecimal()]


@pytest.mark.parametrize("kind", ["text", "parquet"])
def test_readers_share_out_each_epoch(kind, text_folder, parquet_folder, monkeypatch):
    """Readers with short documents do not repeat theirs more often."""
    monkeypatch.setattr("atlasjax.data.packing._LEAST_DOCUMENTS", 8)
    monkeypatch.setattr("atlasjax.data.packing._LEAST_BLOCKS", 2)
    folder = {"text": text_folder, "parquet": parquet_folder}[kind]
    config = DataConfig(
        source=kind, paths=(str(folder),), packing="documents", validation_fraction=0,
        sequence_length=400, batch_size=4,
    )  # fmt: skip
    numbers = first_words(list(itertools.islice(make_pipeline(config, BYTE, "train"), 150)))
    count = collections.Counter(numbers)
    assert set(count) == set(range(90))
    epochs = len(numbers) / 90
    assert epochs > 4
    assert max(abs(n - epochs) for n in count.values()) < 0.5 * epochs


def test_documents_are_dealt_once_an_epoch():
    order = Order((20,), None, 3, repeat=True)
    dealt = [Dealt(order, number, 4) for number in range(4)]
    assert [dealt[i % 4][i // 4] for i in range(60)] == [order[i] for i in range(60)]
    assert sorted(order[i] for i in range(20, 40)) == list(range(20))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("window", [1, 2, 50])
def test_dealt_blocks_use_few_blocks_at_a_time(window, count):
    """Every epoch deals each block to one reader, in groups of `window` blocks."""
    offsets = np.array([0, 4, 4, 9, 10, 16, 23])

    def dealt(seed):
        orders = [DealtBlocks(offsets, window, seed, repeat=True, number=i, count=count) for i in range(count)]
        places = 7 * window  # the largest block has 7 documents
        return [
            [document for i in range(places) if (document := orders[n % count][n // count * places + i]) >= 0]
            for n in range(3 * -(-6 // window))
        ]

    groups = dealt(5)
    assert all(len(set(np.searchsorted(offsets, group, side="right"))) <= window for group in groups)
    size = len(groups) // 3
    epochs = [list(itertools.chain(*groups[e * size : (e + 1) * size])) for e in range(3)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert dealt(5) == groups
    assert dealt(6) != groups


def test_one_pass_over_blocks_in_their_order():
    offsets = np.array([0, 4, 4, 9])
    order = DealtBlocks(offsets, 2, None, repeat=False, number=0, count=1)
    places = list(itertools.takewhile(lambda place: place is not None, (order[i] for i in itertools.count())))
    assert [place for place in places if place >= 0] == list(range(9))


def test_parquet_reads_every_row_group_once_per_epoch(parquet_folder, monkeypatch):
    from atlasjax.data.parquet import ParquetDocuments

    monkeypatch.setattr("atlasjax.data.parquet._MAX_BLOCKS", 3)
    documents = ParquetDocuments([str(parquet_folder)], "text")
    read = list(packed_documents(documents, BYTE, RowConfig(400, 4, 3, slice(3), seed=0), repeat=False, num_threads=0))
    assert sorted(first_words(read)) == list(range(90))
    assert documents._read.cache_info().misses == 14
