"""Contiguous packing, positions, sharding by process, and errors of the pipeline."""

import dataclasses
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlasjax.data import DataConfig, load_text, make_pipeline, make_tokenizer
from atlasjax.data.mixture import pick
from atlasjax.data.pipeline import merge_positions
from atlasjax.data.preparation import prepare
from atlasjax.data.tokenizers import ByteTokenizer
from atlasjax.data.windows import Windows, token_dtype, token_stream
from tests.marks import some_slow

BYTE = ByteTokenizer()


def assert_same(batch, other):
    assert batch.keys() == other.keys()
    for name in batch:
        np.testing.assert_array_equal(batch[name], other[name], err_msg=name)


@pytest.fixture(scope="module")
def prepared_folders(tmp_path_factory, text_folder, parquet_folder):
    """For each packing two prepared data sets of several files: of all texts, and of a part of them in Parquet files."""
    folder = tmp_path_factory.mktemp("prepared")
    sources = {"text": (str(text_folder),), "parquet": (str(parquet_folder / "0.parquet"),)}
    for packing in ("contiguous", "documents"):
        for source, paths in sources.items():
            config = DataConfig(source=source, paths=paths, packing=packing, validation_fraction=0.2, seed=1)
            prepare(config, folder / packing / source, shard_tokens=1500)
    return folder


def prepared_config(folder, packing, *names, **more):
    paths = tuple(str(folder / packing / name) for name in names)
    return DataConfig(source="prepared", paths=paths, packing=packing, **more)


@pytest.fixture(
    params=["contiguous", "documents", "parquet", "threads", "prepared", "prepared documents", "mixed", "mixed documents",
            "prepared threads"]
)  # fmt: skip
def config(request, text_folder, parquet_folder, prepared_folders):
    """Small configurations whose epochs are a few batches long."""
    base = {"sequence_length": 96, "batch_size": 4, "validation_fraction": 0.2, "max_segments": 5, "seed": 3}
    return {
        "contiguous": DataConfig(source="text", paths=(str(text_folder),), **base),
        "documents": DataConfig(source="text", paths=(str(text_folder),), packing="documents", **base),
        "parquet": DataConfig(source="parquet", paths=(str(parquet_folder),), packing="documents", **base),
        "prepared": prepared_config(prepared_folders, "contiguous", "text", **base),
        "prepared documents": prepared_config(prepared_folders, "documents", "text", "parquet", **base),
        "prepared threads": prepared_config(prepared_folders, "documents", "text", num_threads=2, **base),
        "mixed": prepared_config(prepared_folders, "contiguous", "text", "parquet", weights=(1, 2), **base),
        "mixed documents": prepared_config(prepared_folders, "documents", "text", "parquet", weights=(1, 2), **base),
        "threads": DataConfig(
            source="parquet", paths=(str(parquet_folder),), packing="documents", num_threads=2, **base
        ),
    }[request.param]


# Batches


@pytest.mark.parametrize("split", ["train", "validation"])
def test_batch_has_the_promised_shapes_and_types(config, split):
    batch = next(iter(make_pipeline(config, BYTE, split)))
    names = ["inputs", "targets", "weights"] + ["segment_ids"] * (config.packing == "documents")
    assert sorted(batch) == sorted(names)
    for name, array in batch.items():
        assert array.shape == (4, 96)
        assert array.dtype == (np.float32 if name == "weights" else np.int32)
        assert array.flags.c_contiguous


def test_contiguous_pass_is_the_text_in_order(text_folder):
    config = DataConfig(source="text", paths=(str(text_folder),), sequence_length=96, batch_size=4)
    text = load_text(config, "validation").encode()
    pipeline = make_pipeline(config, BYTE, "validation")
    batches = list(pipeline)
    inputs, targets, weights = (
        np.concatenate([b[n].ravel() for b in batches]) for n in ("inputs", "targets", "weights")
    )
    assert bytes(inputs[weights == 1].tolist()) == text[:-1]
    assert bytes(targets[weights == 1].tolist()) == text[1:]
    assert not inputs[weights == 0].any()
    assert set(weights) == {0, 1}
    assert pipeline.num_tokens == len(text)
    assert pipeline.batches_per_epoch == len(batches)
    assert pipeline.max_segments is None


def test_training_epoch_has_every_window_once_in_a_new_order(text_folder):
    config = DataConfig(source="text", paths=(str(text_folder),), sequence_length=96, batch_size=1, held_out="tail")
    pipeline = make_pipeline(config, BYTE, "train")
    batches = iter(pipeline)
    epochs = [[next(batches)["targets"].tobytes() for _ in range(pipeline.batches_per_epoch)] for _ in range(2)]
    in_order = [b["targets"].tobytes() for b in make_pipeline(config, BYTE, "train", repeat=False)]
    still = dataclasses.replace(config, shuffle=False)
    unshuffled = [
        b["targets"].tobytes() for b in itertools.islice(make_pipeline(still, BYTE, "train"), 2 * len(in_order))
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(in_order)
    assert epochs[0] != epochs[1]
    assert unshuffled[: len(in_order)] == unshuffled[len(in_order) :]
    assert epochs[0] != unshuffled[: len(in_order)]


@pytest.mark.parametrize("num_tokens", [2, 5, 6, 7, 11, 23])
def test_windows_predict_every_token_but_the_first_once(num_tokens):
    tokens = np.arange(100, 100 + num_tokens).astype(np.uint8)
    windows = Windows(tokens, 5, multiple=4)
    assert len(windows) % 4 == 0
    kept = [
        np.stack([w["inputs"], w["targets"]])[:, w["weights"] == 1]
        for w in map(windows.__getitem__, range(len(windows)))
    ]
    pairs = np.concatenate(kept, axis=1)
    np.testing.assert_array_equal(pairs[0], tokens[:-1])
    np.testing.assert_array_equal(pairs[1], tokens[1:])


def test_long_texts_are_tokenized_in_pieces(monkeypatch, texts):
    class Recorder(ByteTokenizer):
        longest = 0

        def encode(self, text):
            self.longest = max(self.longest, len(text))
            return super().encode(text)

    monkeypatch.setattr("atlasjax.data.pieces.PIECE", 50)
    recorder = Recorder()
    stream = token_stream(["".join(texts), "no line end " * 20], recorder, "\n\n")
    assert bytes(stream.tolist()).decode() == "".join(texts) + "\n\n" + "no line end " * 20
    assert recorder.longest == 50


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.uint32)]
)
def test_token_dtype_is_the_smallest_that_fits(vocab_size, dtype):
    assert token_dtype(vocab_size) == dtype


def test_bpe_batches_decode_to_the_text():
    config = DataConfig(tokenizer="bpe:500", sequence_length=64, batch_size=2)
    tokenizer = make_tokenizer(config)
    batches = list(make_pipeline(config, tokenizer, "validation"))
    text = load_text(config, "validation")
    weights = np.concatenate([b["weights"].ravel() for b in batches])
    targets = np.concatenate([b["targets"].ravel() for b in batches])[weights == 1]
    first = batches[0]["inputs"].ravel()[:1]
    assert tokenizer.decode(np.concatenate([first, targets])) == text
    assert tokenizer.bytes_per_token[targets].sum() == len(text.encode()) - tokenizer.bytes_per_token[first].sum()


def test_parquet_and_text_of_the_same_documents_give_the_same_stream(text_folder, parquet_folder):
    base = {"sequence_length": 96, "batch_size": 4, "validation_fraction": 0.1, "held_out": "documents"}
    text = DataConfig(source="text", paths=(str(text_folder),), **base)
    parquet = DataConfig(source="parquet", paths=(str(parquet_folder),), **base)
    for split in ("train", "validation"):
        first, second = (list(make_pipeline(c, BYTE, split, repeat=False)) for c in (text, parquet))
        assert len(first) == len(second)
        for batch, other in zip(first, second):
            assert_same(batch, other)


def test_heavy_libraries_are_imported_only_where_they_are_used():
    code = (
        "import sys, atlasjax.data, atlasjax.evaluate.ngram; atlasjax.data.load_text(atlasjax.data.DataConfig(), 'train');"
        "atlasjax.data.make_tokenizer(atlasjax.data.DataConfig());"
        "print([n for n in ('grain', 'jax', 'pyarrow', 'tokenizers', 'sentencepiece', 'tensorflow_datasets')"
        " if n in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# Position


@pytest.mark.parametrize("steps", some_slow([0, 1, 7, 40], [1, 7]))  # the test below tries each of 25
def test_restored_position_gives_the_same_batches(config, steps):
    """Forty batches are more than two epochs of every configuration here."""
    pipeline = make_pipeline(config, BYTE, "train")
    batches = iter(pipeline)
    for _ in range(steps):
        next(batches)
    state = json.loads(json.dumps(batches.get_state()))
    wanted = list(itertools.islice(batches, 12))
    for restored in (iter(pipeline), iter(make_pipeline(config, BYTE, "train")), batches):
        restored.set_state(state)
        for batch in wanted:
            assert_same(next(restored), batch)


def test_position_at_every_batch(config):
    """Also in the middle of a group of packed rows, which Grain emits one by one."""
    pipeline = make_pipeline(config, BYTE, "train")
    batches, states, wanted = iter(pipeline), [], []
    for _ in range(25):
        states.append(batches.get_state())
        wanted.append(next(batches))
    restored = iter(pipeline)
    for state, batch in zip(reversed(states), reversed(wanted)):
        restored.set_state(state)
        assert_same(next(restored), batch)
        assert restored.get_state() == states[states.index(state) + 1] if state != states[-1] else True


def test_validation_passes_are_alike_and_can_be_resumed(config):
    pipeline = make_pipeline(config, BYTE, "validation")
    first, second = list(pipeline), list(pipeline)
    assert len(first) == len(second) > 1
    for batch, other in zip(first, second):
        assert_same(batch, other)
    batches = iter(pipeline)
    next(batches)
    restored = iter(pipeline)
    restored.set_state(batches.get_state())
    rest = list(restored)
    assert len(rest) == len(first) - 1
    for batch, other in zip(rest, first[1:]):
        assert_same(batch, other)


def test_a_position_in_a_text_that_has_changed_is_refused(tmp_path):
    """Also if it is as long as before. Positions of older versions have no checksum, and are accepted."""
    file = tmp_path / "a.txt"
    file.write_text("abcd\n" * 200)
    config = DataConfig(source="text", paths=(str(file),), sequence_length=8, batch_size=2)
    state = iter(make_pipeline(config, BYTE, "train")).get_state()
    file.write_text("abce\n" * 200)
    changed = iter(make_pipeline(config, BYTE, "train"))
    with pytest.raises(ValueError, match=r"another pipeline: tokens_crc32 was \d+ and is now \d+"):
        changed.set_state(state)
    del state["pipeline"]["tokens_crc32"]
    changed.set_state(state)


def test_position_of_another_pipeline_is_refused(config):
    state = iter(make_pipeline(config, BYTE, "train")).get_state()
    for change, message in [
        ({"sequence_length": 32}, "sequence_length was 96 and is now 32"),
        ({"batch_size": 8}, "batch_size was 4 and is now 8"),
        ({"seed": 4}, "shuffle_seed was 3 and is now 4"),
        ({"shuffle": False}, "shuffle_seed was 3 and is now None"),
        ({"validation_fraction": 0.25}, r"num_(tokens|documents) was \d+ and is now \d+")
        if config.source != "prepared"
        else ({"paths": config.paths[::-1], "weights": (2,) * len(config.paths)}, "(sets|weights) was "),
    ]:
        other = iter(make_pipeline(dataclasses.replace(config, **change), BYTE, "train"))
        with pytest.raises(ValueError, match=f"position belongs to another pipeline: .*{message}"):
            other.set_state(state)
    if config.packing == "documents":
        other = iter(make_pipeline(dataclasses.replace(config, max_segments=6), BYTE, "train"))
        with pytest.raises(ValueError, match="max_segments was 5 and is now 6"):
            other.set_state(state)
    if config.source == "prepared":  # positions of an older version did not have it
        old = {name: value for name, value in state["pipeline"].items() if name != "max_segments"}
        iter(make_pipeline(config, BYTE, "train")).set_state({**state, "pipeline": old})
    with pytest.raises(ValueError, match="split was 'train' and is now 'validation'"):
        iter(make_pipeline(config, BYTE, "validation")).set_state(state)
    with pytest.raises(ValueError, match="not a data position"):
        iter(make_pipeline(config, BYTE, "train")).set_state({"next_index": 3})


# Processes


@pytest.mark.parametrize("process_count", [2, 4])
def test_contiguous_slices_make_up_the_global_batch(text_folder, process_count):
    config = DataConfig(
        source="text", paths=(str(text_folder),), sequence_length=96, batch_size=4, validation_fraction=0.3
    )
    for split in ("train", "validation"):
        whole = iter(make_pipeline(config, BYTE, split))
        parts = [iter(make_pipeline(config, BYTE, split, i, process_count)) for i in range(process_count)]
        for _ in range(3 if split == "validation" else 100):
            wanted, slices = next(whole), [next(part) for part in parts]
            assert_same({n: np.concatenate([s[n] for s in slices]) for n in wanted}, wanted)


@pytest.mark.parametrize("bad", [-1, 10**30, None, "x", 1.5, True, []])
def test_a_position_that_is_none_is_refused(config, bad):
    """Every number of a position, and every part of it, in turn."""
    pipeline = make_pipeline(config, BYTE, "train")
    state = iter(pipeline).get_state()

    def changed(position):
        yield bad
        if isinstance(position, dict):
            for key, inner in position.items():
                yield {name: value for name, value in position.items() if name != key}
                yield from ({**position, key: other} for other in changed(inner))

    for position in changed(state["position"]):
        with pytest.raises(ValueError, match="The saved data position") as error:
            iter(pipeline).set_state({**state, "position": position})
        assert len(str(error.value).splitlines()) == 1


def test_contiguous_position_fits_another_number_of_processes(text_folder):
    config = DataConfig(source="text", paths=(str(text_folder),), sequence_length=96, batch_size=4)
    whole = iter(make_pipeline(config, BYTE, "train"))
    for _ in range(5):
        next(whole)
    state, wanted = whole.get_state(), next(whole)
    for i in range(2):
        part = iter(make_pipeline(config, BYTE, "train", i, 2))
        part.set_state(state)
        assert_same(next(part), {n: a[2 * i : 2 * i + 2] for n, a in wanted.items()})


@pytest.mark.parametrize("packing", ["contiguous", "documents"])
@pytest.mark.parametrize("weights", [(), (3.0, 1.0)])
def test_prepared_batches_and_positions_fit_any_number_of_processes(prepared_folders, packing, weights):
    """One order of all rows; each process has its slice of every batch, and all of them the same position."""
    config = prepared_config(
        prepared_folders, packing, "text", "parquet", weights=weights, sequence_length=96, batch_size=4, max_segments=4
    )
    whole = iter(make_pipeline(config, BYTE, "train"))
    for step in range(60):
        state, wanted = whole.get_state(), next(whole)
        if step % 7 == 0:  # from one process to two and four, and on
            parts = [iter(make_pipeline(config, BYTE, "train", i, 2 + step % 2 * 2)) for i in range(2 + step % 2 * 2)]
            for part in parts:
                part.set_state(json.loads(json.dumps(state)))
        slices = [next(part) for part in parts]
        assert_same({n: np.concatenate([s[n] for s in slices]) for n in wanted}, wanted)
        assert all(part.get_state() == whole.get_state() for part in parts)


@pytest.mark.parametrize("packing", ["contiguous", "documents"])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (5.0, 1.0), (0.1, 2.0)])
def test_prepared_sets_are_mixed_by_tokens(prepared_folders, packing, weights, tmp_path):
    """Of two sets whose tokens differ, and whose documents differ in length."""
    (tmp_path / "capitals").mkdir()
    for i in range(12):
        (tmp_path / "capitals" / f"{i}.txt").write_text("CAPITALS " * (90 + i))
    source = DataConfig(source="text", paths=(str(tmp_path / "capitals"),), packing=packing, validation_fraction=0)
    prepare(source, tmp_path / "out")
    config = DataConfig(
        source="prepared", paths=(str(prepared_folders / packing / "text"), str(tmp_path / "out")), packing=packing,
        weights=weights, sequence_length=96, batch_size=4,
    )  # fmt: skip
    batches = list(itertools.islice(make_pipeline(config, BYTE, "train"), 300))
    tokens = np.concatenate([b["inputs"][b["weights"] == 1] for b in batches])
    capitals = np.isin(tokens, list(b"CAPITLS")).sum()
    share = capitals * 9 / 8 / len(tokens)
    assert share == pytest.approx(weights[1] / sum(weights), rel=0.08)


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_a_mixture_takes_each_element_once_in_proportion(weights):
    total = sum(weights)
    taken = [pick(i, weights) for i in range(3 * total)]
    for number, weight in enumerate(weights):
        places = [place for which, place in taken if which == number]
        assert places == list(range(len(places)))
        assert len(places) == 3 * weight
    assert [number for number, _ in taken[:total]].count(0) == weights[0]
    first = np.cumsum([number == 0 for number, _ in taken])
    assert np.abs(first - np.arange(1, 3 * total + 1) * weights[0] / total).max() <= 1


def test_one_pass_has_the_same_number_of_batches_in_every_process(config):
    whole = list(make_pipeline(config, BYTE, "validation"))
    parts = [list(make_pipeline(config, BYTE, "validation", i, 4)) for i in range(4)]
    assert [len(part) for part in parts] == [len(whole)] * 4
    for wanted, *slices in zip(whole, *parts):
        assert_same({n: np.concatenate([s[n] for s in slices]) for n in wanted}, wanted)


@pytest.mark.parametrize(
    ("kind", "num_threads", "shuffle"),
    [("text", 0, True), ("text", 2, False), ("parquet", 2, True), ("parquet", 0, False)],
)
def test_batches_on_the_fly_and_positions_fit_any_number_of_processes(
    kind, num_threads, shuffle, text_folder, parquet_folder, monkeypatch
):
    """The same global batches from 1, 2, 4 and 8 processes, over several epochs, and from any position on."""
    monkeypatch.setattr("atlasjax.data.packing._LEAST_DOCUMENTS", 8)
    monkeypatch.setattr("atlasjax.data.packing._LEAST_BLOCKS", 2)
    folder = {"text": text_folder, "parquet": parquet_folder}[kind]
    config = DataConfig(
        source=kind, paths=(str(folder),), packing="documents", sequence_length=400, batch_size=8, max_segments=4,
        validation_fraction=0, num_threads=num_threads, shuffle=shuffle,
    )  # fmt: skip
    whole, count = iter(make_pipeline(config, BYTE, "train")), 1
    parts = [whole]
    assert len(whole.get_state()["position"]["readers"]) == {"text": 8, "parquet": 4}[kind]
    whole = iter(make_pipeline(config, BYTE, "train"))
    for step in range(48):
        if step % 6 == 5:  # the position of these processes, for another number of them
            position = merge_positions([json.loads(json.dumps(part.get_state())) for part in parts])
            count = (2, 4, 8, 1)[step // 6 % 4]
            parts = [iter(make_pipeline(config, BYTE, "train", i, count)) for i in range(count)]
            for part in parts:
                part.set_state(position)
        wanted, slices = next(whole), [next(part) for part in parts]
        assert_same({n: np.concatenate([s[n] for s in slices]) for n in wanted}, wanted)
    places = [reader["place"] for reader in whole.get_state()["position"]["readers"].values()]
    if kind == "text":
        assert sum(places) > 2 * 90  # the third epoch


def test_each_process_tokenizes_its_own_documents(text_folder, monkeypatch):
    monkeypatch.setattr("atlasjax.data.packing._LEAST_DOCUMENTS", 20)
    config = DataConfig(
        source="text", paths=(str(text_folder),), packing="documents", sequence_length=200, batch_size=8,
        validation_fraction=0,
    )  # fmt: skip
    encoded = []

    class Counting(ByteTokenizer):
        def encode(self, text):
            encoded.append(text)
            return super().encode(text)

    counts = []
    for processes in (1, 4):
        encoded.clear()
        parts = [iter(make_pipeline(config, Counting(), "train", i, processes)) for i in range(processes)]
        for part in parts:
            next(part)
        counts.append(len(encoded))
    assert counts[0] == counts[1]


def test_positions_that_do_not_belong_together(text_folder, monkeypatch):
    monkeypatch.setattr("atlasjax.data.packing._LEAST_DOCUMENTS", 8)
    config = DataConfig(
        source="text", paths=(str(text_folder),), packing="documents", batch_size=4, validation_fraction=0.2
    )
    first, second = (iter(make_pipeline(config, BYTE, "train", i, 2)).get_state() for i in range(2))
    other = {**second, "pipeline": {**second["pipeline"], "vocab_size": 7}}
    for bad in (other, {**second, "position": 3}, None, {**second, "position": {"readers": {"0": {}}}}):
        with pytest.raises(ValueError, match="do not belong together"):
            merge_positions([first, bad])
    with pytest.raises(ValueError, match="it should have the keys"):  # a process is missing
        iter(make_pipeline(config, BYTE, "train")).set_state(first)


# Errors


def test_bad_processes(config):
    with pytest.raises(ValueError, match="batch_size 4 is not divisible by process_count 3"):
        make_pipeline(config, BYTE, "train", 0, 3)
    with pytest.raises(ValueError, match=r"process_index is 2; it must be in \[0, 2\)"):
        make_pipeline(config, BYTE, "train", 2, 2)


def test_text_too_short_for_one_sequence(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("x" * 1000)
    config = DataConfig(source="text", paths=(str(path),), sequence_length=100, validation_fraction=0.1)
    with pytest.raises(
        ValueError, match=r"validation split is too short .* it has 100 tokens, .* 100 needs 101. .* \(now 0.1\)"
    ):
        make_pipeline(config, BYTE, "validation")
    separate = dataclasses.replace(
        config, validation_paths=config.paths, sequence_length=2000
    )  # as of `evaluate --text`
    for split in ("train", "validation"):
        with pytest.raises(
            ValueError, match=f"The {split} text .* Use more text, or train with a shorter sequence_length.$"
        ):
            make_pipeline(separate, BYTE, split)
    config = dataclasses.replace(config, sequence_length=900)
    with pytest.raises(ValueError, match=r"train split is too short .* it has 900 tokens, .* 900 needs 901"):
        make_pipeline(config, BYTE, "train")
    config = dataclasses.replace(config, sequence_length=899)
    assert next(iter(make_pipeline(config, BYTE, "train")))["weights"].all()


def test_fewer_documents_than_processes(tmp_path):
    """They read the same ones, and have their own rows."""
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 1000)
    config = DataConfig(
        source="text",
        paths=(str(tmp_path),),
        packing="documents",
        validation_fraction=0,
        batch_size=4,
        sequence_length=64,
    )
    whole, parts = (
        [next(iter(make_pipeline(config, BYTE, "train", i, count))) for i in range(count)] for count in (1, 4)
    )
    assert_same({n: np.concatenate([part[n] for part in parts]) for n in whole[0]}, whole[0])


def test_only_empty_documents(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"text": ["", None, ""]}), tmp_path / "empty.parquet")
    config = DataConfig(source="parquet", paths=(str(tmp_path),), packing="documents", validation_fraction=0)
    with pytest.raises(ValueError, match="All 3 documents of the train split are empty"):
        make_pipeline(config, BYTE, "train")
    with pytest.raises(ValueError, match="has 4 tokens"):  # the separators
        make_pipeline(dataclasses.replace(config, packing="contiguous"), BYTE, "train")
