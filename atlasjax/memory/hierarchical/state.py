"""The arrays of a hierarchical memory: learned parameters, and the recurrent state."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int, PyTree


class HierarchicalParams(NamedTuple):
    """Learned parameters of every memory, each a pytree of the inner rule, in which the first axis of every leaf is heads.

    Attributes:
      global_memory: those of the global memory.
      local_memories: those of each local memory; its M_0 is the paper's W_init, from which it restarts.
    """

    global_memory: PyTree
    local_memories: tuple[PyTree, ...]


class HierarchicalState(NamedTuple):
    """The memories, and where the local ones are. float32 (float64 for float64 inputs) and int32, with the batch axis first.

    Local memories restart when the first token of the next shard is read. Until then they are those of the last token.

    Attributes:
      global_memory: state of the inner rule with chunks of `global_chunk` tokens.
      local_memories: states of the inner rule, one for each of `local_chunks`.
      projection: P = Σ k kᵀ/‖k‖² over the tokens since the restart, [batch, heads, key_dim, key_dim]. One for all local memories,
        because they restart together. None if the rule is not `projected`.
      position: number of tokens read since the restart, in [0, restart], [batch].
      segment: segment id of the last token, [batch], −1 if no token had one.
    """

    global_memory: PyTree
    local_memories: tuple[PyTree, ...]
    projection: Float[Array, "batch heads key_dim key_dim"] | None
    position: Int[Array, " batch"]
    segment: Int[Array, " batch"]

    @property
    def heads_axis(self) -> int:  # of its arrays, for `distributed.cache_shardings`
        return 1
