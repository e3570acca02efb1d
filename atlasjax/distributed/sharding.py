"""Shardings of parameters, optimizer state, batches and memory states, from logical axis names.

Every parameter names its axes (`logical_axes` metadata of `nnx.Param`). `LOGICAL_AXIS_RULES` maps each name to the mesh axis, or
axes, over which it is split. A mesh axis that does not divide a dimension is skipped for that dimension and reported.
"""

import functools
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from atlasjax.check import plain_array
from atlasjax.mesh_axes import BATCH_AXES, EXPERT_AXES, OPTIONAL_AXES, TIME_AXES
from atlasjax.names import lookup

# Parameters are split twice: over `tensor` along an axis that the computation treats independently (heads, MLP width,
# vocabulary), and along the model width, which is gathered layer by layer, over `fsdp`, `sequence` and `expert`: devices with other
# tokens need the same parameters as devices with other sequences. Experts are divided over `expert`, and the tokens go to them.
# The memory's own axes are small and stay unsplit: splitting them would put a collective into every chunk of the scan over time.
AxisRule = str | tuple[str, ...] | None
LOGICAL_AXIS_RULES: dict[str, AxisRule] = {
    "layers": None,
    "vocab": "tensor",
    "embed": ("fsdp", *TIME_AXES, *EXPERT_AXES),
    "mlp": "tensor",
    "experts": EXPERT_AXES,
    "heads": "tensor",
    "conv": None,
    "rank": None,
    "memory_in": None,
    "memory_out": None,
}


def partition_spec(
    logical_axes: Sequence[str | None],
    shape: Sequence[int],
    mesh: Mesh,
    rules: Mapping[str, AxisRule] = LOGICAL_AXIS_RULES,
) -> tuple[PartitionSpec, list[str]]:
    """Returns the partition spec of one array, and a line of text for each skipped mesh axis.

    Args:
      logical_axes: for each dimension, a name in `rules` or None.
      shape: the array's shape.
      mesh: the mesh with axes data, fsdp, tensor and, if it is split, sequence.
      rules: logical axis → mesh axis, several of them, or None (not split). Those that the mesh lacks are left out.

    Raises:
      ValueError: the number of names is not the number of dimensions, or a name is not in `rules`.
    """
    if len(logical_axes) != len(shape):
        raise ValueError(
            f"logical_axes {tuple(logical_axes)} name {len(logical_axes)} axes of an array of shape {shape}."
        )
    spec: list[str | tuple[str, ...] | None] = []
    used: set[str] = set()
    skipped = []
    for name, size in zip(logical_axes, shape):
        rule = None if name is None else lookup("logical axis", name, rules)
        mine: list[str] = []
        for axis in (rule,) if isinstance(rule, str) else rule or ():
            # An array can use a mesh axis only once; the first dimension that asks for it gets it.
            if mesh.shape.get(axis, 1) == 1 or axis in used:
                continue
            parts = math.prod(mesh.shape[part] for part in mine)
            if size % (parts * mesh.shape[axis]):
                over = "" if parts == 1 else f", after {' and '.join(mine)} of {parts}"
                skipped.append(
                    f"axis {name!r} of size {size} is not divisible by {axis}={mesh.shape[axis]}{over}: not split"
                )
            else:
                mine.append(axis)
        used |= set(mine)
        spec.append(tuple(mine) if len(mine) > 1 else mine[0] if mine else None)
    return PartitionSpec(*spec), skipped


def parameter_shardings(
    logical_axes: PyTree, shapes: PyTree, mesh: Mesh, rules: Mapping[str, AxisRule] = LOGICAL_AXIS_RULES
) -> tuple[PyTree, list[str]]:
    """Shardings of a model's parameters.

    Args:
      logical_axes: tree of the parameters' axis names, one PartitionSpec per parameter (`nn.logical_axes`, as a nested dict).
      shapes: the same tree, of arrays or ShapeDtypeStructs.
      mesh: the mesh.
      rules: see `partition_spec`.

    Returns:
      The same tree, of NamedSharding, and one line of text per skipped mesh axis.

    Raises:
      ValueError: names are unknown or do not match their parameter.
    """
    skipped_lines: list[str] = []

    def sharding(path: jax.tree_util.KeyPath, axes: PartitionSpec, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        try:
            spec, skipped = partition_spec(tuple(axes), leaf.shape, mesh, rules)
        except ValueError as error:
            raise ValueError(f"parameter {name}: {error}") from None
        skipped_lines.extend(f"{name}: {line}" for line in skipped)
        return NamedSharding(mesh, spec)

    is_axes = lambda node: isinstance(node, PartitionSpec)
    return jax.tree_util.tree_map_with_path(sharding, logical_axes, shapes, is_leaf=is_axes), skipped_lines


def optimizer_shardings(optimizer_state: PyTree, shapes: PyTree, param_shardings: PyTree, mesh: Mesh) -> PyTree:
    """Shardings of the optimizer state: moments like their parameters, everything else replicated.

    An array belongs to a parameter if its path ends with the parameter's path. It is split like the parameter if it has the same
    shape. Step counts and statistics of another shape, such as Adafactor's rows and columns, are small.

    Args:
      optimizer_state: the (abstract) state, `jax.eval_shape(optimizer.init, params)`.
      shapes: the parameters that it belongs to, as arrays or ShapeDtypeStructs.
      param_shardings: the same tree, of their shardings.
      mesh: the mesh.
    """
    shapes_of = {path: leaf.shape for path, leaf in jax.tree.leaves_with_path(shapes)}
    param_sharding = dict(zip(shapes_of, jax.tree.leaves(param_shardings), strict=True))

    def place(path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        mine = parameter_of(path, leaf, shapes_of)
        return replicated(mesh) if mine is None else param_sharding[mine]

    return jax.tree_util.tree_map_with_path(place, optimizer_state)


def parameter_of(
    path: jax.tree_util.KeyPath,
    leaf: jax.Array | jax.ShapeDtypeStruct,
    shapes: Mapping[jax.tree_util.KeyPath, tuple[int, ...]],
) -> jax.tree_util.KeyPath | None:
    """The path of the parameter that an array of the optimizer state belongs to, with which its own ends. None: there is none.

    Args:
      path, leaf: the array in the optimizer state, which has the shape of its parameter.
      shapes: the parameters' shapes by their paths.
    """
    return next((path[i:] for i in range(len(path) + 1) if shapes.get(path[i:]) == leaf.shape), None)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that is replicated on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of every array of a batch, [batch, time]: the rows over data, fsdp and expert, the tokens over sequence."""
    time = tuple(axis for axis in TIME_AXES if axis in mesh.shape)
    return NamedSharding(mesh, PartitionSpec(_batch_axes(mesh), time) if time else PartitionSpec(_batch_axes(mesh)))


def _batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes that split the batch, without those that the mesh may lack and does."""
    return tuple(axis for axis in BATCH_AXES if axis in mesh.shape or axis not in OPTIONAL_AXES)


def batch_shards(mesh: Mesh) -> int:
    """Number of parts into which the batch axis is split."""
    return math.prod(mesh.shape[axis] for axis in _batch_axes(mesh))


def cache_shardings(cache: PyTree, mesh: Mesh) -> PyTree:
    """Shardings of a model's streaming cache: batch over data, fsdp and expert, heads of memories, keys and values over tensor.

    A state class says which axis of its arrays is heads by an attribute `heads_axis`: 1 for [batch, heads, …]. It holds for all
    arrays in it that have this axis. What no state speaks for, such as the last inputs of a convolution, is not split over tensor.

    Args:
      cache: the (abstract) cache of `LanguageModel.init_cache`: arrays [layers, batch, ...].
      mesh: the mesh. An axis that does not divide a dimension is skipped for that dimension.
    """

    def spec(leaf: jax.ShapeDtypeStruct, heads: int | None) -> NamedSharding:
        axes: list[str | tuple[str, ...] | None] = [None] * leaf.ndim
        if leaf.ndim > 1 and leaf.shape[1] % batch_shards(mesh) == 0:
            axes[1] = _batch_axes(mesh)
        if heads is not None and leaf.ndim > heads and leaf.shape[heads] % mesh.shape["tensor"] == 0:
            axes[heads] = "tensor"
        return NamedSharding(mesh, PartitionSpec(*axes))

    def node_shardings(node: PyTree) -> PyTree:
        axis = getattr(node, "heads_axis", None)
        return jax.tree.map(lambda leaf: spec(leaf, None if axis is None else axis + 1), node)  # +1: the layers

    return jax.tree.map(node_shardings, cache, is_leaf=lambda node: hasattr(node, "heads_axis"))


def row_reader(mesh: Mesh) -> tuple[int, int]:
    """Which part of a batch's rows this process reads, and the number of parts.

    Processes whose devices hold the same rows, because the axis `sequence` or `tensor` crosses them, read the same part.

    Raises:
      ValueError: the devices of two processes hold some rows in common, and others not.
    """
    parts = sorted(set(_held_rows(mesh).values()))
    if sum(map(len, parts)) != batch_shards(mesh):
        raise ValueError(
            f"mesh {dict(mesh.shape)}: the devices of two processes have some rows of the batch in common and others not. Choose "
            "data × fsdp so that it is a multiple of the number of processes, or divides it."
        )
    return parts.index(_held_rows(mesh)[jax.process_index()]), len(parts)


@functools.lru_cache
def _held_rows(mesh: Mesh) -> dict[int, tuple[int, ...]]:
    """Process → which of the `batch_shards` its devices hold."""
    held: dict[int, set[int]] = {}
    for shard, devices in enumerate(mesh.devices.reshape(batch_shards(mesh), -1)):
        for device in devices:
            held.setdefault(device.process_index, set()).add(shard)
    return {process: tuple(sorted(shards)) for process, shards in held.items()}


def global_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Assembles the global arrays of a batch from the rows of each process.

    Args:
      batch: host arrays [batch / parts, time], the rows read by this process (`row_reader`).
      mesh: the mesh.

    Returns:
      The arrays [batch, time], sharded by `batch_sharding`.
    """
    plain_array("global_batch", "batch", batch)
    sharding, (_, parts) = batch_sharding(mesh), row_reader(mesh)
    held = _held_rows(mesh)[jax.process_index()]

    def assembled(array: np.ndarray) -> jax.Array:
        size = len(array) // len(held)  # rows of a shard
        whole = (parts * len(array), *array.shape[1:])

        def of_device(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            start, stop, _ = index[0].indices(whole[0])
            first = held.index(start // size) * size
            return array[(slice(first, first + stop - start), *index[1:])]

        return jax.make_array_from_callback(whole, sharding, of_device)

    return {name: assembled(array) for name, array in batch.items()}
