"""Byte n-gram models against direct definitions, and on the embedded text."""

import collections
import time

import numpy as np
import pytest

from atlasjax.data import DataConfig, load_text
from atlasjax.evaluate.ngram import ByteNgram, baselines, fit_ngram


@pytest.fixture(scope="module")
def split():
    return load_text(DataConfig(), "train"), load_text(DataConfig(), "validation")


def direct_bits(model: ByteNgram, train: bytes, data: bytes) -> float:
    """The definition, one byte at a time, with dictionaries."""
    order = len(model.grams)
    pad = bytes(order)
    grams = [
        collections.Counter((pad + train)[i - k + 1 : i + 1] for i in range(order, order + len(train)))
        for k in range(1, order + 1)
    ]
    contexts = [collections.Counter() for _ in range(order)]
    for table, context in zip(grams, contexts):
        for gram, count in table.items():
            context[gram[:-1]] += count
    bits = 0.0
    for i in range(order, order + len(data)):
        text, p, total = pad + data, 1 / 256, model.weights[0] / 256
        for k in range(1, order + 1):
            gram = text[i - k + 1 : i + 1]
            seen = contexts[k - 1][gram[:-1]]
            p = grams[k - 1][gram] / seen if seen else p
            total += model.weights[k] * p
        bits -= np.log2(total)
    return bits / len(data)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_bits_per_byte_follow_the_definition(order, split):
    train, data = split[0][:4000].encode(), split[1][:500].encode() + b"\xff\x00never seen"
    model = fit_ngram(train, order)
    assert model.bits_per_byte(data) == pytest.approx(direct_bits(model, train, data), rel=1e-12)


@pytest.mark.parametrize("context", [b"th", b"q\xff", b"\x00\x00"])
def test_probabilities_sum_to_one(context, split):
    model = fit_ngram(split[0][:20_000].encode(), 3)
    # p(byte | context) from the difference between data with and without the byte.
    base = model.bits_per_byte(context) * len(context)
    p = [2.0 ** (base - model.bits_per_byte(context + bytes([b])) * (len(context) + 1)) for b in range(256)]
    assert min(p) > 0
    assert sum(p) == pytest.approx(1, abs=1e-9)


def test_uniform_bytes_cost_eight_bits():
    rng = np.random.default_rng(0)
    train, data = rng.integers(0, 256, 200_000, np.uint8).tobytes(), rng.integers(0, 256, 20_000, np.uint8).tobytes()
    assert fit_ngram(train, 3).bits_per_byte(data) == pytest.approx(8, abs=0.01)


def test_deterministic_text_costs_almost_nothing():
    assert fit_ngram(b"abcd" * 1000, 2).bits_per_byte(b"abcd" * 100) < 0.05
    assert fit_ngram(b"abcd" * 1000, 1).bits_per_byte(b"abcd" * 100) == pytest.approx(2, abs=0.01)


def test_fitted_weights_are_near_the_best(split):
    """No other weights are much better on the held-out text, although they were fitted without it."""
    train, data = (text.encode() for text in split)
    model = fit_ngram(train, 3)
    assert model.weights.sum() == pytest.approx(1)
    assert (model.weights > 0).all()
    rng = np.random.default_rng(1)
    best = min(ByteNgram(w, model.grams).bits_per_byte(data) for w in rng.dirichlet(np.ones(4), 60))
    assert model.bits_per_byte(data) < best + 0.02


def test_baselines_on_the_embedded_text(split):
    start = time.perf_counter()
    bits = baselines(*split)
    assert time.perf_counter() - start < 20  # half a second, on an idle core
    assert 4.4 < bits["unigram"] < 5.0
    assert 2.2 < bits["trigram"] < 3.0


def test_bad_input():
    with pytest.raises(ValueError, match="training text of an n-gram model is empty"):
        fit_ngram(b"", 3)
    with pytest.raises(ValueError, match="has 1 bytes; it needs at least 2"):
        fit_ngram(b"a", 3)
    with pytest.raises(ValueError, match="order is 0"):
        fit_ngram(b"abc", 0)
    with pytest.raises(ValueError, match="data of an n-gram model is empty"):
        fit_ngram(b"abc", 1).bits_per_byte(b"")
