"""How a model's kernels and tables are split over the mesh that is current while they are traced."""

import math

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from atlasjax import memory
from atlasjax.mesh_axes import BATCH_AXES, HEAD_AXES, TIME_AXES

NOT_DIVIDED = "it has no form for a part of a sequence"  # of mixers without a reason of their own


def mesh_partition(batch: int, heads: int, time: int) -> memory.Partition | None:
    """The partition for the current mesh (`jax.set_mesh`, a training step). None without a mesh or inside a `shard_map`.

    Axes with other names, and axes that do not divide `batch`, `heads` or `time`, split nothing: their devices make the same call.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or any(kind == AxisType.Manual for kind in mesh.axis_types):
        return None
    sizes = ((BATCH_AXES, batch), (HEAD_AXES, heads), (TIME_AXES, time))
    return memory.Partition(mesh, *(dividing(mesh, names, size) for names, size in sizes))


def time_partition(batch: int, heads: int, time: int) -> memory.Partition | None:
    """`mesh_partition` where it divides the tokens, which XLA cannot do for a recurrence. Otherwise None."""
    partition = mesh_partition(batch, heads, time)
    return partition if partition is not None and partition.time else None


def time_parts(time: int) -> int:
    """Number of devices over which the current mesh divides `time` tokens of a sequence."""
    partition = mesh_partition(1, 1, time)
    return 1 if partition is None else math.prod(partition.mesh.shape[axis] for axis in partition.time)


def dividing(mesh: Mesh | AbstractMesh, names: tuple[str, ...], size: int) -> tuple[str, ...]:
    """The names that are axes of the mesh and whose sizes together divide `size`."""
    chosen = []
    for name in names:
        if name in mesh.axis_names and size % mesh.shape[name] == 0:
            chosen.append(name)
            size //= mesh.shape[name]
    return tuple(chosen)


def read_table(table: jax.Array, over: tuple[str, ...] = ()) -> jax.Array:
    """Constrains the sharding of a table [entries, width] before a lookup: the width is gathered, the entries stay split.

    In a training step the stored width is split over an axis that also splits the batch. Without this constraint the compiler
    sends the tokens of all devices to each device's columns, and in the backward pass every device gets the whole cotangent.

    Args:
      table: [entries, width], any dtype.
      over: mesh axes that split the entries. Axes that the current mesh does not have, or that do not divide the entries, split
        nothing.
    """
    return _split(table, over)


def split_tokens(x: jax.Array) -> jax.Array:
    """Constrains the sharding of activations [batch, time, …]: only batch and time are split, over all their axes of the mesh.

    Applied at the model's input, this determines the sharding of all activations. Otherwise the compiler may split the width of
    the residual stream over the axis that splits the width of the parameters, and then every device computes the memories of all
    sequences of that axis.
    """
    return _split(x, BATCH_AXES, TIME_AXES)


def _split(x: jax.Array, *over: tuple[str, ...]) -> jax.Array:
    """x with its first axes split over those axes of the current mesh, and no other axis split. x itself without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return x
    spec = (dividing(mesh, names, size) or None for names, size in zip(over, x.shape))
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))
