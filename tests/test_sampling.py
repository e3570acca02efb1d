"""Choice of the next token, and the text of tokens as they come, against slow definitions."""

import functools
import io
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.data.tokenizers import BpeTokenizer, ByteTokenizer, SentencePieceTokenizer
from atlasjax.generate import (
    RowSampling,
    SamplingConfig,
    TextStream,
    filtered_logits,
    penalized_logits,
    sample,
    sample_rows,
)


def probabilities(logits: list[float], seen: list[bool], config: SamplingConfig) -> list[float]:
    """The distribution of the next token, step by step in float64. No two logits are equal."""
    penalty = config.repetition_penalty
    changed = [(x / penalty if x > 0 else x * penalty) if old else x for x, old in zip(logits, seen, strict=True)]
    weights = np.exp(np.array(changed) / config.temperature - max(changed) / config.temperature)
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    order = order[: config.top_k]
    if config.top_p is not None:
        nucleus, total = [], sum(weights[i] for i in order)
        for i in order:
            nucleus.append(i)
            if sum(weights[j] for j in nucleus) / total >= config.top_p:
                break
        order = nucleus
    if config.min_p is not None:
        order = [i for i in order if weights[i] >= config.min_p * weights[order[0]]]
    total = sum(weights[i] for i in order)
    return [weights[i] / total if i in order else 0.0 for i in range(len(weights))]


CONFIGS = [
    SamplingConfig(1.0, min_p=0.1),
    SamplingConfig(0.5, min_p=1.0),
    SamplingConfig(1.5, repetition_penalty=1.7),
    SamplingConfig(0.8, repetition_penalty=0.6, top_k=9),
    SamplingConfig(1.2, top_k=12, top_p=0.8, min_p=0.05, repetition_penalty=1.2),
]


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_probabilities(config):
    rng = np.random.default_rng(3)
    logits, seen = rng.normal(scale=2, size=(6, 20)).astype(np.float32), rng.random((6, 20)) < 0.4

    @jax.jit
    def found(logits, seen):
        return jax.nn.softmax(filtered_logits(penalized_logits(logits, seen, config.repetition_penalty), config))

    for row, one, old in zip(np.asarray(found(logits, seen)), logits, seen, strict=True):
        expected = probabilities(one.tolist(), old.tolist(), config)
        np.testing.assert_array_equal(row > 0, np.array(expected) > 0)
        np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-6)


def test_the_penalty_is_also_that_of_greedy_choice():
    logits, seen = (
        jnp.array([[2.0, 1.9, -1.0], [-0.5, -0.6, -0.7]]),
        jnp.array([[True, False, False], [True, True, False]]),
    )
    config = SamplingConfig(0.0, repetition_penalty=1.5)
    assert sample(logits, jax.random.key(0), config, seen).tolist() == [1, 2]
    with pytest.raises(ValueError, match="seen is None"):
        sample(logits, jax.random.key(0), config)


EXTREMES = [
    *({"temperature": x} for x in (1e-46, 1e-40, 1e-38, 1.2e-38, 1e-37)),
    *({"top_p": x} for x in (1e-46, 1e-40)),
    {"temperature": 2e-38, "top_k": 3, "top_p": 1e-46, "min_p": 1e-46},
    *({"repetition_penalty": x, "top_k": 1} for x in (1e-46, 1e39, 10**300)),
]


def test_the_most_likely_token_can_be_drawn_with_any_numbers():
    """In float32 some are 0 or infinite."""
    configs = [SamplingConfig(**{"temperature": 1.0} | fields) for fields in EXTREMES]
    logits = jnp.array([[0.5, 3.0, 5.0, 0.0, -jnp.inf]] * len(configs))
    seen = jnp.array([[True, False, config.repetition_penalty < 1, True, True] for config in configs])
    keys = jax.random.split(jax.random.key(0), len(configs))
    assert set(sample_rows(logits, keys, RowSampling.of(configs, 5), seen).tolist()) == {2}
    for config, row in zip(configs, seen, strict=True):
        assert sample(logits[:1], keys[0], config, row[None]).tolist() == [2], config


def test_a_temperature_that_is_infinite_in_float32_draws_from_all_tokens():
    config = SamplingConfig(temperature=1e39)
    logits, keys = jnp.array([[0.5, 3.0, -jnp.inf]] * 40), jax.random.split(jax.random.key(0), 40)
    assert set(sample(logits, keys[0], config).tolist()) == {0, 1}
    rows = sample_rows(logits, keys, RowSampling.of([config] * 40, 3), jnp.zeros((40, 3), bool))
    assert set(rows.tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(
            ({name: 10**400}, f"{name} is an integer of more than 300 digits; it must be ")
            for name in ("temperature", "top_p", "min_p", "repetition_penalty")
        ),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": 2.5}, "top_k is 2.5; it must be an integer"),
        ({"min_p": 0.0}, r"min_p is 0.0; it must be in \(0, 1\]"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be positive"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty is inf"),
    ],
)
def test_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        SamplingConfig(**changes)


# Text.

TEXT = "Grüße an alle: 日本語 — the memory 🙂 reads 👩‍👧 a naïve text, and the memory forgets. "


@functools.cache
def tokenizer(name):
    if name == "byte":
        return ByteTokenizer()
    if name == "bpe":
        return BpeTokenizer.train([TEXT], 290)  # characters of several bytes are several tokens
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the memory reads a text, and the memory forgets."] * 9), model_writer=model, vocab_size=290,
        byte_fallback=True, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    return SentencePieceTokenizer(model.getvalue())


def fed(stream: TextStream, tokens: list[int], size: int) -> list[str]:
    pieces = [stream.feed(tokens[start : start + size]) for start in range(0, len(tokens), size)]
    return [*pieces, stream.finish()]


@pytest.mark.parametrize("name", ["byte", "bpe", "sentencepiece"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_pieces_are_the_text_and_never_part_of_a_character(name, size):
    one = tokenizer(name)
    before, tokens = one.encode("the memory").tolist(), one.encode(TEXT * 2).tolist()
    whole = one.decode(before + tokens)[len(one.decode(before)) :]
    pieces = fed(TextStream(one, before), tokens, size)
    assert "".join(pieces) == whole
    assert "\ufffd" not in "".join(pieces)
    if name == "byte" and size == 1:  # a character comes with its last byte
        assert pieces == [*("".join(TEXT * 2)[i] if end else "" for i, end in _ends(TEXT * 2)), ""]


def _ends(text):
    """Of each byte: the index of its character, and whether it is the last one of it."""
    for i, character in enumerate(text):
        size = len(character.encode())
        yield from ((i, byte == size - 1) for byte in range(size))


def test_bytes_that_are_no_text():
    rng = random.Random(5)
    for _ in range(200):
        tokens = rng.choices([0xF0, 0x9F, 0x98, 0x80, 0xE2, 0x41, 0xFF], k=rng.randrange(1, 12))
        for size in (1, 4):
            pieces = fed(TextStream(tokenizer("byte")), tokens, size)
            assert "".join(pieces) == tokenizer("byte").decode(tokens)
    endless = TextStream(tokenizer("byte"))
    assert len(endless.feed([0xFF] * 50)) >= 47  # what can no longer become a character does not wait


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_character_that_began_before_the_stream(size):
    text = "né😀".encode()
    for cut in range(len(text)):
        pieces = fed(TextStream(tokenizer("byte"), text[:cut]), [*text[cut:], 0x41], size)
        begun = len(text[:cut].decode(errors="ignore"))  # whole characters before it
        assert "".join(pieces) == (text.decode() + "A")[begun:]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_spaces_do_not_depend_on_how_tokens_are_fed(size):
    one = tokenizer("sentencepiece")
    tokens = [one._processor.piece_to_id(piece) for piece in ("▁t", "▁", "▁a")]
    assert "".join(fed(TextStream(one), tokens, size)) == one.decode(tokens) == "t  a"


@pytest.mark.parametrize("size", [1, 2, 9])
def test_end_tokens(size):
    one = tokenizer("byte")
    tokens = [*"né".encode(), 7, *b"more"]
    stream = TextStream(one, end_tokens=(9, 7))
    assert ("".join(fed(stream, tokens, size)), stream.stopped) == ("né", True)
    stream = TextStream(one, stop=["né!"], end_tokens=(7,))  # what may begin a stop string is given at last
    assert "".join(fed(stream, tokens, size)) == "né"


def before_stop(text: str, stop: list[str]) -> str:
    """The text as far as it is before the stop string that is complete first."""
    for end in range(len(text) + 1):
        starts = [end - len(one) for one in stop if text[:end].endswith(one)]
        if starts:
            return text[: min(starts)]
    return text


def test_stop_strings():
    rng = random.Random(7)
    for _ in range(500):
        text = "".join(rng.choices("abé", k=rng.randrange(14)))
        stop = ["".join(rng.choices("abé", k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        expected = before_stop(text, stop)
        for size in (1, 3, 20):
            stream, found = TextStream(tokenizer("byte"), stop=stop), ""
            tokens = tokenizer("byte").encode(text).tolist()
            for start in range(0, len(tokens), size):
                found += stream.feed(tokens[start : start + size])
                assert expected.startswith(found)  # nothing of a stop string was given
            assert found + stream.finish() == expected
            assert stream.stopped == any(one in text for one in stop)
    with pytest.raises(ValueError, match="stop is ''"):
        TextStream(tokenizer("byte"), stop=["a", ""])
