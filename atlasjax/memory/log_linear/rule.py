"""`LogLinearRule`: a memory rule that keeps one memory for each level of a Fenwick tree over the earlier segments."""

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float, Int, PyTree

from atlasjax import check
from atlasjax.memory import check as checks
from atlasjax.memory.gates import Gates
from atlasjax.memory.log_linear import state as states_lib
from atlasjax.memory.log_linear.state import LogLinearState
from atlasjax.memory.rule import Params, Rule
from atlasjax.memory.wrapped import WrappedRule, check_lengths


@dataclasses.dataclass(frozen=True)
class LogLinearRule(WrappedRule[Params, LogLinearState]):
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

    has_connector: ClassVar[bool] = True
    segments_continue: ClassVar[bool] = False

    rule: Rule[Params, PyTree]
    segment_size: int = 256
    levels: int = 15

    def __post_init__(self) -> None:
        if not isinstance(self.rule, Rule) or not self.rule.can_be_cached:
            raise ValueError(
                f"LogLinearRule: rule must be a MemoryRule, got {type(self.rule).__name__}. (Or a memory.Rule of your own with "
                "cached_weights and read_cached.)"
            )
        check_lengths(self.rule, "LogLinearRule")
        if 'start="carry"' in self.rule.caching_limits:
            raise ValueError(
                f"LogLinearRule: rule is a {type(self.rule).__name__}, should be one whose state does not grow with the text: "
                "levels continue from one segment to the next."
            )
        for name in ("segment_size", "levels"):
            check.integer("LogLinearRule", name, getattr(self, name))
        if self.levels > 30:
            raise ValueError(f"LogLinearRule: levels={self.levels} should be at most 30.")
        if not self.rule.has_constant_gradient and self.segment_size % self.rule.chunk_size:
            raise ValueError(
                f"LogLinearRule: segment_size={self.segment_size} must be a multiple of the rule's "
                f"chunk_size={self.rule.chunk_size}."
            )

    def connector_channels(self, key_dim: int) -> int | None:
        return 1 + self.levels

    @property
    def soup_limit(self) -> str | None:
        return "it keeps several memories, which every token weighs by itself"

    def gate_channels(self, key_dim: int, value_dim: int | None = None) -> dict[str, int | None]:
        """The rule's gates, and `connector`, of which the softplus is λ."""
        return self.rule.gate_channels(key_dim, value_dim) | {"connector": 1 + self.levels}

    def weight_norm(self, state: LogLinearState) -> Float[Array, "batch heads"] | None:
        """That of the memory of the current segment."""
        return self.rule.weight_norm(state.own)

    def max_length(self, state: object) -> int | None:
        levels = getattr(state, "levels", None)
        count = len(levels) if isinstance(levels, tuple) else 0
        return (self.segment_size << count >> 1) + 1 if count else 1

    def room(self, state: LogLinearState) -> Int[Array, " batch"] | None:
        levels = len(state.levels)
        return None if levels >= self.levels else (self.segment_size << levels) - state.position

    def init_state(self, params: Params, *, batch_size: int, max_length: int | None = None) -> LogLinearState:
        """Fresh memories, for the levels that `max_length` tokens need; None: for all. Outputs of tokens that need more are NaN."""
        return states_lib.init_state(self, params, batch_size, max_length)

    def check_call(
        self,
        params: Params,
        state: LogLinearState | None,
        q: Float[Array, "*tokens heads key_dim"],
        k: Float[Array, "*tokens heads key_dim"],
        v: Float[Array, "*tokens heads value_dim"],
        gates: Gates,
        *,
        time: bool,
        where: str,
    ) -> None:
        plain = gates._replace(connector=None) if isinstance(gates, Gates) else gates
        self.rule.check_call(params, None, q, k, v, plain, time=time, where=where)
        connector = gates.connector if isinstance(gates, Gates) else None
        shape = (*q.shape[:-1], 1 + self.levels)
        if connector is None:
            raise ValueError(f"{where}: gates.connector is missing; this rule needs it with shape {list(shape)}.")
        name = "gates.connector"
        checks.check_floating(name, checks.check_shape(name, connector, shape, where), where)
        if state is not None:
            self.check_state(params, state, q.shape[0], q.shape[-2], where)

    def scan(
        self,
        params: Params,
        state: LogLinearState | None,
        q: Float[Array, "batch time heads key_dim"],
        k: Float[Array, "batch time heads key_dim"],
        v: Float[Array, "batch time heads value_dim"],
        gates: Gates,
        segment_ids: Int[Array, "batch time"] | None = None,
        max_segments: int | None = None,
        *,
        lengths: Int[Array, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch time heads value_dim"], LogLinearState]:
        """`memory.scan`. The state that comes back from a fresh memory has the levels of this call only: to continue a sequence,
        start with `init_state`."""
        from atlasjax.memory.log_linear.scan import xla_scan

        if lengths is not None:
            raise TypeError("LogLinearRule.scan: lengths is only for the rule inside a CachedRule.")
        return xla_scan(self, params, state, q, k, v, gates, segment_ids, max_segments)

    def step(
        self,
        params: Params,
        state: LogLinearState,
        q: Float[Array, "batch heads key_dim"],
        k: Float[Array, "batch heads key_dim"],
        v: Float[Array, "batch heads value_dim"],
        gates: Gates,
    ) -> tuple[Float[Array, "batch heads value_dim"], LogLinearState]:
        """`memory.step`: one step of every memory and one read of each."""
        from atlasjax.memory.log_linear.step import xla_step

        return xla_step(self, params, state, q, k, v, gates)

    def read(
        self,
        params: Params,
        state: LogLinearState,
        q: Float[Array, "batch time heads key_dim"],
        connector: Float[Array, "batch time heads connector_dim"] | None = None,
    ) -> Float[Array, "batch time heads value_dim"]:
        """`memory.read`: a read as by the last token, with the weights λ of `connector`, which is required."""
        from atlasjax.memory.log_linear.step import read_state

        if connector is None:
            raise ValueError("memory.read: connector is missing; a LogLinearRule needs the weights of its levels.")
        return read_state(self, params, state, q, connector)

    def reference(
        self,
        params: Params,
        state: LogLinearState | None,
        q: Float[Array, "batch time heads key_dim"],
        k: Float[Array, "batch time heads key_dim"],
        v: Float[Array, "batch time heads value_dim"],
        gates: Gates,
        segment_ids: Int[Array, "batch time"] | None = None,
    ) -> tuple[Float[Array, "batch time heads value_dim"], LogLinearState]:
        """`memory.reference`: y from the definition; the state from the engine. Very slow."""
        from atlasjax.memory.log_linear.reference import reference_outputs

        if state is not None:
            raise ValueError("memory.reference: state is given, but a log-linear rule requires state=None.")
        _, after = self.scan(params, None, q, k, v, gates, segment_ids, None if segment_ids is None else q.shape[1])
        return reference_outputs(self, params, q, k, v, gates, segment_ids).astype(q.dtype), after
