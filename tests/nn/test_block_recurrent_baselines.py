"""Melodi and block recurrence as layers of a model: their parameters, packed documents, a stream, what they refuse."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax.nn import BlockRecurrenceConfig, LanguageModel, MelodiConfig, ModelConfig, count_parameters
from tests.nn.cases import BLOCK_RECURRENCES
from tests.streams import streamed

CONFIG = ModelConfig(
    vocab_size=40, dim=16, num_layers=2, num_heads=2, mlp_dim=16, mixer=BLOCK_RECURRENCES,
    melodi=MelodiConfig(3, 4), block_recurrence=BlockRecurrenceConfig(4), dtype="float32", remat=False,
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("compile_fast")


def test_documents_streams_and_gradients():
    """A packed row, its documents alone, and each of them streamed are one function; every parameter has a gradient."""
    graphdef, params = nnx.split(LanguageModel(CONFIG, rngs=nnx.Rngs(0)), nnx.Param)
    x = jax.random.randint(jax.random.key(1), (2, 23), 0, 40)
    ids = jnp.asarray(np.repeat([[1, 2], [4, 3]], [10, 13], axis=1))
    model = nnx.merge(graphdef, params)

    def loss(params):
        y = nnx.merge(graphdef, params)(x, ids, 2)
        return jnp.sum(jax.nn.log_softmax(y)[..., 0]), y

    (_, y), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert all(bool(jnp.any(leaf != 0)) for leaf in jax.tree.leaves(gradient))
    extend = jax.jit(lambda params, x, cache: nnx.merge(graphdef, params).extend(x, cache))
    for start, stop in ((0, 10), (10, 23)):
        cuts = (start, start + 7, start + 8, stop)
        found, _ = streamed(functools.partial(extend, params), x, model.init_cache(2), cuts)
        expected = y[:, start:stop]
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_parameters():
    """Block recurrence has none but attention's; Melodi N (dim + L + N + 1) + 3 dim more."""
    count = lambda mixer: count_parameters(dataclasses.replace(CONFIG, mixer=mixer, num_layers=1))
    assert count("block_recurrence") == count("attention")
    assert count("melodi") - count("attention") == 3 * (16 + 4 + 3 + 1) + 3 * 16


@pytest.mark.parametrize("mixer", ["melodi", "block_recurrence"])
def test_odd_heads_are_refused(mixer):
    with pytest.raises(ValueError, match=f"head_dim=7 must be even for rotary positions in mixer '{mixer}'"):
        LanguageModel(dataclasses.replace(CONFIG, mixer=mixer, head_dim=7), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("config", "field"),
    [(MelodiConfig, "summary_tokens"), (MelodiConfig, "block_size"), (BlockRecurrenceConfig, "block_size")],
)
def test_sizes_below_one_are_refused(config, field):
    with pytest.raises(ValueError, match=f"{config.__name__}: {field} must be an integer ≥ 1, got 0"):
        config(**{field: 0})
