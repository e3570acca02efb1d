"""Logical axes to shardings."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from atlasjax.distributed import (
    LOGICAL_AXIS_RULES,
    MeshConfig,
    cache_shardings,
    global_batch,
    make_mesh,
    partition_spec,
)
from atlasjax.memory import MemoryState
from atlasjax.nn import AXES, AttentionConfig, abstract_model
from atlasjax.presets import get_preset


def test_every_axis_of_the_legend_has_a_rule():
    assert set(LOGICAL_AXIS_RULES) == set(AXES)


@pytest.mark.parametrize(
    ("axes", "shape", "spec", "num_skipped"),
    [
        (("vocab", "embed"), (256, 64), P("tensor", "fsdp"), 0),
        (("layers", "embed", None, "heads"), (3, 64, 3, 8), P(None, "fsdp", None, "tensor"), 0),
        (("heads", "embed"), (7, 64), P(None, "fsdp"), 1),  # 2 does not divide 7
        (("embed", "embed"), (64, 64), P("fsdp", None), 0),  # a mesh axis is used once
        ((), (), P(), 0),
    ],
)
def test_partition_spec(axes, shape, spec, num_skipped):
    found, skipped = partition_spec(axes, shape, make_mesh(MeshConfig(2, 2, 2)))
    assert found == spec
    assert len(skipped) == num_skipped


@pytest.mark.parametrize(
    ("axes", "shape", "spec", "skipped"),
    [
        (("vocab", "embed"), (256, 64), P("tensor", ("fsdp", "sequence")), []),
        (("embed", "embed"), (64, 64), P(("fsdp", "sequence"), None), []),
        (
            ("embed",), (6,), P("fsdp"),
            ["axis 'embed' of size 6 is not divisible by sequence=2, after fsdp of 2: not split"],
        ),
        (
            ("embed",), (7,), P(None),
            [f"axis 'embed' of size 7 is not divisible by {axis}=2: not split" for axis in ("fsdp", "sequence")],
        ),
    ],
)  # fmt: skip
def test_parameters_are_split_over_the_devices_of_a_sequence(axes, shape, spec, skipped):
    assert partition_spec(axes, shape, make_mesh(MeshConfig(1, 2, 2, 2))) == (spec, skipped)


def test_what_is_skipped_is_said():
    _, [line] = partition_spec(("heads",), (7,), make_mesh(MeshConfig(2, 2, 2)))
    assert line == "axis 'heads' of size 7 is not divisible by tensor=2: not split"


@pytest.mark.parametrize(
    ("axes", "words"), [(("haeds",), "Did you mean 'heads'"), (("heads", "embed"), "name 2 axes of an array of shape")]
)
def test_refused(axes, words):
    with pytest.raises(ValueError, match=words):
        partition_spec(axes, (8,), make_mesh(MeshConfig(2, 2, 2)))


def test_the_cache_is_split_over_batch_and_heads():
    config = get_preset("atlas-tiny")
    graphdef, params = nnx.split(abstract_model(config), nnx.Param)
    cache = jax.eval_shape(lambda params: nnx.merge(graphdef, params).init_cache(8), params)
    mesh = make_mesh(MeshConfig(2, 2, 2))
    shardings = cache_shardings(cache, mesh)
    states = lambda tree: [
        x for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, MemoryState)) if isinstance(x, MemoryState)
    ]
    [state], [where] = states(cache), states(shardings)
    for leaf, sharding in zip(jax.tree.leaves(state.memory), jax.tree.leaves(where.memory), strict=True):
        assert sharding.spec[:3] == (None, ("data", "fsdp"), "tensor")
        layers, batch, heads, *_ = leaf.shape
        assert sharding.shard_shape(leaf.shape)[:3] == (layers, batch // 4, heads // 2)
    made = jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), cache), out_shardings=shardings)()
    assert all(leaf.sharding.shard_shape(leaf.shape)[1] == 2 for leaf in jax.tree.leaves(made))


@pytest.mark.parametrize("mixer", ["attention", "swa", "mac"])
def test_keys_and_values_are_split_over_batch_and_heads(mixer):
    config = dataclasses.replace(get_preset("titans-tiny"), mixer=mixer, attention=AttentionConfig(window=24))
    graphdef, params = nnx.split(abstract_model(config), nnx.Param)
    cache = jax.eval_shape(lambda params: nnx.merge(graphdef, params).init_cache(8, 32), params)
    shardings = cache_shardings(cache, make_mesh(MeshConfig(2, 2, 2)))
    tokens = shardings.tokens if mixer == "mac" else shardings
    assert tokens.keys.spec == tokens.values.spec == P(None, ("data", "fsdp"), None, "tensor")
    assert tokens.position.spec == P(None, ("data", "fsdp"))
    if mixer == "mac":
        for leaf in jax.tree.leaves(shardings.start.memory):
            assert leaf.spec[:3] == (None, ("data", "fsdp"), "tensor")


@pytest.mark.parametrize("mixer", ["memorizing", "infini"])
def test_memories_of_blocks_are_split_over_batch_and_heads(mixer):
    config = dataclasses.replace(get_preset("titans-tiny"), mixer=mixer)
    graphdef, params = nnx.split(abstract_model(config), nnx.Param)
    cache = jax.eval_shape(lambda params: nnx.merge(graphdef, params).init_cache(8), params)
    shardings = cache_shardings(cache, make_mesh(MeshConfig(2, 2, 2)))
    held = P(None, ("data", "fsdp"), None, "tensor", None)
    block, memory = shardings.block, shardings.memory
    assert block.keys.spec == block.values.spec == held
    assert block.position.spec == P(None, ("data", "fsdp"))
    for leaf in memory:
        assert leaf.spec == held if mixer == "memorizing" else leaf.spec[:3] == (None, ("data", "fsdp"), "tensor")


@pytest.mark.parametrize("mixer", ["melodi", "block_recurrence"])
def test_keys_and_values_of_blocks_are_split_over_batch_and_heads(mixer):
    """All that has heads, and nothing else, is split over tensor too."""
    config = dataclasses.replace(get_preset("titans-tiny"), mixer=mixer)
    graphdef, params = nnx.split(abstract_model(config), nnx.Param)
    cache = jax.eval_shape(lambda params: nnx.merge(graphdef, params).init_cache(8), params)
    shardings = cache_shardings(cache, make_mesh(MeshConfig(2, 2, 2)))
    if mixer == "melodi":
        assert {leaf.spec for leaf in (*shardings.memory, *shardings.block)} == {
            P(None, ("data", "fsdp"), None, "tensor", None)
        }
        assert shardings.mixed.spec == P(None, ("data", "fsdp"), None, None)
    else:
        assert shardings.keys.spec == shardings.values.spec == P(None, ("data", "fsdp"), None, None, "tensor", None)
    assert shardings.position.spec == P(None, ("data", "fsdp"))


def test_global_batch():
    mesh = make_mesh(MeshConfig(2, 2, 2))
    rows = np.arange(32, dtype=np.int32).reshape(8, 4)
    batch = global_batch({"inputs": rows}, mesh)["inputs"]
    assert batch.sharding.shard_shape(batch.shape) == (2, 4)
    np.testing.assert_array_equal(batch, rows)
