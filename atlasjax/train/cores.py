"""Training on a CPU with all of its cores: one device per core, each with its part of the batch."""

import dataclasses
import os

import jax

from atlasjax.data.files import usable_cores
from atlasjax.distributed.mesh import MeshConfig
from atlasjax.machine import machine_memory
from atlasjax.train import fits
from atlasjax.train.config import TrainConfig

_FLAG = "xla_force_host_platform_device_count"


def use_cores(config: TrainConfig) -> None:
    """Makes the CPU devices for a run whose `mesh.data` is 0. Must run before anything touches a device.

    A single device computes most operations of a small model on one core, because they are too small to be split. The devices of an
    accelerator do not change. Nothing happens if jax has made its devices, or was told how many to make.
    """
    if config.mesh.data != 0 or config.processes.distributed:
        return
    told = jax.config.jax_num_cpu_devices != -1  # type: ignore[attr-defined]
    if told or _FLAG in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        jax.config.update("jax_num_cpu_devices", max(1, mesh_of(config, usable_cores(), machine_memory()).data))
    except RuntimeError:  # jax has made its devices
        return


def mesh_of(config: TrainConfig, cpu_devices: int, memory: int) -> MeshConfig:
    """The mesh of a run. A `data` of 0 becomes the largest number of CPU devices over which the batch can be split.

    Args:
      config: the run.
      cpu_devices: how many devices there are, or can be made. 1 on an accelerator.
      memory: bytes that they share. Each has a copy of the parameters, so a large model uses fewer.
    """
    mesh, rows = config.mesh, config.data.batch_size // config.accumulation
    if mesh != MeshConfig(data=0):
        return mesh
    parameters = fits.parameters_at_least(config.model)

    def serves(devices: int) -> bool:
        if rows % devices:
            return False
        try:
            fits.check_fits(config, MeshConfig(data=devices).resolve(devices), parameters, memory // devices)
        except ValueError:
            return False
        return True

    data = next((n for n in range(min(cpu_devices, rows), 1, -1) if serves(n)), 1)
    return dataclasses.replace(mesh, data=data)


def usable_cpu_devices() -> int:
    """The number of CPU devices that jax has made, at most one per core. 1 on an accelerator, or with several processes."""
    if jax.default_backend() != "cpu" or jax.process_count() > 1:
        return 1
    return min(jax.local_device_count(), usable_cores())
