"""Device meshes, and the sharding of every array."""

from atlasjax.distributed.mesh import MeshConfig, make_mesh
from atlasjax.distributed.processes import ProcessConfig, initialize
from atlasjax.distributed.sharding import (
    LOGICAL_AXIS_RULES,
    batch_sharding,
    cache_shardings,
    global_batch,
    optimizer_shardings,
    parameter_shardings,
    partition_spec,
    replicated,
)

__all__ = [
    "LOGICAL_AXIS_RULES",
    "MeshConfig",
    "ProcessConfig",
    "batch_sharding",
    "cache_shardings",
    "global_batch",
    "initialize",
    "make_mesh",
    "optimizer_shardings",
    "parameter_shardings",
    "partition_spec",
    "replicated",
]
