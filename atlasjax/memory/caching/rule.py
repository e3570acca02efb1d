"""`CachedRule`: how a `CachedSpec` is initialized, scanned, stepped and read, by the modules of this package."""

from jaxtyping import Array, Float

from atlasjax.memory.caching import init
from atlasjax.memory.caching.check import check_capacity, check_read_gates
from atlasjax.memory.caching.gates import tokens_of
from atlasjax.memory.caching.read import read_state
from atlasjax.memory.caching.reference import reference_cached
from atlasjax.memory.caching.scan import xla_scan
from atlasjax.memory.caching.sequence_parallel import scan_part
from atlasjax.memory.caching.spec import CachedSpec
from atlasjax.memory.caching.state import CachedState
from atlasjax.memory.caching.step import xla_step, xla_step_layer
from atlasjax.memory.rule import Params
from atlasjax.memory.tokens import Tokens


class CachedRule(CachedSpec[Params]):
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

    # The functions of this package, with the rule as their first argument.
    init_state, check_read_gates, scan_tokens, scan_tokens_part = init.init_state, check_read_gates, xla_scan, scan_part
    step_token, step_token_in_layer = xla_step, xla_step_layer

    def check_state(self, params: Params, state: CachedState, batch: int, heads: int, where: str) -> None:
        check_capacity(self, state, where)
        super().check_state(params, state, batch, heads, where)

    def read(
        self,
        params: Params,
        state: CachedState,
        q: Float[Array, "batch time heads key_dim"],
        connector: Float[Array, "batch time heads connector_dim"] | None = None,
        blend: Float[Array, "batch time heads"] | None = None,
    ) -> Float[Array, "batch time heads value_dim"]:
        """`memory.read`: a read as by the last token. u = q if no connector is given, and λ = 1 if no blend is."""
        if connector is None and self.connector == "age" and self.has_scores:
            raise ValueError('memory.read: connector is missing; this rule has connector="age" and needs it.')
        return read_state(self, params, state, q, connector, blend)

    def reference_tokens(
        self, params: Params, state: CachedState | None, tokens: Tokens
    ) -> tuple[Float[Array, "batch time heads value_dim"], CachedState]:
        """`memory.reference`: y from the definition, with explicit memories and soups; the state from the engine. Very slow."""
        if state is not None:
            raise ValueError("memory.reference: state is given, but a cached rule requires state=None.")
        q, ids = tokens.q, tokens.segment_ids
        _, after = self.scan(params, None, *tokens, None if ids is None else q.shape[1])
        return reference_cached(self, params, tokens_of(self, tokens), ids).astype(q.dtype), after
