"""Mixers in parallel in one layer, and layers with and without a feed-forward network."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax.nn import AttentionConfig, LanguageModel, ModelConfig, MultiplierConfig, SSMConfig
from atlasjax.nn.mixers import make_mixer
from tests.comparisons import close
from tests.streams import streamed

SSM = SSMConfig(state_dim=3, head_dim=4, inner=12, output_norm="none")
CONFIG = ModelConfig(
    dim=8, num_layers=2, num_heads=2, mixer="mamba2+attention", ssm=SSM, dtype="float32",
    multipliers=MultiplierConfig(attention_out=0.3, ssm_out=0.7), attention=AttentionConfig(scale=0.9, kv_heads=1),
)  # fmt: skip


@pytest.fixture(scope="module")
def mixer():
    return make_mixer("mamba2+attention", CONFIG, rngs=nnx.Rngs(0))


def test_the_outputs_are_added(mixer):
    x = jax.random.normal(jax.random.key(1), (2, 7, 8))
    ids = jnp.asarray([[0, 0, 0, 1, 1, 1, 1]] * 2)
    expected = mixer.mixer_0(x, ids, 2) + mixer.mixer_1(x, ids, 2)
    np.testing.assert_allclose(mixer(x, ids, 2), expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_pieces_of_a_stream(mixer):
    x = jax.random.normal(jax.random.key(1), (2, 7, 8))
    y, _ = streamed(mixer.extend, x, mixer.init_state(2, 7), (0, 3, 4, 7))
    close(y, mixer(x))


def attention_by_hand(p, x, scale, kv_heads, heads=2):
    """Grouped attention with another scale, for one row, without rotation."""
    size = x.shape[1] // heads
    found = np.einsum("td,dhk->thk", x, p["attention"]["inputs"]["kernel"])
    q, k, v = np.split(found, [heads // kv_heads * size, heads // kv_heads * size + size], axis=-1)
    q = q.reshape(len(x), heads, size)
    scores = np.einsum("thk,sgk->hts", q, k) * scale
    scores = np.where(np.tril(np.ones((len(x), len(x)), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    y = np.einsum("hts,sgk->thk", weights, v)
    return np.einsum("ti,id->td", y.reshape(len(x), -1), p["out"]["kernel"])


def test_the_scale_of_attention():
    config = ModelConfig(
        dim=8, num_heads=2, dtype="float32", attention=AttentionConfig(scale=0.9, kv_heads=1, rope_theta=None),
        multipliers=MultiplierConfig(attention_out=0.3),
    )  # fmt: skip
    mixer = make_mixer("attention", config, rngs=nnx.Rngs(0))
    x = np.asarray(jax.random.normal(jax.random.key(1), (1, 7, 8)), np.float64)
    values = jax.tree.map(lambda a: np.asarray(a, np.float64), nnx.to_pure_dict(nnx.state(mixer, nnx.Param)))
    expected = 0.3 * attention_by_hand(values, x[0], 0.9, 1)
    got = mixer(jnp.asarray(x, jnp.float32))[0]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_multipliers_of_the_stream():
    """By hand around the mixer and the network of the only layer."""
    multipliers = MultiplierConfig(embedding=3.0, residual=0.5, logits=0.1, mlp_gate=0.6, mlp_out=0.4)
    config = ModelConfig(
        dim=8, num_layers=1, num_heads=2, vocab_size=11, mixer="short_conv", mlp_dim=12, dtype="float32", multipliers=multipliers
    )  # fmt: skip
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    tokens = jnp.arange(10).reshape(2, 5)
    layer = nnx.merge(
        nnx.split(model.layers, nnx.Param)[0], jax.tree.map(lambda a: a[0], nnx.state(model.layers, nnx.Param))
    )
    x = 3.0 * model.embedding[...][tokens]
    x = x + 0.5 * layer.mixer(layer.mixer_norm(x))
    h = layer.mlp.gate_and_wide(layer.mlp_norm(x))
    x = x + 0.5 * 0.4 * layer.mlp.out(jax.nn.silu(0.6 * h[..., 0, :]) * h[..., 1, :])
    expected = 0.1 * model.norm(x) @ model.embedding[...].T
    np.testing.assert_allclose(model(tokens), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_layers_without_a_network():
    """relu2 in the first layer of each repetition only, and its formula."""
    config = ModelConfig(
        dim=8, num_layers=4, num_heads=2, mixer=("short_conv", "short_conv"), ffn=("relu2", "none"), mlp_dim=12, dtype="float32"
    )  # fmt: skip
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    assert (config.num_networks, config.network, config.output_scale) == (2, "relu2", 6**-0.5)
    assert model.layers.layer_1.mlp is None
    assert model.layers.layer_1.mlp_norm is None
    mlp = nnx.merge(
        nnx.split(model.layers, nnx.Param)[0], jax.tree.map(lambda a: a[1], nnx.state(model.layers, nnx.Param))
    )
    mlp, x = mlp.layer_0.mlp, jax.random.normal(jax.random.key(0), (3, 8))
    expected = np.maximum(np.asarray(x @ mlp.wide.kernel[...]), 0) ** 2 @ np.asarray(mlp.out.kernel[...])
    np.testing.assert_allclose(mlp(x), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mixer": "mamba2+mamba2"}, "mixer 'mamba2\\+mamba2': what runs in parallel must be different mixers"),
        ({"mixer": "mamba2+atention"}, "atention"),
        (
            {"mixer": ("mamba2", "attention"), "ffn": ("swiglu",)},
            r"ffn=\('swiglu',\) is for 1 layers, must be for the 2",
        ),
        (
            {"mixer": ("mamba2", "attention"), "ffn": ("swiglu", "gelu")},
            "one kind of network besides 'experts' and 'none'",
        ),
        ({"ffn": "relu3"}, "ffn='relu3'|ffn is 'relu3'|relu3"),
        ({"ssm": SSMConfig(inner=13, head_dim=4)}, "ssm.head_dim=4 must divide ssm.inner = 13"),
    ],
)
def test_what_is_refused(change, words):
    fields = {"dim": 8, "num_layers": 2, "num_heads": 2, "mixer": "mamba2+attention", "ssm": SSM}
    with pytest.raises(ValueError, match=words):
        LanguageModel(ModelConfig(**(fields | change)), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MultiplierConfig(ssm=(1.0, 2.0)), "must be five numbers"),
        (lambda: MultiplierConfig(logits=0.0), "MultiplierConfig: logits"),
        (lambda: SSMConfig(least_step=0.5, largest_step=0.1), "SSMConfig: largest_step"),
        (lambda: AttentionConfig(scale=-1.0), "AttentionConfig: scale"),
    ],
)
def test_constants_out_of_range(make, words):
    with pytest.raises(ValueError, match=words):
        make()
