"""How a layer's kernels are split over the mesh of the program that they are traced in."""

import jax
from jax.sharding import AxisType

from atlasjax import memory

BATCH_AXES = ("data", "fsdp")
HEAD_AXES = ("tensor",)


def mesh_partition(batch: int, heads: int) -> memory.Partition | None:
    """The partition of the mesh around this trace (`jax.set_mesh`, a training step); None without one or inside a `shard_map`.

    Axes of other names, and those that do not divide `batch` or `heads`, split nothing: their devices see the same call.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or any(kind == AxisType.Manual for kind in mesh.axis_types):
        return None

    def dividing(names: tuple[str, ...], size: int) -> tuple[str, ...]:
        chosen = []
        for name in names:
            if name in mesh.axis_names and size % mesh.shape[name] == 0:
                chosen.append(name)
                size //= mesh.shape[name]
        return tuple(chosen)

    return memory.Partition(mesh, dividing(BATCH_AXES, batch), dividing(HEAD_AXES, heads))
