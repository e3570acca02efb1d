"""How mixers call `memory.scan` for whole sequences: by which backend, over which devices, and with which sizes."""

from typing import NamedTuple, TypedDict

import jax

from atlasjax import memory
from atlasjax.memory.backends import needs_partition
from atlasjax.nn.partition import mesh_partition, time_partition


class MemoryCall(NamedTuple):
    """The rule and the sizes of a mixer's `memory.scan`.

    A mixer with the attribute `memory_call` follows `MemoryConfig.implementation`, and `atlasjax tune` measures its kernels.
    """

    rule: memory.Rule
    num_heads: int
    key_dim: int
    value_dim: int


class Execution(TypedDict):
    """Arguments of `memory.scan`."""

    implementation: str | None
    partition: memory.Partition | None


def execution(implementation: str | None, rule: memory.Rule, q: jax.Array, v: jax.Array) -> Execution:
    """The arguments of `memory.scan` that choose the implementation, which may have to be split by hand over a mesh.

    Args:
      implementation: `MemoryConfig.implementation`.
      rule: the rule.
      q, v: as in `memory.scan`. Of q only the size of a query and the dtype are used, of v only the shape.
    """
    split = mesh_partition if needs_partition(implementation, rule, q, v) else time_partition
    return {"implementation": implementation, "partition": split(v.shape[0], v.shape[2], v.shape[1])}
