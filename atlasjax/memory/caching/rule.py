"""`CachedRule`: a memory rule whose memories are cached at the end of every segment, and read together (Memory Caching)."""

import dataclasses
from typing import Any

from atlasjax.memory.kernelized.rule import KernelRule
from atlasjax.memory.rule import MemoryRule
from atlasjax.memory.structures import Matrix
from atlasjax.names import lookup

AGGREGATIONS = {
    "residual": "y = M_t(q) + Σ_i M^(i)(q) (MC §3.1)",
    "grm": "gated residual memory: y = γ_t M_t(q) + Σ_i γ_i M^(i)(q) (MC §3.2)",
    "soup": "memory soup: one memory with the parameters γ_t θ_t + Σ_i γ_i θ^(i) (MC §3.3)",
    "ssc": "sparse selective caching: grm over the top_k cached memories and M_t (MC §3.4)",
}
GATES = {"softmax": "over all that are read", "sigmoid": "of each score", "raw": "the score itself"}
CONNECTORS = {"input": "u_t is the gate `connector`", "query": "u_t = q_t"}
POOLINGS = {"mean": "p = mean of a segment's keys", "sum": "p = their sum"}
STARTS = {"fresh": "each segment starts from M_0", "carry": "each goes on from the end of the one before"}


@dataclasses.dataclass(frozen=True)
class CachedRule:
    """Memory Caching (arXiv 2602.24281, §3; SEMANTICS 4) around any rule; frozen and hashable, static under `jax.jit`.

    A sequence is cut into segments of C tokens. At a segment's end the memory's parameters θ^(i) and a pooled key p^(i) are
    cached. Token t of segment s reads the memory M_t of its own segment and the cached ones, i < s, weighed by gates γ from the
    scores ⟨u_t, p^(i)⟩; for its own segment p is pooled over the keys up to t, so nothing of the future is seen. What a memory
    adds to its input (a residual) is added once.

    A cached memory costs as much as the memory itself: `value_dim · feature_dim` numbers for a matrix, and for an MLP of two
    layers and expansion 4 8 · head_dim², which from head_dim 64 on is more than the keys and values of a segment of 256 tokens.

    A kernel memory is cached as the tokens of its segment and their coefficients: segments are then an attention of its own each,
    weighed by γ. It takes neither "soup" nor "carry".

    Attributes:
      rule: the rule by which every segment is written.
      aggregation: how the memories are read together: a name of `AGGREGATIONS`.
      segment_size: C ≥ 1 tokens of a segment; a multiple of the rule's chunk size.
      top_k: k ≥ 1 cached memories that "ssc" reads.
      gate: γ from the scores: a name of `GATES`; without effect for "residual".
      connector: where u_t comes from: "input", the gate `Gates.connector`, or "query", the query itself.
      pooling: "mean" or "sum" of the keys.
      start: "fresh", M_0 with momentum and window reset (segments are then computed in parallel), or "carry".
      capacity: the most memories that are kept, oldest evicted first, so that the state is bounded; None keeps all.
      stop_gradient: whether no gradient flows into cached memories.

    Raises:
      ValueError: an unknown name, a number out of its range, a segment size that the chunk size does not divide, or a choice
        that a kernel memory does not take.
    """

    rule: MemoryRule | KernelRule
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
        if not isinstance(self.rule, MemoryRule | KernelRule):
            raise ValueError(f"CachedRule: rule must be a MemoryRule or a KernelRule, got {type(self.rule).__name__}.")
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
        if isinstance(self.rule, KernelRule) and self.start == "carry":
            raise ValueError(
                'CachedRule: start="carry" is not offered for a kernel memory: it keeps its tokens, so that every cached memory '
                'would keep all tokens before it once more. Give start="fresh".'
            )
        if isinstance(self.rule, KernelRule) and self.aggregation == "soup":
            raise ValueError(
                'CachedRule: aggregation="soup" is not offered for a kernel memory: what is mixed would be its sums before '
                'the division by Z and before the activation, which no reading of one memory gives. Give "grm".'
            )
        if not isinstance(self.stop_gradient, bool):
            raise ValueError(f"CachedRule: stop_gradient must be True or False, got {self.stop_gradient!r}.")

    @property
    def mixes_weights(self) -> bool:
        """Whether reads go through mixed layers. A soup of matrices is a sum of reads, like grm."""
        return self.aggregation == "soup" and not isinstance(self.rule.structure, Matrix)

    @property
    def has_scores(self) -> bool:
        """Whether gates depend on u_t and the pooled keys."""
        return self.aggregation != "residual"

    # What a memory is, to those who ask any rule.
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
