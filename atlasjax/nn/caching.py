"""How a memory layer caches the memories of earlier segments: the fields of `memory.CachedRule` that a config chooses."""

import dataclasses
from typing import Literal

from atlasjax import memory


@dataclasses.dataclass(frozen=True)
class CachingConfig:
    """Memory Caching (arXiv 2602.24281) around the rule of a `MemoryConfig`; the fields are those of `memory.CachedRule`.

    Attributes:
      aggregation: how cached memories are read together: "residual", "grm", "soup" or "ssc".
      segment_size: C ≥ 1 tokens after which a memory is cached; a multiple of the rule's chunk size.
      top_k: memories that "ssc" reads, ≥ 1.
      gate: "softmax", "sigmoid" or "raw".
      connector: u_t is a projection of the layer's input ("input") or the query ("query").
      pooling: "mean" or "sum" of a segment's keys.
      start: "fresh" segments, or "carry" the memory on.
      capacity: most memories kept, ≥ 1, so that decoding has a bounded state; None keeps all.
      stop_gradient: no gradient into cached memories.

    Raises:
      ValueError: by `MemoryConfig`, which knows the rule: see `memory.CachedRule`.
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
        """The rule with its memories cached.

        Raises:
          ValueError: a field out of its range, or "soup" or "carry" of a softmax memory.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return memory.CachedRule(rule, **fields)  # type: ignore[arg-type]
