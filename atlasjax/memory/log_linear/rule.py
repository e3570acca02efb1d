"""`LogLinearRule`: how a `LogLinearSpec` is initialized, scanned, stepped and read, by the modules of this package."""

from jaxtyping import Array, Float

from atlasjax.memory.log_linear import init
from atlasjax.memory.log_linear.reference import reference_outputs
from atlasjax.memory.log_linear.scan import xla_scan
from atlasjax.memory.log_linear.spec import LogLinearSpec
from atlasjax.memory.log_linear.state import LogLinearState
from atlasjax.memory.log_linear.step import read_state, xla_step
from atlasjax.memory.rule import Params
from atlasjax.memory.tokens import Tokens


class LogLinearRule(LogLinearSpec[Params]):
    """Log-Linear memories (arXiv 2506.04761) around any rule, deep ones too; SEMANTICS 4.8. Frozen and hashable, static under jit.

    A sequence is split into segments of C tokens, b = 0, 1, … A token of segment b reads the memory M_t of its own segment and, for
    every bit j that is set in b, the memory M^(j) of the 2^j segments before segment (b >> j) << j, each written from M_0:

        y_t = λ_t[0] M_t(q_t) + Σ_j λ_t[1 + j] M^(j)(q_t),  λ_t = softplus(gate `connector`)

    These memories cover every earlier token once, the nearer ones in shorter segments. The residual (the memory's input, added to
    its output) is added once. With C = 1 and linear attention without decay this is Log-Linear Attention as published; a sum of two
    deep memories is not a memory, so for others each level is written on its own. This is the "+ Log-Linear" of Memory Caching's
    tables (arXiv 2602.24281, Tables 1 to 4), which does not define it.

    The state has 1 + levels memories, of which at most two are written at a time. A sequence from a fresh memory costs
    1 + levels / 4 times the writes of the inner rule, all segments of a level in parallel. Packed documents and calls that
    continue from a state are computed one segment after another, with 1 + levels times the writes.

    Attributes:
      rule: the rule that writes. Not a softmax memory, whose state has room for one segment only.
      segment_size: C ≥ 1 tokens per segment, a multiple of the rule's chunk size.
      levels: maximum number of levels, at least 1: what lies more than C · 2^levels tokens back may be forgotten. 15 as published.

    Raises:
      ValueError: a number out of range, a segment size that is not a multiple of the chunk size, or a rule that cannot be cached
        (one of your own: whose `scan` does not take `lengths`).
    """

    # The functions of this package, with the rule as their first argument.
    init_state, scan_tokens, step_token = init.init_state, xla_scan, xla_step

    def read(
        self,
        params: Params,
        state: LogLinearState,
        q: Float[Array, "batch time heads key_dim"],
        connector: Float[Array, "batch time heads connector_dim"] | None = None,
    ) -> Float[Array, "batch time heads value_dim"]:
        """`memory.read`: a read as by the last token, with the weights λ of `connector`, which is required."""
        if connector is None:
            raise ValueError("memory.read: connector is missing; a LogLinearRule needs the weights of its levels.")
        return read_state(self, params, state, q, connector)

    def reference_tokens(
        self, params: Params, state: LogLinearState | None, tokens: Tokens
    ) -> tuple[Float[Array, "batch time heads value_dim"], LogLinearState]:
        """`memory.reference`: y from the definition; the state from the engine. Very slow."""
        if state is not None:
            raise ValueError("memory.reference: state is given, but a log-linear rule requires state=None.")
        q = tokens.q
        _, after = self.scan(params, None, *tokens, None if tokens.segment_ids is None else q.shape[1])
        return reference_outputs(self, params, tokens).astype(q.dtype), after
