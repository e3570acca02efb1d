"""How a model's kernels and tables are split over the mesh of the program that they are traced in."""

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from atlasjax import memory
from atlasjax.mesh_axes import BATCH_AXES, HEAD_AXES


def mesh_partition(batch: int, heads: int) -> memory.Partition | None:
    """The partition of the mesh around this trace (`jax.set_mesh`, a training step); None without one or inside a `shard_map`.

    Axes of other names, and those that do not divide `batch` or `heads`, split nothing: their devices see the same call.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or any(kind == AxisType.Manual for kind in mesh.axis_types):
        return None
    return memory.Partition(mesh, _dividing(mesh, BATCH_AXES, batch), _dividing(mesh, HEAD_AXES, heads))


def _dividing(mesh: AbstractMesh, names: tuple[str, ...], size: int) -> tuple[str, ...]:
    """Of the names those that are axes of the mesh and together divide a size."""
    chosen = []
    for name in names:
        if name in mesh.axis_names and size % mesh.shape[name] == 0:
            chosen.append(name)
            size //= mesh.shape[name]
    return tuple(chosen)


def read_table(table: jax.Array, over: tuple[str, ...] = ()) -> jax.Array:
    """A table [entries, width] on the way to being read at some entries: its width whole, its entries split as they are stored.

    In a training step the width is stored split over an axis that also splits the batch. Without this the compiler takes the
    tokens of all devices to the columns that a device holds, and in the backward pass every device gets the whole cotangent.

    Args:
      table: of any dtype.
      over: mesh axes that split the entries; those that the mesh around this trace has not, or that do not divide the entries,
        split nothing.
    """
    return _split_first(table, over)


def split_batch(x: jax.Array) -> jax.Array:
    """Activations [batch, …], their batch split over all axes that split a batch, and nothing else.

    Where the model begins this decides for all of it. Left to itself the compiler may split the residual stream's width over the
    axis that splits the parameters' width, and then every device computes the memories of all sequences of that axis.
    """
    return _split_first(x, BATCH_AXES)


def _split_first(x: jax.Array, over: tuple[str, ...]) -> jax.Array:
    """x with its first axis split over those of the mesh around this trace, and no other; x itself without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(_dividing(mesh, over, x.shape[0]) or None))
