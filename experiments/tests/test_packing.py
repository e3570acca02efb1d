"""experiments/packing: a few models, the hard cases that the batch promises, and the committed rows."""

import numpy as np
import pytest

from atlasjax.presets import preset_names
from experiments.packing import batch, run
from experiments.rows import read_rows

PRESETS = "gated-deltanet-h2-tiny", "linear-attention-mag-tiny", "titans-mac-tiny", "elastic-exp-tiny", "gam-tiny"


@pytest.mark.slow  # of each mixer in tests/nn
@pytest.mark.parametrize("preset", PRESETS)
def test_no_document_reads_another(preset):
    row = run.measure(preset)
    assert not run.leaks(row), row["differences"]
    assert list(row["differences"]) == list(run.KINDS)
    assert row["unseparated"] > 0.1  # the comparisons see a document that reads another


def test_the_batch_has_the_hard_cases():
    documents = batch.documents()
    tokens = np.arange(len(documents) * batch.TIME, dtype=np.int32).reshape(len(documents), batch.TIME) + 1
    rows, ids = batch.packed(tokens, np.zeros((len(batch.ROWS), batch.TIME), np.int32))
    assert rows.shape == ids.shape == (len(batch.ROWS), batch.TIME)
    for document in documents:
        here = slice(document.start, document.start + document.length)
        np.testing.assert_array_equal(rows[document.row, here], tokens[document.number, : document.length])
        assert len(set(ids[document.row, here])) == 1
    lengths = [document.length for document in documents]
    assert 1 in lengths
    assert set(range(max(ids[0]))) - set(ids[0])  # ids without a token
    changes = np.flatnonzero(np.diff(ids[1]))
    assert len(set(ids[1])) < len(changes) + 1  # an id returns
    assert [bool(rows[row, 0]) for row in (2, 3, 4, 6)] == [False] * 4  # left padding
    assert not rows[5, -1]


def test_a_difference_is_a_leak():
    assert run.leaks({"differences": {"packed": 1e-7, "padded": 3e-5, "decoded": float("inf")}}) == [
        "padded",
        "decoded",
    ]


def test_only_tokens_that_float32_cannot_compare_are_left_out():
    model = run.Model("gam-tiny", run.Recipe())
    tokens = run._random(run.Recipe())[0]
    alone = np.asarray(model.parallel(model.params, tokens))
    moved = model.sensitivity(tokens, alone) / np.abs(alone).max()
    assert moved.shape == tokens.shape
    assert 0 < moved.min() < moved.max() < run.TOLERANCE  # about one unit in the last place: none of them is left out
    expected = np.array([1.0, np.nan])
    assert run._largest(np.array([1.5, 9.0]), expected) == 0.5
    assert run._largest(np.array([np.nan, 9.0]), expected) == np.inf


def test_every_tiny_preset_has_a_row_without_a_leak():
    rows = {row["model"]: row for row in read_rows(run.HERE / "results/packing.jsonl")}
    assert set(rows) == set(preset_names("tiny"))
    tokens = {name: row.get("ill_conditioned", 0) for name, row in rows.items()}
    # pkda scales write keys by a function of log(a + 1e-6), with a = β k² at a segment's first token: where k is near 1e-3, the
    # rounding of k, of 6e-8, changes a by 1e-4 of its size.
    assert tokens.pop("pkda-tiny") < 20
    assert sum(tokens.values()) < 10
    assert not {name: found for name, row in rows.items() if (found := run.leaks(row))}
