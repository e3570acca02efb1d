"""The device mesh: data, fsdp, tensor and, where they are used, expert and sequence."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from atlasjax.mesh_axes import MESH_AXES, OPTIONAL_AXES


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Number of devices on each mesh axis. -1 on one axis means all remaining devices.

    Attributes:
      data: number of copies of the parameters; each processes its own part of the batch. 0 is for models too small for several
        accelerators: one device, and in training on a CPU a device for each core (`train.cores`).
      fsdp: devices over which parameters, optimizer state and the batch are split (fully sharded data parallelism).
      tensor: devices over which heads, MLP width and vocabulary are split.
      sequence: devices over which the tokens of each sequence are split, for mixers that allow it (`nn.check_divided`), and with
        them parameters and optimizer state.
      expert: devices over which experts are split (expert parallelism) and, as over fsdp, the batch and the other parameters. It
        should divide the number of experts.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1
    expert: int = 1

    def resolve(self, num_devices: int, platform: str | None = None) -> dict[str, int]:
        """Returns axis → size in the order of the mesh, with -1 filled in, and 1 for a `data` of 0. Without `expert` or `sequence`
        where it is 1.

        Args:
          num_devices: how many devices there are.
          platform: what they are, "cpu" for example: an error then says how to get as many as are needed.

        Raises:
          ValueError: a size is neither positive nor -1 (nor 0 for `data`), more than one is -1, or they do not fit `num_devices`.
        """
        sizes = {axis: getattr(self, axis) for axis in MESH_AXES}
        sizes["data"] = 1 if self.data == 0 else self.data
        wrong = {axis: size for axis, size in sizes.items() if size != -1 and size < 1}
        if wrong:
            raise ValueError(f"mesh sizes must be positive, or -1 for all the remaining devices; got {wrong}.")
        free = [axis for axis, size in sizes.items() if size == -1]
        if len(free) > 1:
            raise ValueError(f"at most one mesh axis may be -1; got -1 for {' and '.join(free)}.")
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if free:
            if num_devices % fixed:
                raise ValueError(
                    f"mesh {sizes} needs a multiple of {fixed} devices; there are {num_devices}. Change mesh.{free[0]} "
                    f"or the other sizes.{_remedy(-(-num_devices // fixed) * fixed, platform)}"
                )
            sizes[free[0]] = num_devices // fixed
        elif fixed > num_devices:
            raise ValueError(f"mesh {sizes} needs {fixed} devices; there are {num_devices}.{_remedy(fixed, platform)}")
        return {axis: size for axis, size in sizes.items() if size > 1 or axis not in OPTIONAL_AXES}


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes the mesh over `devices` (default: all devices of all processes).

    A mesh smaller than the machine uses the first devices. With several processes it must use every device. Devices in several
    slices (TPU pods joined by the data-centre network) are ordered so that only one axis crosses that network: `data`, which
    communicates least, if its size is a multiple of the number of slices, otherwise `fsdp`.

    Raises:
      ValueError: the sizes do not fit the devices (see `MeshConfig.resolve`) or the slices.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = config.resolve(len(devices), devices[0].platform)
    needed = math.prod(shape.values())
    if needed < len(devices) and jax.process_count() > 1:
        raise ValueError(
            f"mesh {shape} uses {needed} of {len(devices)} devices; with several processes it must "
            "use all of them. Set one size to -1."
        )
    return Mesh(_arranged(shape, devices[:needed]), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def _remedy(needed: int, platform: str | None) -> str:
    """How to get so many devices: a sentence, empty where they are only planned for."""
    if platform is None:
        return ""
    if platform == "cpu" and jax.process_count() == 1:
        return f" XLA_FLAGS=--xla_force_host_platform_device_count={needed}, set before the start, makes {needed} of this CPU."
    return " Make a size smaller, or -1, which takes all that there are."


def num_slices(devices: Sequence[jax.Device]) -> int:
    """Number of slices that the devices are in: groups with a fast network of their own. 1 where a platform has none."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def crossing_axis(shape: Mapping[str, int], slices: int) -> str:
    """The axis of a mesh (axis → size) that crosses several slices. Raises ValueError if none can."""
    crossing = next((axis for axis in ("data", "fsdp") if shape[axis] % slices == 0), None)
    if crossing is None:
        raise ValueError(
            f"mesh.data is {shape['data']} and mesh.fsdp is {shape['fsdp']}; one of them must be a multiple of {slices}, the "
            "number of slices."
        )
    return crossing


def _arranged(shape: Mapping[str, int], devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices as an array of the mesh's shape, neighbours on the mesh being neighbours on the machine."""
    # A mesh axis may be shorter than every axis of the pod's torus (4 on 16 × 16), so a torus axis may have to be split.
    slices, sizes = num_slices(devices), tuple(shape.values())
    if slices == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    crossing = crossing_axis(shape, slices)
    across = tuple(slices if axis == crossing else 1 for axis in shape)
    inside = tuple(size // parts for size, parts in zip(sizes, across))
    return mesh_utils.create_hybrid_device_mesh(inside, across, devices, allow_split_physical_axes=True)
