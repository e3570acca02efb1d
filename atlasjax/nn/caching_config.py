"""Memory Caching in a config: the options of `memory.CachedRule` and `memory.LogLinearRule`."""

import dataclasses
from typing import Literal

from atlasjax import check, memory


@dataclasses.dataclass(frozen=True)
class CachingConfig:
    """Memory Caching (arXiv 2602.24281) around the rule of a `MemoryConfig` or the recurrence of a mixer (`ModelConfig.caching`).

    The fields are those of `memory.CachedRule`, or with "log_linear" of `memory.LogLinearRule`, which takes segment_size and
    levels only.

    Attributes:
      aggregation: how the reads of cached memories are combined: "residual", "grm", "soup" or "ssc". "log_linear": one memory for
        each level of a Fenwick tree instead of one for each segment.
      segment_size: C ≥ 1, number of tokens after which a memory is cached. A multiple of the rule's chunk size.
      top_k: number of cached memories that "ssc" reads, ≥ 1.
      gate: "softmax", "sigmoid", "raw" or "ones".
      connector: u_t is a projection of the layer's input ("input") or the query ("query"). "age": scores that are a projection of
        the input alone, one for each age of a memory, with a capacity.
      pooling: "mean" or "sum" of a segment's keys.
      start: the memory at the start of a segment: "fresh", or "carry" over from the segment before.
      capacity: maximum number of cached memories, ≥ 1, which bounds the state in decoding. None: unlimited.
      stop_gradient: whether to stop gradients into cached memories.
      blended: whether each head has a learned λ, initially 0, and reads (1 − λ) M_t(q) + λ y instead of y. With start="carry" a
        trained model to which it is added starts with the same outputs. For `ModelConfig.caching` only.
      levels: maximum number of levels of "log_linear", in 1…30.

    Raises:
      ValueError: `blended` is not a bool, or a field that the aggregation does not take is not at its default. Everything
        else is checked where the rule is known. See `memory.CachedRule`.
    """

    aggregation: Literal["residual", "grm", "soup", "ssc", "log_linear"] = "grm"
    segment_size: int = 256
    top_k: int = 2
    gate: Literal["softmax", "sigmoid", "raw", "ones"] = "softmax"
    connector: Literal["input", "query", "age"] = "input"
    pooling: Literal["mean", "sum"] = "mean"
    start: Literal["fresh", "carry"] = "fresh"
    capacity: int | None = None
    stop_gradient: bool = False
    blended: bool = False
    levels: int = 15

    def __post_init__(self) -> None:
        check.boolean("CachingConfig", "blended", self.blended)
        kept = {"aggregation", "segment_size"} | ({"levels"} if self.aggregation == "log_linear" else _CACHED)
        for field in dataclasses.fields(self):
            if field.name not in kept and getattr(self, field.name) != field.default:
                raise ValueError(
                    f"CachingConfig: {field.name} is {getattr(self, field.name)!r}, which aggregation={self.aggregation!r} does "
                    f"not take; must be {field.default!r}."
                )

    @classmethod
    def added(
        cls, aggregation: Literal["residual", "grm", "soup", "ssc"] = "grm", segment_size: int = 256
    ) -> "CachingConfig":
        """Caching for a trained model: memories carry over as before, and the weight of the cached ones starts at 0."""
        return cls(aggregation, segment_size, start="carry", blended=True)

    def around(self, rule: memory.Rule) -> memory.CachedRule | memory.LogLinearRule:
        """`rule` with Memory Caching.

        Raises:
          ValueError: a field is out of range, or "soup" or "carry" is used with a softmax memory.
        """
        if self.aggregation == "log_linear":
            return memory.LogLinearRule(rule, self.segment_size, self.levels)
        return memory.CachedRule(rule, **{name: getattr(self, name) for name in _CACHED})


# The fields of `memory.CachedRule`.
_CACHED = {field.name for field in dataclasses.fields(memory.CachedRule)} - {"rule"}
