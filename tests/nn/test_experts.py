"""Mixtures of experts against their definition: every expert on every token."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax.flops import count_flops
from atlasjax.nn import ExpertsConfig, LanguageModel, ModelConfig, count_parameters
from atlasjax.nn.experts import Experts, Load, balance, route
from atlasjax.presets import describe
from tests.streams import streamed

DIM, WIDTH = 16, 12
CONFIGS = {
    "qwen": ExpertsConfig(8, 3, WIDTH, shared_width=20, shared_gate=True),
    "granite": ExpertsConfig(6, 2, WIDTH, shared_width=20),
    "deepseek": ExpertsConfig(
        8, 3, WIDTH, scores="sigmoid", correction_bias=True, groups=4, top_groups=2, scale=2.5, shared_width=24
    ),
    "nemotron": ExpertsConfig(4, 2, WIDTH, network="relu2", scores="sigmoid", normalize=False, shared_width=8),
    "one": ExpertsConfig(4, 1, WIDTH, normalize=False),
}


def model_config(experts: ExpertsConfig, **changes) -> ModelConfig:
    sizes = {"dim": DIM, "num_layers": 2, "num_heads": 2, "mixer": "attention", "ffn": "experts", "dtype": "float32"}
    return ModelConfig(**{**sizes, "experts": experts, **changes})


@functools.cache
def parts(name: str):
    layer = Experts(model_config(CONFIGS[name]), rngs=nnx.Rngs(1))
    graphdef, params = nnx.split(layer, nnx.Param)
    if layer.correction is not None:
        params["correction"][...] = jnp.asarray(np.random.default_rng(0).normal(size=8) / 3, jnp.float32)
    return graphdef, params


def scores_of(params, x, given: ExpertsConfig) -> jax.Array:
    logits = x @ params["router"]["kernel"][...]
    return jax.nn.softmax(logits) if given.scores == "softmax" else jax.nn.sigmoid(logits)


def choices(params, x, given: ExpertsConfig) -> np.ndarray:
    """1 where a token chooses an expert, [batch, time, number], token by token."""
    by = np.array(scores_of(params, x, given))
    if "correction" in params:
        by += params["correction"][...]
    chosen = np.zeros(by.shape, np.float32)
    for token in np.ndindex(by.shape[:-1]):
        groups = by[token].reshape(given.groups, -1)
        best = np.argsort(-np.sort(groups)[:, -2:].sum(1))[: given.top_groups]
        open_to = [e for e in range(given.number) if e // groups.shape[1] in best]
        chosen[token][sorted(open_to, key=lambda e: -by[token][e])[: given.per_token]] = 1.0
    return chosen


def network(x, wide, out):
    h = jnp.einsum("btd,d...->bt...", x, wide)
    return (jax.nn.silu(h[..., 0, :]) * h[..., 1, :] if wide.ndim == 3 else jax.nn.relu(h) ** 2) @ out


def definition(params, x, given: ExpertsConfig, chosen: np.ndarray) -> jax.Array:
    """Every expert on every token, with weights that are 0 for those that it does not choose."""
    weights = chosen * scores_of(params, x, given)
    if given.normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    y = jnp.zeros_like(x)
    for e in range(given.number):
        y += given.scale * weights[..., e, None] * network(x, params["wide"][...][e], params["out"][...][e])
    if "shared" in params:
        first = params["shared"]["gate_and_wide" if given.network == "swiglu" else "wide"]
        more = network(x, first["kernel"][...], params["shared"]["out"]["kernel"][...])
        y += more * (jax.nn.sigmoid(x @ params["shared_gate"]["kernel"][...]) if "shared_gate" in params else 1.0)
    return y


def inputs(seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(2, 7, DIM)), jnp.float32)


@pytest.mark.parametrize("name", CONFIGS)
def test_values_gradients_and_load_are_those_of_the_definition(name):
    graphdef, params = parts(name)
    x, given = inputs(), CONFIGS[name]
    weights = jnp.asarray(np.random.default_rng(1).normal(size=x.shape), jnp.float32)

    def total(params, x):
        y, load = nnx.merge(graphdef, params).observe(x, None)
        return jnp.sum(y * weights), (y, load)

    (_, (y, load)), found = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(params, x)
    chosen = choices(params, x, given)
    expected, pull = jax.vjp(lambda params, x: definition(params, x, given, chosen), params, x)
    chex.assert_trees_all_close(y, expected, rtol=2e-5, atol=2e-6)
    chex.assert_trees_all_close(found, pull(weights), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(load.chosen, chosen.sum((0, 1)))
    assert load.tokens == 14
    assert "correction" not in params or not np.any(found[0]["correction"][...])


def test_experts_without_tokens_get_no_gradient():
    """Two experts get all tokens; 16-bit activations take the same path."""
    graphdef, params = parts("deepseek")
    params = jax.tree.map(jnp.copy, params)
    params["correction"][...] = jnp.zeros(8).at[jnp.array([2, 3, 6])].set(9.0)
    x, given = inputs(), CONFIGS["deepseek"]
    call = lambda params, x: nnx.merge(graphdef, params)(x)
    y, pull = jax.vjp(call, params, x)
    chosen = choices(params, x, given)
    assert chosen.sum((0, 1)).tolist() == [0, 0, 14, 14, 0, 0, 14, 0]
    chex.assert_trees_all_close(y, definition(params, x, given, chosen), rtol=2e-5, atol=2e-6)
    grads, _ = pull(jnp.ones_like(y))
    used = np.any(grads["wide"][...] != 0, axis=(1, 2, 3))
    assert used.tolist() == [False, False, True, True, False, False, True, False]
    short = call(params, x.astype(jnp.bfloat16))
    assert short.dtype == jnp.bfloat16
    assert np.abs(short.astype(jnp.float32) - y).max() < 0.02 * np.abs(y).max()


def test_the_load_counts_the_tokens_that_count():
    graphdef, params = parts("qwen")
    x = inputs()
    counted = jnp.arange(7)[None] < jnp.array([7, 3])[:, None]
    load = nnx.merge(graphdef, params).observe(x, counted)[1]
    chosen, scores = choices(params, x, CONFIGS["qwen"]), np.asarray(scores_of(params, x, CONFIGS["qwen"]))
    np.testing.assert_allclose(load.chosen, chosen[0].sum(0) + chosen[1, :3].sum(0))
    np.testing.assert_allclose(load.score, scores[0].sum(0) + scores[1, :3].sum(0), rtol=1e-5)
    assert load.tokens == 10
    mean = lambda total: np.asarray(total) / 10
    np.testing.assert_allclose(balance(load), 8 * (mean(load.chosen) * mean(load.score)).sum(), rtol=1e-6)
    equal = Load(jnp.array(40.0), jnp.full(8, 15.0), jnp.full(8, 5.0))
    assert balance(equal) == CONFIGS["qwen"].per_token


def test_equal_scores_choose_different_experts():
    routing = route(jnp.zeros((1, 8)), None, dataclasses.replace(CONFIGS["deepseek"], correction_bias=False))
    assert len({*routing.expert[0].tolist()}) == 3


MIXED = model_config(CONFIGS["qwen"], mixer=("attention", "gated_deltanet"), ffn=("swiglu", "experts"), mlp_dim=24)


def test_a_model_with_a_dense_layer_streams_and_packs():
    model = LanguageModel(MIXED, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 256, (2, 9)), jnp.int32)
    whole = model(tokens)
    logits, _ = streamed(model.extend, tokens, model.init_cache(2, 9), (0, 4, 8, 9))
    chex.assert_trees_all_close(logits, whole, rtol=1e-4, atol=1e-4)
    packed = model(jnp.reshape(tokens, (1, 18)), jnp.repeat(jnp.arange(2), 9)[None], 2)
    chex.assert_trees_all_close(packed.reshape(whole.shape), whole, rtol=1e-4, atol=1e-4)
    assert model.measure(tokens)[2][0] is None
    assert model.measure(tokens)[2][1].chosen.shape == (1, 8)


def test_active_parameters_and_flops():
    """Without the embedding's lookup, the forward pass takes 2 FLOPs per active parameter that is multiplied."""
    one = model_config(CONFIGS["qwen"], num_layers=1, mixer="short_conv", conv_width=1)
    shapes = jax.eval_shape(lambda: nnx.split(LanguageModel(one, rngs=nnx.Rngs(0)), nnx.Param)[1])
    total = sum(x.size for x in jax.tree.leaves(shapes))
    idle = 5 * 3 * DIM * WIDTH
    assert count_parameters(one, active=True) == total - idle
    assert describe(one)["parameters"] == total
    graphdef, params = parts("qwen")
    x = jax.ShapeDtypeStruct((2, 7, DIM), jnp.float32)
    call = lambda params, x: nnx.merge(graphdef, params)(x).sum()
    active = sum(x.size for x in jax.tree.leaves(params)) - idle
    router = DIM * 8
    sums = 2 * 14 * 3 * DIM  # of the chosen experts' outputs
    assert count_flops(call, params, x) == 2 * 14 * active + sums
    assert count_flops(jax.grad(call, argnums=(0, 1)), params, x) >= 6 * 14 * (active - router)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"per_token": 9}, "per_token=9 is more than the 8 experts that a token can choose from"),
        ({"groups": 3}, "groups=3 does not divide number=8"),
        ({"groups": 4, "top_groups": 5}, "top_groups=5 is more than groups=4"),
        ({"groups": 8, "top_groups": 4}, "groups=8 leave one expert in each"),
        ({"groups": 4, "per_token": 3}, "per_token=3 is more than the 2 experts"),
        ({"shared_gate": True}, "shared_gate needs shared_width"),
        ({"bias_update": 0.1}, "bias_update needs correction_bias"),
        ({"scores": "tanh"}, "scores"),
    ],
)
def test_what_a_config_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        ExpertsConfig(**changes)


def test_what_a_model_refuses():
    with pytest.raises(ValueError, match="one kind of network besides 'experts' and 'none'"):
        model_config(CONFIGS["one"], num_layers=3, mixer=("attention",) * 3, ffn=("gelu", "experts", "swiglu"))
    with pytest.raises(ValueError, match="block='bare' needs ffn='none'"):
        model_config(CONFIGS["one"], block="bare")
