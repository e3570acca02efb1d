"""Memorizing Transformer and Infini-attention as layers: the formula in float64, documents, gradients, what they refuse."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax.nn import AttentionConfig, InfiniConfig, LanguageModel, MemorizingConfig, ModelConfig, count_parameters
from atlasjax.nn.mixers import MIXERS
from tests import comparisons
from tests.nn.cases import BLOCK_MEMORIES

DIM, HEADS, KEY, VALUE, BATCH, TIME, SIZE, QUEUE, THETA, EPS = 12, 2, 4, 8, 2, 11, 4, 6, 100.0, 0.05
CONFIG = ModelConfig(
    vocab_size=40, dim=DIM, num_layers=1, num_heads=HEADS, head_dim=KEY, value_expansion=2, norm_eps=EPS,
    attention=AttentionConfig(rope_theta=THETA), memorizing=MemorizingConfig(QUEUE, SIZE), infini=InfiniConfig(SIZE),
    dtype="float32",
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("compile_fast")


def make(name):
    """Every parameter moved off its initial value."""
    graphdef, params = nnx.split(MIXERS[name](CONFIG, rngs=nnx.Rngs(0)), nnx.Param)
    rng = np.random.default_rng(7)
    return graphdef, jax.tree.map(lambda x: x + 0.4 * rng.normal(size=x.shape).astype(np.float32), params)


def inputs():
    return 2 * jax.random.normal(jax.random.key(0), (BATCH, TIME, DIM))


close = functools.partial(comparisons.close, tolerance=2e-5)


def rotated(x, place):
    angle = place * THETA ** (-np.arange(KEY // 2) / (KEY // 2))
    first, second = np.split(x, 2)
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)]
    )


def attend(q, keys, values):
    weights = np.exp(np.stack(keys) @ q / np.sqrt(KEY))
    return weights @ np.stack(values) / weights.sum()


def formula(name, params, x):
    """One row [time, dim], one head and one token at a time."""
    phi = lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))
    projected = np.einsum("td,dhe->the", x, params["inputs"]["kernel"])
    heads = np.zeros((TIME, HEADS, VALUE))
    for h in range(HEADS):
        q, k, v = np.split(projected[:, h], (KEY, 2 * KEY), axis=1)
        share = 1 / (1 + np.exp(-params["gate"][h]))
        matrix, total = np.zeros((KEY, VALUE)), np.zeros(KEY)
        for t in range(TIME):
            start = t // SIZE * SIZE
            block = range(start, t + 1)
            y = attend(rotated(q[t], t - start), [rotated(k[s], s - start) for s in block], [v[s] for s in block])
            if start:
                if name == "memorizing":
                    past = range(max(0, start - QUEUE), start)
                    read = attend(q[t], [k[s] for s in past], [v[s] for s in past])
                else:
                    read = phi(q[t]) @ matrix / (phi(q[t]) @ total)
                    read = read / np.sqrt(np.mean(read**2) + EPS)
                y = (1 - share) * y + share * read
            heads[t, h] = y
            if t == start + SIZE - 1:
                written = range(start, t + 1)
                errors = [v[s] - (phi(k[s]) @ matrix / (phi(k[s]) @ total) if start else 0) for s in written]
                matrix = matrix + sum(np.outer(phi(k[s]), e) for s, e in zip(written, errors))
                total = total + sum(phi(k[s]) for s in written)
    return heads.reshape(TIME, -1) @ params["out"]["kernel"]


@pytest.mark.parametrize("name", BLOCK_MEMORIES)
def test_layer_is_the_formula_and_documents_are_sequences(name):
    graphdef, params = make(name)
    x = inputs()
    y = jax.jit(lambda params, x: nnx.merge(graphdef, params)(x))(params, x)
    values = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(params))
    for row in range(BATCH):
        close(y[row], formula(name, values, np.asarray(x[row], np.float64)))
    long = jnp.concatenate([x[:, :5], x], axis=1)
    ids = jnp.broadcast_to(jnp.asarray(np.repeat([3, 1], [5, TIME])), long.shape[:2])
    packed = jax.jit(lambda params, x, ids: nnx.merge(graphdef, params)(x, ids, 2))(params, long, ids)
    close(packed[:, :5], y[:, :5])
    close(packed[:, 5:], y)


@pytest.mark.parametrize("name", BLOCK_MEMORIES)
def test_parameters_learn_and_the_gate_starts_at_half(name):
    graphdef, params = make(name)
    gradients = jax.jit(jax.grad(lambda params: jnp.sum(nnx.merge(graphdef, params)(inputs()) ** 2)))(params)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.all(np.isfinite(gradient)), path
        assert np.abs(gradient).max() > 1e-3, path
    assert not np.asarray(MIXERS[name](CONFIG, rngs=nnx.Rngs(0)).gate[...]).any()
    count = lambda mixer: count_parameters(dataclasses.replace(CONFIG, mixer=mixer))
    assert count(name) == count("elastic") + HEADS


@pytest.mark.parametrize("name", BLOCK_MEMORIES)
def test_odd_heads_are_refused(name):
    with pytest.raises(ValueError, match=f"head_dim=7 must be even for rotary positions in mixer '{name}'"):
        LanguageModel(dataclasses.replace(CONFIG, mixer=name, head_dim=7), rngs=nnx.Rngs(0))
