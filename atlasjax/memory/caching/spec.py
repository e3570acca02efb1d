"""`CachedRule`: a memory rule whose memory is cached at the end of every segment and read together with the current one."""

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float, Int, PyTree

from atlasjax import check
from atlasjax.memory.caching.state import CachedState
from atlasjax.memory.rule import Params, Rule
from atlasjax.memory.wrapped import WrappedRule, check_lengths
from atlasjax.names import lookup

AGGREGATIONS = {
    "residual": "y = M_t(q) + Σ_i M^(i)(q) (MC §3.1)",
    "grm": "gated residual memory: y = γ_t M_t(q) + Σ_i γ_i M^(i)(q) (MC §3.1)",
    "soup": "memory soup: one memory with the parameters γ_t θ_t + Σ_i γ_i θ^(i) (MC §3.2)",
    "ssc": "sparse selective caching: grm over the top_k cached memories and M_t (MC §3.3)",
}
GATES = {
    "softmax": "over all memories read",
    "sigmoid": "of each score",
    "raw": "the score itself",
    "ones": "1 for every memory read; scores only select (an ablation, MC Fig. 5)",
}
CONNECTORS = {
    "input": "u_t is the gate `connector`",
    "query": "u_t = q_t",
    "age": "the scores themselves are the gate `connector`, one for each age of a memory (an ablation, MC Fig. 5)",
}
POOLINGS = {"mean": "p = mean of a segment's keys", "sum": "p = their sum"}
STARTS = {"fresh": "each segment starts from M_0", "carry": "each continues from the end of the previous one"}


@dataclasses.dataclass(frozen=True)
class CachedSpec(WrappedRule[Params, CachedState]):
    """The choices of a `CachedRule`, and what follows from them. `rule` runs it."""

    has_connector: ClassVar[bool] = True
    segments_continue: ClassVar[bool] = False
    read_gates: ClassVar[tuple[str, ...]] = ("connector", "blend")

    rule: Rule[Params, PyTree]
    aggregation: str = "grm"
    segment_size: int = 256
    top_k: int = 2
    gate: str = "softmax"
    connector: str = "input"
    pooling: str = "mean"
    start: str = "fresh"
    capacity: int | None = None
    stop_gradient: bool = False
    blended: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.rule, Rule) or not self.rule.can_be_cached:
            raise ValueError(
                f"CachedRule: rule must be a MemoryRule or a SoftmaxRule, got {type(self.rule).__name__}. (Or a memory.Rule of "
                "your own with cached_weights and read_cached.)"
            )
        check_lengths(self.rule, "CachedRule")
        tables = {
            "aggregation": AGGREGATIONS, "gate": GATES, "connector": CONNECTORS, "pooling": POOLINGS, "start": STARTS,
        }  # fmt: skip
        for name, table in tables.items():
            lookup(name, getattr(self, name), table)
        for name in ("segment_size", "top_k", "capacity"):
            value = getattr(self, name)
            if name != "capacity" or value is not None:
                check.integer("CachedRule", name, value)
        if not self.rule.has_constant_gradient and self.segment_size % self.rule.chunk_size:
            raise ValueError(
                f"CachedRule: segment_size={self.segment_size} must be a multiple of the rule's "
                f"chunk_size={self.rule.chunk_size}."
            )
        if self.connector == "age" and self.capacity is None:
            raise ValueError(
                'CachedRule: connector="age" has a score for each of capacity memories; capacity is None and must be a number.'
            )
        if self.aggregation == "ssc" and self.capacity is not None and self.top_k > self.capacity:
            raise ValueError(f"CachedRule: top_k={self.top_k} must be at most capacity={self.capacity}.")
        for choice in (f'start="{self.start}"', f'aggregation="{self.aggregation}"'):
            if choice in self.rule.caching_limits:
                raise ValueError(f"CachedRule: {choice} {self.rule.caching_limits[choice]}")
        check.boolean("CachedRule", "stop_gradient", self.stop_gradient)
        check.boolean("CachedRule", "blended", self.blended)

    @property
    def mixes_weights(self) -> bool:
        """Whether reads need mixed layers. A soup of matrices does not: it is a sum of reads, like "grm"."""
        return self.aggregation == "soup" and not self.rule.reads_are_linear

    @property
    def has_scores(self) -> bool:
        """Whether gates depend on scores, or select by them."""
        return self.aggregation == "ssc" or (self.aggregation != "residual" and self.gate != "ones")

    def connector_channels(self, key_dim: int) -> int | None:
        """Channels of the gate `connector`; None if the rule has no such gate."""
        if not self.has_scores or self.connector == "query":
            return None
        return key_dim if self.capacity is None or self.connector == "input" else 1 + self.capacity

    @property
    def undivided(self) -> str | None:
        if self.start == "fresh":
            return None
        return f'its segments continue from each other (start="{self.start}"); with start="fresh" they can'

    @property
    def part_multiple(self) -> int:
        return self.segment_size

    @property
    def undivided_documents(self) -> str | None:
        return "segments begin with their documents, and could then lie on two devices"

    @property
    def soup_limit(self) -> str | None:
        return 'it keeps several memories, which its aggregation combines for every token (also as a "soup")'

    def gate_channels(self, key_dim: int, value_dim: int | None = None) -> dict[str, int | None]:
        """The rule's gates (`MemoryRule.gate_channels`), `connector` where one is used, and `blend`."""
        gates = self.rule.gate_channels(key_dim, value_dim)
        channels = self.connector_channels(key_dim)
        if channels is not None:
            gates["connector"] = channels
        if self.blended:
            gates["blend"] = None
        return gates

    def weight_norm(self, state: CachedState) -> Float[Array, "batch heads"] | None:
        """The norm of the memory that is being written."""
        return self.rule.weight_norm(state.online)

    def max_length(self, state: object) -> int | None:
        keys = getattr(state, "keys", None)
        return keys.shape[2] * self.segment_size + 1 if keys is not None and getattr(keys, "ndim", 0) == 4 else 1

    def room(self, state: CachedState) -> Int[Array, " batch"] | None:
        if self.capacity is not None:
            return None
        # The memory of the current segment is not in the cache.
        return (state.keys.shape[2] + 1 - state.cached_count) * self.segment_size - state.position
