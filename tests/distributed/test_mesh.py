"""The mesh: -1, and refusals."""

import jax
import numpy as np
import pytest

from atlasjax.distributed import MeshConfig, ProcessConfig, initialize, make_mesh
from atlasjax.distributed.mesh import _arranged


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (MeshConfig(), (8, 1, 1)),
        (MeshConfig(2, -1, 2), (2, 2, 2)),
        (MeshConfig(1, 2, -1), (1, 2, 4)),
        (MeshConfig(2, 1, 1), (2, 1, 1)),
        (MeshConfig(2, sequence=4), (2, 1, 4, 1)),
        (MeshConfig(1, 1, 2, -1), (1, 1, 4, 2)),
    ],
)
def test_sizes(config, shape):
    mesh = make_mesh(config)
    assert tuple(mesh.shape.values()) == shape
    assert mesh.axis_names == (
        ("data", "fsdp", "tensor") if len(shape) == 3 else ("data", "fsdp", "sequence", "tensor")
    )
    assert mesh.devices.ravel()[0] == jax.devices()[0]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MeshConfig(1, 0), "must be positive"),
        (MeshConfig(-2), "must be positive"),
        (MeshConfig(-1, -1), "at most one mesh axis may be -1; got -1 for data and fsdp"),
        (
            MeshConfig(-1, 3),
            r"multiple of 3 devices; there are 8\. .* XLA_FLAGS=--xla_force_host_platform_device_count=9, set before",
        ),
        (MeshConfig(4, 4), "needs 16 devices; there are 8. XLA_FLAGS=--xla_force_host_platform_device_count=16"),
    ],
)
def test_refused(config, words):
    with pytest.raises(ValueError, match=words):
        make_mesh(config)


def test_the_remedy_is_that_of_the_platform():
    """Only of a CPU can there be more devices; a plan has none."""
    for platform, end in (
        ("tpu", "Make a size smaller, or -1, which takes all that there are."),
        (None, "there are 1."),
    ):
        with pytest.raises(ValueError, match="needs 2 devices; there are 1") as error:
            MeshConfig(tensor=2, data=1).resolve(1, platform)
        assert str(error.value).endswith(end)


class Device:
    """What a mesh asks of a device; only a TPU's has a slice."""

    platform = device_kind = "cpu"
    process_index = 0

    def __init__(self, index: int, slice_index: int):
        self.id, self.slice_index = index, slice_index


def slices(config: MeshConfig, count: int):
    """Which slice each device of a mesh is in; 12 devices."""
    devices = [Device(index, index * count // 12) for index in range(12)]
    return np.vectorize(lambda device: device.slice_index)(_arranged(config.resolve(12), devices))


def test_data_crosses_the_slices():
    found = slices(MeshConfig(4, 3, 1), 2)
    assert found.shape == (4, 3, 1)
    np.testing.assert_array_equal(found[:, :, 0], [[0] * 3, [0] * 3, [1] * 3, [1] * 3])


def test_fsdp_crosses_the_slices_where_data_cannot():
    found = slices(MeshConfig(1, 4, 3), 2)
    np.testing.assert_array_equal(found[0], [[0] * 3, [0] * 3, [1] * 3, [1] * 3])


def test_a_mesh_that_does_not_fit_the_slices():
    with pytest.raises(ValueError, match=r"mesh.data is 2 and mesh.fsdp is 2; one of them must be a multiple of 3"):
        slices(MeshConfig(2, 2, 3), 3)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ProcessConfig(coordinator="localhost:1"), "distributed is False"),
        (ProcessConfig(distributed=True, coordinator="localhost:1"), "belong together; got only coordinator"),
    ],
)
def test_processes_refused(config, words):
    with pytest.raises(ValueError, match=words):
        initialize(config)
