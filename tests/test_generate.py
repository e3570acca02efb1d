"""Sampling: seeds, streams, filters, and the cache against the parallel model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax.generate import SamplingConfig, filtered_logits, generate, read, room, sample, stream
from atlasjax.generate.context import prefill
from atlasjax.generate.definition import split
from atlasjax.nn import LanguageModel, MemoryConfig, ModelConfig

CONFIG = ModelConfig(
    vocab_size=32, dim=16, num_layers=2, num_heads=2, mlp_dim=32, dtype="float32",
    memory=MemoryConfig(rule="delta_rule", chunk_size=4),
)  # fmt: skip
PROMPT = np.array([[3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8, 2, 8, 1]], np.int32)
LENGTH = 12


pytestmark = pytest.mark.usefixtures("compile_fast")


@functools.cache
def model() -> LanguageModel:
    return LanguageModel(CONFIG, rngs=nnx.Rngs(0))


@functools.cache
def tokens(seed: int, config: SamplingConfig = SamplingConfig(temperature=1.0)) -> np.ndarray:
    return np.asarray(generate(model(), PROMPT, LENGTH, config=config, seed=seed))


def test_shape_and_range():
    assert tokens(0).shape == (2, LENGTH)
    assert tokens(0).dtype == np.int32
    assert ((tokens(0) >= 0) & (tokens(0) < 32)).all()


def test_tokens_that_a_tokenizer_lacks_are_never_sampled():
    """A tokenizer trained on a small text may have fewer tokens than the model; temperature 50 samples nearly uniformly."""
    few = generate(model(), PROMPT, 60, config=SamplingConfig(temperature=50.0), vocab_size=5)
    assert set(np.asarray(few).ravel().tolist()) == set(range(5))
    greedy = generate(model(), PROMPT, 9, config=SamplingConfig(temperature=0.0), vocab_size=3)
    assert (greedy < 3).all()


def test_a_seed_is_a_text():
    np.testing.assert_array_equal(
        generate(model(), PROMPT, LENGTH, config=SamplingConfig(temperature=1.0), seed=0), tokens(0)
    )
    assert (tokens(1) != tokens(0)).any()


@pytest.mark.parametrize("block", [1, 5])
def test_streamed_in_blocks(block):
    blocks = list(stream(model(), PROMPT, LENGTH, config=SamplingConfig(temperature=1.0), seed=0, block=block))
    assert [part.shape[1] for part in blocks] == [min(block, LENGTH - start) for start in range(0, LENGTH, block)]
    np.testing.assert_array_equal(np.concatenate(blocks, axis=1), tokens(0))


def test_greedy_is_the_argmax_of_the_parallel_model():
    """The cache's logits, token after token, are those of one parallel call over prompt and continuation."""
    drawn = tokens(0, SamplingConfig(temperature=0))
    text = jnp.concatenate([PROMPT, drawn], axis=1)
    logits = np.asarray(model()(text))[:, PROMPT.shape[1] - 1 : -1]
    top = np.sort(logits, axis=-1)
    assert (top[..., -1] - top[..., -2]).min() > 1e-5  # no ties: the comparison below means something
    np.testing.assert_array_equal(logits.argmax(-1), drawn)


def test_prefill_gives_the_parallel_logits():
    logits, _ = prefill(*split(model()), PROMPT, model().init_cache(2))
    np.testing.assert_allclose(logits, model()(jnp.asarray(PROMPT))[:, -1], rtol=1e-4, atol=1e-5)


def test_prompts_of_unequal_length():
    """Each row is what it is alone, from the lengths of one token to more than a chunk, in any order."""
    config, prompts = SamplingConfig(temperature=0), [PROMPT[0, :5], PROMPT[1, :1], PROMPT[0], PROMPT[1, :5].tolist()]
    found = generate(model(), prompts, LENGTH, config=config)
    for row, prompt in zip(found, prompts, strict=True):
        np.testing.assert_array_equal(row, generate(model(), [prompt], LENGTH, config=config)[0])
    np.testing.assert_array_equal(
        found[2], tokens(0, config)[0]
    )  # rows of one length do not influence each other either


LOGITS = jnp.log(jnp.array([[0.5, 0.25, 0.15, 0.1], [0.1, 0.2, 0.3, 0.4]]))


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (SamplingConfig(1.0), [[1, 1, 1, 1], [1, 1, 1, 1]]),
        (SamplingConfig(1.0, top_k=2), [[1, 1, 0, 0], [0, 0, 1, 1]]),
        (SamplingConfig(1.0, top_k=9), [[1, 1, 1, 1], [1, 1, 1, 1]]),
        (SamplingConfig(1.0, top_p=0.6), [[1, 1, 0, 0], [0, 0, 1, 1]]),
        (SamplingConfig(1.0, top_p=0.01), [[1, 0, 0, 0], [0, 0, 0, 1]]),
        (SamplingConfig(1.0, top_k=3, top_p=0.8), [[1, 1, 0, 0], [0, 1, 1, 1]]),
    ],
)
def test_filters(config, kept):
    np.testing.assert_array_equal(np.isfinite(filtered_logits(LOGITS, config)), np.array(kept, bool))


def test_frequencies_are_the_probabilities():
    draw = jax.vmap(lambda key: sample(LOGITS, key, SamplingConfig(temperature=2.0)))
    drawn = np.asarray(draw(jax.random.split(jax.random.key(0), 4000)))
    expected = np.sqrt(np.exp(LOGITS[0])) / np.sqrt(np.exp(LOGITS[0])).sum()
    np.testing.assert_allclose(np.bincount(drawn[:, 0], minlength=4) / 4000, expected, atol=0.03)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"temperature": -1.0}, "temperature is -1.0"), ({"top_k": 0}, "top_k is 0"), ({"top_p": 0.0}, "top_p is 0.0")],
)
def test_refused_sampling(changes, words):
    with pytest.raises(ValueError, match=words):
        SamplingConfig(**changes)


@pytest.mark.parametrize(
    "prompt",
    [
        np.zeros((1, 0), np.int32),
        np.zeros(3, np.int32),
        np.zeros((1, 3), np.float32),
        [[1, 2], []],
        [[1], [[1, 2]]],
        [[1], 2.5],
        [],
    ],
)
def test_refused_prompts(prompt):
    with pytest.raises(ValueError, match=r"prompt is .* integer array \[batch, time\]"):
        generate(model(), prompt, 1)


@pytest.mark.parametrize("token", [-1, 32])
def test_refused_tokens(token):
    with pytest.raises(ValueError, match=rf"prompt has the token {token}; it should have tokens in \[0, 32\)"):
        generate(model(), [[1, 2], [token]], 1)
    with pytest.raises(ValueError, match=f"prompt has the token {token}"):
        read(model(), [[token, 1]])


@pytest.mark.parametrize("value", [10**20, 10**400, 2.5, True])
@pytest.mark.parametrize("name", ["num_tokens", "num_samples"])
def test_refused_amounts(name, value):
    with pytest.raises(ValueError, match=f"^{name} is .*; it must be ") as error:
        generate(model(), PROMPT, **{"num_tokens": 2, name: value})
    assert len(str(error.value).splitlines()) == 1


def test_what_does_not_fit_in_memory_is_refused_before_it_is_made(monkeypatch):
    """A state of constant size: the number of texts decides. One that keeps every token: the number of tokens too."""
    text = sum(x.nbytes for x in jax.tree.leaves(read(model(), PROMPT[:1]).cache))
    monkeypatch.setattr(room, "available_bytes", lambda: 100 * text)
    with pytest.raises(ValueError, match=r"^num_samples is 50, for which .* it must be at most 4\d, with "):
        generate(model(), PROMPT, 2, num_samples=50)
    assert read(model(), PROMPT, max_length=10**9).max_length == 10**9  # room that such a state does not need
    keeps = LanguageModel(dataclasses.replace(CONFIG, mixer="attention"), rngs=nnx.Rngs(0))
    per_token = 2 * 2 * 2 * 8 * 4  # layers · (key and value) · heads · channels · bytes
    monkeypatch.setattr(room, "available_bytes", lambda: 1000 * 2 * per_token)
    with pytest.raises(ValueError, match=r"^num_tokens is 5000, for which .* it must be at most 9\d\d, with"):
        generate(keeps, PROMPT, 5000)
    with pytest.raises(ValueError, match=r"^max_length is 5000, for which"):
        read(keeps, PROMPT, max_length=5000)
    assert generate(keeps, PROMPT, 3).shape == (2, 3)


@pytest.mark.parametrize(("num_tokens", "block"), [(0, 1), (1, 0)])
def test_refused_lengths(num_tokens, block):
    with pytest.raises(ValueError, match="is 0; it must be at least 1"):
        next(stream(model(), PROMPT, num_tokens, block=block))
