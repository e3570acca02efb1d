"""The mesh: -1, and refusals."""

import jax
import pytest

from atlasjax.distributed import MeshConfig, ProcessConfig, initialize, make_mesh


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (MeshConfig(), (8, 1, 1)),
        (MeshConfig(2, -1, 2), (2, 2, 2)),
        (MeshConfig(1, 2, -1), (1, 2, 4)),
        (MeshConfig(2, 1, 1), (2, 1, 1)),
    ],
)
def test_sizes(config, shape):
    mesh = make_mesh(config)
    assert tuple(mesh.shape.values()) == shape
    assert mesh.axis_names == ("data", "fsdp", "tensor")
    assert mesh.devices.ravel()[0] == jax.devices()[0]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MeshConfig(0), "must be positive"),
        (MeshConfig(-1, -1), "at most one mesh axis may be -1; got -1 for data and fsdp"),
        (MeshConfig(-1, 3), "multiple of 3 devices; there are 8"),
        (MeshConfig(4, 4), "needs 16 devices; there are 8"),
    ],
)
def test_refused(config, words):
    with pytest.raises(ValueError, match=words):
        make_mesh(config)


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
