"""Every array of a model's cache that has heads is divided over them, whatever state it lies in."""

import jax
import pytest
from flax import nnx

from atlasjax.distributed import MeshConfig, make_mesh
from atlasjax.distributed.sharding import cache_shardings
from atlasjax.nn import ModelConfig, abstract_model
from atlasjax.nn.memory_mixer import MemoryMixerState
from atlasjax.presets import get_preset, has_memory, preset_names
from tests.marks import some_slow

# State and field → why its arrays are on all devices of `tensor`.
REPLICATED = {
    "MemoryMixerState.conv": "the last inputs of a convolution",
    "MACState.conv": "the last inputs of a convolution",
    "RecurrentState.inputs": "the last inputs of a convolution",
    "MelodiState.mixed": "a sum over the channels of a layer",
    "MelodiState.position": "a number for each row",
    "PositionedCache.position": "a number for each row",
    "SelfModifyingState.position": "a number for each row",
    "Progress.chunks": "a number for each row",
    "InnerState.filled": "a number for each row",
    "InnerState.inputs": "the inputs of an inner loop's first layer, in one chunk",
    "InnerState.tokens": "the tokens of that chunk",
    "FastWeights.gate_and_wide": "weights of a feed-forward network of each row",
    "FastWeights.out": "the same",
    "LayerState.mlp": "the last input of a feed-forward network",
    "LatentCache.latents": "the latent from which all heads get their keys and values",
    "LatentCache.position": "a number for each row",
    "RecurrentState.recurrence": "the state of Mamba, which has channels and no heads",
    "": "the last inputs of a convolution, which are GAM's whole state",
    "PositionedCache.layers": "the same, in a model with learned positions",
}


def kind(name: str) -> object:
    """What two presets have in common if their caches consist of the same states."""
    model = get_preset(name)
    branch = model.branch
    rule = type(model.memory.build()).__name__ if has_memory(model) else ""
    return tuple(model.pattern), rule, model.ffn, model.max_positions is None, branch, model.inner_loop is None


ALL = preset_names("tiny")
ONE_OF_EACH = list({kind(name): name for name in reversed(ALL)}.values())


def shardings_of(config: ModelConfig, mesh):
    graphdef, params = nnx.split(abstract_model(config), nnx.Param)
    cache = jax.eval_shape(lambda params: nnx.merge(graphdef, params).init_cache(8, 64), params)
    return cache, cache_shardings(cache, mesh)


def unsaid(node, name=""):
    """(state and field, array) of all arrays that no state with `heads_axis` speaks for."""
    if hasattr(node, "heads_axis"):
        return
    if isinstance(node, jax.ShapeDtypeStruct):
        yield name, node
    elif isinstance(node, dict):
        for part in node.values():
            yield from unsaid(part, name)
    else:
        fields = getattr(node, "_fields", None)
        for i, part in enumerate(node or ()):
            yield from unsaid(part, name if fields is None else f"{type(node).__name__}.{fields[i]}")


@pytest.mark.parametrize("name", some_slow(ALL, set(ALL) - set(ONE_OF_EACH)))
def test_all_that_has_heads_is_divided(name):
    config = get_preset(name)
    cache, shardings = shardings_of(config, make_mesh(MeshConfig(2, 2, 2)))
    found = {where for where, _ in unsaid(cache)}
    assert found <= set(REPLICATED), "give the state heads_axis, or say here why its arrays are on every device"
    says = lambda node: hasattr(node, "heads_axis")
    states = [node for node in jax.tree.leaves(cache, is_leaf=says) if says(node)]
    divided = [node for node in jax.tree.leaves(shardings, is_leaf=says) if says(node)]
    assert len(states) == len(divided)
    for state, where in zip(states, divided):
        axis = state.heads_axis + 1
        for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(where), strict=True):
            assert sharding.spec[1] == ("data", "fsdp")
            if leaf.ndim > axis and leaf.shape[axis] > 1:  # Longhorn has one head
                assert sharding.spec[axis] == "tensor", (type(state).__name__, leaf.shape)


def test_a_state_of_ones_own():
    """`tests/memory/own_family.py` says its axis of heads; the library does not know the class."""
    from tests.memory.own_family import State

    leaf = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
    cache = MemoryMixerState(memory=State(leaf(4, 8, 2, 6), leaf(4, 8)), conv=leaf(4, 8, 3, 16))
    where = cache_shardings(cache, make_mesh(MeshConfig(2, 2, 2)))
    assert where.memory.sums.spec == jax.P(None, ("data", "fsdp"), "tensor", None)
    assert "tensor" not in (*where.memory.segment.spec, *where.conv.spec)
