"""How a model's kernels and tables are split over the mesh that is current while they are traced."""

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from atlasjax import memory
from atlasjax.mesh_axes import BATCH_AXES, HEAD_AXES


def mesh_partition(batch: int, heads: int) -> memory.Partition | None:
    """The partition for the current mesh (`jax.set_mesh`, a training step). None without a mesh or inside a `shard_map`.

    Axes with other names, and axes that do not divide `batch` or `heads`, split nothing: their devices make the same call.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or any(kind == AxisType.Manual for kind in mesh.axis_types):
        return None
    return memory.Partition(mesh, _dividing(mesh, BATCH_AXES, batch), _dividing(mesh, HEAD_AXES, heads))


def _dividing(mesh: AbstractMesh, names: tuple[str, ...], size: int) -> tuple[str, ...]:
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
    return _split_first(table, over)


def split_batch(x: jax.Array) -> jax.Array:
    """Constrains the sharding of activations [batch, …]: only the batch is split, over all batch axes of the mesh.

    Applied at the model's input, this determines the sharding of all activations. Otherwise the compiler may split the width of
    the residual stream over the axis that splits the width of the parameters, and then every device computes the memories of all
    sequences of that axis.
    """
    return _split_first(x, BATCH_AXES)


def _split_first(x: jax.Array, over: tuple[str, ...]) -> jax.Array:
    """x with its first axis split over the axes `over` of the current mesh, and no other axis split. x itself without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(_dividing(mesh, over, x.shape[0]) or None))
