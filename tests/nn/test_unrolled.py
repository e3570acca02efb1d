"""Decoding without a loop over layers: the same logits and caches as the model, in whatever its layers keep."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx

from atlasjax.generate import SamplingConfig, generate, stream
from atlasjax.generate.definition import decoder
from atlasjax.nn import CachingConfig, InnerLoopConfig, LanguageModel, MemoryConfig, ModelConfig, unrolled
from atlasjax.nn.unrolled import CacheForm, UnrolledModel
from atlasjax.serve import BatchConfig, Batcher, Done, Request
from tests.tiny_model import CONFIG, Ascii

pytestmark = pytest.mark.usefixtures("compile_fast")

SIZES = {"vocab_size": 16, "dim": 8, "num_layers": 2, "num_heads": 2, "mlp_dim": 8, "dtype": "float32"}
INNER = InnerLoopConfig(layers=1, periods=(4, 8), learning_rate=0.1, clip=0.3, mlp_dim=5)
GRM = MemoryConfig("delta_rule", chunk_size=4, caching=CachingConfig(segment_size=4))
MODELS = {  # states of feed-forward networks and values of the first layer; cached memories
    "rwkv7": ModelConfig(mixer="rwkv7", ffn="channel_mixing", **SIZES),
    "grm": ModelConfig(memory=GRM, **SIZES),
}


@functools.cache
def model() -> LanguageModel:
    return LanguageModel(dataclasses.replace(CONFIG, num_layers=4), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_caches(name):
    """Of a memory that has begun, token by token over the end of a chunk."""
    one = LanguageModel(MODELS[name], rngs=nnx.Rngs(0))
    number = jax.tree.leaves(nnx.state(one.layers, nnx.Param))[0].shape[0]
    other, form = UnrolledModel(one), CacheForm(number)
    tokens = np.arange(14).reshape(2, 7)
    _, cache = one.extend(tokens[:, :3], one.init_cache(2, 16))
    own = form.of(cache)
    assert jax.tree.structure(other.init_cache(2, 16)) == jax.tree.structure(own)
    for token in np.split(tokens[:, 3:], 4, axis=1):
        expected, cache = one.extend(token, cache)
        logits, own = other.extend(token, own)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6), form.back(own), cache)


def test_generated_and_served_tokens(monkeypatch):
    """Large models take this form; small ones do with another bound. The parameters lie where the model has them."""
    prompt, how = np.array([[3, 1, 4, 1, 5]]), SamplingConfig(1.0)

    def texts() -> list[np.ndarray]:
        at_once = generate(model(), prompt, 6, config=how, seed=1)
        return [at_once, *stream(model(), prompt, 6, config=how, seed=1, block=3)]

    expected = texts()
    assert decoder(model()).form == CacheForm()
    assert decoder(model(), state_bytes=2**24).form == CacheForm(2)
    monkeypatch.setattr(unrolled, "_LEAST_BYTES", 0)
    assert decoder(model()).form == CacheForm(2)
    for found, same in zip(texts(), expected, strict=True):
        np.testing.assert_array_equal(found, same)
    large = max(decoder(model()).params[1:], key=lambda leaf: leaf.nbytes)
    ends = [(leaf.unsafe_buffer_pointer(), leaf.nbytes) for leaf in jax.tree.leaves(nnx.state(model(), nnx.Param))]
    assert any(start <= large.unsafe_buffer_pointer() < start + nbytes for start, nbytes in ends)
    batcher, events = Batcher(model(), Ascii(), BatchConfig(slots=2, room=16, pieces=(4,))), []
    batcher.submit(Request(prompt[0], 6, how, 1, keep=True), events.append)
    while batcher.step():
        pass
    assert isinstance(events[-1], Done)
    assert list(events[-1].tokens) == expected[0][0].tolist()
    assert jax.tree.structure(events[-1].context.cache) == jax.tree.structure(model().init_cache(1, 16))


def test_caches_with_an_inner_loop():
    """Its state stays as it is beside those of the layers."""
    config = ModelConfig(inner_loop=INNER, **SIZES | {"num_layers": 3})
    cache, form = jax.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)).init_cache(2)), CacheForm(2)
    there = jax.eval_shape(form.of, cache)
    assert len(there.layers) == 2
    assert jax.eval_shape(form.back, there) == cache
    assert there.inner == cache.inner
