"""TNT's hierarchical memory in a config: the options of `memory.HierarchicalRule`."""

import dataclasses

from atlasjax import memory


@dataclasses.dataclass(frozen=True)
class HierarchyConfig:
    """A global and several local memories (TNT, arXiv 2511.07343) with the rule of a `MemoryConfig`.

    The fields are those of `memory.HierarchicalRule`.

    Attributes:
      global_chunk: C_G ≥ 1, tokens in a chunk of the global memory.
      local_chunks: C_L of each local memory, at most C_G.
      restart: S_L, tokens after which local memories restart; a multiple of each of local_chunks.
      projected: whether local queries are projected on the keys seen since the restart.
      fine_chunks: C_L' of each local memory in the second stage of training, in which a run with `init_from` may have them. None:
        local_chunks.

    Raises (by `around`, where the rule is known):
      ValueError: as `memory.HierarchicalRule`.
    """

    global_chunk: int = 2048
    local_chunks: tuple[int, ...] = (8,)
    restart: int = 2048
    projected: bool = True
    fine_chunks: tuple[int, ...] | None = None

    def around(self, rule: memory.Rule) -> memory.HierarchicalRule:
        """The hierarchical memory of `rule`."""
        return memory.HierarchicalRule(
            rule, self.global_chunk, self.local_chunks, self.restart, self.projected, self.fine_chunks
        )
