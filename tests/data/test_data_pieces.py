"""A text that is encoded in pieces has the tokens of the whole."""

import io
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlasjax.data import DataConfig, load_text, make_tokenizer
from atlasjax.data.pieces import _EXPRESSIONS, encode_pieces, last_word_cut, words_are_apart
from atlasjax.data.tokenizers import BpeTokenizer, ByteTokenizer, SentencePieceTokenizer

GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTES = GPT2 | {"use_regex": False}


def split(expression):
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


PRE_TOKENIZERS = {
    "GPT-2": GPT2,
    "digits, GPT-2": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2]},
    **{
        f"expression {i}": {"type": "Sequence", "pretokenizers": [split(expression), BYTES]}
        for i, expression in enumerate(_EXPRESSIONS)
    },
}
# Everything that expressions tell apart: contractions, runs of white space, punctuation before line ends, marks, numbers, scripts.
PARTS = [
    "word", "Word", "it's", "IT'S", "'ll", "'", " ", "  ", "\n", "\n\n", "\r\n", "\t", "...", ".\n", "!\n\n", "/\n", "123", "4567",
    "é", "e\u0301", "日本語", "。", "\u3000", "\u00a0", "\u0085", "\x1c", "½", "😀", "_", "²", "ſ", "\u2028", "\u180e", "ǅ", "ʰ",
    "\u1e9e", "\U00031350", "\u0897",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PARTS), max_size=30).map("".join) | st.text(max_size=40)


@pytest.fixture(scope="module")
def definition():
    """A BPE with merges across everything that a pre-tokenizer would keep apart: without one, all of them are used."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(0)
    texts = ["".join(rng.choices(PARTS, k=12)) for _ in range(3000)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    )
    return json.loads(tokenizer.to_str())


@pytest.fixture(scope="module", params=PRE_TOKENIZERS)
def bpe(request, definition):
    return BpeTokenizer(json.dumps(definition | {"pre_tokenizer": PRE_TOKENIZERS[request.param]}))


def joined(tokenizer, texts):
    pieces = list(encode_pieces(tokenizer, texts))
    return np.concatenate(pieces).tolist() if pieces else [], len(pieces)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_every_cut_keeps_the_tokens(bpe, text):
    """All cuts of a text at once: each is the last one of what comes before the next."""
    parts, rest = [], text
    while cut := bpe.last_cut(rest):
        rest, part = rest[:cut], rest[cut:]
        parts.append(part)
    assert "".join([rest, *reversed(parts)]) == text
    tokens = np.concatenate([bpe.encode(part) for part in [rest, *reversed(parts)]])
    np.testing.assert_array_equal(tokens, bpe.encode(text))


@pytest.mark.parametrize("size", [1, 3, 16, 200])
def test_pieces_have_the_tokens_of_the_whole(bpe, monkeypatch, size):
    monkeypatch.setattr("atlasjax.data.pieces.PIECE", size)
    rng = random.Random(size)
    for _ in range(30):
        text = "".join(rng.choices(PARTS, k=rng.randint(1, 200)))
        cuts = sorted(rng.choices(range(len(text) + 1), k=5))
        given = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
        found, count = joined(bpe, given)
        assert found == bpe.encode(text).tolist()
    assert count > 1 or size == 200


def test_english_prose_in_small_pieces(monkeypatch):
    monkeypatch.setattr("atlasjax.data.pieces.PIECE", 64)
    tokenizer, text = make_tokenizer(DataConfig(tokenizer="bpe:600")), load_text(DataConfig(), "validation")
    found, count = joined(tokenizer, [text])
    assert found == tokenizer.encode(text).tolist()
    assert count > len(text) / 200


def sentencepiece_model(**more) -> bytes:
    sentencepiece = pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    text, model = load_text(DataConfig(), "train")[:60_000], io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.split("\n")), model_writer=model, vocab_size=600, minloglevel=2, **more
    )
    return model.getvalue()


PROSE = [load_text(DataConfig(), "train")[at : at + 5000] for at in (0, 20_000)]


def test_sentencepiece_bpe(monkeypatch):
    monkeypatch.setattr("atlasjax.data.pieces.PIECE", 40)
    tokenizer = SentencePieceTokenizer(sentencepiece_model(model_type="bpe"))
    for part in (*PROSE, "  a  b\n\n c\u200b d\u3000e  ", "日本語 " * 50):
        found, count = joined(tokenizer, [part])
        assert found == tokenizer.encode(part).tolist()
    assert count > 1


def test_sentencepiece_unigram_up_to_ties(monkeypatch):
    """The likeliest pieces of a text: where two choices are alike, rounding over a long text may take the other one."""
    monkeypatch.setattr("atlasjax.data.pieces.PIECE", 40)
    tokenizer = SentencePieceTokenizer(sentencepiece_model(model_type="unigram"))
    score = lambda ids: sum(tokenizer._processor.get_score(int(i)) for i in ids)
    for part in PROSE:
        found, count = joined(tokenizer, [part])
        whole = tokenizer.encode(part).tolist()
        assert tokenizer.decode(found) == tokenizer.decode(whole)
        assert score(found) == pytest.approx(score(whole), abs=1e-3)
        assert count > 10


def test_sentencepiece_that_keeps_white_space_is_not_cut():
    model = sentencepiece_model(normalization_rule_name="identity", remove_extra_whitespaces=False)
    assert SentencePieceTokenizer(model).last_cut("two words here") == 0


def test_where_words_end():
    assert last_word_cut("a b c") == 3
    assert last_word_cut("abc\ndef.\nghi") == 3
    assert last_word_cut(" ab.\n1\n") == 0
    assert last_word_cut("") == last_word_cut(" ") == 0
    assert last_word_cut("a b" + "." * 10_000) == 1
    assert last_word_cut("a b" + "\n" * 10_000) == 4 - 1


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": BYTES},
        {"pre_tokenizer": GPT2 | {"add_prefix_space": True}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(r"\n\n"), GPT2]}},
        {"normalizer": {"type": "NFKC"}},
        {"added_tokens": [{"content": "<a b>", "lstrip": False, "rstrip": False}]},
        {"added_tokens": [{"content": "<a>", "lstrip": False, "rstrip": True}]},
    ],
)
def test_other_tokenizers_are_not_cut(change):
    assert words_are_apart({"pre_tokenizer": GPT2, "added_tokens": [], "normalizer": None})
    assert not words_are_apart({"pre_tokenizer": GPT2, "added_tokens": [], "normalizer": None} | change)


def test_a_file_that_truncates_does_not():
    tokenizer = BpeTokenizer.train(["some words to learn from"], 256)
    parsed = json.loads(tokenizer._tokenizer.to_str())
    parsed["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    again = BpeTokenizer(json.dumps(parsed))
    assert len(again.encode("some words to learn from")) == 24
    assert again.fingerprint == tokenizer.fingerprint != ByteTokenizer().fingerprint
