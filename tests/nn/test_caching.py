"""Memory Caching around the recurrences of mixers whose state is a matrix, and added to a trained model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.memory import CachedState
from atlasjax.nn import CachingConfig, MemoryConfig, ModelConfig, RWKV7Config, SSMConfig
from atlasjax.storage.tensors import named
from atlasjax.train import state as state_lib
from atlasjax.train.trainable import marked, replaced, select
from tests.marks import some_slow
from tests.memory.cases import assert_close
from tests.streams import streamed

pytestmark = pytest.mark.usefixtures("compile_fast")

SIZE, TIME = 4, 14
SMALL = ModelConfig(
    vocab_size=11, dim=8, num_layers=1, num_heads=2, mlp_dim=8, ssm=SSMConfig(state_dim=4, head_dim=8),
    rwkv7=RWKV7Config(decay_rank=2, rate_rank=2, gate_rank=2), dtype="float32", remat=False,
)  # fmt: skip
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, TIME)), jnp.int32)
CASES = {
    "gated_deltanet grm": ("gated_deltanet", CachingConfig.added("grm", SIZE)),
    "mamba2 ssc": ("mamba2", CachingConfig.added("ssc", SIZE)),
    "mamba3 grm": ("mamba3", CachingConfig.added("grm", SIZE)),
    "gla residual": ("gla", CachingConfig.added("residual", SIZE)),
    "retnet soup": ("retnet", CachingConfig.added("soup", SIZE)),
    "deltanet query": ("deltanet", dataclasses.replace(CachingConfig.added("grm", SIZE), connector="query")),
    "kda soup": ("kda", CachingConfig.added("soup", SIZE)),
    "gdn2 residual": ("gdn2", CachingConfig.added("residual", SIZE)),
    "rwkv7 grm": ("rwkv7", CachingConfig.added("grm", SIZE)),
}


def built(model):
    graphdef, _ = state_lib.model_shapes(model)
    params = state_lib.init_params(model, jax.random.key(1))
    return lambda params: state_lib.merge(graphdef, params), params


@pytest.mark.parametrize("name", some_slow(CASES, set(CASES) - {"gated_deltanet grm"}))
def test_a_trained_model_starts_as_itself_and_learns_what_was_added(name):
    """With the old parameters and any new ones: equal logits; λ has a gradient at once, and what it weighs once λ is not 0. Then
    a stream gives the logits of the whole sequence."""
    mixer, caching = CASES[name]
    plain = dataclasses.replace(SMALL, mixer=mixer)
    (old_model, old), (new_model, new) = built(plain), built(dataclasses.replace(plain, caching=caching))
    new = replaced(new, old)
    added = marked(new, lambda path: path not in named(old))
    assert all(path.startswith("layers.mixer.cache.") for path in named(select(new, added)))

    @jax.jit
    def run(old, new):
        def loss(part, new):
            logits = new_model(replaced(new, part))(TOKENS)
            return -jnp.mean(jax.nn.log_softmax(logits[:, :-1])[..., 3]), logits

        (_, logits), at_start = jax.value_and_grad(loss, has_aux=True)(select(new, added), new)
        # One step of gradient descent that moves λ by about 0.1.
        largest = jnp.max(jnp.abs(at_start["layers"]["mixer"]["cache"]["blend"]))
        part = jax.tree.map(lambda p, g: p - 0.1 * g / largest, select(new, added), at_start)
        (_, moved), later = jax.value_and_grad(loss, has_aux=True)(part, new)
        model = new_model(replaced(new, part))
        end = streamed(model.extend, TOKENS, model.init_cache(2, TIME), (0, TIME - 1, TIME))
        return old_model(old)(TOKENS), logits, at_start, moved, later, *end

    want, logits, at_start, moved, later, pieces, cache = run(old, new)
    assert_close(logits, want, 1e-6)
    assert np.abs(named(at_start)["layers.mixer.cache.blend"]).min() > 0
    for path, slope in named(later).items():
        assert np.abs(slope).max() > 0, path
    assert np.abs(moved - want).max() > 1e-3
    assert_close(pieces, moved, 1e-5)
    assert isinstance(cache.recurrence, CachedState)


def test_without_a_blend_it_is_memory_caching_from_the_start():
    caching = CachingConfig("grm", SIZE)
    model = dataclasses.replace(SMALL, mixer="gated_deltanet", num_layers=1, caching=caching)
    paths = named(state_lib.model_shapes(model)[1])
    assert [path for path in paths if "cache" in path] == ["layers.mixer.cache.connector.kernel"]


def test_refused():
    with pytest.raises(
        ValueError, match=r"caching is given, but mixer is 'swa'.*retnet, gla, deltanet.*memory.caching"
    ):
        state_lib.model_shapes(dataclasses.replace(SMALL, mixer="swa", caching=CachingConfig()))
    with pytest.raises(ValueError, match="caching is given, but mixer is 'log_linear_mamba2'"):
        state_lib.model_shapes(dataclasses.replace(SMALL, mixer="log_linear_mamba2", caching=CachingConfig()))
    with pytest.raises(ValueError, match=r"blended=True, which is for ModelConfig\.caching"):
        MemoryConfig(caching=CachingConfig.added())
    with pytest.raises(ValueError, match="segment_size"):
        state_lib.model_shapes(dataclasses.replace(SMALL, mixer="gla", caching=CachingConfig(segment_size=0)))
