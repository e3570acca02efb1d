"""Elastic Memory as a layer of a model."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax import config_json
from atlasjax.mixers.elastic import banks, sampling
from atlasjax.nn import (
    AttentionConfig,
    BlockAttentionConfig,
    BranchConfig,
    ElasticConfig,
    ElasticMixer,
    LanguageModel,
    ModelConfig,
    count_parameters,
)
from atlasjax.nn.elastic import bank, reconstruction
from tests import comparisons
from tests.streams import streamed

ELASTIC = ElasticConfig(order=6, samples=5, block_size=8, context=32)
CONFIG = ModelConfig(
    vocab_size=40, dim=16, num_layers=2, num_heads=2, mlp_dim=16, mixer=("attention", "elastic"), elastic=ELASTIC,
    dtype="float32", remat=False,
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("compile_fast")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ATLASJAX_CACHE", str(tmp_path))
    banks._load.cache_clear()


def split(config):
    return nnx.split(LanguageModel(config, rngs=nnx.Rngs(0)), nnx.Param)


def tokens(time):
    return jax.random.randint(jax.random.key(1), (2, time), 0, 40)


close = functools.partial(comparisons.close, tolerance=2e-5)


def test_another_reading_of_the_same_parameters():
    """Sampling, number of samples and order may change at test time; before the second block none of it is seen."""
    x = tokens(20)
    _, params = split(CONFIG)

    def run(**changes):
        config = dataclasses.replace(CONFIG, elastic=dataclasses.replace(ELASTIC, **changes))
        graphdef = nnx.split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))), nnx.Param)[0]
        return np.asarray(nnx.merge(graphdef, params)(x))

    y = run()
    for changes in (
        {"sampling": "uniform"}, {"samples": 9}, {"order": 3}, {"alpha": 0.5}, {"discretization": "backward"},
        {"rotate_memory_queries": False},
    ):  # fmt: skip
        other = run(**changes)
        close(other[:, :8], y[:, :8], tolerance=2e-6)
        assert np.abs(other - y)[:, 8:].max() > 1e-3, changes
    sampling.SAMPLINGS["ends"] = lambda count, length: np.linspace(0, length, count)
    try:
        assert np.abs(run(sampling="ends") - y)[:, 8:].max() > 1e-3
    finally:
        del sampling.SAMPLINGS["ends"]


def test_memory_adds_no_parameters():
    assert count_parameters(CONFIG) == count_parameters(dataclasses.replace(CONFIG, mixer="attention"))


def test_a_stream_and_its_longest_length():
    graphdef, params = split(CONFIG)
    x = tokens(20)
    model = nnx.merge(graphdef, params)
    expected = model(x)
    extend = jax.jit(lambda params, x, cache: nnx.merge(graphdef, params).extend(x, cache))
    close(streamed(functools.partial(extend, params), x, model.init_cache(2, 20), (0, 7, 8, 20))[0], expected)
    y, _ = extend(params, x, model.init_cache(2, 19))
    assert np.isnan(y[:, 19:]).all()
    with pytest.raises(ValueError, match=r"mixer 'elastic' .*max_length is None"):
        ElasticMixer(CONFIG, rngs=nnx.Rngs(0)).init_state(2)


def test_without_memory_blocks_are_sequences_of_their_own():
    config = dataclasses.replace(CONFIG, mixer="block_attention", num_layers=1, block_attention=BlockAttentionConfig(8))
    graphdef, params = split(config)
    x = tokens(20)
    model = nnx.merge(graphdef, params)
    y = model(x)
    whole = nnx.split(
        nnx.eval_shape(lambda: LanguageModel(dataclasses.replace(config, mixer="attention"), rngs=nnx.Rngs(0))),
        nnx.Param,
    )
    paths = lambda tree: {tuple(p for p in path if p != "attention"): leaf for path, leaf in nnx.to_flat_state(tree)}
    flat = paths(params)
    renamed = nnx.from_flat_state(
        [(path, flat[tuple(p for p in path if p != "attention")]) for path, _ in nnx.to_flat_state(whole[1])]
    )
    attention = nnx.merge(whole[0], renamed)
    for start in (0, 8, 16):
        close(y[:, start : start + 8], attention(x[:, start : start + 8]))
    close(streamed(model.extend, x, model.init_cache(2), (0, 7, 8, 20))[0], y)


def test_packed_documents():
    graphdef, params = split(CONFIG)
    x, ids = tokens(30), jnp.asarray(np.repeat([[1, 2], [4, 3]], [11, 19], axis=1))
    y = jax.jit(lambda x, ids: nnx.merge(graphdef, params)(x, ids, 2))(x, ids)
    for start, stop in ((0, 11), (11, 30)):
        close(y[:, start:stop], nnx.merge(graphdef, params)(x[:, start:stop]))


def test_banks_are_shared_constants_of_the_context():
    assert bank(ELASTIC, 8).kernels.shape == (0, 6, 8)
    assert bank(ELASTIC, 17).kernels.shape == (2, 6, 8)
    assert bank(ELASTIC, 17) is bank(ELASTIC, 24)
    assert reconstruction(ELASTIC).shape == (5, 6)
    np.testing.assert_allclose(
        reconstruction(dataclasses.replace(ELASTIC, alpha=0.5))[:, 1],
        np.sqrt(3) * (1 - 2 * 0.5 ** np.arange(5)),
        rtol=1e-6,
    )


def test_config_is_json():
    assert config_json.from_dict(ModelConfig, json.loads(json.dumps(config_json.to_dict(CONFIG)))) == CONFIG


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"order": 0}, "order must be an integer ≥ 1, got 0"),
        ({"samples": 0}, "samples must be an integer ≥ 1 or None, got 0"),
        ({"block_size": 2.5}, "block_size must be an integer ≥ 1, got 2.5"),
        ({"sampling": "unifrom"}, "Did you mean 'uniform'"),
        ({"discretization": "zo"}, "Did you mean 'zoh'"),
        ({"alpha": 1.5}, r"alpha must be a number in \(0, 1\) or None, got 1.5"),
        ({"alpha": 0.5, "sampling": "uniform"}, "alpha=0.5 clashes with sampling='uniform'"),
        ({"legacy_hippo": 1}, "legacy_hippo must be True or False, got 1"),
    ],
)
def test_bad_config_is_named(changes, words):
    with pytest.raises(ValueError, match=words):
        ElasticConfig(**changes)


def test_odd_heads_are_refused():
    with pytest.raises(ValueError, match="head_dim=7 must be even"):
        LanguageModel(dataclasses.replace(CONFIG, mixer="elastic", head_dim=7), rngs=nnx.Rngs(0))


WITHIN_BLOCKS = ("block_attention", "elastic", "memorizing", "infini", "melodi", "block_recurrence")


def abstract(**changes):
    """Shapes of the logits."""
    config = dataclasses.replace(CONFIG, **changes)
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model, nnx.Param)
    return jax.eval_shape(lambda params: nnx.merge(graphdef, params)(tokens(9)), params).shape


@pytest.mark.parametrize("mixer", WITHIN_BLOCKS)
def test_heads_may_be_odd_without_rotary_positions(mixer):
    assert abstract(mixer=(mixer, "attention"), head_dim=7, attention=AttentionConfig(rope_theta=None)) == (2, 9, 40)


@pytest.mark.parametrize("mixer", WITHIN_BLOCKS)
def test_refuses_attention_that_no_layer_takes(mixer):
    for name, value in (
        ("qk_norm", "head"), ("bias", True), ("persistent_tokens", 2), ("kv_heads", 1), ("gate", True), ("rope_dim", 4),
        ("num_heads", 4), ("head_dim", 4), ("value_dim", 4), ("fused", True), ("output_bias", False),
    ):  # fmt: skip
        for pattern in (mixer, (mixer, "memory")):
            config = dataclasses.replace(CONFIG, mixer=pattern, attention=AttentionConfig(**{name: value}))
            with pytest.raises(ValueError, match=rf"mixer '{mixer}': attention\.{name} is {value!r}; it must be "):
                count_parameters(config)
    # Other layers, or the branch, may take it.
    attention = AttentionConfig(window=4, kv_heads=1, qk_norm="head")
    assert abstract(mixer=(mixer, "swa"), attention=attention) == (2, 9, 40)
    assert abstract(mixer=mixer, branch=BranchConfig("swa", attention=attention)) == (2, 9, 40)
