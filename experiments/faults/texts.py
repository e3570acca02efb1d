"""Texts that look like something else: control tokens and special words, odd characters, spaces of every kind; with tokenizers of
every kind, generated too. The bytes of the tokens sum to the bytes of the text, no control token comes from a text, and decoding
gives the text back (where a tokenizer changes white space, all but that; of SentencePiece, where it has every character)."""

import functools
import io
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from atlasjax.data.tokenizers import BpeTokenizer, ByteTokenizer, SentencePieceTokenizer, Tokenizer
from experiments.faults import small
from experiments.faults.run import Case, WrongError, case, some

_SPECIAL = ("<|endoftext|>", "<s>", "</s>", "<unk>", "<pad>", "<|im_start|>", "[INST]", "<0x41>")
_PARTS = (
    *_SPECIAL, "<|endof", "text|>", "a", "the memory ", " learns", "  ", "\n", "\t", "\r\n", " ", "\u00a0", "\u2028", "\u3000", "▁",
    "é", "e\u0301", "ﬁ", "İ", "中文", "🧠", "👩‍🚀", "\u200b", "\ufeff", "\0", "٣", "½", "Ａ", "õx", "ÿÿ", "龍",
    "0" * 30, "x" * 50, "",
)  # fmt: skip
_BYTES = ("é", "Ġ", "ÿ", "¡")  # words that are the byte-level characters of single bytes
_TEXTS = 200  # of each tokenizer


def cases(seed: int, most: int | None = None) -> Iterator[Case]:
    """Texts of parts in any order, for every tokenizer."""
    rng = random.Random(seed)
    random_texts = ("".join(rng.choices(_PARTS, k=rng.randrange(2, 9))) for _ in range(_TEXTS))
    texts = list(dict.fromkeys((*_PARTS, *random_texts)))
    every = [(name, text) for name in _TOKENIZERS for text in texts]
    for name, text in some(every, most, rng):
        yield case(f"{name}: {text[:40]!r}", _summed, name, text)
    for word in _BYTES:
        made = functools.partial(_bpe, words=(word,))
        yield case(f"bpe with the word {word!r}", small.refused, made, ("added_tokens",))


def _summed(name: str, text: str) -> str:
    tokenizer = _tokenizer(name)
    tokens, sizes = tokenizer.encode_sized(text)
    if not np.array_equal(tokens, tokenizer.encode(text)):
        raise WrongError("the tokens depend on whether they are counted")
    total = int(sizes.sum())
    if len(tokens) and total != len(text.encode()):
        raise WrongError(f"{total} bytes are counted, {len(text.encode())} are there")
    if tokenizer.is_exact and not np.array_equal(tokenizer.bytes_per_token[tokens], sizes):
        raise WrongError("the bytes of a token are not those of its id")
    decoded = tokenizer.decode(tokens)
    if tokenizer.is_exact and decoded != text:
        raise WrongError(f"decoded as {decoded!r}")
    if (name.startswith("bpe") or _is_plain(text)) and "".join(decoded.split()) != "".join(text.split()):
        raise WrongError(f"decoded as {decoded!r}")
    control = {token.id for token in tokenizer.control_tokens.values()}
    control |= set(np.flatnonzero(tokenizer.bytes_per_token == 0).tolist())
    return "right" if not control & set(tokens.tolist()) else "wrong"


def _is_plain(text: str) -> bool:
    """Whether a model without byte fallback has every character."""
    return all(character.isascii() and character.isprintable() and character != "_" for character in text)


@functools.cache
def _tokenizer(name: str) -> Tokenizer:
    return _TOKENIZERS[name]()


def _bpe(*, special: bool = False, words: tuple[str, ...] = (), strip: bool = False, prefix: bool = False) -> Tokenizer:
    """A byte-level BPE, with added tokens."""
    definition: dict[str, Any] = json.loads(BpeTokenizer.train([small.TEXT * 9], 300)._tokenizer.to_str())
    first = 1 + max(definition["model"]["vocab"].values())
    definition["added_tokens"] = [
        {
            "id": first + n, "content": word, "special": special, "single_word": False, "lstrip": strip, "rstrip": strip,
            "normalized": not special,
        }
        for n, word in enumerate(words)
    ]  # fmt: skip
    if prefix:
        definition["pre_tokenizer"]["add_prefix_space"] = True
    return BpeTokenizer(json.dumps(definition))


def _sentencepiece(**options: Any) -> Tokenizer:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([small.TEXT, "Control tokens: a, b, c; 0 1 2 3.", *map(chr, range(33, 127))] * 9),
        model_writer=model, minloglevel=3, hard_vocab_limit=False, **{"vocab_size": 150, "model_type": "unigram", **options},
    )  # fmt: skip
    return SentencePieceTokenizer(model.getvalue())


_TOKENIZERS = {
    "byte": ByteTokenizer,
    "bpe": _bpe,
    "bpe with control tokens": functools.partial(_bpe, special=True, words=_SPECIAL),
    "bpe with added words": functools.partial(_bpe, words=("memory", "  ", "õx", "ÿÿ", "▁")),
    "bpe with words that strip": functools.partial(_bpe, words=("memory", "<s>"), strip=True),
    "bpe with control tokens that strip": functools.partial(_bpe, special=True, words=_SPECIAL, strip=True),
    "sentencepiece": _sentencepiece,
    "sentencepiece with bytes": functools.partial(_sentencepiece, byte_fallback=True, vocab_size=420),
    "sentencepiece, bpe": functools.partial(_sentencepiece, model_type="bpe"),
    "sentencepiece, identity": functools.partial(
        _sentencepiece, normalization_rule_name="identity", remove_extra_whitespaces=False
    ),
    "sentencepiece without a space first": functools.partial(_sentencepiece, add_dummy_prefix=False),
    "sentencepiece, suffix": functools.partial(_sentencepiece, treat_whitespace_as_suffix=True),
}
