"""Tokenizers: round trips, counts of bytes, saving, and bad files."""

import io
import json
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlasjax.data import DataConfig, load_text, load_tokenizer, make_tokenizer
from atlasjax.data.tokenizers import BpeTokenizer, ByteTokenizer, SentencePieceTokenizer

BYTE = ByteTokenizer()


@pytest.fixture(scope="module")
def bpe():
    return make_tokenizer(DataConfig(tokenizer="bpe:400"))


@pytest.fixture(scope="module")
def sentencepiece_path(tmp_path_factory):
    sentencepiece = pytest.importorskip("sentencepiece")
    text, model = load_text(DataConfig(), "train")[:60_000], io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.split("\n")), model_writer=model, vocab_size=600, byte_fallback=True, minloglevel=2
    )
    path = tmp_path_factory.mktemp("tokenizer") / "small.model"
    path.write_bytes(model.getvalue())
    return path


@given(st.text())
def test_byte_round_trip(text):
    ids = BYTE.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text.encode())
    assert BYTE.decode(ids) == text


@given(st.lists(st.integers(0, 255)))
def test_byte_decode_takes_any_bytes(ids):
    assert BYTE.decode(ids) == bytes(ids).decode("utf-8", "replace")


@pytest.mark.parametrize("ids", [[256], [-1], np.array([3, 999])])
def test_ids_outside_the_vocabulary(ids, bpe):
    with pytest.raises(ValueError, match="outside the tokenizer's vocabulary of 256"):
        BYTE.decode(ids)
    if max(ids) >= bpe.vocab_size:
        with pytest.raises(ValueError, match=r"Token id 999 .* 400"):
            bpe.decode(ids)


@given(text=st.text())
def test_bpe_round_trip_and_bytes(bpe, text):
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert bpe.bytes_per_token[ids].sum() == len(text.encode())


def test_bpe_shortens_text_and_is_deterministic(bpe):
    text = load_text(DataConfig(), "validation")
    ids = bpe.encode(text)
    assert bpe.vocab_size == 400
    assert ids.dtype == np.int32
    assert ids.max() < 400
    assert len(ids) < 0.7 * len(text)
    again = make_tokenizer(DataConfig(tokenizer="bpe:400"))
    np.testing.assert_array_equal(again.encode(text), ids)


def test_bpe_decode_takes_half_a_character(bpe):
    ids = bpe.encode("日")
    assert len(ids) == 3
    assert "\ufffd" in bpe.decode(ids[:2])


def test_bpe_vocabulary_is_smaller_where_there_is_too_little_to_merge():
    assert BpeTokenizer.train(["ab ab"], 1000).vocab_size < 262


def test_bpe_special_tokens_have_no_bytes(bpe, tmp_path):
    bpe.save(tmp_path)
    definition = json.loads((tmp_path / "bpe.json").read_text())
    end = {"id": 400, "content": "<|end|>", "special": True}
    plain = {"id": 401, "content": "<line>", "special": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    definition["added_tokens"] = [end | flags, plain | flags]
    tokenizer = BpeTokenizer(json.dumps(definition))
    assert tokenizer.vocab_size == 402
    assert tokenizer.bytes_per_token[[400, 401]].tolist() == [0, 6]
    assert tokenizer.decode([400, 401]) == "<line>"


def test_sentencepiece(sentencepiece_path):
    tokenizer = make_tokenizer(DataConfig(tokenizer=f"sentencepiece:{sentencepiece_path}"))
    text = "The statement is executed, größer 日."
    ids = tokenizer.encode(text)
    assert tokenizer.vocab_size == 600
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    # SentencePiece puts a space before the text.
    assert tokenizer.bytes_per_token[ids].sum() == len(text.encode()) + 1
    assert tokenizer.bytes_per_token[[1, 2]].tolist() == [0, 0]  # <s>, </s>
    assert isinstance(tokenizer.decode(ids[:-2]), str)
    with pytest.raises(ValueError, match="Token id 600"):
        tokenizer.decode([600])


@pytest.mark.parametrize("kind", ["byte", "bpe", "sentencepiece"])
def test_save_and_load(kind, tmp_path, bpe, sentencepiece_path):
    tokenizer = {
        "byte": lambda: BYTE,
        "bpe": lambda: bpe,
        "sentencepiece": lambda: SentencePieceTokenizer(sentencepiece_path.read_bytes()),
    }[kind]()
    tokenizer.save(tmp_path / "saved")
    tokenizer.save(tmp_path / "saved")  # a second time, over the first
    loaded = load_tokenizer(tmp_path / "saved")
    text = "A memory that learns at test time."
    assert type(loaded) is type(tokenizer)
    assert loaded.vocab_size == tokenizer.vocab_size
    np.testing.assert_array_equal(loaded.encode(text), tokenizer.encode(text))
    np.testing.assert_array_equal(loaded.bytes_per_token, tokenizer.bytes_per_token)
    assert not list((tmp_path / "saved").glob("*.partial"))


def test_bpe_from_a_file(bpe, tmp_path):
    bpe.save(tmp_path)
    loaded = make_tokenizer(DataConfig(tokenizer=f"bpe:{tmp_path / 'bpe.json'}"))
    np.testing.assert_array_equal(loaded.encode("def f(x):"), bpe.encode("def f(x):"))


@pytest.mark.parametrize(
    ("specification", "error", "message"),
    [
        ("bite", ValueError, "Did you mean 'byte'"),
        ("byte:300", ValueError, "'byte' takes no argument"),
        ("bpe", ValueError, "it must be bpe:<vocabulary size> or bpe:<path>"),
        ("bpe:100", ValueError, "at least 256 tokens, not 100"),
        ("bpe:missing.json", FileNotFoundError, "'missing.json' does not exist"),
        ("sentencepiece:", ValueError, "sentencepiece:<path>"),
        ("sentencepiece:missing.model", FileNotFoundError, "'missing.model' does not exist"),
    ],
)
def test_bad_specification(specification, error, message):
    with pytest.raises(error, match=message):
        make_tokenizer(DataConfig(tokenizer=specification))


def test_bad_files(tmp_path):
    path = tmp_path / "bad"
    path.write_bytes(b"not a model \xff")
    with pytest.raises(ValueError, match="bad' is not a SentencePiece model"):
        make_tokenizer(DataConfig(tokenizer=f"sentencepiece:{path}"))
    with pytest.raises(ValueError, match="bad' is not a tokenizers JSON file"):
        make_tokenizer(DataConfig(tokenizer=f"bpe:{path}"))
    path.write_bytes(b'{"a": 1}')
    with pytest.raises(ValueError, match="bad' is not a tokenizers JSON file"):
        make_tokenizer(DataConfig(tokenizer=f"bpe:{path}"))
    from tokenizers import Tokenizer, models

    with pytest.raises(ValueError, match="not a byte-level BPE"):
        BpeTokenizer(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str())
    with pytest.raises(FileNotFoundError, match="no tokenizer in"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"kind": "morse"}')
    with pytest.raises(ValueError, match="unknown kind 'morse'"):
        load_tokenizer(tmp_path)


def test_a_saved_bpe_that_is_not_as_saved(tmp_path):
    """Still a tokenizer, but another one: its numbers would be wrong without a word."""
    BpeTokenizer.train(["the memory learns while it reads " * 20], 300).save(tmp_path)
    path = tmp_path / "bpe.json"
    definition = json.loads(path.read_text())
    merges = definition["model"]["merges"]
    merges[0], merges[-1] = merges[-1], merges[0]
    path.write_text(json.dumps(definition))
    with pytest.raises(ValueError, match=r"bpe.json' is damaged: its checksum does not match"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "bpe.json"])
def test_a_folder_in_place_of_a_saved_file(name, tmp_path):
    BpeTokenizer.train(["the memory learns while it reads " * 20], 300).save(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"{name}' is damaged"):
        load_tokenizer(tmp_path)


def test_a_bpe_with_ids_far_apart():
    definition = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 30_000_000}, "merges": []},
    }  # fmt: skip
    with pytest.raises(ValueError, match="2 tokens and ids up to 30000000"):
        BpeTokenizer(json.dumps(definition))


def test_other_threads_run_while_a_text_is_encoded(bpe):
    """One call takes long; if it held the interpreter, nothing would be counted until it ends."""
    text = " ".join(f"{i}{word}" for i, word in enumerate(["antidisestablishmentarianism"] * 60_000))
    thread = threading.Thread(target=bpe.encode, args=(text,))
    thread.start()
    turns = 0
    while thread.is_alive():
        turns += 1
        time.sleep(1e-3)
    assert turns > 20
