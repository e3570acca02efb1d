"""`CachedRule`: a memory rule whose memory is cached at the end of every segment and read together with the current one."""

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float, Int, PyTree

from atlasjax import check
from atlasjax.memory.caching import state as states_lib
from atlasjax.memory.caching.state import CachedState
from atlasjax.memory.gates import Gates
from atlasjax.memory.rule import Params, Rule, ScanCall
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
class CachedRule(WrappedRule[Params, CachedState]):
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
      connector: source of u_t: "input", the gate `Gates.connector`, or "query", the query itself. "age": no pooled keys; the score
        of M_t is channel 0 of `Gates.connector`, and that of the memory cached j segments ago channel j. Needs a capacity.
      pooling: "mean" or "sum" of the keys.
      start: "fresh" starts each segment from M_0 with momentum and window reset, so that segments are computed in parallel;
        "carry" continues from the previous segment.
      capacity: maximum number of memories kept, with the oldest evicted first, so that the state is bounded. None keeps all.
      stop_gradient: whether to stop gradients into cached memories.
      blended: whether to read (1 − λ) M_t(q) + λ y instead of y, with λ from the gate `Gates.blend`: γ_i becomes λ γ_i, and γ_t
        becomes 1 + λ (γ_t − 1). With "carry" and λ = 0 the outputs are those of the rule without Memory Caching, so that a
        trained memory can be given a cache without a change. Not in the paper.

    Raises:
      ValueError: an unknown name, a number out of range, a segment size that is not a multiple of the chunk size, a choice
        that softmax memories do not support, or a rule of your own whose `scan` does not take `lengths`.
    """

    has_connector: ClassVar[bool] = True
    segments_continue: ClassVar[bool] = False

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
                'CachedRule: connector="age" has a score for each of capacity memories; capacity is None and should be a number.'
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

    def scan_part(
        self,
        axes: tuple[str, ...],
        run: ScanCall[Params, CachedState],
        params: Params,
        state: CachedState | None,
        q: Float[Array, "batch time heads key_dim"],
        k: Float[Array, "batch time heads key_dim"],
        v: Float[Array, "batch time heads value_dim"],
        gates: Gates,
        segment_ids: Int[Array, "batch time"] | None,
    ) -> tuple[Float[Array, "batch time heads value_dim"], CachedState]:
        from atlasjax.memory.caching.sequence_parallel import scan_part

        if state is not None:
            raise ValueError(
                "Partition: time divides the tokens of a CachedRule only from a fresh memory; state should be None."
            )
        return scan_part(self, axes, params, states_lib.tokens_of(self, q, k, v, gates))

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

    # Methods of `Rule`, implemented in the modules of this package.

    def init_state(self, params: Params, *, batch_size: int, max_length: int | None = None) -> CachedState:
        return states_lib.init_state(self, params, batch_size=batch_size, max_length=max_length)

    def weight_norm(self, state: CachedState) -> Float[Array, "batch heads"] | None:
        """That of the memory which is being written."""
        return self.rule.weight_norm(state.online)

    def max_length(self, state: object) -> int | None:
        keys = getattr(state, "keys", None)
        return keys.shape[2] * self.segment_size + 1 if keys is not None and getattr(keys, "ndim", 0) == 4 else 1

    def room(self, state: CachedState) -> Int[Array, " batch"] | None:
        if self.capacity is not None:
            return None
        # The memory of the current segment is not in the cache.
        return (state.keys.shape[2] + 1 - state.cached_count) * self.segment_size - state.position

    def check_call(
        self,
        params: Params,
        state: CachedState | None,
        q: Float[Array, "*tokens heads key_dim"],
        k: Float[Array, "*tokens heads key_dim"],
        v: Float[Array, "*tokens heads value_dim"],
        gates: Gates,
        *,
        time: bool,
        where: str,
    ) -> None:
        from atlasjax.memory.caching.check import check_call

        check_call(self, params, state, q, k, v, gates, time=time, where=where)

    def check_state(self, params: Params, state: CachedState, batch: int, heads: int, where: str) -> None:
        from atlasjax.memory.caching.check import check_capacity

        check_capacity(self, state, where)
        super().check_state(params, state, batch, heads, where)

    def scan(
        self,
        params: Params,
        state: CachedState | None,
        q: Float[Array, "batch time heads key_dim"],
        k: Float[Array, "batch time heads key_dim"],
        v: Float[Array, "batch time heads value_dim"],
        gates: Gates,
        segment_ids: Int[Array, "batch time"] | None = None,
        max_segments: int | None = None,
        *,
        lengths: Int[Array, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch time heads value_dim"], CachedState]:
        """`memory.scan`. A fresh memory computes the segments in parallel. The state that comes back then has room only for the
        memories of this call, unless the rule has a capacity: to continue a sequence, start with `init_state`."""
        from atlasjax.memory.caching.scan import xla_scan

        if lengths is not None:
            raise TypeError("CachedRule.scan: lengths is only for the rule inside a CachedRule.")
        return xla_scan(self, params, state, q, k, v, gates, segment_ids, max_segments)

    def step(
        self,
        params: Params,
        state: CachedState,
        q: Float[Array, "batch heads key_dim"],
        k: Float[Array, "batch heads key_dim"],
        v: Float[Array, "batch heads value_dim"],
        gates: Gates,
    ) -> tuple[Float[Array, "batch heads value_dim"], CachedState]:
        """`memory.step`: one step of the inner rule and one read of the cache (with "ssc", of top_k memories)."""
        from atlasjax.memory.caching.step import xla_step

        return xla_step(self, params, state, q, k, v, gates)

    def step_layer(
        self,
        params: Params,
        states: CachedState,
        layer: Int[Array, ""],
        q: Float[Array, "batch heads key_dim"],
        k: Float[Array, "batch heads key_dim"],
        v: Float[Array, "batch heads value_dim"],
        gates: Gates,
    ) -> tuple[Float[Array, "batch heads value_dim"], CachedState]:
        from atlasjax.memory.caching.step import xla_step_layer

        return xla_step_layer(self, params, states, layer, q, k, v, gates)

    def read(
        self,
        params: Params,
        state: CachedState,
        q: Float[Array, "batch time heads key_dim"],
        connector: Float[Array, "batch time heads connector_dim"] | None = None,
        blend: Float[Array, "batch time heads"] | None = None,
    ) -> Float[Array, "batch time heads value_dim"]:
        """`memory.read`: a read as by the last token. u = q if no connector is given, and λ = 1 if no blend is."""
        from atlasjax.memory.caching.read import read_state

        if connector is None and self.connector == "age" and self.has_scores:
            raise ValueError('memory.read: connector is missing; this rule has connector="age" and needs it.')
        return read_state(self, params, state, q, connector, blend)

    def reference(
        self,
        params: Params,
        state: CachedState | None,
        q: Float[Array, "batch time heads key_dim"],
        k: Float[Array, "batch time heads key_dim"],
        v: Float[Array, "batch time heads value_dim"],
        gates: Gates,
        segment_ids: Int[Array, "batch time"] | None = None,
    ) -> tuple[Float[Array, "batch time heads value_dim"], CachedState]:
        """`memory.reference`: y from the definition, with explicit memories and soups; the state from the engine. Very slow."""
        from atlasjax.memory.caching.reference import reference_cached

        if state is not None:
            raise ValueError("memory.reference: state is given, but a cached rule requires state=None.")
        _, after = self.scan(params, None, q, k, v, gates, segment_ids, None if segment_ids is None else q.shape[1])
        return reference_cached(self, params, states_lib.tokens_of(self, q, k, v, gates), segment_ids).astype(
            q.dtype
        ), after
