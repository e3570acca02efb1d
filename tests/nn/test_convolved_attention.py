"""Short convolutions in attention: the layer written out in NumPy, streamed, packed, in a model, and refused elsewhere."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax.nn import AttentionConfig, LanguageModel, MemoryConfig, ModelConfig
from atlasjax.nn.mixers import MIXERS
from tests import comparisons
from tests.nn.baseline_formulas import conv, linear, sigmoid
from tests.nn.lact_formulas import rotate, window_attention
from tests.streams import streamed

TIME, WIDTH = 11, 3
pytestmark = pytest.mark.usefixtures("compile_fast")
CONFIG = ModelConfig(
    vocab_size=13, dim=8, num_layers=2, num_heads=4, head_dim=4, mlp_dim=8, dtype="float32", mixer="swa",
    attention=AttentionConfig(window=5, kv_heads=2, gate=True, conv_width=WIDTH),
)  # fmt: skip


@functools.cache
def make(name):
    graphdef, params = nnx.split(MIXERS[name](CONFIG, rngs=nnx.Rngs(0)), nnx.Param)
    return graphdef, params, jax.jit(lambda p, x, ids=None: nnx.merge(graphdef, p)(x, ids))


def inputs():
    return jax.random.normal(jax.random.key(0), (2, TIME, 8))


close = functools.partial(comparisons.close, tolerance=2e-5)


def written_out(p, x, window):
    """Two heads of queries with their gates for each head of keys: [q, z, q, z, k, v] of 4 channels each."""
    q, z, more_q, more_z, k, v = np.split(linear(p["attention"]["inputs"], x), 6, axis=-1)
    q, more_q, k, v = np.split(conv(p["attention"]["conv"], np.concatenate([q, more_q, k, v], -1)), 4, axis=-1)
    both = lambda a, b: np.stack([a, b], 2).reshape(len(x), 4, 4)
    repeat = lambda a: np.repeat(a, 2, axis=1)
    y = window_attention(rotate(both(q, more_q)), rotate(repeat(k)), repeat(v), window) * sigmoid(both(z, more_z))
    return linear(p["out"], y.reshape(len(x), -1))


@pytest.mark.parametrize("name", ["swa", "attention"])
def test_definition_and_streams(name):
    graphdef, params, parallel = make(name)
    plain = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(params))
    expected = parallel(params, inputs())
    close(expected[1], written_out(plain, np.asarray(inputs()[1], np.float64), 5 if name == "swa" else TIME))
    extend = jax.jit(lambda p, x, state: nnx.merge(graphdef, p).extend(x, state))
    for cuts in (range(TIME + 1), [0, 1, 6, 11]):
        empty = nnx.merge(graphdef, params).init_state(2, TIME)
        close(streamed(functools.partial(extend, params), inputs(), empty, cuts)[0], np.asarray(expected))


def test_no_tap_crosses_documents():
    _, params, parallel = make("swa")
    packed = parallel(params, inputs(), jnp.asarray(np.repeat([[0, 1, 0], [2, 3, 4]], [4, 1, 6], axis=1)))
    for start, stop in ((0, 4), (4, 5), (5, 11)):
        alone = parallel(params, jnp.roll(inputs(), -start, axis=1))[:, : stop - start]
        close(packed[:, start:stop], np.asarray(alone))


def test_a_model_streams_and_learns_its_taps():
    model, tokens = LanguageModel(CONFIG, rngs=nnx.Rngs(0)), jnp.arange(2 * TIME).reshape(2, TIME) % 13
    logits, gradient = nnx.jit(lambda m: (m(tokens), nnx.grad(lambda m: jnp.square(m(tokens)).mean())(m)))(model)
    assert np.abs(gradient["layers"]["mixer"]["attention"]["conv"]["kernel"][...]).max() > 1e-7
    extend = nnx.jit(lambda m, x, cache: m.extend(x, cache))
    found, _ = streamed(functools.partial(extend, model), tokens, model.init_cache(2), range(TIME + 1))
    close(found, np.asarray(logits))


@pytest.mark.parametrize("name", ["mag", "mac", "mal", "lact", "block_attention"])
def test_others_refuse_it(name):
    given = AttentionConfig(window=5, conv_width=WIDTH)
    config = dataclasses.replace(CONFIG, mixer=name, attention=given, memory=MemoryConfig("delta_rule"))
    with pytest.raises(ValueError, match=r"attention\.conv_width is 3"):
        nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
