"""Training steps compiled ahead of time for TPU pods and GPUs that are not there (in child processes)."""

import dataclasses
import importlib.util

import jax
import pytest

from atlasjax.data.pipeline import make_pipeline
from atlasjax.data.tokenizers import make_tokenizer
from atlasjax.distributed import MeshConfig, make_mesh
from atlasjax.plan import device_hours, forward_flops_per_token, plan_training, suggested_mesh
from atlasjax.plan.topology import Topology, check_topology
from atlasjax.plan.training import abstract_batch
from atlasjax.train import default_config
from atlasjax.train.fits import check_divisible

TOPOLOGY = "v5e:16x16"
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="needs CUDA's compiler, no GPU: pip install 'atlasjax[cuda-compile]'",
)


def test_the_suggested_mesh_fits_batch_and_devices():
    config = default_config("atlas-340m")
    assert suggested_mesh(config, TOPOLOGY) == MeshConfig(-1, 16, 4)  # 64 sequences per microbatch on 256 devices
    one = dataclasses.replace(config, accumulation=1)
    assert suggested_mesh(one, "v5e:2x2") == MeshConfig(-1, 4, 1)
    assert suggested_mesh(one, "2x v5e:2x2") == MeshConfig(-1, 4, 1)  # data 2, one for each slice


def test_the_suggested_mesh_splits_experts():
    config = default_config("qwen3-next-340m")
    assert config.model.experts.number == 8
    assert suggested_mesh(config, TOPOLOGY) == MeshConfig(-1, 2, 4, expert=8)
    six = dataclasses.replace(config.model.experts, number=6)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, experts=six))
    mesh = suggested_mesh(config, TOPOLOGY)
    assert mesh == MeshConfig(-1, 8, 4, expert=2)
    check_divisible(config, mesh.resolve(Topology.parse(TOPOLOGY).num_devices))


def test_the_suggested_mesh_of_gpus():
    config = default_config("atlas-340m")
    assert suggested_mesh(config, "h100:8") == MeshConfig(-1, 8, 1)
    assert suggested_mesh(config, "2x h100:8") == MeshConfig(-1, 8, 1)  # data 2, one for each host
    assert Topology.parse("2x h100:8").num_devices == 16


@pytest.mark.parametrize(
    ("topology", "batch", "mesh"),
    [
        ("h100:8", 6, MeshConfig(-1, 2, 4)), ("h100:8", 12, MeshConfig(-1, 4, 2)), ("h100:2", 3, MeshConfig(-1, 1, 2)),
        ("h100:6", 3, MeshConfig(-1, 1, 2)), ("2x h100:8", 6, MeshConfig(-1, 1, 8)),
    ],
)  # fmt: skip
def test_the_suggested_mesh_divides_any_batch(topology, batch, mesh):
    config = batches_of(batch)
    assert suggested_mesh(config, topology) == mesh
    check_divisible(config, mesh.resolve(Topology.parse(topology).num_devices))


@pytest.mark.parametrize(
    ("topology", "batch", "accumulation", "works"),
    [("h100:6", 4, 1, 6), ("h100:3", 8, 1, 9), ("2x h100:8", 3, 1, 4), ("h100:3", 8, 2, 12)],
)
def test_a_batch_that_no_mesh_divides(topology, batch, accumulation, works):
    with pytest.raises(ValueError, match=rf"data.batch_size is {batch} .* e.g. {works}\.$"):
        suggested_mesh(batches_of(batch, accumulation), topology)
    suggested_mesh(batches_of(works, accumulation), topology)


def batches_of(batch, accumulation=1):
    """A run of a model with eight heads."""
    config = default_config("swa-tiny")
    model = dataclasses.replace(config.model, num_heads=8)
    data = dataclasses.replace(config.data, batch_size=batch)
    return dataclasses.replace(config, model=model, data=data, accumulation=accumulation)


def test_device_hours():
    config = default_config("linear-attention-170m")
    hours = device_hours(config, "v5e:4x4")
    tokens = config.steps * 2**19
    assert hours * 3600 * 197e12 * 0.4 == pytest.approx(3 * forward_flops_per_token(config) * tokens)
    assert device_hours(config, "2x v6e:8x8", utilization=0.2) == pytest.approx(2 * hours * 197 / 918)
    assert device_hours(config, "h100:8") == pytest.approx(hours * 197 / 989)


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        ("v5e", "must be like v5e:16x16"),
        ("v9:2x2", "Unknown accelerator 'v9'"),
        ("h10:8", "Did you mean 'h100'"),
        ("h200", "must be like h100:8"),
        ("h200:2x4", "2x h100:8 for two hosts"),
        ("0x h200:8", "2x h100:8 for two hosts"),
        ("v5e:0x2", "must be like v5e:16x16"),
        ("0x v5e:2x2", "2x v5e:16x16 for two slices"),
    ],
)
def test_unknown_topologies(topology, words):
    with pytest.raises(ValueError, match=words):
        check_topology(topology)


@needs_libtpu
def test_what_only_the_compiler_knows_is_an_error_of_the_topology():
    with pytest.raises(ValueError, match=r"topology is 'v5p:1x2x1', which libtpu does not know: .*2x2x1"):
        plan_training(dataclasses.replace(default_config("gla-tiny"), mesh=MeshConfig(-1)), "v5p:1x2x1")


@needs_libtpu
def test_a_chip_alone():
    assert len(Topology.parse("v5e:1x1").devices()) == 1


@pytest.mark.parametrize("packing", ["contiguous", "documents"])
def test_the_batch_is_that_of_the_run(packing):
    config = default_config("swa-tiny")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, packing=packing))
    batch = abstract_batch(config, make_mesh(MeshConfig(1), jax.devices()[:1]))
    pipeline = make_pipeline(config.data, make_tokenizer(config.data), "train")
    first = next(iter(pipeline))
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
        name: (x.shape, x.dtype) for name, x in first.items() if name in batch
    }
    assert (pipeline.max_segments is not None) == ("segment_ids" in batch)


@needs_libtpu
@pytest.mark.slow  # compiles a training step
def test_a_sequence_divided_over_a_pod():
    config = default_config("gated-deltanet-tiny")
    config = dataclasses.replace(config, mesh=MeshConfig(1, sequence=4), accumulation=1)
    plan = plan_training(config, "v5e:2x2")
    assert plan.mesh == {"data": 1, "fsdp": 1, "sequence": 4, "tensor": 1}
    assert plan.collectives["collective-permute"] > 0  # the halos of convolutions
    assert plan.rematerialized == ()


@needs_cuda
@pytest.mark.parametrize("topology", ["a100:2", "2x h100:2"])
def test_a_step_for_gpus(topology):
    config = default_config("titans-tiny")
    config = dataclasses.replace(config, mesh=suggested_mesh(config, topology))
    plan = plan_training(config, topology)
    assert plan.devices == Topology.parse(topology).num_devices
    assert plan.fits
    assert plan.kernels == 0
    assert plan.collectives["all-reduce"] > 0
    assert plan.rematerialized == ()
    assert plan.alias_bytes > 0.99 * plan.argument_bytes - 2**20  # the state is donated


@needs_cuda
def test_kernels_of_a_step_for_a_gpu():
    config = default_config("delta-rule-340m")
    rule = dataclasses.replace(config.model.memory, implementation="pallas_gpu")
    data = dataclasses.replace(config.data, batch_size=2, sequence_length=512)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, memory=rule),
        data=data,
        accumulation=1,
        mesh=MeshConfig(2),
    )
    plan = plan_training(config, "h100:2")
    assert plan.kernels > 0


@needs_libtpu
@pytest.mark.slow
def test_the_340m_preset_fits_a_v5e_pod():
    """Half a million tokens a step, as in the papers; every device has 15.75 GiB."""
    config = default_config("atlas-340m")
    config = dataclasses.replace(config, mesh=suggested_mesh(config, TOPOLOGY))
    plan = plan_training(config, TOPOLOGY)
    print(
        f"\natlas-340m on {TOPOLOGY}, mesh {plan.mesh}, bytes per device: arguments {plan.argument_bytes:,}, temporary "
        f"{plan.temp_bytes:,}, output {plan.output_bytes:,} ({plan.alias_bytes:,} of it in the arguments' place), program "
        f"{plan.code_bytes:,}; {plan.flops:.3g} FLOPs per step; {plan.collectives}; compiled in {plan.compile_seconds} s"
    )
    assert plan.devices == 256
    assert plan.total_bytes < 15.75 * 2**30
    assert plan.fits
    # One sequence and four heads a device: 1 GiB. With the memories of 16 devices' sequences on each it was 7.7.
    assert plan.temp_bytes < 2 * 2**30
    assert plan.rematerialized == ()
    # The state is split: 12 bytes for each of 390M parameters over fsdp × tensor = 64 devices, and little is left whole.
    assert plan.argument_bytes < 3 * 12 * 390e6 / 64
    assert plan.alias_bytes > 0.99 * plan.argument_bytes - 2**20  # the state is donated
    assert plan.collectives["all-gather"] > 0
    assert plan.collectives["all-reduce"] + plan.collectives["reduce-scatter"] > 0
    assert plan.flops > 6 * 300e6 * 2**19
