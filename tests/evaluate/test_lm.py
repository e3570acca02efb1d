"""Perplexity and bits per byte, in parallel and as a stream."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax.evaluate.lm import LanguageModelResult, evaluate, evaluate_stream
from atlasjax.nn import LanguageModel, MemoryConfig, ModelConfig
from atlasjax.train.step import eval_sums

CONFIG = ModelConfig(
    vocab_size=32, dim=16, num_layers=2, num_heads=2, mlp_dim=32, dtype="float32",
    memory=MemoryConfig(rule="titans", chunk_size=4, expansion=1),
)  # fmt: skip
BYTES = np.arange(32) % 3


pytestmark = pytest.mark.usefixtures("compile_fast")


@functools.cache
def model() -> LanguageModel:
    return LanguageModel(CONFIG, rngs=nnx.Rngs(0))


def test_units():
    result = LanguageModelResult(nats=80 * math.log(2), tokens=20, num_bytes=40)
    assert result.bits_per_byte == pytest.approx(2.0)
    assert result.loss == pytest.approx(4 * math.log(2))
    assert result.perplexity == pytest.approx(16.0)


def test_batches():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, (2, 3, 9)).astype(np.int32)
    weights = (rng.random((2, 3, 8)) < 0.5).astype(np.float32)
    batches = [{"inputs": t[:, :-1], "targets": t[:, 1:], "weights": w} for t, w in zip(tokens, weights)]
    graphdef, params = nnx.split(model(), nnx.Param)
    step = jax.jit(eval_sums(graphdef, BYTES))
    params = nnx.to_pure_dict(params)
    result = evaluate(step, params, batches)
    logits = np.concatenate([np.asarray(model()(jnp.asarray(b["inputs"])), np.float64) for b in batches])
    targets = np.concatenate([b["targets"] for b in batches])
    counted = np.concatenate(weights) > 0
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = -np.take_along_axis(log_probabilities, targets[..., None], -1)[..., 0]
    assert result.tokens == counted.sum()
    assert result.num_bytes == BYTES[targets][counted].sum()
    assert result.nats == pytest.approx(nats[counted].sum(), rel=1e-5)
    assert evaluate(step, params, batches) == result
    assert evaluate(step, params, batches, max_batches=1).tokens == counted[:3].sum()


def test_one_program_at_a_time(monkeypatch):
    """Hundreds of batches in flight stopped XLA's CPU devices for ever: `atlasjax train` on a book, two devices, two cores."""
    events = []
    monkeypatch.setattr(jax, "block_until_ready", lambda sums: events.append(("done", *(int(s[0]) for s in sums))))

    def step(params, batch):
        events.append(("started", batch["number"]))
        return batch["number"], 1.0, 1.0

    def put(batch):
        events.append(("placed", batch["number"]))
        return batch

    result = evaluate(step, None, [{"number": float(n)} for n in (1, 2, 3)], put=put)
    assert result.nats == 6
    assert events == [
        ("placed", 1), ("done",), ("started", 1),
        ("placed", 2), ("done", 1), ("started", 2),
        ("placed", 3), ("done", 2), ("started", 3),
    ]  # fmt: skip


def test_nothing_to_predict():
    with pytest.raises(ValueError, match="no token to predict"):
        evaluate(lambda params, batch: (0.0, 0, 0), {}, [])


@pytest.mark.parametrize("piece", [pytest.param(7, marks=pytest.mark.slow), 100])
def test_a_stream_has_the_numbers_of_one_parallel_call(piece):
    tokens = np.random.default_rng(1).integers(0, 32, (2, 31)).astype(np.int32)
    result, losses = evaluate_stream(model(), tokens, BYTES, piece=piece)
    logits = np.asarray(model()(jnp.asarray(tokens[:, :-1])), np.float64)
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_probabilities, tokens[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-5)
    assert (result.tokens, result.num_bytes) == (60, BYTES[tokens[:, 1:]].sum())
    assert result.nats == pytest.approx(expected.sum(), rel=1e-5)


@pytest.mark.parametrize(
    ("tokens", "piece", "words"),
    [
        ([1], 4, "at least two tokens"),
        ([1, 2, 3], 0, "piece is 0"),
        ([1, 32, 3], 4, r"tokens has the token 32; it should have tokens in \[0, 32\)"),
        ([1, 2, -1], 4, "tokens has the token -1"),
    ],
)
def test_refused_streams(tokens, piece, words):
    with pytest.raises(ValueError, match=words):
        evaluate_stream(model(), np.array(tokens), BYTES, piece=piece)
