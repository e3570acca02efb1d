"""TNT's memory in a model: its config, its gates, and streams of a mixer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax import memory
from atlasjax.nn import CachingConfig, HierarchyConfig, MemoryConfig, ModelConfig
from atlasjax.nn.gates import GateProjection
from atlasjax.nn.memory_mixer import MemoryMixer
from atlasjax.presets import get_preset
from tests.streams import streamed

HIERARCHY = HierarchyConfig(global_chunk=8, local_chunks=(4, 2), restart=4)


def test_what_is_refused():
    for changes in ({"caching": CachingConfig()}, {"chunk_size": 8}):
        with pytest.raises(ValueError, match=r"is given with hierarchy.*must be None"):
            MemoryConfig("titans", hierarchy=HIERARCHY, **changes)
    with pytest.raises(ValueError, match="hierarchy must be a HierarchyConfig"):
        MemoryConfig("titans", hierarchy=8)
    with pytest.raises(ValueError, match="must be at most global_chunk=4"):
        MemoryConfig("titans", hierarchy=HierarchyConfig(4, (8,)))


@pytest.mark.parametrize("rule", ["titans", "omeganet", "atlas"])
def test_presets(rule):
    built = get_preset(f"{rule}-tnt-tiny").memory.build()
    assert isinstance(built, memory.HierarchicalRule)
    assert (built.global_chunk, built.local_chunks, built.restart) == (64, (8,), 128)


@pytest.mark.parametrize("similar_keys", [False, True])
def test_gates_start_at_the_values_of_each_chunk_size(similar_keys):
    rule = MemoryConfig("omeganet", hierarchy=HIERARCHY).build()
    sizes = {"num_heads": 2, "key_dim": 4, "value_dim": 4}
    make = lambda rule: GateProjection(rule, dim=8, max_step=None, similar_keys=similar_keys, rngs=nnx.Rngs(0), **sizes)
    gates = make(rule)(jnp.zeros((1, 1, 8)))
    for one, own in zip(rule.members, rule.split_gates(gates, 4, 4), strict=True):
        expected = make(one)(jnp.zeros((1, 1, 8)))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), own, expected)
    assert make(rule).max_step == max(make(one).max_step for one in rule.members)


def test_a_stream_of_a_mixer():
    """Pieces that end inside a shard, at its end, and one token."""
    memory_config = MemoryConfig("delta_rule", rule_options='{"chunk_size": 4}', hierarchy=HIERARCHY)
    config = ModelConfig(dim=8, num_layers=1, num_heads=2, memory=memory_config, dtype="float32", remat=False)
    mixer = MemoryMixer(config, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 11, 8))
    y, norm = mixer.observe(x)
    assert norm.shape == (2, 2)
    np.testing.assert_allclose(streamed(mixer.extend, x, mixer.init_state(2), (0, 5, 10, 11))[0], y, atol=1e-5)
    finer = dataclasses.replace(memory_config, hierarchy=dataclasses.replace(HIERARCHY, fine_chunks=(1, 1)))
    other = MemoryMixer(dataclasses.replace(config, memory=finer), rngs=nnx.Rngs(0))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, nnx.state(mixer, nnx.Param), nnx.state(other, nnx.Param)))
