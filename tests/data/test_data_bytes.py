"""The bytes of every token sum to those of the text, for tokenizers of every construction; control tokens are no part of a text."""

import dataclasses
import functools
import io
import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from atlasjax.data import DataConfig, make_pipeline, prepare
from atlasjax.data.pieces import encode_text
from atlasjax.data.tokenizers import BpeTokenizer, ByteTokenizer, SentencePieceTokenizer

PROSE = ["the memory learns while it reads, and it forgets", "so that a long text fits in little: 12 é 日本"] * 20
NORMALIZERS = {
    "none": None,
    "NFC": {"type": "NFC"},
    "NFKC": {"type": "NFKC"},
    "lowercase": {"type": "Lowercase"},
    "strip": {"type": "Strip", "strip_left": True, "strip_right": True},
    "prepend": {"type": "Prepend", "prepend": "_"},
    "replace": {"type": "Replace", "pattern": {"String": "the"}, "content": ""},
    "accents": {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}]},
}
ADDED = {
    "plain": {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False},
    "strips": {"single_word": False, "lstrip": True, "rstrip": True, "normalized": False},
    "word": {"single_word": True, "lstrip": False, "rstrip": False, "normalized": True},
}
PARTS = ["<|end|>", "</s>", "<s>", "<x>", "<0x41>", "<unk>", " ", "  ", "\n", "\r\n", "\t", "the", "The memory", "é",
         "e\u0301", "日本", "😀", "👩\u200d👩", "\u200b", "ﬁ", "½", "İ", "▁", "_", "\u3000", "\x00", "\ufeff"]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PARTS), max_size=12).map("".join) | st.text(max_size=20)


@functools.cache
def learned() -> dict:
    return json.loads(BpeTokenizer.train(PROSE, 300)._tokenizer.to_str())


@functools.cache
def bpe(normalizer: str, added: str, prefix: bool, whole: bool) -> BpeTokenizer:
    parsed = json.loads(json.dumps(learned()))
    if not whole:  # bytes without a token are dropped
        last = max(parsed["model"]["vocab"].values())
        vocabulary, merges = parsed["model"]["vocab"], parsed["model"]["merges"]
        gone = [token for token in vocabulary if token in ("é", "Ã", "<")]
        parsed["model"]["vocab"] = {token: i for token, i in vocabulary.items() if token not in gone}
        parsed["model"]["merges"] = [m for m in merges if not any(one in "".join(m) for one in gone)]
        parsed["model"]["vocab"] = {t: i for t, i in parsed["model"]["vocab"].items() if not any(g in t for g in gone)}
    else:
        last = max(parsed["model"]["vocab"].values())
    parsed["normalizer"] = NORMALIZERS[normalizer]
    parsed["pre_tokenizer"] = parsed["pre_tokenizer"] | {"add_prefix_space": prefix}
    special = [{"id": last + 1 + i, "content": name, "special": True} for i, name in enumerate(("<|end|>", "</s>"))]
    parsed["added_tokens"] = [one | ADDED["strips"] for one in special]
    parsed["added_tokens"].append({"id": last + 3, "content": "<x>", "special": False} | ADDED[added])
    return BpeTokenizer(json.dumps(parsed))


@functools.cache
def pieces(
    model: str, rule: str, prefix: bool, collapses: bool, suffix: bool, fallback: bool
) -> SentencePieceTokenizer:
    sentencepiece = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PROSE), model_writer=written, vocab_size=330 if fallback else 60, hard_vocab_limit=False,
        model_type=model, normalization_rule_name=rule, add_dummy_prefix=prefix, remove_extra_whitespaces=collapses,
        treat_whitespace_as_suffix=suffix, byte_fallback=fallback, user_defined_symbols=["<x>"], minloglevel=2,
    )  # fmt: skip
    return SentencePieceTokenizer(written.getvalue())


TOKENIZERS = st.builds(
    bpe, st.sampled_from(list(NORMALIZERS)), st.sampled_from(list(ADDED)), st.booleans(), st.booleans()
) | st.builds(
    pieces, st.sampled_from(["unigram", "bpe"]), st.sampled_from(["identity", "nmt_nfkc", "nfkc_cf"]), st.booleans(), st.booleans(),
    st.booleans(), st.booleans(),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(tokenizer=TOKENIZERS, text=TEXTS)
def test_the_bytes_of_the_tokens_are_those_of_the_text(tokenizer, text):
    ids, sizes = tokenizer.encode_sized(text)
    np.testing.assert_array_equal(ids, tokenizer.encode(text))
    assert (sizes >= 0).all()
    assert sizes.sum() == len(text.encode()) * (len(ids) > 0)
    if tokenizer.is_exact:
        np.testing.assert_array_equal(tokenizer.bytes_per_token[ids], sizes)
        assert tokenizer.decode(ids) == text
    assert not {token.id for token in tokenizer.control_tokens.values()} & set(ids.tolist())


@pytest.mark.parametrize("normalizer", [name for name in NORMALIZERS if name != "none"])
def test_a_normalizer_is_not_exact(normalizer):
    assert bpe("none", "plain", False, True).is_exact
    assert not bpe(normalizer, "plain", False, True).is_exact
    assert not bpe("none", "strips", False, True).is_exact
    assert not bpe("none", "plain", True, True).is_exact
    assert not bpe("none", "plain", False, False).is_exact


def test_where_the_bytes_go():
    """Spaces before a token are its own, and those at the end the last one's; a character is that of its first byte."""
    tokenizer = bpe("strip", "strips", False, True)
    ids, sizes = tokenizer.encode_sized("  é  <x>  🦊 ")
    assert tokenizer.decode(ids) == "é<x>🦊"
    assert sizes.tolist() == [4, 7, 4, 0, 0, 1]


def test_the_name_of_a_control_token_in_a_text_is_text():
    tokenizer = bpe("none", "plain", False, True)
    text = "a<|end|>b</s> <x>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.bytes_per_token[ids].sum() == len(text)
    end = tokenizer.control_tokens["<|end|>"].id
    assert tokenizer.bytes_per_token[end] == 0
    assert tokenizer.decode([*ids, end]) == text


def test_a_special_token_that_plain_text_gives_is_text():
    vocabulary = learned()["model"]["vocab"]
    word = next(token for token in vocabulary if len(token) > 1 and token.isascii() and token.isalpha())
    special = {"id": vocabulary[word], "content": word, "special": True} | ADDED["plain"]
    tokenizer = BpeTokenizer(json.dumps(learned() | {"added_tokens": [special]}))
    ids = tokenizer.encode(f"{word} memory")
    assert vocabulary[word] in ids
    assert tokenizer.control_tokens == {}
    assert tokenizer.decode(ids) == f"{word} memory"
    assert tokenizer.bytes_per_token[ids].sum() == len(word) + 7


def test_an_added_word_of_characters_that_stand_for_bytes():
    """The decoder of `tokenizers` takes such a word for bytes, here of 0xF5, which no text has."""
    parsed = json.loads(json.dumps(learned()))
    last = max(parsed["model"]["vocab"].values())
    parsed["model"]["vocab"].pop("õ")
    words = ["õ", "éx", "日"]
    parsed["added_tokens"] = [
        {"id": last + 1 + i, "content": word, "special": False} | ADDED["plain"] for i, word in enumerate(words)
    ]
    tokenizer = BpeTokenizer(json.dumps(parsed))
    assert tokenizer.is_exact
    text = "aõõ éx é 日本 龍õ"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.bytes_per_token[ids].sum() == len(text.encode())


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("word", ["é", "Ġ"])
def test_an_added_word_with_the_id_of_a_byte(word, special):
    """ "é" is the character of the byte 0xE9: one id would be this text, and a third of 龍."""
    last = max(learned()["model"]["vocab"].values())
    added = {"id": last + 1, "content": word, "special": special} | ADDED["plain"]
    with pytest.raises(ValueError, match=f"has the added token '{word}' with the id .*delete it from added_tokens"):
        BpeTokenizer(json.dumps(learned() | {"added_tokens": [added]}))


@pytest.mark.parametrize("size", [4, 9])
def test_pieces_have_the_bytes_of_the_whole(monkeypatch, size):
    monkeypatch.setattr("atlasjax.data.pieces.PIECE", size)
    text = "   \n  the  memory ﬁ   learns   while " * 3
    for tokenizer in (pieces("bpe", "nmt_nfkc", True, True, False, True), bpe("none", "plain", False, True)):
        ids, sizes = encode_text(tokenizer, text, np.dtype(np.int32), sized=True)
        np.testing.assert_array_equal(ids, encode_text(tokenizer, text, np.dtype(np.int32)))
        assert sizes.sum() == len(text.encode())


@pytest.mark.parametrize("packing", ["contiguous", "documents"])
def test_batches_count_the_bytes_of_the_text(tmp_path, packing):
    model = tmp_path / "small.model"
    model.write_bytes(pieces("unigram", "nmt_nfkc", True, True, False, True)._model)
    texts = [f"{i}  the ﬁrst\n\nmemory ½ </s>" for i in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = DataConfig(
        source="jsonl", paths=(str(tmp_path / "a.jsonl"),), packing=packing, tokenizer=f"sentencepiece:{model}",
        held_out="documents", validation_fraction=0.25,
    )  # fmt: skip
    prepare(config, tmp_path / "out")
    given = {"packing": packing, "sequence_length": 16, "batch_size": 2}
    flying = DataConfig(**{**vars(config), **given})
    prepared = DataConfig(source="prepared", paths=(str(tmp_path / "out"),), **given)
    tokenizer = SentencePieceTokenizer(model.read_bytes())
    held = texts[3::4]
    firsts = [int(tokenizer.encode_sized(text)[1, 0]) for text in held]
    for data in (flying, prepared):
        batches = list(make_pipeline(data, tokenizer, "validation"))
        counted = sum(int(batch["bytes"][batch["weights"] > 0].sum()) for batch in batches)
        whole = sum(len(text.encode()) for text in held)
        if packing == "documents":
            assert counted == whole - sum(firsts)
        else:
            ends = len(held) - (data is flying)  # the stream of prepared data ends with a separator
            assert counted == whole + 2 * ends - firsts[0]
        assert all("bytes" not in batch for batch in [next(iter(make_pipeline(data, tokenizer, "train")))])


def test_a_separator_that_is_a_control_token_is_one(tmp_path):
    tokenizer = bpe("none", "plain", False, True)
    (tmp_path / "bpe.json").write_text(tokenizer._tokenizer.to_str())
    (tmp_path / "a.jsonl").write_text('{"text": "the <|end|>"}\n{"text": "memory"}\n')
    config = DataConfig(
        source="jsonl", paths=(str(tmp_path / "a.jsonl"),), tokenizer=f"bpe:{tmp_path / 'bpe.json'}", separator="\n<|end|>",
        validation_fraction=0, shuffle=False, sequence_length=8, batch_size=1,
    )  # fmt: skip
    end = tokenizer.control_tokens["<|end|>"].id
    wanted = [*tokenizer.encode("the <|end|>\n").tolist(), end, *tokenizer.encode("memory").tolist()]
    batch = next(iter(make_pipeline(config, tokenizer, "train")))
    assert batch["inputs"][0].tolist() == wanted[:8]
    manifest = prepare(dataclasses.replace(config, sequence_length=512, batch_size=8), tmp_path / "out")
    assert manifest.totals("train") == {
        "documents": 2,
        "tokens": len(wanted) + 2,
        "num_bytes": len("the <|end|>\nmemory\n"),
    }


@pytest.mark.parametrize(
    "tokenizer", [ByteTokenizer(), bpe("none", "plain", False, True), bpe("NFC", "plain", False, True)]
)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (5, "text is 5, a int"),
        (True, "a bool"),
        (None, "a NoneType"),
        (b"x", "a bytes"),
        (["a"], "a list"),
        ("a\ud800", "character 1"),
    ],
)
def test_what_is_no_text(tokenizer, text, message):
    for encode in (tokenizer.encode, tokenizer.encode_sized):
        with pytest.raises(ValueError, match=message):
            encode(text)


@pytest.mark.parametrize("ids", [[True], [1.5], ["a"], [2**70], np.array([1.0])])
def test_what_is_no_id(ids):
    with pytest.raises(ValueError, match="must be integers"):
        ByteTokenizer().decode(ids)


@pytest.mark.parametrize("kind", ["sentencepiece", "bpe"])
def test_control_tokens_of_a_template_are_ids_and_those_of_its_content_are_text(kind):
    tokenizer = (
        pieces("unigram", "nmt_nfkc", True, True, False, True)
        if kind == "sentencepiece"
        else bpe("none", "plain", False, True)
    )
    end = tokenizer.control_tokens["</s>"].id
    found = tokenizer.encode_controlled("the</s> memory </s>")
    assert (found == end).sum() == 2
    assert found[-1] == end
    np.testing.assert_array_equal(found[: len(tokenizer.encode("the"))], tokenizer.encode("the"))
    text = "the </s> memory"
    np.testing.assert_array_equal(tokenizer.encode_controlled(tokenizer.guarded(text)), tokenizer.encode(text))


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.sampled_from(["<", "/s>", "</", "s", ">", "</s>", "<|end|>", "|end|>", "<|", "a", " ", "\n"]), max_size=8),
       before=st.sampled_from(["", "<", "</", "<|end", "a"]), after=st.sampled_from(["", "/s>", ">", "|end|>", "a"]),
       strip=st.booleans())  # fmt: skip
def test_no_content_makes_a_control_token(parts, before, after, strip):
    """Whatever a template writes beside it."""
    content = "".join(parts)
    wanted = content.strip() if strip else content
    assume(wanted)
    tokenizer = bpe("none", "plain", False, True)
    marked = tokenizer.guarded(content)
    ids = tokenizer.encode_controlled(before + (marked.strip() if strip else marked) + after)
    assert not {token.id for token in tokenizer.control_tokens.values()} & set(ids.tolist())
    assert tokenizer.decode(ids) == before + wanted + after


def test_the_character_of_the_mark_is_refused():
    with pytest.raises(ValueError, match=r"U\+FDD0"):
        bpe("none", "plain", False, True).guarded("a\ufdd0")
