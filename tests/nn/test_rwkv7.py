"""The published form of RWKV-7: value residual, channel mixing, LayerNorm, a norm of the embeddings.

Its logits are compared with the formulas in tests/interop/test_formulas.py, and its mixer without value residual in
test_baselines.py.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax.nn import MIXERS, ModelConfig, RWKV7Config, abstract_model
from tests import comparisons
from tests.marks import some_slow
from tests.streams import streamed

BATCH, TIME = 2, 9
CUTS = (0, 4, 5, TIME)  # of the documents in a packed row
CONFIG = ModelConfig(
    vocab_size=64, dim=12, num_layers=2, num_heads=3, mixer="rwkv7", ffn="channel_mixing", norm="layer", embedding_norm=True,
    mlp_dim=16, rwkv7=RWKV7Config(value_residual=True, decay_rank=3, rate_rank=2, gate_rank=4, value_rank=2),
    tie_embeddings=False, dtype="float32",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("compile_fast")


@functools.cache
def made(config=CONFIG):
    """(graphdef, params, jitted parallel pass), every parameter random: zeros and ones hide mistakes."""
    graphdef, shapes = nnx.split(abstract_model(config), nnx.Param)
    rng = np.random.default_rng(7)
    params = jax.tree.map(lambda x: 0.3 * rng.normal(size=x.shape).astype(np.float32), shapes)
    return graphdef, params, jax.jit(lambda p, x: nnx.merge(graphdef, p)(x))


def tokens():
    return np.random.default_rng(0).integers(0, CONFIG.vocab_size, (BATCH, TIME))


close = functools.partial(comparisons.close, tolerance=2e-5)


# In a pattern only the first of two layers has values that the others see, and its state is one of several.
@pytest.mark.parametrize("mixer", some_slow(["rwkv7", ("rwkv7", "gla")], [("rwkv7", "gla")]))
def test_streamed_is_parallel(mixer):
    config = dataclasses.replace(CONFIG, mixer=mixer)
    graphdef, params, parallel = made(config)
    expected = parallel(params, tokens())
    extend = jax.jit(lambda p, x, cache: nnx.merge(graphdef, p).extend(x, cache))
    empty = jax.jit(lambda p: nnx.merge(graphdef, p).init_cache(BATCH))(params)
    close(streamed(functools.partial(extend, params), tokens(), empty, (0, 1, 4, 7, 8, TIME))[0], expected)


@functools.cache
def packed():
    """Logits of packed rows, and the gradients of their loss."""
    graphdef, params, _ = made()

    def loss(params):
        logits = nnx.merge(graphdef, params)(
            tokens(), np.broadcast_to(np.repeat([3, 1, 3], np.diff(CUTS)), (BATCH, TIME)), 3
        )
        return -jnp.take_along_axis(
            jax.nn.log_softmax(logits), jnp.roll(tokens(), -1, axis=1)[..., None], axis=-1
        ).mean(), logits

    gradients, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
    return np.asarray(logits), gradients


def test_packed_row_is_its_documents():
    _, params, parallel = made()
    for start, stop in itertools.pairwise(CUTS):
        # The document at the start of its row; what follows it has no influence, because the model is causal.
        alone = np.asarray(parallel(params, np.roll(tokens(), -start, axis=1)))
        close(packed()[0][:, start:stop], alone[:, : stop - start])


def test_every_parameter_learns_except_the_first_layers_residual():
    """The first layer mixes its values with themselves."""
    for path, gradient in jax.tree_util.tree_leaves_with_path(packed()[1]):
        name = jax.tree_util.keystr(path)
        per_layer = np.abs(np.asarray(gradient).reshape(2 if "layers" in name else 1, -1)).max(axis=1)
        assert np.all(np.isfinite(per_layer)), name
        if "'mixer']['value']" in name:
            assert per_layer[0] < 1e-4 * per_layer[1], name
        else:
            assert np.all(per_layer > 0), name


def test_values_of_the_first_layer_reach_the_others():
    _, params, parallel = made()
    before = np.asarray(parallel(params, tokens()))
    for layer, changes in ((0, False), (1, True)):
        changed = jax.tree.map(np.copy, params)
        changed["layers"]["mixer"]["value"]["bias"][...][layer] += 1.0
        after = np.asarray(parallel(changed, tokens()))
        assert (np.abs(after - before).max() > 1e-3) == changes


def test_refuses_what_does_not_fit():
    for changes, words in (
        ({"value_rank": 0}, "RWKV7Config.*value_rank"),
        ({"key_eps": 0.0}, "RWKV7Config.*key_eps"),
        ({"value_residual": 1}, "RWKV7Config.*value_residual"),
    ):
        with pytest.raises(ValueError, match=words):
            RWKV7Config(**changes)
    config = dataclasses.replace(CONFIG, mixer=("gla", "rwkv7"))
    with pytest.raises(
        ValueError, match=r"value_residual needs the first layer to be 'rwkv7'; mixer is \('gla', 'rwkv7'\)"
    ):
        MIXERS["rwkv7"](config, rngs=nnx.Rngs(0))


def test_without_ranks_they_are_the_published_ones():
    """As flash-linear-attention computes them for layers without ranks."""
    for dim, ranks in ((768, (64, 64, 128, 32)), (2048, (128, 128, 224, 64))):
        assert ModelConfig(dim=dim, num_heads=dim // 64).rwkv7_ranks == ranks
