"""`CachedRule`: a memory rule whose memory is cached at the end of every segment and read together with the current one."""

import dataclasses
from typing import Any

from atlasjax.memory.fast_weights.rule import MemoryRule
from atlasjax.memory.softmax.rule import SoftmaxRule
from atlasjax.names import lookup

AGGREGATIONS = {
    "residual": "y = M_t(q) + Σ_i M^(i)(q) (MC §3.1)",
    "grm": "gated residual memory: y = γ_t M_t(q) + Σ_i γ_i M^(i)(q) (MC §3.1)",
    "soup": "memory soup: one memory with the parameters γ_t θ_t + Σ_i γ_i θ^(i) (MC §3.2)",
    "ssc": "sparse selective caching: grm over the top_k cached memories and M_t (MC §3.3)",
}
GATES = {"softmax": "over all memories read", "sigmoid": "of each score", "raw": "the score itself"}
CONNECTORS = {"input": "u_t is the gate `connector`", "query": "u_t = q_t"}
POOLINGS = {"mean": "p = mean of a segment's keys", "sum": "p = their sum"}
STARTS = {"fresh": "each segment starts from M_0", "carry": "each continues from the end of the previous one"}


@dataclasses.dataclass(frozen=True)
class CachedRule:
    """Memory Caching (arXiv 2602.24281, §3; SEMANTICS 4) around any rule. Frozen and hashable, static under `jax.jit`.

    A sequence is split into segments of C tokens. At the end of a segment the memory's parameters θ^(i) and a pooled key p^(i) are
    cached. Token t of segment s reads the memory M_t of its own segment and the cached memories i < s, weighted by gates γ computed
    from the scores ⟨u_t, p^(i)⟩. For its own segment, p is pooled over the keys up to t, so nothing of the future is seen. The
    residual (the memory's input, added to its output) is added once.

    A cached memory is as large as the memory itself: `value_dim · feature_dim` numbers for a matrix, and 8 · head_dim² for an MLP
    of two layers and expansion 4. From head_dim 64 on the latter exceeds the keys and values of a segment of 256 tokens.

    A softmax memory is cached as its segment's tokens and their coefficients, so each segment is a separate attention, weighted by
    γ. It supports neither "soup" nor "carry".

    Attributes:
      rule: the rule that writes every segment.
      aggregation: how the memories are combined, a name in `AGGREGATIONS`.
      segment_size: C ≥ 1 tokens per segment, a multiple of the rule's chunk size.
      top_k: number k ≥ 1 of cached memories that "ssc" reads.
      gate: how γ is computed from the scores, a name in `GATES`. No effect for "residual".
      connector: source of u_t: "input", the gate `Gates.connector`, or "query", the query itself.
      pooling: "mean" or "sum" of the keys.
      start: "fresh" starts each segment from M_0 with momentum and window reset, so that segments are computed in parallel;
        "carry" continues from the previous segment.
      capacity: maximum number of memories kept, with the oldest evicted first, so that the state is bounded. None keeps all.
      stop_gradient: whether to stop gradients into cached memories.

    Raises:
      ValueError: an unknown name, a number out of range, a segment size that is not a multiple of the chunk size, or a choice
        that softmax memories do not support.
    """

    rule: MemoryRule | SoftmaxRule
    aggregation: str = "grm"
    segment_size: int = 256
    top_k: int = 2
    gate: str = "softmax"
    connector: str = "input"
    pooling: str = "mean"
    start: str = "fresh"
    capacity: int | None = None
    stop_gradient: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.rule, MemoryRule | SoftmaxRule):
            raise ValueError(f"CachedRule: rule must be a MemoryRule or a SoftmaxRule, got {type(self.rule).__name__}.")
        tables = {
            "aggregation": AGGREGATIONS, "gate": GATES, "connector": CONNECTORS, "pooling": POOLINGS, "start": STARTS,
        }  # fmt: skip
        for name, table in tables.items():
            lookup(name, getattr(self, name), table)
        for name in ("segment_size", "top_k", "capacity"):
            value = getattr(self, name)
            if name == "capacity" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"CachedRule: {name} must be an integer ≥ 1, got {value!r}.")
        if not self.rule.has_constant_gradient and self.segment_size % self.rule.chunk_size:
            raise ValueError(
                f"CachedRule: segment_size={self.segment_size} must be a multiple of the rule's "
                f"chunk_size={self.rule.chunk_size}."
            )
        if self.aggregation == "ssc" and self.capacity is not None and self.top_k > self.capacity:
            raise ValueError(f"CachedRule: top_k={self.top_k} is more than capacity={self.capacity} memories.")
        if isinstance(self.rule, SoftmaxRule) and self.start == "carry":
            raise ValueError(
                'CachedRule: start="carry" is not supported for a softmax memory: it stores its tokens, so every cached memory '
                'would store all earlier tokens again. Use start="fresh".'
            )
        if isinstance(self.rule, SoftmaxRule) and self.aggregation == "soup":
            raise ValueError(
                'CachedRule: aggregation="soup" is not supported for a softmax memory: it would mix the sums before the '
                'division by Z and the activation, which a read of one memory does not return. Use "grm".'
            )
        if not isinstance(self.stop_gradient, bool):
            raise ValueError(f"CachedRule: stop_gradient must be True or False, got {self.stop_gradient!r}.")

    @property
    def mixes_weights(self) -> bool:
        """Whether reads need mixed layers. A soup of matrices does not: it is a sum of reads, like "grm"."""
        return self.aggregation == "soup" and not self.rule.structure.is_matrix

    @property
    def has_scores(self) -> bool:
        """Whether gates depend on u_t and the pooled keys."""
        return self.aggregation != "residual"

    # The properties that every kind of rule has.
    @property
    def structure(self) -> Any:
        return self.rule.structure

    @property
    def chunk_size(self) -> int:
        return self.rule.chunk_size

    @property
    def has_constant_gradient(self) -> bool:
        return self.rule.has_constant_gradient

    def gate_channels(self, key_dim: int, value_dim: int | None = None) -> dict[str, int | None]:
        """The rule's gates (`MemoryRule.gate_channels`), and `connector` with key_dim channels where one is used."""
        gates = self.rule.gate_channels(key_dim, value_dim)
        if self.has_scores and self.connector == "input":
            gates["connector"] = key_dim
        return gates
