"""The full training step of a 340M model, compiled ahead of time for a TPU pod that is not there (in a child process)."""

import dataclasses
import importlib.util

import pytest

from atlasjax.distributed import MeshConfig
from atlasjax.plan import device_hours, forward_flops_per_token, plan_training, suggested_mesh
from atlasjax.plan.libtpu import check_topology
from atlasjax.train import default_config

TOPOLOGY = "v5e:16x16"
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")


def test_the_suggested_mesh_fits_batch_and_devices():
    config = default_config("atlas-340m")
    assert suggested_mesh(config, TOPOLOGY) == MeshConfig(-1, 16, 4)  # 64 sequences per microbatch on 256 devices
    one = dataclasses.replace(config, accumulation=1)
    assert suggested_mesh(one, "v5e:2x2") == MeshConfig(-1, 4, 1)
    assert suggested_mesh(one, "2x v5e:2x2") == MeshConfig(-1, 4, 1)  # data 2, one for each slice


def test_device_hours():
    config = default_config("linear-attention-170m")
    hours = device_hours(config, "v5e:4x4")
    tokens = config.steps * 2**19
    assert hours * 3600 * 197e12 * 0.4 == pytest.approx(3 * forward_flops_per_token(config) * tokens)
    assert device_hours(config, "2x v6e:8x8", utilization=0.2) == pytest.approx(2 * hours * 197 / 918)


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        ("v5e", "should be like v5e:16x16"),
        ("v9:2x2", "Unknown TPU generation 'v9'"),
        ("h200:8", "not for GPUs"),
        ("0x v5e:2x2", "2x v5e:16x16 for two slices"),
    ],
)
def test_unknown_topologies(topology, words):
    with pytest.raises(ValueError, match=words):
        check_topology(topology)


@needs_libtpu
@pytest.mark.slow  # compiles a training step
def test_a_sequence_divided_over_a_pod():
    config = default_config("gated-deltanet-tiny")
    config = dataclasses.replace(config, mesh=MeshConfig(1, sequence=4), accumulation=1)
    plan = plan_training(config, "v5e:2x2")
    assert plan.mesh == {"data": 1, "fsdp": 1, "sequence": 4, "tensor": 1}
    assert plan.collectives["collective-permute"] > 0  # the halos of convolutions
    assert plan.rematerialized == ()


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
