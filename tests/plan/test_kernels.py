"""Atlas' training steps compiled ahead of time for three TPU pods (in child processes), their memories by the kernels."""

import collections
import dataclasses
import functools
import importlib.util
import re

import jax
import pytest

from atlasjax import memory
from atlasjax.plan import Plan, child, compiled, plan_training, suggested_mesh
from atlasjax.train import default_config

PODS = ("v5e:16x16", "v5p:8x8x8", "v6e:16x16")
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")


def run_config(preset, topology, implementation):
    config = default_config(preset)
    rule = dataclasses.replace(config.model.memory, implementation=implementation)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, memory=rule))
    return dataclasses.replace(config, mesh=suggested_mesh(config, topology))


def head_params(config):
    """Shapes of one head's memory, and of its queries' features."""
    rule, dim = config.model.memory.build(), config.model.resolved_head_dim
    sizes = {"num_heads": 1, "key_dim": dim, "value_dim": config.model.value_dim}
    return rule, jax.eval_shape(functools.partial(memory.init_params, rule, **sizes), jax.random.key(0))


def gathered_states(config, plan):
    """All-gathers whose result holds a memory's matrix: two of its dimensions are those of a weight."""
    _, params = head_params(config)
    matrices = [collections.Counter(w.shape[1:]) for w in params.weights.values()]
    dims = lambda kind: collections.Counter(int(n) for n in re.findall(r"\d+", kind.partition("[")[2]))
    return [kind for kind in plan.gathers if any(matrix <= dims(kind) for matrix in matrices)]


def check(config, plan):
    """It fits, nothing is copied whole from one sharding to another, and no memory's state is gathered."""
    assert plan.fits, (plan.total_bytes, plan.available_bytes)
    assert plan.rematerialized == ()
    assert plan.gathers  # that of the parameters' model width: the list is not empty for want of a pattern
    assert sum(plan.gathers.values()) == plan.collectives["all-gather"]
    assert gathered_states(config, plan) == []


@needs_libtpu
def test_a_whole_copy_is_found():
    """The compiler warns of it on its standard error, in this version as the pattern has it, and the gather is in the text.

    The mesh's axes of 4 are parts of the pod's of 16.
    """
    mesh = {"data": 4, "fsdp": 16, "tensor": 4}
    plan = child.run_in_child("tests.plan.resharding", {"topology": "v6e:16x16", "mesh": mesh})
    assert plan.mesh == mesh
    (line,) = plan.rematerialized
    formats = "{devices=[4,1,4,16]<=", "[{'data'}, {}, {'tensor'}]}"  # until jax 0.10, and from 0.12
    assert any(sharding in line for sharding in formats), line
    assert plan.gathers == {"f32[32,16,6]": 1}


def test_a_gathered_state_is_found():
    config = run_config("atlas-340m", PODS[0], "pallas_tpu")
    _, params = head_params(config)
    assert {name: w.shape[1:] for name, w in params.weights.items()} == {"W1": (64, 256), "W2": (256, 128)}
    text = """
      %all-gather.1 = bf16[1,1024,4,256]{3,2,0,1:T(4,128)(2,1)} all-gather(%copy.2), channel_id=128
      %all-gather.2 = f32[16,16,64,256]{3,2,1,0:T(8,128)} all-gather(%w), dimensions={1}
      %start = (f32[4,128,256]{2,1,0}, f32[16,128,256]{2,1,0:T(8,128)S(1)}) all-gather-start(%w), dimensions={0}
      %all-reduce.2 = f32[16,16,64,256]{3,2,1,0:T(8,128)} all-reduce(%all-gather.2)
    """
    gathers = compiled.gathers(text)
    assert gathers == {"bf16[1,1024,4,256]": 1, "f32[16,16,64,256]": 1, "f32[16,128,256]": 1}
    fields = {field.name: None for field in dataclasses.fields(Plan)}
    plan = Plan(**{**fields, "gathers": gathers})
    assert gathered_states(config, plan) == ["f32[16,16,64,256]", "f32[16,128,256]"]


@needs_libtpu
@pytest.mark.slow  # the kernels compile in tests/pallas_kernels/test_compile.py, and a copy and a gather are found above
@pytest.mark.parametrize("topology", PODS)
def test_atlas_340m_with_kernels(topology):
    """Every layer's memory is four kernels: forward; then forward again (remat), a chunk's blocks again, and backward."""
    config = run_config("atlas-340m", topology, "pallas_tpu")
    plan = plan_training(config, topology)
    check(config, plan)
    assert plan.kernels == 4


def test_atlas_1_3b_has_no_kernel():
    """Two layers of 256 × 1,024 and 1,024 × 512 and their momenta: with what one write needs more than a core holds."""
    config = run_config("atlas-1.3b", PODS[0], "pallas_tpu")
    rule, params = head_params(config)
    shape = (1, config.data.sequence_length, 1)
    q = jax.ShapeDtypeStruct((*shape, config.model.resolved_head_dim), "bfloat16")
    gate = jax.ShapeDtypeStruct(shape, "float32")
    gates = memory.Gates(gate, gate, gate, jax.ShapeDtypeStruct((*shape, rule.window), "float32"))
    scan = functools.partial(memory.scan, rule, implementation="pallas_tpu")
    with pytest.raises(ValueError, match="their momenta have 1,572,864 numbers per head, more than 393,216"):
        jax.eval_shape(lambda params, q, gates: scan(params, None, q, q, q, gates), params, q, gates)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("topology", PODS)
def test_atlas_1_3b(topology):
    """By the XLA engine. A device that computed the memories of sequences of others would not have the room on a v5e or v6e."""
    config = run_config("atlas-1.3b", topology, "xla")
    plan = plan_training(config, topology)
    check(config, plan)
    assert plan.kernels == 0
    assert plan.temp_bytes < 6 * 2**30
