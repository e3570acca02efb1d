"""MQAR is the public definition: what stands where, what is asked, and how far away."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.data import associative_recall
from atlasjax.data.associative_recall import IGNORE, RecallConfig, recall_accuracy, recall_sequences

CONFIGS = [
    RecallConfig(vocab_size=256, length=64, num_pairs=16),  # every slot is asked
    RecallConfig(vocab_size=256, length=64, num_pairs=5, filler="random"),
    RecallConfig(vocab_size=67, length=66, num_pairs=16, power=1.0),  # an odd vocabulary
    RecallConfig(vocab_size=5, length=4, num_pairs=1),  # the smallest
]


@pytest.mark.parametrize("config", CONFIGS)
def test_definition(config):
    """Sequence by sequence, by the words of the definition."""
    half, context = config.vocab_size // 2, 2 * config.num_pairs
    tokens, labels = recall_sequences(config, 40, seed=3)
    assert tokens.shape == labels.shape == (40, config.length)
    assert tokens.dtype == labels.dtype == np.int32
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        keys, values = row[:context:2], row[1:context:2]
        assert len(set(keys)) == len(set(values)) == config.num_pairs
        assert all(1 <= key < half for key in keys)
        assert all(half <= value < config.vocab_size for value in values)
        asked = [t for t in range(config.length) if label[t] != IGNORE]
        assert sorted(row[t] for t in asked) == sorted(keys)
        assert all(t >= context and t % 2 == 0 for t in asked)
        answers = dict(zip(keys, values, strict=True))
        assert all(label[t] == answers[row[t]] for t in asked)
        rest = [row[t] for t in range(context, config.length) if t not in asked]
        assert all(token == 0 for token in rest) or config.filler == "random"
        assert all(0 <= token < config.vocab_size for token in rest)


def test_all_tokens_are_drawn_alike():
    config = RecallConfig(vocab_size=40, length=24, num_pairs=6, filler="random")
    tokens, labels = recall_sequences(config, 20_000, seed=0)
    for drawn, low, high in ((tokens[:, 0:12:2], 1, 20), (tokens[:, 1:12:2], 20, 40)):
        for column in (0, 5):
            counts = np.bincount(drawn[:, column], minlength=41)[low:high]
            expected = 20_000 / (high - low)
            assert np.abs(counts - expected).max() < 5 * expected**0.5
    filler = tokens[:, 12:][labels[:, 12:] == IGNORE]
    counts, expected = np.bincount(filler, minlength=40), len(filler) / 40
    assert np.abs(counts - expected).max() < 5 * expected**0.5


@pytest.mark.parametrize("power", [0.01, 1.0])
def test_distances(power):
    """The first key's slot has the weights themselves; the second those of drawing from what is left."""
    config = RecallConfig(vocab_size=64, length=24, num_pairs=2, power=power)
    n, slots = 60_000, 10
    tokens, labels = recall_sequences(config, n, seed=1)
    slot = lambda pair: (((tokens[:, 4:] == tokens[:, [2 * pair]]) & (labels[:, 4:] != IGNORE)).argmax(1)) // 2
    first, second = slot(0), slot(1)
    p = np.arange(1, slots + 1) ** (power - 1.0)
    p /= p.sum()
    left = np.array([sum(p[i] * p[j] / (1 - p[i]) for i in range(slots) if i != j) for j in range(slots)])
    for found, expected in ((first, p), (second, left)):
        shares = np.bincount(found, minlength=slots) / n
        assert np.abs(shares - expected).max() < 5 * (expected.max() / n) ** 0.5
    assert (power == 1.0) == (np.abs(p - left).max() < 1e-9)


def test_seeds_and_splits(monkeypatch):
    config = CONFIGS[1]
    tokens, labels = recall_sequences(config, 50, seed=7)
    again, labels_again = recall_sequences(config, 50, seed=7)
    np.testing.assert_array_equal(tokens, again)
    np.testing.assert_array_equal(labels, labels_again)
    for other in (recall_sequences(config, 50, seed=8), recall_sequences(config, 50, seed=7, split="test")):
        assert not (other[0][:, :10] == tokens[:, :10]).all(1).any()
    monkeypatch.setattr(associative_recall, "_BLOCK", 256 * 7)  # 50 sequences in blocks of 7
    blocks, _ = recall_sequences(config, 50, seed=7)
    assert blocks.shape == tokens.shape
    assert len(np.unique(blocks[:, :10], axis=0)) == 50


def test_accuracy_is_a_mean_over_sequences():
    labels = np.array([[IGNORE, 1, 2, IGNORE], [3, IGNORE, IGNORE, IGNORE]])
    answers = np.array([[0, 1, 0, 0], [3, 0, 0, 0]])  # half of the first, all of the second
    logits = np.eye(4)[answers]
    assert recall_accuracy(logits, labels) == 0.75
    mapped = jax.jit(jax.vmap(recall_accuracy))(jnp.stack([logits, 1 - logits]), jnp.stack([labels, labels]))
    np.testing.assert_allclose(mapped, [0.75, 0.0])
    with pytest.raises(ValueError, match=r"logits has shape \(2, 4\)"):
        recall_accuracy(answers, labels)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 64}, "vocab_size must be greater than length=64, got 64"),
        ({"num_pairs": 17}, r"num_pairs=17 needs a length of at least 4 · num_pairs = 68, got 64"),
        ({"length": 65}, "length must be even, got 65"),
        ({"num_pairs": 0}, "num_pairs must be an integer ≥ 1, got 0"),
        ({"power": 0.0}, "power must be a number > 0, got 0.0"),
        ({"filler": "zero"}, "(?s)zero.*Did you mean 'zeros'"),
    ],
)
def test_impossible_settings(fields, message):
    with pytest.raises(ValueError, match=message):
        RecallConfig(**{"vocab_size": 256, **fields})


def test_impossible_requests():
    with pytest.raises(ValueError, match="num_sequences must be an integer ≥ 1, got 0"):
        recall_sequences(CONFIGS[0], 0, seed=0)
    with pytest.raises(ValueError, match="seed must be an integer ≥ 0, got -1"):
        recall_sequences(CONFIGS[0], 1, seed=-1)
    with pytest.raises(ValueError, match="validation"):
        recall_sequences(CONFIGS[0], 1, seed=0, split="validation")
