"""A run on a CPU has one device per core, over which its batch is split."""

import dataclasses
import subprocess
import sys

import pytest

from atlasjax.distributed import MeshConfig
from atlasjax.train.cores import mesh_of
from atlasjax.train.defaults import default_config
from atlasjax.train.setup import prepare

_GIB = 2**30
CONFIG = default_config("titans-tiny")  # 4 rows


@pytest.mark.parametrize(
    ("cores", "rows", "accumulation", "devices"),
    [(1, 4, 1, 1), (2, 4, 1, 2), (3, 4, 1, 2), (64, 4, 1, 4), (4, 6, 1, 3), (8, 6, 2, 3), (4, 7, 1, 1), (7, 7, 1, 7)],
)
def test_the_largest_number_that_divides_the_rows_of_a_step(
    cores: int, rows: int, accumulation: int, devices: int
) -> None:
    data = dataclasses.replace(CONFIG.data, batch_size=rows)
    config = dataclasses.replace(CONFIG, data=data, accumulation=accumulation)
    assert mesh_of(config, cores, 64 * _GIB).data == devices


def test_a_run_has_this_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atlasjax.train.cores.usable_cores", lambda: 2)
    assert dict(prepare(CONFIG).mesh.shape) == {"data": 2, "fsdp": 1, "tensor": 1}


def test_a_mesh_of_the_users_own_is_left_alone() -> None:
    for mesh in (MeshConfig(data=1), MeshConfig(), MeshConfig(data=1, fsdp=-1), MeshConfig(data=0, tensor=2)):
        config = dataclasses.replace(CONFIG, mesh=mesh)
        assert mesh_of(config, 4, 64 * _GIB) == config.mesh


def test_every_copy_of_the_parameters_has_to_fit() -> None:
    large = default_config("titans-340m")
    data = dataclasses.replace(large.data, batch_size=4, sequence_length=256)
    config = dataclasses.replace(large, data=data, mesh=MeshConfig(data=0), accumulation=1)
    assert mesh_of(config, 4, 1024 * _GIB).data == 4
    assert mesh_of(config, 4, 8 * _GIB).data == 2  # about 3 GiB each
    assert mesh_of(config, 4, 1 * _GIB).data == 1  # the run itself says that it does not fit


def test_jax_makes_them_unless_it_was_told_how_many() -> None:
    code = (
        "import jax; from atlasjax.train.cores import use_cores; from atlasjax.train.defaults import default_config;"
        "import atlasjax.train.cores as cores; cores.usable_cores = lambda: 2;"
        "use_cores(default_config('titans-tiny')); print(len(jax.devices()));"
        "use_cores(default_config('titans-tiny'))"  # too late, and no error
    )

    def devices(flags: str) -> int:
        env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PATH": ""}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert devices("") == 2
    assert devices("--xla_force_host_platform_device_count=3") == 3
