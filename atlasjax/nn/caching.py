"""Memory Caching in a config: the options of `memory.CachedRule`."""

import dataclasses
from typing import Literal

from atlasjax import memory


@dataclasses.dataclass(frozen=True)
class CachingConfig:
    """Memory Caching (arXiv 2602.24281) around the rule of a `MemoryConfig`. The fields are those of `memory.CachedRule`.

    Attributes:
      aggregation: how the reads of cached memories are combined: "residual", "grm", "soup" or "ssc".
      segment_size: C ≥ 1, number of tokens after which a memory is cached. A multiple of the rule's chunk size.
      top_k: number of cached memories that "ssc" reads, ≥ 1.
      gate: "softmax", "sigmoid" or "raw".
      connector: u_t is a projection of the layer's input ("input") or the query ("query").
      pooling: "mean" or "sum" of a segment's keys.
      start: the memory at the start of a segment: "fresh", or "carry" over from the segment before.
      capacity: maximum number of cached memories, ≥ 1, which bounds the state in decoding. None: unlimited.
      stop_gradient: whether to stop gradients into cached memories.

    Raises:
      ValueError: raised by `MemoryConfig`, which knows the rule. See `memory.CachedRule`.
    """

    aggregation: Literal["residual", "grm", "soup", "ssc"] = "grm"
    segment_size: int = 256
    top_k: int = 2
    gate: Literal["softmax", "sigmoid", "raw"] = "softmax"
    connector: Literal["input", "query"] = "input"
    pooling: Literal["mean", "sum"] = "mean"
    start: Literal["fresh", "carry"] = "fresh"
    capacity: int | None = None
    stop_gradient: bool = False

    def around(self, rule: memory.Rule) -> memory.CachedRule:
        """`rule` with Memory Caching.

        Raises:
          ValueError: a field is out of range, or "soup" or "carry" is used with a softmax memory.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return memory.CachedRule(rule, **fields)  # type: ignore[arg-type]
