"""The device mesh (data, fsdp, tensor) and the start of a multi-process job."""

import dataclasses
from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from atlasjax.nn.partition import BATCH_AXES, HEAD_AXES

MESH_AXES = (*BATCH_AXES, *HEAD_AXES)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many devices each axis of the mesh has; -1 on one axis means all the remaining devices.

    Attributes:
      data: copies of the parameters; each sees its own part of the batch.
      fsdp: parameters and optimizer state are split over it, and so is the batch (fully sharded data parallelism).
      tensor: heads, MLP width and vocabulary are split over it.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1

    def resolve(self, num_devices: int) -> tuple[int, int, int]:
        """Returns (data, fsdp, tensor) with -1 filled in.

        Raises:
          ValueError: a size is neither positive nor -1, more than one is -1, or the sizes do not fit `num_devices`.
        """
        sizes = {axis: getattr(self, axis) for axis in MESH_AXES}
        wrong = {axis: size for axis, size in sizes.items() if size != -1 and size < 1}
        if wrong:
            raise ValueError(f"mesh sizes must be positive, or -1 for all the remaining devices; got {wrong}.")
        free = [axis for axis, size in sizes.items() if size == -1]
        if len(free) > 1:
            raise ValueError(f"at most one mesh axis may be -1; got -1 for {' and '.join(free)}.")
        fixed = 1
        for size in sizes.values():
            fixed *= size if size != -1 else 1
        if free:
            if num_devices % fixed:
                raise ValueError(
                    f"mesh {sizes} needs a multiple of {fixed} devices; there are {num_devices}. Change mesh.{free[0]} "
                    "or the other sizes."
                )
            sizes[free[0]] = num_devices // fixed
        elif fixed > num_devices:
            raise ValueError(f"mesh {sizes} needs {fixed} devices; there are {num_devices}.")
        return sizes["data"], sizes["fsdp"], sizes["tensor"]


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes the mesh over `devices` (default: all of them, of every process).

    A mesh smaller than the machine uses the first devices; with several processes it must use every device.

    Raises:
      ValueError: the sizes do not fit the devices (see `MeshConfig.resolve`).
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = config.resolve(len(devices))
    needed = shape[0] * shape[1] * shape[2]
    if needed < len(devices) and jax.process_count() > 1:
        raise ValueError(
            f"mesh {dict(zip(MESH_AXES, shape))} uses {needed} of {len(devices)} devices; with several processes it must "
            "use all of them. Set one size to -1."
        )
    # A pod's torus may have no axis as long as one of the mesh, such as 4 of 16 × 16: then a part of an axis.
    parts = mesh_utils.create_device_mesh(shape, devices[:needed], allow_split_physical_axes=True)
    return Mesh(parts, MESH_AXES, axis_types=(AxisType.Auto,) * 3)


@dataclasses.dataclass(frozen=True)
class ProcessConfig:
    """Several processes, one per host, that train together (`jax.distributed`).

    On Cloud TPU pods, Slurm and Kubernetes `distributed=True` is enough: jax finds the rest by itself.

    Attributes:
      distributed: start `jax.distributed`.
      coordinator: "host:port" of process 0; None: found by jax.
      num_processes: how many processes there are; None: found by jax.
      process_id: which of them this is; None: found by jax.
    """

    distributed: bool = False
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


def initialize(config: ProcessConfig) -> None:
    """Joins the other processes, when the config asks for it; must run before anything touches a device.

    Raises:
      ValueError: some of coordinator, num_processes and process_id are given, but `distributed` is off or they are
        not all given.
    """
    given = {
        name: value
        for name, value in (
            ("coordinator", config.coordinator),
            ("num_processes", config.num_processes),
            ("process_id", config.process_id),
        )
        if value is not None
    }
    if not config.distributed:
        if given:
            raise ValueError(f"{', '.join(given)} given, but distributed is False; set distributed to True.")
        return
    if given and len(given) < 3:
        raise ValueError(
            f"coordinator, num_processes and process_id belong together; got only {', '.join(given)}. Give all three, "
            "or none where jax can find them itself (TPU pods, Slurm, Kubernetes)."
        )
    if jax.distributed.is_initialized():
        return
    # Collectives between CPU processes; must be chosen before the backend exists and is ignored by TPU and GPU.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(config.coordinator, config.num_processes, config.process_id)
