"""Memories and windows that are added to imported hybrids: the model starts as exactly the old one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import unflatten_dict

from atlasjax.interop import import_weights
from atlasjax.nn import AttentionConfig, BranchConfig, CachingConfig, LanguageModel, MemoryConfig
from atlasjax.storage.tensors import named
from atlasjax.train.load import load_run
from tests.interop import peers
from tests.marks import some_slow

pytestmark = pytest.mark.usefixtures("compile_fast")

ADDED = {
    "titans": lambda model: {
        "branch": BranchConfig(
            "memory", memory=MemoryConfig("titans", chunk_size=4), num_heads=2, head_dim=4, value_expansion=1
        )
    },
    "window": lambda model: {"branch": BranchConfig("swa", attention=AttentionConfig(4), num_heads=2, head_dim=4)},
    "grm": lambda model: {"caching": CachingConfig.added("grm", 4)},
}
FAMILIES = (
    "granitemoehybrid",
    "falcon_h1",
    "nemotron_h",
    "lfm2",
    "bamba",
    "granitemoehybrid with experts",
    "qwen3_next",
    "kimi_linear",
)
# LFM2's recurrences have no matrix to cache.
CASES = [(name, what) for name in FAMILIES for what in ADDED if (name, what) != ("lfm2", "grm")]
BY_DEFAULT = {("falcon_h1", "titans"), ("nemotron_h", "grm"), ("lfm2", "window")}


@pytest.mark.parametrize("case", some_slow(CASES, set(CASES) - BY_DEFAULT), ids=" ".join)
def test_starts_as_the_imported_model(tmp_path, case):
    """Logits of a packed row and of pieces, with the imported parameters in their places and the added ones as they begin."""
    name, what = case
    import_weights(peers.write(tmp_path / "source", name), tmp_path / "run", tokenizer="byte")
    old = load_run(tmp_path / "run").model
    new = LanguageModel(dataclasses.replace(old.config, **ADDED[what](old.config)), rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(new, nnx.Param)
    given = named(nnx.to_pure_dict(nnx.state(old, nnx.Param)))
    places = named(nnx.to_pure_dict(params))
    assert given.keys() < places.keys()
    nnx.replace_by_pure_dict(params, unflatten_dict({**places, **given}, sep="."))
    new = nnx.merge(graphdef, params)
    tokens = jax.random.randint(jax.random.key(0), (1, 11), 0, 250)
    ids = jnp.asarray([[0] * 6 + [1] * 5])
    expected = np.asarray(old(tokens, ids, max_segments=2))
    np.testing.assert_allclose(new(tokens, ids, max_segments=2), expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    _, cache = new.extend(tokens[:, :7], new.init_cache(1, 11))
    logits, _ = new.extend(tokens[:, 7:], cache)
    whole = np.asarray(old(tokens))
    np.testing.assert_allclose(logits, whole[:, 7:], rtol=0, atol=1e-5 * np.abs(whole).max())
