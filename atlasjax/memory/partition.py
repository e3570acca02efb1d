"""Explicit partitioning of a call over the devices of a mesh, each with its own batch elements and heads, which are independent.

XLA partitions the code that it compiles, but not kernels, which are opaque to it.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from atlasjax.memory.gates import Gates
from atlasjax.memory.rule import Rule


@dataclasses.dataclass(frozen=True)
class Partition:
    """The mesh axes that split the batch and the heads. Hashable, static under jit.

    Attributes:
      mesh: the mesh of the arrays. The call is replicated over axes that are not named.
      batch: mesh axes over which the batch is split.
      heads: mesh axes over which the heads are split.

    Raises:
      ValueError: an axis is not in the mesh, or is named twice.
    """

    mesh: Mesh | AbstractMesh
    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        named = (*self.batch, *self.heads)
        unknown = sorted(set(named) - set(self.mesh.axis_names))
        if unknown or len(set(named)) < len(named):
            raise ValueError(
                f"Partition: batch={self.batch} and heads={self.heads} should name different axes of the mesh, which has "
                f"{tuple(self.mesh.axis_names)}."
            )

    def check(self, batch: int, heads: int) -> None:
        """Raises ValueError if the batch or the number of heads is not divisible by the size of its axes."""
        for name, size, axes in (("batch", batch, self.batch), ("heads", heads, self.heads)):
            parts = math.prod(self.mesh.shape[axis] for axis in axes)
            if size % parts:
                raise ValueError(
                    f"Partition: {name}={size} must be divisible by {parts}, the size of the mesh axes {axes}."
                )


def partitioned(partition: Partition, rule: Rule, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `run(params, state, q, k, v, gates, segment_ids)` → (y, state): each device runs its own batch elements and heads."""
    batch, heads = partition.batch or None, partition.heads or None
    tokens = PartitionSpec(batch, None, heads)
    of_state = lambda x: PartitionSpec(batch) if x.ndim == 1 else PartitionSpec(batch, heads)

    def call(params: Any, state: Any, q: jax.Array, k: jax.Array, v: jax.Array, gates: Gates, ids: Any) -> Any:
        partition.check(q.shape[0], q.shape[2])
        arguments = (params, state, q, k, v, gates, ids)
        specs = (
            jax.tree.map(lambda _: PartitionSpec(heads), params),
            jax.tree.map(of_state, state),
            tokens, tokens, tokens, jax.tree.map(lambda _: tokens, gates), None if ids is None else PartitionSpec(batch),
        )  # fmt: skip
        after = jax.eval_shape(
            lambda params: rule.init_state(params, batch_size=q.shape[0], max_length=q.shape[1]), params
        )
        outputs = (tokens, jax.tree.map(of_state, after))
        return jax.shard_map(run, mesh=partition.mesh, in_specs=specs, out_specs=outputs, check_vma=False)(*arguments)

    return call
